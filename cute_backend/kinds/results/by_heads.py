"""The face of memory in which a plane is by heads."""

from __future__ import annotations

from cute_backend.kinds.axes import Call, Dim, Extent, plane
from cute_backend.kinds.results.form import Form


class ByHeads(Form):
    """The memory of a plane as (B, H, L, D), contiguous, if M is (B, S) and N is (H, D)."""

    rows: int
    """S, the rows of a batch; 0 if they are known only at launch."""
    columns: int
    """D, the columns of a head."""

    is_plane = True
    needs_dense = True
    moves_axes = True

    @property
    def batch_rows(self) -> int:
        return self.rows

    @property
    def block_columns(self) -> int:
        return self.columns

    @property
    def memory_rows(self) -> int:
        """L, the rows that each batch has in memory; 0 if they are known only at launch."""
        return self.rows

    def title(self) -> str:
        return f"output, {self}"

    def dims(self, width: int) -> tuple[Dim, ...]:
        return plane((Extent.M, Extent.N), True, width)

    def calls(self, rows: str) -> tuple[Call, ...]:
        return (("by_heads", (self.memory_rows or rows, self.columns)),)
