"""Whole planes, and one value for each block of columns, by rows or by columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cute_backend.dtypes import DType
from cute_backend.kinds.axes import Dim, Extent, Order, plane
from cute_backend.kinds.results.form import Form

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WholePlane(Form):
    """All elements of a value, (M, N)."""

    order: Order

    is_plane = True
    in_boxes = True
    _columns = Extent.N

    def title(self) -> str:
        return self._title() + (", column-major" if self.order is Order.COLUMN else "")

    def _title(self) -> str:
        return "output"

    def dims(self, width: int) -> tuple[Dim, ...]:
        return plane((Extent.M, self._columns), self.order is Order.ROW, width, self.block_columns)

    def placed(self, elements: Tensor, rows: int) -> Tensor:
        m, n = elements.shape
        by_rows = self.order is Order.ROW
        out = elements.new_empty((m, n)) if by_rows else elements.new_empty((n, m)).t()
        return out.copy_(elements)


@dataclass(frozen=True)
class OfBlocks(WholePlane):
    """The value at the first column of every block, (M, N / columns): of reductions of blocks, or of what is
    computed from these alone."""

    columns: int

    is_plane = False
    in_boxes = False
    _columns = Extent.BLOCKS

    def contradiction(self, value: DType, stored: DType) -> str:
        several = type(self.columns) is int and self.columns >= 2
        return "" if several else f"has one element for each {self.columns} columns; a block has two or more"

    @property
    def block_columns(self) -> int:
        return self.columns

    def elements(self, plane: Tensor) -> Tensor:
        return plane[:, :: self.columns]

    def _title(self) -> str:
        return f"of {self.columns} columns"

    def words(self) -> str:
        return f"[:, ::{self.columns}]"

    def statements(self, name: str, columns: int, position: str, by_row: bool) -> list[str]:
        return [
            f"if cutlass.const_expr(sub.begins_block(e, {self.columns})):",
            "    row, column, inside = sub.target(e)",
            f"    if inside & (column % {self.columns} == 0):",
            f"        {name}_glob[row, column // {self.columns}] = {name}_rmem[e]",
        ]
