"""Rotations of columns, as rotary embeddings have them: (x, y), where x and y are halves, becomes (-y, x)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_backend.kinds.blocks.kind import BlockOp

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PAIRED_COLUMNS = 4
"""A number that divides the first columns of blocks that are rotated: each half has pairs of columns, which
one thread has."""


def _rotated(rows: Tensor) -> Tensor:
    import torch  # here, since planning works without it

    first, second = rows.chunk(2, -1)
    return torch.cat((-second, first), -1)


class RotateHalf(BlockOp):
    """Rotates the halves of each block. Blocks of two columns are pairs of neighbours."""

    name = "block_rotate_half"
    pairs_halves = True

    def contradiction(self, block: int, part: int) -> str:
        return "halves make an even number" if block % 2 else ""

    def words(self, block: int) -> str:
        return f"block{block}_rotate_half({{0}})"

    def text(self, value: str, block: int, part: int) -> str:
        return f"sub.rotate_pairs({value})" if block == 2 else f"sub.rotate_half({value}, {block})"

    def reference(self, rows: Tensor, part: int, accumulate: torch.dtype) -> Tensor:
        return _rotated(rows)


class RotateFirst(BlockOp):
    """Rotates the halves of the first columns of each block, and leaves its other columns as they are.

    Tables of cosines and sines for these columns have blocks as their period (`Blocks.period`).
    """

    name = "block_rotate_first"
    has_part = True
    narrow_visits = (32, 64)

    def contradiction(self, block: int, part: int) -> str:
        if 0 < part <= block and part % PAIRED_COLUMNS == 0:
            return ""
        return f"the operand is a multiple of {PAIRED_COLUMNS} columns, and at most a block"

    def fits_visit(self, columns: int, block: int, part: int) -> bool:
        return block % columns == 0 and part <= columns

    def whole_columns(self, block: int, part: int) -> int:
        return 0 if any(self.fits_visit(each, block, part) for each in self.narrow_visits) else block

    def words(self, block: int) -> str:
        return f"block{block}_rotate_first({{0}}, {{1}})"

    def text(self, value: str, block: int, part: int) -> str:
        return f"sub.rotate_first({value}, {block}, {part})"

    def reference(self, rows: Tensor, part: int, accumulate: torch.dtype) -> Tensor:
        import torch  # here, since planning works without it

        return torch.cat((_rotated(rows[:, :part]), rows[:, part:]), -1)


ROTATE_HALF = RotateHalf()
ROTATE_FIRST = RotateFirst()
