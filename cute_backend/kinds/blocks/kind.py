"""The face of an op over blocks of columns: its check, its needs, its text and its reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_backend.kinds.kind import Kind
from cute_backend.kinds.reductions import ReductionKind

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class BlockOp(Kind):
    """An op whose result depends on the place of an element in its block of columns.

    An op of a spec has the number of columns of its blocks: here `block`, two or more. Some kinds work on a
    part of each block, whose columns are their last operand: here `part`, or 0 if that operand is no whole
    number.
    """

    reads = True
    """Whether its first operand is a value, of which it reads other columns of the block. This value and the
    result are fp32. Otherwise it reads no value, and its result is an int32 for each column."""
    has_part = False
    """Whether the columns of a part are an operand."""
    reduction: ReductionKind | None = None
    """The reduction of which all elements of a block have the result, if there is one. Passes over narrower
    subtiles can compute it ahead of the visits."""
    pairs_halves = False
    """Whether an element depends on the one at the same place in the other half of its block, so that kernels
    reorder columns until one thread has both. Neighbours are in one thread anyway."""
    narrow_visits: tuple[int, ...] = ()
    """The columns of visits that may have all that the op needs of a block, as `fits_visit` says, though they
    are narrower than one."""

    def contradiction(self, block: int, part: int) -> str:
        """The rule that these columns break; empty if they break none."""
        return ""

    def fits_visit(self, columns: int, block: int, part: int) -> bool:
        """Whether visits of this number of columns have all that the op needs of a block."""
        return True

    def whole_columns(self, block: int, part: int) -> int:
        """The columns of the blocks that a tile has to hold whole; 0 if the op needs none."""
        return 0

    def columns_together(self, block: int, part: int) -> int:
        """The number of columns that stay together where halves of smaller blocks are reordered."""
        return block

    def resized_part(self, part: int, block: int) -> int:
        """The columns of a part if its blocks had `block` columns instead."""
        return min(part, block)

    def words(self, block: int) -> str:
        """Its spelling in formulas, with `{0}` and `{1}` for the operands."""
        raise NotImplementedError

    def text(self, value: str, block: int, part: int) -> str:
        """The expression in a kernel: of a subtile's elements from a fragment `value`; or, if it reads none,
        of element `e`. `sub` is the subtile, and `reduce` is `memory_ops/device_reduce.py`."""
        raise NotImplementedError

    def reference(self, rows: Tensor, part: int, accumulate: torch.dtype) -> Tensor:
        """The result for blocks (blocks, columns) of fp32, or of the indices of columns if it reads no value.
        Sums are computed in the dtype that is given."""
        raise NotImplementedError
