"""Draws the load classes for docs/operands.md: `python docs/load_classes.py` writes docs/drawings/*.svg.

Each drawing has the (M, N) plane with the offset of the element that each of its elements reads, and below it
the operand's memory. Offsets are m * s_m + n * s_n; where M is several modes, each mode has its stride.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

M, N = 4, 6
LINE = 12
"""Elements of memory beside one another."""

WIDTH = 4.2
"""Inches, about a phone's width, so that no text is scaled down there."""

GROUND, TEXT, DIGITS = "#20242b", "#e6e8eb", "#000000"
"""The colours of a dark card, which suits light and dark pages."""

FOLDER = Path(__file__).parent / "drawings"


@dataclass(frozen=True)
class Drawing:
    name: str
    title: str
    offset: Callable[[int, int], int]


DRAWINGS = (
    Drawing("scalar", "scalar: s_m = 0, s_n = 0", lambda m, n: 0),
    Drawing("rowvec", "rowvec: s_m = 0, s_n = 1", lambda m, n: n),
    Drawing("colvec", "colvec: s_m = 1, s_n = 0", lambda m, n: m),
    Drawing("exact", "exact, row-major: s_m = N, s_n = 1", lambda m, n: m * N + n),
    Drawing("exact_column", "exact, column-major: s_m = 1, s_n = M", lambda m, n: m + n * M),
    Drawing("modes", "exact, M of the modes (2, 2): (2, 1, N) beside (2, 2, N)", lambda m, n: m // 2 * N + n),
    Drawing("blocks", "rowvec of blocks of 3 columns: (3,) beside (M, 2, 3)", lambda m, n: n % 3),
)


def draw(drawing: Drawing) -> Figure:
    """Draws the plane above the operand's memory, with a colour for each offset."""
    offsets = [[drawing.offset(m, n) for n in range(N)] for m in range(M)]
    last = max(map(max, offsets))
    rows = last // LINE + 1
    figure = Figure(figsize=(WIDTH, 2.5 + 0.35 * rows), layout="constrained", facecolor=GROUND)
    plane, memory = figure.subplots(2, 1, height_ratios=(M, rows))
    plane.set_title(drawing.title, fontsize=9, color=TEXT)
    for m, row in enumerate(offsets):
        for n, offset in enumerate(row):
            _cell(plane, n, m, offset, last)
    _frame(plane, N, M)
    plane.set_xticks([n + 0.5 for n in range(N)], [f"n = {n}" for n in range(N)], fontsize=8, color=TEXT)
    plane.set_yticks([m + 0.5 for m in range(M)], [f"m = {m}" for m in range(M)], fontsize=8, color=TEXT)
    for offset in range(last + 1):
        _cell(memory, offset % LINE, offset // LINE, offset, last)
    _frame(memory, min(LINE, max(last + 1, N)), rows)
    memory.set_title("the operand's memory, by offset", fontsize=9, color=TEXT)
    memory.set_xticks([])
    memory.set_yticks([])
    return figure


def _cell(axes: Axes, x: int, y: int, offset: int, last: int) -> None:
    colour = matplotlib.colormaps["viridis"](0.5 + 0.45 * offset / max(last, 1))
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=GROUND))
    axes.text(x + 0.5, y + 0.5, str(offset), ha="center", va="center", fontsize=9, color=DIGITS)


def _frame(axes: Axes, width: int, height: int) -> None:
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_facecolor(GROUND)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "cute_backend"  # else names inside of the file are drawn at random
    matplotlib.rcParams["svg.fonttype"] = "none"
    FOLDER.mkdir(exist_ok=True)
    for drawing in DRAWINGS:
        draw(drawing).savefig(FOLDER / f"{drawing.name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
