"""Draws the layers of the package for docs/code.md: `python docs/layers.py` writes docs/drawings/layers.svg.

The drawing follows from the import statements. A box is a folder or some modules. It stands above all that it
imports, and has a line to each of these that it reaches by no longer way. Modules that may be imported
anywhere (`ANYWHERE`) are left out.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "cute_backend"

TOGETHER = {
    "api": ("api", "presentation"),
    "backend.py": ("backend", "artifacts", "registration"),
    "ops.py, replay.py, signature.py": (
        *("ops", "replay", "signature"),
        *("numerics", "reduce", "formula", "philox"),
    ),
}
"""Parts of the package that are one box, by its name. The others have the name of their folder or module."""

ANYWHERE = ("config", "dtypes", "errors", "options", "tracing", "variables", "__version__")
FACES = ("__init__", "__main__")
"""Modules that only name others."""

GROUND, TEXT, DIGITS = "#20242b", "#e6e8eb", "#000000"
"""The colours of a dark card, as those of the other drawings."""
BOX, LINE = "#7fb8a4", "#9aa0a8"

WIDTH, HEIGHT, GAP, LETTER = 400, 26, 24, 6.8
"""Pixels: of the whole width, of the height of a box, between two rows, and of the width of a letter."""


def box_of(part: str) -> str:
    name = next((name for name, parts in TOGETHER.items() if part in parts), part)
    return name if name.endswith(".py") or (PACKAGE / name).is_dir() else f"{name}.py"


def imports() -> dict[str, set[str]]:
    """The boxes that each box imports, for types included."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if part in (*ANYWHERE, *FACES):
            continue
        found[box_of(part)] |= {
            box_of(target) for target in _imported(path) if target not in (part, *ANYWHERE, *FACES)
        } - {box_of(part)}
    return dict(found)


def _imported(path: Path) -> set[str]:
    """The parts of the package that a file reaches for. Imports are absolute."""
    targets = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            targets |= {f"{node.module}.{each.name}" for each in node.names}
    paths = (target.split(".") for target in targets)
    return {path[1] for path in paths if path[0] == "cute_backend" and len(path) > 1}


class Drawing:
    """Rows of boxes from the top, and lines between them."""

    def __init__(self, arrows: dict[str, set[str]]) -> None:
        @cache
        def below(box: str) -> frozenset[str]:
            return frozenset(arrows[box]).union(*map(below, arrows[box]))

        @cache
        def height(box: str) -> int:
            return 1 + max(map(height, arrows[box]), default=-1)

        top = max(map(height, arrows))
        self.rows = [sorted(box for box in arrows if height(box) == top - row) for row in range(top + 1)]
        """A circle of imports has no heights: it is a RecursionError."""
        self.lines = sorted(
            (box, target)
            for box in arrows
            for target in arrows[box]
            if not any(target in below(other) for other in arrows[box])
        )

    def svg(self) -> str:
        places: dict[str, tuple[float, float]] = {}
        texts = []
        for row, boxes in enumerate(self.rows):
            widths = [len(self.label(box)) * LETTER + 14 for box in boxes]
            space = (WIDTH - sum(widths)) / (len(boxes) + 1)
            left, y = space, GAP + row * (HEIGHT + GAP)
            for box, width in zip(boxes, widths, strict=True):
                places[box] = left + width / 2, y
                texts += [
                    f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" rx="4" '
                    f'style="fill: {BOX}"/>',
                    f'<text x="{places[box][0]:.1f}" y="{y + 17}" text-anchor="middle" '
                    f'style="fill: {DIGITS}; font: 11px monospace">{self.label(box)}</text>',
                ]
                left += width + space
        lines = [
            f'<path d="M {places[box][0]:.1f} {places[box][1] + HEIGHT} '
            f'L {places[target][0]:.1f} {places[target][1]}" style="fill: none; stroke: {LINE}"/>'
            for box, target in self.lines
        ]
        bottom = GAP + len(self.rows) * (HEIGHT + GAP)
        note = "a box imports what its lines lead down to"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom}">',
                f'<rect width="{WIDTH}" height="{bottom}" style="fill: {GROUND}"/>',
                f'<text x="{WIDTH / 2}" y="15" text-anchor="middle" '
                f'style="fill: {TEXT}; font: 11px sans-serif">{note}</text>',
                *lines,
                *texts,
                "</svg>\n",
            ]
        )

    @staticmethod
    def label(box: str) -> str:
        return box if box.endswith(".py") else f"{box}/"


DRAWN = Path(__file__).parent / "drawings" / "layers.svg"

if __name__ == "__main__":
    DRAWN.write_text(Drawing(imports()).svg())
