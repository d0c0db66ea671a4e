"""Planes that are written to some rows of a cache of keys or values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Union

from cute_backend.dtypes import DType
from cute_backend.kinds.axes import Dim, Extent, Stride
from cute_backend.kinds.results.by_heads import ByHeads

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Cache(ByHeads):
    """The place of a plane in a cache of keys or values (B, H, L, D), contiguous, if M is (B, S) and N is (H,
    D): `length` is L, `rows` is S and `columns` is D. The other rows of the cache stay as they are.

    Row b * S + s of the plane becomes a row of batch b. `at` names the load that says which: a colvec has the
    position of each row, and a scalar has the position of s = 0, which the others follow; or `at` is that
    number. A position p < 0 of a load stands for p + L. A row whose position is not in the cache is not
    written. If rows of a batch have one position, each element is that of any of them, as with `index_put` of
    torch.
    """

    length: int
    rows: int
    columns: int
    at: Union[str, int]

    field: ClassVar[str] = "cache"
    is_partial = True

    def __str__(self) -> str:
        return f"rows of (B, H, {self.length}, {self.columns}) at {self.at}"

    @property
    def memory_rows(self) -> int:
        return self.length

    @property
    def holds_pairs(self) -> bool:
        return True

    @property
    def positions(self) -> str:
        return self.at if isinstance(self.at, str) else ""

    def contradiction(self, value: DType, stored: DType) -> str:
        sizes = (self.length, self.rows, self.columns)
        if not all(type(size) is int and size > 0 for size in sizes) or self.rows > self.length:
            return f"heads have {self.columns} columns, and the rows are no more than those of the cache"
        if self.positions or (type(self.at) is int and 0 <= self.at <= self.length - self.rows):
            return ""
        return f"it begins at row {self.at}, and all its rows are in the cache"

    def described(self, value: str) -> str:
        return f" is written to {self.rows} rows of a cache of {self.length};"

    def batches(self, rows: int | str) -> str:
        return f"writes {rows} rows of each batch to a cache"

    def dims(self, width: int) -> tuple[Dim, ...]:
        rows = Dim(Extent.CACHE_ROWS, Stride.OTHER, self.rows, self.length)
        return (rows, Dim(Extent.N, Stride.ONE, width=width))

    def placed(self, elements: Tensor, rows: int, positions: Tensor | None) -> Tensor:
        """A cache (B * L, N) in which all bits of the other rows are set."""
        import torch  # here, since planning works without it

        m, n = elements.shape
        memory = elements.new_empty(m // self.rows * self.length, n)
        memory.view(torch.uint8).fill_(0xFF)
        row, batch, position = self._written(m, positions, elements.device)
        heads = n // self.columns
        in_bytes = elements.contiguous().view(-1, heads, self.columns).view(torch.uint8)
        self._in_bytes(memory, heads)[batch, :, position] = in_bytes[row]
        return memory

    def copy(self, memory: Tensor, target: Tensor, positions: Tensor | None) -> None:
        """Copies the rows that were written. The target may have any shape."""
        rows, heads = memory.shape[0] // self.length * self.rows, memory.shape[1] // self.columns
        _, batch, position = self._written(rows, positions, memory.device)
        source = self._in_bytes(memory, heads)
        self._in_bytes(target, heads)[batch, :, position] = source[batch, :, position]

    def _in_bytes(self, memory: Tensor, heads: int) -> Tensor:
        """The memory of a cache as (B, H, L, bytes of a row): torch does not index every dtype."""
        import torch

        return memory.view(-1, heads, self.length, self.columns).view(torch.uint8)

    def _written(
        self, rows: int, positions: Tensor | None, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of a plane of `rows` rows that are written, their batches and their positions."""
        import torch

        row = torch.arange(rows, device=device)
        if positions is None:
            assert isinstance(self.at, int)
            position = self.at + row % self.rows
        elif positions.numel() == 1:
            position = positions.long().reshape(1) + row % self.rows
        else:
            position = positions.long().reshape(-1)
        position = torch.where(position < 0, position + self.length, position)
        row = row[(position >= 0) & (position < self.length)]
        return row, row // self.rows, position[row]

    def words(self) -> str:
        return f" to {self}"

    def function(self, by_row: bool) -> str:
        if not self.positions:
            return ""
        return "device_cache.place_in_cache" if by_row else "device_cache.follow_in_cache"

    def statements(self, name: str, columns: int, position: str, by_row: bool) -> list[str]:
        found = f"place = row // {self.rows} * {self.length} + row % {self.rows} + {self.at}"
        if self.positions:
            _, called = self.function(by_row).split(".")
            found = f"place, kept = {called}({position}, row, {self.rows}, {self.length})"
        elif self.rows == 1:
            found = f"place = row * {self.length} + {self.at}"
        return [
            "row, column, inside = sub.target(e)",
            *(["r = sub.row_of(e)"] if by_row else []),
            found,
            f"if inside{' & kept' if self.positions else ''}:",
            f"    {name}_glob[place, column] = {name}_rmem[e]",
        ]
