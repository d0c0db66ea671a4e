"""Operands that vary over columns in blocks, as tables of cosines and sines do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cute_backend.kinds.axes import Call, Dim, Extent, Stride
from cute_backend.kinds.kind import LEFT_OUT

if TYPE_CHECKING:
    from torch import Tensor

TABLE_COLUMNS = 16
"""A number that divides the columns of a block in a table: the columns of the narrowest subtile, for which
TMA brings a part of a block."""

_TABLE_BITS = 128
"""A number that divides the bits of a row of a table with a period: the distances of rows, for TMA."""


@dataclass(frozen=True)
class Blocks:
    """How an operand varies over columns in blocks: N is the two modes (N / columns, columns).

    `outer` is the class of the stride from one block to the next, `inner` of that within a block; not both
    are ZERO. The number of columns in a block is the only size that a spec holds. A kernel divides column
    indices by it, and a division by a constant takes few instructions.

    With a `period`, N is in blocks of that many columns, of each of which the operand has only the first
    `columns`: its axes are (N / period, columns). Its values in the other columns are not defined, and no
    result may depend on them.
    """

    columns: int
    outer: Stride
    inner: Stride
    period: int = field(default=0, metadata=LEFT_OUT)

    @property
    def step(self) -> int:
        """The columns from one block to the next."""
        return self.period or self.columns

    def contradiction(self, of_rows: Sequence[Stride], of_columns: Stride, is_plane: bool) -> str:
        """The rule that it breaks, with the strides of M's modes and of all of N; empty if it breaks none."""
        if type(self.columns) is not int or self.columns < 2:
            return "; a block has two or more"
        longer = type(self.period) is int and self.period > self.columns
        if self.period and not (longer and is_plane and self.outer is Stride.ZERO):
            return (
                f" at the beginning of every {self.period}, and a stride of class {self.outer.value} between "
                "these; such a load is exact, and all blocks, which have more columns, share it"
            )
        if self.outer is self.inner is Stride.ZERO:
            return " and strides of class 0 along both of their axes, which are one mode then"
        if of_columns is not Stride.OTHER:
            return f" and a stride of class {of_columns.value} along all of N; expected s"
        along = [*of_rows, self.outer, self.inner].count(Stride.ONE)
        return " and strides of 1 along two axes; one of them is contiguous, or none" if along > 1 else ""

    def is_table(self, of_rows: Sequence[Stride], bits: int) -> bool:
        """Whether a plane of such elements is a table (S, b): all blocks share its columns, and all modes of
        M but the innermost share its rows. TMA can bring boxes of it."""
        *outer, inner = of_rows
        whole = not (self.columns * bits % _TABLE_BITS if self.period else self.columns % TABLE_COLUMNS)
        repeats = all(mode is Stride.ZERO for mode in (self.outer, *outer))
        return whole and repeats and self.inner is Stride.ONE and inner is Stride.OTHER

    def fits_boxes(self, columns: int) -> bool:
        """Whether a subtile of `columns` columns is in one block of a table or, with a period, has all or
        none of its columns. TMA fills the others with zeros, and loads the first ones where it has none."""
        if self.period:
            return self.period % columns == 0 and self.columns <= columns
        return self.columns % columns == 0

    def dims(self, width: int) -> tuple[Dim, ...]:
        """The axes in place of N, in a segment of `width` columns if there are segments."""
        outer = Dim(Extent.BLOCKS, self.outer, self.step, width)
        return (outer, Dim(Extent.BLOCK, self.inner, self.columns))

    def calls(self) -> tuple[Call, ...]:
        """The calls by which a kernel views it as one axis."""
        first = (("first_columns", (self.period,)),) if self.period else ()
        return (("collapse_n", ()), *first)

    def words(self) -> str:
        """Its strides in words."""
        of = f"the first {self.columns} of {self.period}" if self.period else f"{self.columns}"
        strides = f"({self.outer.value}, {self.inner.value})"
        return f", strides {strides} from block to block of {of} columns and within one"

    def reference(self, tensor: Tensor) -> Tensor:
        """A tensor with these axes in place of its last one, N, repeated along axes of class ZERO."""
        outer, inner = (slice(1 if each is Stride.ZERO else None) for each in (self.outer, self.inner))
        tensor = tensor[..., outer, inner].expand(tensor.shape)
        if self.period:  # In the other columns it is not defined, and is the last element here.
            places = range(self.period)
            tensor = tensor[..., [min(place, self.columns - 1) for place in places]]
        return tensor.flatten(-2)
