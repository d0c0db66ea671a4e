"""Products with scales of blocks.

A recipe's scales are drawn as two matrices of values: rows of A by blocks of K, and columns of B by blocks of
K. The program lays them out as the recipe requires, and packs values of fp4. So the reference, which
multiplies by the matrices, is independent of both layouts. On a CPU, torch has no kernel for any of these
products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_backend.fuzz.drawn_program import Fill


@dataclass(frozen=True)
class Recipe:
    """How A (rows, K) and the weight (columns, K) are scaled.

    A scale is shared by `lines[0]` rows of A, or by `lines[1]` rows of the weight, and by `depth` values
    along K. `fill` and `dtype` are those of the scales' values. `layouts` are texts that make of the two
    matrices the scales of A and of the weight as `_scaled_mm` takes them; `packed` is a text that makes an
    operand of its values.
    """

    name: str
    lines: tuple[int, int]
    depth: int
    layouts: tuple[str, str]
    fill: Fill = Fill.POSITIVE
    dtype: torch.dtype = torch.float32
    packed: str = "{}"

    @property
    def is_fp4(self) -> bool:
        return self.packed != "{}"

    @property
    def depths(self) -> tuple[int, ...]:
        """Sizes of K. Rows of operands are multiples of 16 bytes; the last block may be incomplete."""
        return (128, 160, 288, 416) if self.is_fp4 else (128, 144, 272, 400)

    def scales_shape(self, rows: str, of: int) -> tuple[str, str]:
        """The shape of the matrix of scales of `rows` rows of operand number `of`."""
        lines = rows if self.lines[of] == 1 else f"({rows} + {self.lines[of] - 1}) // {self.lines[of]}"
        return lines, f"(K + {self.depth - 1}) // {self.depth}"

    def text(self, out: torch.dtype, bias: str) -> str:
        """The product of operands {0} and {1} with scales {2} and {3}."""
        a, b = self.packed.format("{0}"), self.packed.format("{1}")
        of_a, of_b = self.layouts
        return f"torch._scaled_mm({a}, {b}.t(), {of_a}, {of_b}{bias}, out_dtype={out})"

    def reference(self, bias: str) -> str:
        a, b = (f"scaled({{{i}}}, {{{i + 2}}}, {self.lines[i]}, {self.depth})" for i in range(2))
        return f"{a} @ {b}.t(){bias}"


_ROWS, _COLUMNS = "{2}.t().contiguous().t()", "{3}.t()"
"""Scales of A contiguous along M, and scales of the weight transposed to those of B."""


def _of_mma(name: str, depth: int, dtype: torch.dtype, fill: Fill, packed: str = "{}") -> Recipe:
    layouts = f"tiled({{2}}, {dtype})", f"tiled({{3}}, {dtype})"
    return Recipe(name, (1, 1), depth, layouts, fill, dtype, packed)


RECIPES = (
    Recipe("1x128 by 128x128", (1, 128), 128, (_ROWS, _COLUMNS)),
    Recipe("1x128 by 128x128, scales of a row in order", (1, 128), 128, ("{2}", _COLUMNS)),
    Recipe("1x128 by 1x128", (1, 1), 128, (_ROWS, "{3}.t().contiguous()")),
    Recipe("128x128 by 1x128", (128, 1), 128, ("{2}", _COLUMNS)),
    _of_mma("MXFP8", 32, torch.float8_e8m0fnu, Fill.POWERS),
    _of_mma("MXFP4", 32, torch.float8_e8m0fnu, Fill.POWERS, "fp4({})"),
    _of_mma("NVFP4", 16, torch.float8_e4m3fn, Fill.POSITIVE, "fp4({})"),
)
