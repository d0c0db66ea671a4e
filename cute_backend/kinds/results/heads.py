"""Planes that attention reads: by heads, in a tensor of their own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from cute_backend.dtypes import DType
from cute_backend.kinds.kind import LEFT_OUT
from cute_backend.kinds.results.by_heads import ByHeads
from cute_backend.kinds.results.form import Form

if TYPE_CHECKING:
    from torch import Tensor

HEAD_COLUMNS = 16
"""The columns of a head must be a multiple of this number. In every dtype, this number of columns has at
least 16 bytes, of which TMA's strides are multiples."""


@dataclass(frozen=True)
class Heads(ByHeads):
    """The memory of a plane as (B, H, S, D), contiguous, if M is (B, S) and N is (H, D): `rows` is S and
    `columns` is D. Attention reads it so. A kernel divides by both, which are its constants; but if S is
    known only at launch, `rows` is 0 (`EpilogueSpec.rows_of_batch`)."""

    rows: int = dataclasses.field(metadata=LEFT_OUT)
    columns: int

    field: ClassVar[str] = "heads"
    in_boxes = True
    only_by_tma = True
    columns_step = HEAD_COLUMNS

    def __str__(self) -> str:
        return f"(B, H, {self.rows or 'S'}, {self.columns})"

    @property
    def batches_at_launch(self) -> bool:
        return not self.rows

    @property
    def smem_words(self) -> str:
        return ", by_heads=True"

    def resized(self, columns: int) -> Form:
        return replace(self, columns=columns)

    def placed(self, elements: Tensor, rows: int, positions: Tensor | None) -> Tensor:
        m, n = elements.shape
        out = elements.new_empty((m, n))
        memory = out.view(-1, n // self.columns, rows, self.columns).transpose(1, 2)
        memory.copy_(elements.reshape(memory.shape))
        return out

    def contradiction(self, value: DType, stored: DType) -> str:
        if type(self.rows) is not int or self.rows < 0 or self.rows == 1 or type(self.columns) is not int:
            return "rows are 2 or more, or 0 if they are known at launch, and both are numbers"
        whole = self.columns >= HEAD_COLUMNS and self.columns % HEAD_COLUMNS == 0
        return "" if whole else f"columns are a multiple of {HEAD_COLUMNS}"

    def described(self, value: str) -> str:
        return f" has heads of {self.rows} rows and {self.columns} columns;"

    def batches(self, rows: int | str) -> str:
        return f"has heads of {rows} rows"

    def words(self) -> str:
        return f" as {self}"
