"""The results of an invented run, with round figures, so that ratios and limits are obvious."""

from cute_backend.bench.results import (
    Ceilings,
    Clock,
    HostResult,
    Machine,
    Measurement,
    ProblemResult,
    Results,
    TableResult,
    Timing,
    Work,
)
from cute_backend.bench.table import Cell, Rate, Ratio, Runner

BARE, FULL = Cell("bare", Runner.CUTE), Cell("full", Runner.CUTE)
TORCH, INDUCTOR, QUACK = (
    Cell("bare", Runner.EAGER),
    Cell("full", Runner.INDUCTOR),
    Cell("full", Runner.QUACK),
)
CEILINGS = Ceilings(bandwidth=4e12, rates={Rate.FP8: 1e15, Rate.BF16: 5e14})


def timing(median: float) -> Timing:
    return Timing(median, median * 0.98, median * 1.05)


def problem(name: str, scale: float, clock: Clock | None) -> ProblemResult:
    """Arithmetic takes at least 100 us times `scale`, and the epilogue's bytes 120; every program takes
    longer."""
    works = (
        Work("bare", int(1e11 * scale), int(2e8 * scale), Rate.FP8),
        Work("full", int(1e11 * scale), int(4.8e8 * scale), Rate.FP8),
    )
    return ProblemResult(
        name,
        works,
        (
            Measurement(TORCH, timing(150 * scale), calls=4, difference=0.0),
            Measurement(BARE, timing(125 * scale), calls=4, difference=0.001),
            Measurement(FULL, timing(160 * scale), calls=4, difference=0.002),
            Measurement(INDUCTOR, timing(200 * scale), calls=4, difference=0.003),
            Measurement(QUACK, note="not installed: pip install --no-deps quack-kernels"),
        ),
        clock,
    )


def results() -> Results:
    table = TableResult(
        "scaled_mm",
        "A linear and its epilogue",
        TORCH,
        (Ratio(BARE, TORCH), Ratio(FULL, TORCH), Ratio(FULL, INDUCTOR), Ratio(FULL, QUACK)),
        (problem("4096x4096x4096", 1.0, Clock(1500, 1600, 1980)), problem("16x8192x8192-slow", 0.1, None)),
    )
    machine = Machine("NVIDIA H200", 132, 700, "580.1", "13.0", "2.11.0", "3.12.1", {"triton": "3.6.0"})
    return Results(
        "2026-01-02T03:04:05+00:00", "python -m cute_backend bench --peers", machine, CEILINGS, (table,)
    )


def host() -> HostResult:
    return HostResult({"eager _scaled_mm": timing(20.0), "the op alone": timing(8.0)}, 6.5, 0.05, 0.03, False)
