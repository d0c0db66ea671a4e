"""Reductions of the whole plane (M, N): for each row, for each column, or to one element.

A thread takes its elements of a subtile into its partials, and writes these to the workspace, where the last
tile of a row or a second kernel finishes them. To add an axis, add a member.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from cute_backend.dtypes import DType
from cute_backend.kinds.axes import Dim, Extent, Stride
from cute_backend.kinds.kind import LEFT_OUT
from cute_backend.kinds.reductions.kind import Part, ReductionKind
from cute_backend.kinds.results.form import Form

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Axis(str, Enum):
    """The axis that a reduction keeps: it has one result for each row or column, or one for the plane.

    The JSON form of a spec has its value, and generated modules have its name and its texts.
    """

    keeps_rows: bool
    keeps_columns: bool
    width: int
    """The results of a CTA of the second kernel. Rows may be few with many parts each, which need many
    threads. Columns are many with few parts each, and eight of them fill a sector of L2."""
    take: str
    lanes: str
    partials: str
    slot: str
    place: str
    target: str
    """Texts of generated modules: the method that takes the elements of a subtile; the lanes that share
    results; the number of a thread's partials, one of these, its place in the workspace, (parts, results),
    and the statement that finds it."""

    def __new__(cls, name: str, keeps: str = "", width: int = 1, texts: tuple[str, ...] = ()) -> Axis:
        axis = str.__new__(cls, name)
        axis._value_, axis.width = name, width
        axis.keeps_rows, axis.keeps_columns = "m" in keeps, "n" in keeps
        axis.take, axis.lanes, axis.partials, axis.slot, axis.place, axis.target = texts
        return axis

    # fmt: off
    ROW = "row", "m", 4, (
        "take_rows", "tile.row_lanes", "tile.rows", "r", "part, row",
        "part, row, inside = tile.row_target(r)",
    )
    """Each row, reduced over N: (M,)."""
    COLUMN = "column", "n", 8, (
        "take_columns", "sub.column_lanes", "sub.columns", "c", "piece, column",
        "piece, column, inside = sub.column_target(c)",
    )
    """Each column, reduced over M: (N,)."""
    ALL = "all", "", 1, (
        "take_plane", "tile.lanes", "1", "0", "part, 0",
        "part, inside = tile.plane_target()",
    )
    """The whole plane, reduced to one element: 0-d."""
    # fmt: on

    @property
    def is_held(self) -> bool:
        """Whether a thread keeps its partials from one subtile to the next. It meets all its elements of a
        row or of the plane in the visits of a tile, and all those of a column within one visit."""
        return not self.keeps_columns

    @property
    def over(self) -> tuple[int, ...]:
        """The axes of (M, N) that are reduced."""
        return (0,) * (not self.keeps_rows) + (1,) * (not self.keeps_columns)

    def kept(self, m: Any, n: Any) -> tuple[Any, ...]:
        """The one of both that a reduction keeps, if it keeps any."""
        return (m,) * self.keeps_rows + (n,) * self.keeps_columns

    def reduced(self, m: Any, n: Any) -> tuple[Any, ...]:
        """The others, over which it reduces: each result has as many elements as their product."""
        return (m,) * (not self.keeps_rows) + (n,) * (not self.keeps_columns)

    @property
    def transposed(self) -> Axis:
        """The axis of the transposed plane."""
        found = (self.keeps_columns, self.keeps_rows)
        return next(axis for axis in Axis if (axis.keeps_rows, axis.keeps_columns) == found)


BATCH_ROWS = 32
"""A number that divides the rows of a batch whose columns are reduced. A warp has as many rows on sm_100a,
and 16 on other targets, so no partial of a column spans two batches."""


@dataclass(frozen=True)
class Reduction(Form):
    """The reduction of a stored value: one element along `axis` in place of the plane.

    Two stores of one value, MAX and ARGMAX, are what torch calls `max` with a dimension.

    Columns may be reduced over batches of `rows` rows, a multiple of BATCH_ROWS that divides M, instead of
    over all rows. The result then has an element for each column of each batch, (M / rows * N,), and those of
    a batch are together.
    """

    axis: Axis
    kind: ReductionKind
    rows: int = dataclasses.field(default=0, metadata=LEFT_OUT)

    field: ClassVar[str] = "reduce"
    in_segments = False

    @classmethod
    def drawn(cls, block: int, kinds: Sequence[ReductionKind]) -> tuple[Form, ...]:
        return tuple(cls(axis, kind) for axis in Axis for kind in kinds if kind.drawn)

    @property
    def reduction(self) -> Reduction:
        return self

    @property
    def rows_apart(self) -> bool:
        return self.axis.keeps_rows

    @property
    def is_element(self) -> bool:
        return self.kind.is_element

    @property
    def transposed(self) -> Form | None:
        if self.kind.is_place or self.rows:
            return None
        return replace(self, axis=self.axis.transposed)

    @property
    def batch_rows(self) -> int:
        return self.rows

    @property
    def name(self) -> str:
        """Its name in `explain` and, before the number of `rows`, in formulas."""
        return f"{self.axis.value}_{self.kind.name}"

    def title(self) -> str:
        return self.name

    def spelled(self, value: str) -> str:
        return f"{self.name}{self.rows or ''}({value})"

    def partials(self, store: str) -> tuple[Part, ...]:
        """The numbers of a partial, with the names of their tensors. Places in the whole plane are I64."""
        wide = {} if self.axis.keeps_rows or self.axis.keeps_columns else {DType.I32: DType.I64}
        parts = ((f"{store}{part.name}", part.identity, part.dtype) for part in self.kind.parts)
        return tuple(Part(name, identity, wide.get(dtype, dtype)) for name, identity, dtype in parts)

    @property
    def text(self) -> str:
        """Its kind as an expression, where `reduce` is `memory_ops/device_reduce.py`."""
        name = f"reduce.{self.kind.name.upper()}"
        return name if self.partials("") == self.kind.parts else f"reduce.of_plane({name})"

    def begin(self, name: str) -> str:
        """The statement that makes partials of no elements."""
        return f"{name} = reduce.Partials({self.text}, {self.axis.partials})"

    def take(self, store: str) -> list[str]:
        if self.axis.is_held:
            return [f"held.{store}.{self.axis.take}({store}, sub)"]
        parts = f"{store}_parts"
        return [self.begin(parts), f"{parts}.{self.axis.take}({store}, sub)", *self.write(store, parts)]

    def write(self, store: str, parts: str) -> list[str]:
        """The statements that combine partials with those of other lanes and write them to their places."""
        axis, names = self.axis, [part.name for part in self.partials(store)]
        values = ", ".join(f"{name}_part" for name in names)
        lines = [
            axis.target,
            f"{values if len(names) > 1 else f'({values},)'} = {parts}[{axis.slot}]",
            "if inside:",
            *(f"    {name}_glob[{axis.place}] = {name}_part" for name in names),
        ]
        if axis.slot.isidentifier():
            each = f"for {axis.slot} in cutlass.range_constexpr({axis.partials}):"
            lines = [each, *(f"    {line}" for line in lines)]
        return [f"{parts}.across({axis.lanes})", *(f"{name}_glob = glob.{name}" for name in names), *lines]

    def described(self, value: str) -> str:
        return f", the {self.axis.value} {self.kind.name} of {value!r},"

    def stored_as(self, value: DType) -> tuple[DType, ...]:
        return () if value is DType.I32 else self.kind.stored_as(value)

    def contradiction(self, value: DType, stored: DType) -> str:
        if type(self.rows) is not int or self.rows < 0 or self.rows % BATCH_ROWS:
            return f"has batches of {self.rows} rows, which are a multiple of {BATCH_ROWS}"
        if self.rows and (not self.axis.keeps_columns or self.kind.is_place):
            return f"has batches of {self.rows} rows; only columns have them, and no places"
        if value is DType.I32:
            return "reduces i32, which fp32 does not hold"
        if stored in (able := self.stored_as(value)):
            return ""
        accepted = ", ".join(dtype.value for dtype in able)
        expected = f"expected {accepted}" if able else f"it reduces no {value.value}"
        return f"is stored as {stored.value}; {expected}"

    def dims(self, width: int) -> tuple[Dim, ...]:
        if self.rows:
            return (Dim(Extent.COLUMNS_OF_BATCHES, Stride.ONE, self.rows),)
        return tuple(Dim(extent, Stride.ONE) for extent in self.axis.kept(Extent.M, Extent.N))

    def elements(self, plane: Tensor, accumulate: torch.dtype) -> Tensor:
        return self.reference(plane.float(), accumulate)

    def placed(self, elements: Tensor, rows: int, positions: Tensor | None) -> Tensor:
        return elements

    def reference(self, plane: Tensor, accumulate: torch.dtype) -> Tensor:
        """An fp32 (M, N) plane, reduced: fp32, or int64 for places. Sums are computed in the dtype
        `accumulate`. Raises IndexError for an extremum of no elements, as torch does."""
        if self.rows:
            import torch  # here, since planning works without it

            alone = replace(self, rows=0)
            batches = plane.unflatten(0, (-1, self.rows))
            return torch.cat([alone.reference(batch, accumulate) for batch in batches])
        rows = plane.t() if self.axis.keeps_columns else plane
        if self.axis.keeps_rows or self.axis.keeps_columns:
            return self.kind.reference(rows, accumulate)
        return self.kind.reference(plane.reshape(1, -1), accumulate).reshape(())
