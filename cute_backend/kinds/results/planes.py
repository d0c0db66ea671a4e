"""Whole planes, and one value for each block of columns, by rows or by columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from cute_backend.dtypes import VALUE_DTYPES, DType
from cute_backend.kinds.axes import Dim, Extent, Order, plane
from cute_backend.kinds.results.form import Form

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from cute_backend.kinds.reductions.kind import ReductionKind


class InOrder(Form):
    """Elements by rows or by columns, without gaps."""

    _columns = Extent.N

    def dims(self, width: int) -> tuple[Dim, ...]:
        return plane((Extent.M, self._columns), self.order is Order.ROW, width, self.block_columns)

    def placed(self, elements: Tensor, rows: int, positions: Tensor | None) -> Tensor:
        m, n = elements.shape
        by_rows = self.order is Order.ROW
        out = elements.new_empty((m, n)) if by_rows else elements.new_empty((n, m)).t()
        return out.copy_(elements)


@dataclass(frozen=True)
class WholePlane(InOrder):
    """All elements of a value, (M, N)."""

    order: Order = Order.ROW

    is_plane = True
    in_boxes = True

    @classmethod
    def drawn(cls, block: int, kinds: Sequence[ReductionKind]) -> tuple[Form, ...]:
        return tuple(map(cls, (Order.ROW, Order.COLUMN)))

    @property
    def holds_pairs(self) -> bool:
        return self.order is Order.ROW

    @property
    def transposed(self) -> Form | None:
        return replace(self, order=Order.ROW if self.order is Order.COLUMN else Order.COLUMN)

    @property
    def smem_words(self) -> str:
        return ", Order.COLUMN" if self.order is Order.COLUMN else ""

    def title(self) -> str:
        return "output, column-major" if self.order is Order.COLUMN else "output"


PLANE = WholePlane()
"""The plane by rows."""


@dataclass(frozen=True)
class PartOf(InOrder):
    """A plane that is a part of a result (M, `count` * N), which several stores write side by side, one for
    each `index`. The part's columns begin at `index` * N."""

    index: int
    count: int

    field: ClassVar[str] = "part"
    is_plane = True
    in_boxes = True
    in_segments = False

    @property
    def transposed(self) -> Form | None:
        return WholePlane(Order.COLUMN)

    def described(self, value: str) -> str:
        return f" is part {self.index} of {self.count};"

    def contradiction(self, value: DType, stored: DType) -> str:
        numbers = type(self.index) is int and type(self.count) is int
        several = numbers and 0 <= self.index < self.count and self.count > 1
        return "" if several else _PARTS

    def title(self) -> str:
        return f"output, part {self.index + 1} of {self.count}"


_PARTS = "the parts of a result are two or more, and follow each other from 0 on"


@dataclass(frozen=True)
class OfBlocks(InOrder):
    """The value at the first column of every block, (M, N / block): of reductions of blocks, or of what is
    computed from these alone."""

    block: int
    order: Order = Order.ROW

    _columns = Extent.BLOCKS

    @classmethod
    def drawn(cls, block: int, kinds: Sequence[ReductionKind]) -> tuple[Form, ...]:
        return tuple(cls(block, order) for order in (Order.ROW, Order.COLUMN))

    def stored_as(self, value: DType) -> tuple[DType, ...]:
        return (*VALUE_DTYPES, DType.E8M0)

    def contradiction(self, value: DType, stored: DType) -> str:
        several = type(self.block) is int and self.block >= 2
        return "" if several else f"has one element for each {self.block} columns; a block has two or more"

    @property
    def block_columns(self) -> int:
        return self.block

    @property
    def whole_columns(self) -> int:
        return self.block

    def resized(self, columns: int) -> Form:
        return replace(self, block=columns)

    def elements(self, plane: Tensor, accumulate: torch.dtype) -> Tensor:
        return plane[:, :: self.block]

    def title(self) -> str:
        return f"of {self.block} columns" + (", column-major" if self.order is Order.COLUMN else "")

    def words(self) -> str:
        return f"[:, ::{self.block}]"

    def statements(self, name: str, columns: int, position: str, by_row: bool) -> list[str]:
        return [
            f"if cutlass.const_expr(sub.begins_block(e, {self.block})):",
            "    row, column, inside = sub.target(e)",
            f"    if inside & (column % {self.block} == 0):",
            f"        {name}_glob[row, column // {self.block}] = {name}_rmem[e]",
        ]
