"""A picture of results: speeds relative to the baseline, a panel for each workload, with limits as lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cute_backend.bench.results import Ceilings, ProblemResult, Results, TableResult
from cute_backend.bench.table import Cell, Runner
from cute_backend.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Look:
    """The colours of a picture, as matplotlib names them. `bars` are in Okabe and Ito's palette, which
    colour-blind readers can distinguish; all differ from `paper` by a contrast of 2 or more, text by 4.5."""

    paper: str
    ink: str
    baseline: str
    bars: Mapping[Runner, str]


LIGHT = Look(
    paper="white",
    ink="black",
    baseline="#555555",
    bars={
        Runner.EAGER: "#9a9a9a",
        Runner.INDUCTOR: "#e69f00",
        Runner.MAX_AUTOTUNE: "#cc79a7",
        Runner.QUACK: "#56b4e9",
        Runner.CUTE: "#00589b",
    },
)
DARK = Look(
    paper="#0d1117",
    ink="#e6edf3",
    baseline="#9aa4af",
    bars={**LIGHT.bars, Runner.CUTE: "#1f77c4"},
)

_WIDE = 12
"""The number of problems whose names fit in the usual size."""

_FORMATS = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Raises UsageError if a picture can't be drawn to `path`. It is called before minutes of timing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("a picture needs matplotlib, which is missing: pip install matplotlib") from error
    if path.suffix not in _FORMATS:
        raise UsageError(f"a picture is written as {', '.join(_FORMATS)}, not as {path.name}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"the folder of the picture, {path.parent}, does not exist")


def draw(results: Results, path: Path) -> None:
    """Writes the picture of all tables, in the format of the path's ending, and for dark pages another one
    beside it, whose name ends in "-dark". Raises UsageError as `check`."""
    check(path)
    try:
        figure(results).savefig(path, dpi=120)
        figure(results, DARK).savefig(path.with_stem(f"{path.stem}-dark"), dpi=120)
    except OSError as error:
        raise UsageError(f"the picture can't be written to {path}: {error}") from error


def figure(results: Results, look: Look = LIGHT) -> Figure:
    """All tables, a panel for each workload. Raises UsageError if no table has a baseline and another
    result."""
    panels = [(table, workload) for table in results.tables for workload in _workloads(table)]
    if results.ceilings is None or not panels:
        raise UsageError("there is nothing to draw: the results have no table with a baseline")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colors: Any = {
        "axes.facecolor": look.paper,
        "text.color": look.ink,
        "axes.edgecolor": look.ink,
        "axes.labelcolor": look.ink,
        "xtick.color": look.ink,
        "ytick.color": look.ink,
    }
    with rc_context(colors):
        drawn = Figure(figsize=(10, 0.6 + 2.3 * len(panels)), layout="constrained", facecolor=look.paper)
        every = drawn.subplots(len(panels), squeeze=False)[:, 0]
        for axes, (table, workload) in zip(every, panels, strict=True):
            _panel(axes, table, workload, results.ceilings, look)
        drawn.suptitle(f"{results.machine.gpu}, {results.date[:10]}: cute_backend and its peers", fontsize=11)
    return drawn


def _workloads(table: TableResult) -> list[str]:
    """The workloads for which more than the baseline was measured."""
    return list(
        dict.fromkeys(
            each.cell.workload
            for problem in table.problems
            for each in problem.measurements
            if each.timing and each.cell != table.baseline and problem.median_us(table.baseline)
        )
    )


def _panel(axes: Any, table: TableResult, workload: str, ceilings: Ceilings, look: Look) -> None:
    cells = [Cell(workload, runner) for runner in Runner if Cell(workload, runner) != table.baseline]
    problems = [
        problem
        for problem in table.problems
        if problem.median_us(table.baseline) and any(problem.median_us(cell) for cell in cells)
    ]
    cells = [cell for cell in cells if any(problem.median_us(cell) for problem in problems)]
    width = 0.8 / len(cells)
    tallest = 1.0
    for index, cell in enumerate(cells):
        places = [number - 0.4 + width * (index + 0.5) for number in range(len(problems))]
        speeds = [_speed(problem, table.baseline, problem.median_us(cell)) for problem in problems]
        axes.bar(places, speeds, width * 0.92, color=look.bars[cell.runner], label=cell.runner.value)
        if cell.runner is Runner.CUTE:
            for place, speed in zip(places, speeds, strict=True):
                if speed:
                    text = f"{speed:.2f} "
                    axes.text(place, speed, text, ha="center", va="top", rotation=90, color="w", fontsize=7.5)
        tallest = max(tallest, *speeds)
    limits = [
        _speed(problem, table.baseline, problem.work(cells[0]).limit_us(ceilings)) for problem in problems
    ]
    axes.hlines(
        limits,
        [number - 0.45 for number in range(len(problems))],
        [number + 0.45 for number in range(len(problems))],
        color=look.ink,
        linewidth=1.4,
        label="limit",
    )
    axes.axhline(1, color=look.baseline, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    axes.set_ylim(0, 1.12 * max(tallest, *limits))
    axes.set_xlim(-0.55, len(problems) - 0.45)
    names = [_label(problem.name) for problem in problems]
    axes.set_xticks(range(len(problems)), names, fontsize=8 if len(names) <= _WIDE else 6.5)
    axes.set_title(workload, loc="left", fontsize=10)
    axes.set_ylabel(f"speed, {table.baseline} = 1", fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, ncols=len(cells) + 1, loc="lower right", bbox_to_anchor=(1, 0.98))


def _speed(problem: ProblemResult, baseline: Cell, taken: float | None) -> float:
    """The speed relative to the baseline; 0, which draws no bar, if there is no timing."""
    base = problem.median_us(baseline)
    return base / taken if base and taken else 0.0


def _label(name: str) -> str:
    """`8192x8192x1024-slow` on two lines."""
    return name.replace("-", "\n")
