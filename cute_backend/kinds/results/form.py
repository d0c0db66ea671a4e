"""The face of a form in which a value is stored: its elements and their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_backend.dtypes import DType
from cute_backend.kinds.axes import Call, Dim

if TYPE_CHECKING:
    from torch import Tensor


class Form:
    """The elements of a value (M, N) that a store writes, and where they are in memory.

    `by_row` below says whether the load with a store's positions has one for each row of the plane.
    """

    is_plane = False
    """Whether a store writes all elements of the plane."""
    in_boxes = False
    """Whether the plane's boxes are boxes in memory, which TMA can write."""
    pads_rows = False
    """Whether rows behind the last one are written, too, so that rows are whole tiles that an MMA reads."""

    @property
    def batch_rows(self) -> int:
        """The rows of a batch, of which M is a multiple; 0 if it has none, or if a launch says how many."""
        return 0

    @property
    def block_columns(self) -> int:
        """The columns of a block or of a head, of which N is a multiple; 0 if it has none."""
        return 0

    @property
    def positions(self) -> str:
        """The name of the load that says which rows are written; empty if none does."""
        return ""

    def described(self, value: str) -> str:
        """The words of messages that follow the name of a store of `value`."""
        return ""

    def contradiction(self, value: DType, stored: DType) -> str:
        """The rule that it breaks, with a value and memory of these dtypes; empty if it breaks none."""
        return ""

    def batches(self, rows: int) -> str:
        """The words of messages, after a store's name, for rows by which M has to be divisible."""
        return f"has batches of {rows} rows"

    def dims(self, width: int) -> tuple[Dim, ...]:
        """The axes of a store's tensor, in a segment of `width` columns if there are segments."""
        raise NotImplementedError

    def elements(self, plane: Tensor) -> Tensor:
        """The elements that are stored of a value (M, N)."""
        return plane

    def placed(self, elements: Tensor, rows: int) -> Tensor:
        """New memory with these elements, whose batches have `rows` rows."""
        raise NotImplementedError

    def title(self) -> str:
        """Its words in the tables of `explain`."""
        return "output"

    def words(self) -> str:
        """Its spelling in formulas, after the value."""
        return ""

    def calls(self, rows: str) -> tuple[Call, ...]:
        """The calls that make a kernel's view of a store's tensor. `rows` are those of a batch."""
        return ()

    def function(self, by_row: bool) -> str:
        """The module of `memory_ops` and the function that `statements` call; empty if they call none."""
        return ""

    def statements(self, name: str, columns: int, position: str, by_row: bool) -> list[str]:
        """The statements of a kernel that store element `e` of a subtile of `columns` columns, from
        `{name}_rmem` to `{name}_glob`; none where elements are at their rows and columns. `position` is the
        expression of the value of `positions`."""
        return []
