"""The face of scales of an operand: the vectors that come beside it, and what they make of its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cute_backend.dtypes import DType
from cute_backend.kinds.axes import Dim, Extent

if TYPE_CHECKING:
    from torch import Tensor

    Round = Callable[[Tensor, DType], Tensor]
    """Rounds values of fp32 to a dtype, and returns them in fp32 (`numerics.cast`)."""


@dataclass(frozen=True)
class Side:
    """An operand of a product, A (lines, K) or B (K, lines): the extents of its lines, of blocks of these,
    and of their scales in tiles. If each of the `groups` has a B of its own, they are an axis ahead of
    these."""

    name: str
    lines: Extent
    blocks: Extent
    tiles: Extent
    groups: tuple[Extent, ...] = ()
    has_rows_in_groups: bool = False
    """Whether its lines are in groups, whose sizes only the device knows."""

    @property
    def k_axis(self) -> int:
        return 1 if self.name == "A" else 0

    def along(self, lines: Any, k: Any) -> tuple[Any, Any]:
        """Facts of its lines and of K, in the order of its axes."""
        return (lines, k) if self.k_axis == 1 else (k, lines)


@dataclass(frozen=True)
class Vector:
    """A tensor that comes beside an operand: its `name` in those of arguments and in messages, its `title` in
    front of the operand's name, its dtype and its axes."""

    name: str
    title: str
    dtype: DType
    dims: tuple[Dim, ...]
    inner: int | None
    """The one of two axes along which libraries store neighbours, if kernels take any strides."""
    by_tma: bool = False


class Scales:
    """Vectors beside an operand that vary along K. This one has none: the operand's values are its own."""

    @property
    def word(self) -> str:
        """The word for a product with them in names of kernels."""
        return ""

    @property
    def in_order(self) -> bool:
        """Whether the lines of both operands have to be in the order of the plane, in one dense tile after
        another: neither transposed, nor paired, nor in segments or blocks of columns."""
        return False

    def fault(self, product: Any) -> str:
        """The facts about a product, an `Accumulator`, that contradict them, in words that follow its name;
        empty if there are none."""
        return ""

    @property
    def words(self) -> str:
        """Its blocks or groups, in the header of a generated module."""
        return ""

    @property
    def place(self) -> str:
        """Where a kernel keeps the vectors, and how they come there, in the same header."""
        return ""

    @property
    def of_values(self) -> str:
        """The words that follow the dtype of values that are converted."""
        return ""

    @property
    def parts(self) -> str:
        """The parts of an operand that have one element of a vector, in messages."""
        return ""

    @property
    def scales_sums(self) -> bool:
        """Whether sums of products are scaled, block by block of K, and the operand's values are not."""
        return False

    def beside(self, side: Side) -> tuple[Vector, ...]:
        """The vectors beside an operand, in the order of arguments."""
        return ()

    def sizes(self, side: Side, lines: Any, k: Any) -> dict[Extent, Any]:
        """The sizes of extents of the vectors beside `lines` rows of A, or columns of B, by `k` values."""
        return {}

    def misfit(
        self, side: Side, shape: Sequence[Any], k: Any, groups: Any, given: Sequence[Sequence[Any]]
    ) -> str:
        """Why tensors of the shapes `given` are not the vectors of an operand of this shape, with `k` values
        along K and a number of groups, in a sentence; empty if they are."""
        sizes = {Extent.GROUPS: groups, **self.sizes(side, shape[1 - side.k_axis - 2], k)}
        for vector, each in zip(self.beside(side), given, strict=True):
            expected = tuple(dim.size(sizes) for dim in vector.dims)
            if tuple(each) != expected:
                return f"the {vector.name} of {side.name} have shape {shown(each)}; {self.taken(expected)}"
        return ""

    def taken(self, expected: Sequence[Any]) -> str:
        """The shape that a vector has, in words."""
        raise NotImplementedError

    def applied(self, operand: Tensor, vectors: Sequence[Tensor], to: DType, rounded: Round) -> Tensor:
        """The values of an operand (K, lines), which a product takes in the dtype `to`, with its vectors."""
        return operand

    def in_groups(
        self, operand: Tensor, ends: Sequence[int], vectors: Sequence[Tensor], to: DType, rounded: Round
    ) -> Tensor:
        """The values of an operand (rows, K), whose rows are in groups with these ends, with its vectors."""
        return operand


def shown(sizes: Sequence[Any]) -> str:
    """A shape in messages."""
    return "(" + ", ".join(str(size) for size in sizes) + ")"
