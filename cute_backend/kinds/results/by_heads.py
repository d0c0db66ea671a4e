"""The face of memory in which a plane is by heads."""

from __future__ import annotations


class ByHeads:
    """The memory of a plane as (B, H, L, D), contiguous, if M is (B, S) and N is (H, D)."""

    rows: int
    """S, the rows of a batch; 0 if they are known only at launch."""
    columns: int
    """D, the columns of a head."""

    in_boxes = True
    """Whether L is S, and rows are in their order, so that TMA can write boxes of them."""

    @property
    def memory_rows(self) -> int:
        """L, the rows that each batch has in memory; 0 if they are known only at launch."""
        return self.rows

    @property
    def positions(self) -> str:
        """The name of the load that says which rows are written; empty if none does."""
        return ""

    def contradiction(self) -> str:
        """The rule that its numbers break; empty if they break none."""
        raise NotImplementedError

    def described(self) -> str:
        """The words of messages for a store that has it, after the store's name."""
        raise NotImplementedError

    def batches(self, rows: int) -> str:
        """The same words for the number of rows by which M has to be divisible."""
        raise NotImplementedError

    def words(self) -> str:
        """Its spelling in formulas, after the value."""
        raise NotImplementedError

    def function(self, by_row: bool) -> str:
        """The function in `memory_ops/device_cache.py` that finds the row of an element in memory, from a
        load that has a position for each row, or the first one of each batch."""
        raise NotImplementedError

    def place(self, position: str, by_row: bool) -> tuple[str, str]:
        """The statement that sets `place` to the row of an element in memory, from its `row` in the plane and
        the load's value `position`; and the condition under which there is one. Only memory that is not
        `in_boxes` needs it."""
        raise NotImplementedError
