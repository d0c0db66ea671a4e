"""The numbers of parts of blocks, so that a program may work on the first columns of each head alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_backend.kinds.blocks.kind import BlockOp

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class NumberedPart(BlockOp):
    """For an element in column n: n % block // part, where parts divide the block."""

    name = "block_part"
    reads = False
    has_part = True

    def contradiction(self, block: int, part: int) -> str:
        divides = part > 0 and block % part == 0
        return "" if divides else "the operand is a number of columns that divides them"

    def columns_together(self, block: int, part: int) -> int:
        return part

    def resized_part(self, part: int, block: int) -> int:
        return block

    def words(self, block: int) -> str:
        return f"column % {block} // {{0}}"

    def text(self, value: str, block: int, part: int) -> str:
        return f"sub.part_of(e, {block}, {part})"

    def reference(self, rows: Tensor, part: int, accumulate: torch.dtype) -> Tensor:
        return rows % rows.shape[-1] // part


PART = NumberedPart()
