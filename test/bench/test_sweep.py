"""`benchmarks/sweep.py`: which problems it draws, what it says of a file, and what it says without a GPU."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cute_backend.bench.measure import Prepared, relative_difference
from cute_backend.bench.program_timing import Unit
from cute_backend.bench.results import Timing
from cute_backend.bench.table import Cell, Runner

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SWEPT = BENCHMARKS / "results" / "nvidia-h200-2026-11-23-sweep-2.csv"


@pytest.fixture(scope="module", autouse=True)
def importable():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def test_150_fused_problems_and_30_bare_ones() -> None:
    import sweep

    drawn = sweep.problems(2, 150)
    assert drawn == sweep.problems(2, 150) and len(set(drawn)) == 180
    kinds = Counter((each.operands.value, each.epilogue.value) for each in drawn)
    assert {kinds[operands, "bare"] for operands in ("fp8", "bf16", "fp16")} == {10}
    fused = [kinds[operands, name] for operands in ("fp8", "bf16", "fp16") for name in ("full", "gated")]
    assert len(fused) == 6 and set(fused) <= {16, 17} and sum(kinds.values()) == 180
    # So a run that is cut off has as many of each kind as another.
    assert [each.epilogue.value == "bare" for each in drawn[:12]] == ([False] * 5 + [True]) * 2
    assert sweep.problems(3, 150) != drawn
    assert all(each.m <= 768 for each in sweep.problems(2, 10, (129, 768)))


def test_a_problem_where_ours_is_slower_is_timed_three_times() -> None:
    import sweep

    class Turn:
        ours = iter([12.0, 9.0, 11.0, 8.0])

        def time(self, units, rounds):
            us = [5.0, 10.0, next(self.ours)]
            return {cell: Timing(us, us, us) for cell, us in zip(units, us, strict=True)}

    drawn, turn = sweep.problems(2, 10)[0], Turn()
    cells = [sweep._BARE, *(Cell(sweep._OURS, runner) for runner in (Runner.INDUCTOR, Runner.CUTE))]
    unit = Unit(lambda: None, 1)
    prepared = Prepared(
        drawn.name,
        [],
        [
            SimpleNamespace(measurement=SimpleNamespace(cell=c, agrees=True, note=""), unit=unit)
            for c in cells
        ],
    )
    row = sweep.row_of(drawn, prepared, turn, 15)
    assert (row["torch"], row["inductor"], row["cute"], row["agrees"]) == ("5.00", "10.00", "11.00", True)
    assert sweep.row_of(drawn, prepared, turn, 15)["cute"] == "8.00"
    assert next(turn.ours, None) is None


def test_processes_divide_what_a_file_lacks(tmp_path: Path) -> None:
    """The division does not depend on what other processes have timed in the meantime."""
    import sweep

    drawn = sweep.problems(2, 25)
    path = tmp_path / "sweep.csv"
    with path.open("w", newline="") as file:
        rows = csv.DictWriter(file, sweep.COLUMNS)
        rows.writeheader()
        for each in drawn[:4]:
            sizes = {"m": each.m, "n": each.n, "k": each.k}
            rows.writerow({**sizes, "operands": each.operands.value, "epilogue": each.epilogue.value})
    arguments = SimpleNamespace(
        file=path, seed=2, count=25, rows=sweep.ROWS, operands=sweep._DRAWN, problems=None
    )
    parts = []
    for part in range(3):
        arguments.part = f"{part}/3"
        parts.append(sweep._missing(arguments))
    assert parts[1] == drawn[1::3][1:] and len(parts[0]) == 8
    assert {each for part in parts for each in part} == set(drawn[4:])
    arguments.part, arguments.operands = "0/1", ["fp16"]
    assert sweep._missing(arguments) == [each for each in drawn[4:] if each.operands.value == "fp16"]
    arguments.problems = [sweep._named(each.name) for each in drawn]
    assert arguments.problems == drawn and sweep._missing(arguments)[0].operands.value == "fp16"


def test_what_loses_is_timed_again_without_what_other_processes_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of earlier runs stay, and so do those that were added and don't lose. The process has the kernels,
    and neither choices nor graphs of Inductor's."""
    import sweep

    path, cache = tmp_path / "sweep.csv", tmp_path / "cache"
    facts = {"k": 64, "operands": "bf16", "agrees": True}
    times = [(1, "full", 9.0, 8.0), (2, "full", 9.0, 8.0), (3, "full", 7.0, 8.0), (4, "bare", "", 8.0)]
    with path.open("w", newline="") as file:
        rows = csv.DictWriter(file, sweep.COLUMNS)
        rows.writeheader()
        for m, epilogue, inductor, ours in [(0, "full", 7.0, 8.0), *times]:
            timed = {"torch": 7.5, "inductor": inductor, "cute": ours}
            rows.writerow({"m": m, "n": 32, "epilogue": epilogue, **facts, **timed})
    slower = sweep._slower(path, before={"0x32x64-bf16-full"})
    assert slower == ["3x32x64-bf16-full", "4x32x64-bf16-bare"]
    cache.mkdir()
    for name in ("kernel", "tuned.json"):
        (cache / name).touch()
    monkeypatch.setattr(sweep, "writable_cache", lambda: SimpleNamespace(root=cache))

    def run(command: list[str], env: dict[str, str], check: bool) -> None:
        assert command[-2:] == slower and check
        assert [each.name for each in Path(env["CUTE_BACKEND_CACHE_DIR"]).iterdir()] == ["kernel"]
        assert not Path(env["TORCHINDUCTOR_CACHE_DIR"]).exists()
        assert sweep._names(path) == {f"{m}x32x64-bf16-full" for m in (0, 1, 2)}

    monkeypatch.setattr(sweep.subprocess, "run", run)
    sweep._time_alone(path, slower)


def test_a_bare_product_is_one_of_our_kernels() -> None:
    import sweep
    from problems import Drawn, Epilogue, Operands

    for operands in (Operands.FP8, Operands.BF16):
        drawn = Drawn(16, 32, 64, operands, Epilogue.BARE)
        inputs = drawn.product_inputs()
        (torchs, ours) = sweep.table_of(drawn).problems[0].workloads
        assert torchs.fn is not ours.fn
        assert ours.check(inputs, drawn.by_gemm(*inputs)) < 0.01
        assert ours.check(inputs, drawn.by_gemm(*inputs) * 1.5) > 0.02


@pytest.mark.parametrize("operands", ["fp8-blocks", "fp8-lines"])
def test_a_bare_product_may_have_scales_of_blocks(operands: str) -> None:
    """torch multiplies them on a GPU alone, so they are dequantised here."""
    from problems import Drawn, Epilogue, Operands

    drawn = Drawn(16, 256, 384, Operands(operands), Epilogue.BARE)
    x, weight, of_x, of_weight = inputs = drawn.product_inputs()
    lines = weight.shape[0] // of_weight.shape[0]
    scales = of_weight.repeat_interleave(lines, 0).repeat_interleave(128, 1)
    right = (x.double() * of_x.repeat_interleave(128, 1)) @ (weight.double() * scales).t()
    assert relative_difference(drawn.by_gemm(*inputs), right) < 0.01


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "sweep.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.exhaustive
def test_what_a_file_has_is_printed_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run(str(SWEPT), "--shown", "--picture", str(tmp_path / "sweep.png"))
    assert done.returncode == 0, done.stderr
    with SWEPT.open() as file:
        rows = [row for row in csv.DictReader(file) if row["inductor"] and row["cute"]]
    fp8 = [float(row["inductor"]) / float(row["cute"]) for row in rows if row["operands"] == "fp8"]
    mean = math.prod(fp8) ** (1 / len(fp8))
    assert len(fp8) == 24
    assert f"fused, fp8: 24 problems, inductor / ours {mean:.3f}, least {min(fp8):.3f}" in done.stdout
    bare = [float(row["inductor"]) / float(row["torch"]) for row in rows if row["operands"] == "fp8"]
    assert f"ceiling {math.prod(bare) ** (1 / 24):.3f}" in done.stdout.splitlines()[0]
    least = min(rows, key=lambda row: float(row["inductor"]) / float(row["cute"]))
    assert f"{least['m']}x{least['n']}x{least['k']}" in done.stdout
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path: Path) -> None:
    done = run(str(tmp_path / "sweep.csv"))
    assert done.returncode == 1
    assert done.stderr == "bench times kernels on a GPU, and torch finds no CUDA device on this machine\n"
    assert not list(tmp_path.iterdir())
