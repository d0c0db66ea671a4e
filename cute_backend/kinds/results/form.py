"""The face of a form in which a value is stored: its elements and their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from cute_backend.dtypes import VALUE_DTYPES, DType
from cute_backend.kinds.axes import Call, Dim, Order
from cute_backend.kinds.scales import Scaling

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from cute_backend.kinds.reductions.axis import Reduction
    from cute_backend.kinds.reductions.kind import ReductionKind


class Form:
    """The elements of a value (M, N) that a store writes, and where they are in memory. It is a frozen
    dataclass, whose fields are in the JSON form of a spec.

    `by_row` below says whether the load with a store's positions has one for each row of the plane.
    """

    field: ClassVar[str] = ""
    """The field of a store in JSON that has those of the form. If it is empty, they are fields of the store
    themselves."""
    order = Order.ROW
    """The order of its elements in memory."""
    index = 0
    count = 1
    """Its place among the forms that make up a result side by side, and their number."""
    is_plane = False
    """Whether a store writes all elements of the plane."""
    in_boxes = False
    """Whether the plane's boxes are boxes in memory, which TMA can write."""
    only_by_tma = False
    """Whether regions store it only on targets whose planes move by TMA."""
    in_segments = True
    """Whether one of several segments of columns may have it."""
    needs_dense = False
    """Whether the product has to be a dense one."""
    is_partial = False
    """Whether its memory has other elements, too, which stay as they are. A caller may give such memory in
    any shape."""
    moves_axes = False
    """Whether the axes of a program's tensor are in another order than those of the plane."""
    pads_rows = False
    """Whether rows behind the last one are written, too, so that rows are whole tiles that an MMA reads."""
    read_as: ClassVar[Scaling | None] = None
    """The scales of the next product's operand that it is, in the tiles that an MMA reads."""
    columns_step = 1
    """A number that divides its `block_columns`."""

    @classmethod
    def drawn(cls, block: int, kinds: Sequence[ReductionKind]) -> tuple[Form, ...]:
        """Examples for random specs, with blocks of `block` columns and `kinds` of reductions; none if M and
        N have to fit what memory has."""
        return ()

    @property
    def holds_pairs(self) -> bool:
        """Whether its elements may be pairs of values, which are two columns in memory."""
        return False

    @property
    def rows_apart(self) -> bool:
        """Whether one row of the plane alone decides each of its elements."""
        return True

    @property
    def is_element(self) -> bool:
        """Whether its elements are those of the value, so that one that was rounded stays as it is."""
        return True

    @property
    def smem_words(self) -> str:
        """The arguments, after name and dtype, of its `SmemOperand` (`templates/epilogue.py`)."""
        return ""

    @property
    def reduction(self) -> Reduction | None:
        """It, if partials of tiles make up its elements, which are complete only when the kernel is done."""
        return None

    @property
    def batch_rows(self) -> int:
        """The rows of a batch, of which M is a multiple; 0 if it has none, or if a launch says how many."""
        return 0

    @property
    def batches_at_launch(self) -> bool:
        """Whether it has batches whose rows are known only at launch."""
        return False

    @property
    def block_columns(self) -> int:
        """The columns of a block or of a head, of which N is a multiple; 0 if it has none."""
        return 0

    @property
    def whole_columns(self) -> int:
        """The columns of the blocks that a tile has to hold whole; 0 if it needs none."""
        return 0

    @property
    def positions(self) -> str:
        """The name of the load that says which rows are written; empty if none does."""
        return ""

    @property
    def transposed(self) -> Form | None:
        """The form with the same memory for the transposed plane; None if kernels have none."""
        return None

    def resized(self, columns: int) -> Form:
        """The form with blocks or heads of `columns` columns instead, if it has any."""
        return self

    def described(self, value: str) -> str:
        """The words of messages that follow the name of a store of `value`."""
        return ""

    def stored_as(self, value: DType) -> tuple[DType, ...]:
        """The dtypes that elements may have in memory if the value has this one; none if the form has no such
        values."""
        return VALUE_DTYPES

    def contradiction(self, value: DType, stored: DType) -> str:
        """The rule that it breaks, with a value and memory of these dtypes; empty if it breaks none."""
        return ""

    def batches(self, rows: int | str) -> str:
        """The words of messages, after a store's name, for rows by which M has to be divisible."""
        return f"has batches of {rows} rows"

    def dims(self, width: int) -> tuple[Dim, ...]:
        """The axes of a store's tensor, in a segment of `width` columns if there are segments."""
        raise NotImplementedError

    def elements(self, plane: Tensor, accumulate: torch.dtype) -> Tensor:
        """The elements that are stored of a value (M, N). Sums are computed in the dtype that is given."""
        return plane

    def placed(self, elements: Tensor, rows: int, positions: Tensor | None) -> Tensor:
        """New memory with these elements, whose batches have `rows` rows, and the tensor of `positions`."""
        raise NotImplementedError

    def copy(self, memory: Tensor, target: Tensor, positions: Tensor | None) -> None:
        """Copies memory that `placed` made to that of a caller."""
        target.copy_(memory)

    def title(self) -> str:
        """Its words in the tables of `explain`."""
        return "output"

    def spelled(self, value: str) -> str:
        """The spelling of its elements in formulas."""
        return value

    def words(self) -> str:
        """Its spelling in formulas, after the value that is stored."""
        return ""

    def calls(self, rows: str) -> tuple[Call, ...]:
        """The calls that make a kernel's view of a store's tensor. `rows` are those of a batch."""
        return ()

    def take(self, store: str) -> list[str]:
        """The statements that reduce a subtile's elements `store`; none where they are stored."""
        return []

    def function(self, by_row: bool) -> str:
        """The module of `memory_ops` and the function that `statements` call; empty if they call none."""
        return ""

    def statements(self, name: str, columns: int, position: str, by_row: bool) -> list[str]:
        """The statements of a kernel that store element `e` of a subtile of `columns` columns, from
        `{name}_rmem` to `{name}_glob`; none where elements are at their rows and columns. `position` is the
        expression of the value of `positions`."""
        return []
