"""The reductions of generated epilogues: partial results in registers, combined in threads and across lanes.

Generated modules import this as `reduce`. Each kind defines the partial of one element, the identity, and how
two partials combine; every kind but a sum and a product gives the same result in any order
(`cute_backend.reduce` has the rules). The second stage combines the partials of all tiles by the same kinds,
and makes a store's elements.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Union

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_backend.memory_ops import device_math as math
from cute_backend.spec import Axis

Values = tuple[Any, ...]
"""A partial: a register scalar for each of its parts."""

Index = Union[Int32, Int64]
"""The place of an element in a row or column, or in the plane."""

_INFINITY = float("inf")


@dataclass(frozen=True)
class Kind:
    """One kind of reduction.

    `types` and `identity` have an entry for each part of a partial. `element` makes a partial from a value
    and its index, and `combine` combines two. `result` makes the stored value from the partial of all
    elements and their number. `several` makes a partial from several values at once, if that is cheaper than
    combining them one by one. `follow` combines a partial with that of an element of a higher index, and
    ignores the element if it is not inside; a kind has it if it is cheaper than `combine`.
    """

    types: tuple[type[cutlass.Numeric], ...]
    identity: tuple[float | int, ...]
    element: Callable[[Float32, Index], Values]
    combine: Callable[[Values, Values], Values]
    result: Callable[[Values, Int64], Float32 | Int64]
    several: Callable[[Sequence[Float32]], Values] | None = None
    follow: Callable[[Values, Values, Boolean], Values] | None = None


def _of_numbers(identity: float, combine: Callable[[Float32, Float32], Float32]) -> Kind:
    """Returns a kind whose partials are single values."""
    return Kind(
        (Float32,),
        (identity,),
        element=lambda value, index: (value,),
        combine=lambda a, b: (combine(a[0], b[0]),),
        result=lambda whole, count: whole[0],
    )


def _of_indices(index: type[Index], key: Callable[[Float32], Float32]) -> Kind:
    """Returns a kind that finds the index of the largest key. Its partials are a key and an index.

    The identity has index 0, which is also the result if no element is above -inf.
    """
    return Kind(
        (Float32, index),
        (-_INFINITY, 0),
        element=lambda value, index: (key(value), index),
        combine=_largest,
        result=lambda whole, count: Int64(whole[1]),
    )


def _above(a: Float32, b: Float32) -> Boolean:
    """Whether a counts as the larger: NaN is above all numbers, zeros are equal (`cute_backend.reduce`)."""
    return math.logical_not(a <= b) & (b == b)


def _largest(a: Values, b: Values) -> Values:
    """Returns the partial with the larger key or, if the keys are equal, the one with the lower index."""
    later = _above(b[0], a[0]) | (math.logical_not(_above(a[0], b[0])) & (b[1] < a[1]))
    return math.where(later, b[0], a[0]), math.where(later, b[1], a[1])


def _first_largest(a: Values, b: Values, inside: Boolean) -> Values:
    """Returns `_largest` of a and b, where b has the higher index, or a if b is not inside."""
    later = inside & _above(b[0], a[0])
    return math.where(later, b[0], a[0]), math.where(later, b[1], a[1])


def _shift(top: Float32) -> Float32:
    """The value that is subtracted from exponents: the largest one, or 0 if that is infinite."""
    return math.where(math.isinf(top), Float32(0.0), top)


def _exp(value: Float32) -> Float32:
    """Returns exp of a value that is not positive, or not finite, as a term of a sum.

    It takes one approximate instruction, within 2 ulp or |value| ulp.
    """
    return math.exp2(value * 1.4426950408889634, fastmath=True)


def _exponentials(values: Sequence[Float32]) -> Values:
    top = functools.reduce(math.maximum, values)
    shift = _shift(top)
    return top, functools.reduce(operator.add, [_exp(value - shift) for value in values])


def _sum_of_exponentials(a: Values, b: Values) -> Values:
    top = math.maximum(a[0], b[0])
    shift = _shift(top)

    def shifted(part: Values) -> Float32:
        # An infinite top was not subtracted from the exponents; its total is 0 or infinite, and stays so.
        return part[1] * _exp(math.fmin(_shift(part[0]) - shift, 0.0))

    return top, shifted(a) + shifted(b)


def _logarithm(whole: Values, count: Int64) -> Float32:
    top, total = whole
    return math.log(total) + _shift(top)


SUM = _of_numbers(0.0, operator.add)
MEAN = replace(SUM, result=lambda whole, count: math.div(whole[0], count.to(Float32)))
PROD = _of_numbers(1.0, operator.mul)
MAX = _of_numbers(-_INFINITY, math.maximum)
MIN = _of_numbers(_INFINITY, math.minimum)
ARGMAX = replace(_of_indices(Int32, lambda value: value), follow=_first_largest)
ARGMIN = replace(_of_indices(Int32, lambda value: -value), follow=_first_largest)
PLANE_ARGMAX = _of_indices(Int64, lambda value: value)
PLANE_ARGMIN = _of_indices(Int64, lambda value: -value)
LOGSUMEXP = Kind(
    (Float32, Float32),
    (-_INFINITY, 0.0),
    element=lambda value, index: _exponentials([value]),
    combine=_sum_of_exponentials,
    result=_logarithm,
    several=_exponentials,
)


def of_blocks(kind: Kind, values: cute.Tensor, sub: Any, columns: int) -> cute.Tensor:
    """Returns, for every element of a subtile, the reduction of the block of `columns` columns that contains
    it. All lanes that share a row get the same result.

    No block extends beyond the last column, and none spans two subtiles.
    """
    blocks: dict[tuple[int, int], list[int]] = {}
    for e in range(cute.size(values)):
        blocks.setdefault((sub.row_of(e), sub.block_of(e, columns)), []).append(e)
    results = cute.make_rmem_tensor(cute.size(values), Float32)
    for elements in blocks.values():
        whole = _by_pairs(kind, [kind.element(values[e], Int32(0)) for e in elements])
        result = _across(kind, whole, sub.tile.row_lanes, columns)
        for e in elements:
            results[e] = result
    return results


class Blocks:
    """A thread's partials of one block of `columns` columns, which several subtiles make up, in each of its
    rows of these."""

    def __init__(self, kind: Kind, columns: int) -> None:
        self._kind, self._columns = kind, columns
        self._partials: dict[int, Values] = {}

    def take(self, values: cute.Tensor, sub: Any) -> None:
        """Combines the elements of a subtile into the partials of their rows. No block extends beyond the
        last column."""
        rows: dict[int, list[Values]] = {}
        for e in range(cute.size(values)):
            rows.setdefault(sub.row_of(e), []).append(self._kind.element(values[e], Int32(0)))
        for row, elements in rows.items():
            earlier = [self._partials[row]] if row in self._partials else []
            self._partials[row] = _by_pairs(self._kind, [*earlier, _by_pairs(self._kind, elements)])

    def results(self, tile: Any) -> cute.Tensor:
        """Returns the reductions by the row of the tile, in which all lanes that share a row agree. Rows that
        no subtile had have no value."""
        found = cute.make_rmem_tensor(tile.rows, Float32)
        for row, partial in self._partials.items():
            found[row] = _across(self._kind, partial, tile.row_lanes, self._columns)
        return found


def _across(kind: Kind, partial: Values, lanes: Sequence[int], columns: int) -> Any:
    """The reduction of a block of `columns` columns of which several lanes have partials: all whose numbers
    differ by `lanes`."""
    for offset in lanes:
        partial = kind.combine(partial, tuple(cute.arch.shuffle_sync_bfly(part, offset) for part in partial))
    return kind.result(partial, Int64(columns))


def _by_pairs(kind: Kind, partials: list[Values]) -> Values:
    """Combines all partials in a tree, neighbours first, to keep the chain of dependent ops short."""
    while len(partials) > 1:
        pairs = [kind.combine(a, b) for a, b in zip(partials[::2], partials[1::2], strict=False)]
        partials = pairs + partials[len(partials) // 2 * 2 :]
    return partials[0]


@dataclass(frozen=True)
class Result:
    """A store of a reduction along `axis`: it turns partials into elements of `dtype`, as memory has them.
    Each batch of `rows` rows has results of its own, unless that is 0. An element is what `after` makes of a
    result.

    Elements are rounded as `device_math.narrow` does.
    """

    kind: Kind
    axis: Axis
    dtype: type[cutlass.Numeric]
    saturate: bool = True
    rows: int = 0
    after: Callable[[Float32], Float32] = lambda result: result

    @property
    def types(self) -> tuple[type[cutlass.Numeric], ...]:
        """The types of a partial's components."""
        return self.kind.types

    def identity(self) -> Partials:
        """The partial of no elements, in slot 0."""
        return Partials(self.kind, 1)

    def element(self, whole: Values, count: Int64) -> cutlass.Numeric:
        """The store's element of the partial of all `count` elements."""
        result = self.kind.result(whole, count)
        if self.dtype is Int64:
            return result
        fragment = cute.make_rmem_tensor(2, Float32)  # conversions go by pairs
        fragment.fill(0.0)
        fragment[0] = self.after(result)
        return math.narrow(fragment, self.dtype, self.saturate)[0]


class Partials:
    """A thread's partials of `count` reductions: of its rows of a tile, or its columns of a subtile."""

    def __init__(self, kind: Kind, count: int) -> None:
        self._kind = kind
        self._count = count
        self._parts = [cute.make_rmem_tensor(count, kind_type) for kind_type in kind.types]
        for part, identity in zip(self._parts, kind.identity, strict=True):
            part.fill(identity)

    def __getitem__(self, slot: int) -> Values:
        return tuple(part[slot] for part in self._parts)

    def take_rows(self, values: cute.Tensor, sub: Any) -> None:
        """Combines each element of a subtile into the partial of its row, except elements beyond the plane.

        The subtiles of a row must be taken in the order of their columns.
        """
        self._take(values, sub.row_of, sub.along_row)

    def take_columns(self, values: cute.Tensor, sub: Any) -> None:
        """Combines each element of a subtile into the partial of its column, except elements beyond the
        plane."""
        self._take(values, sub.column_of, sub.along_column)

    def take_plane(self, values: cute.Tensor, sub: Any) -> None:
        """Combines all elements of a subtile into one partial, except elements beyond the plane."""
        self._take(values, lambda e: 0, sub.along_plane)

    def take(self, slot: int, partial: Values, inside: Boolean) -> None:
        """Combines a partial into a slot if it is `inside`."""
        self._combine(slot, self._unless(inside, partial))

    def _take(
        self,
        values: cute.Tensor,
        slot_of: Callable[[int], int],
        place_of: Callable[[int], tuple[Index, Boolean]],
    ) -> None:
        slots: dict[int, list[int]] = {}
        for e in range(cute.size(values)):
            slots.setdefault(slot_of(e), []).append(e)
        kind = self._kind
        for slot, elements in slots.items():
            if kind.several is not None:
                none = Float32(kind.identity[0])
                inside = [math.where(place_of(e)[1], values[e], none) for e in elements]
                self._combine(slot, kind.several(inside))
            else:
                for e in elements:
                    index, inside_plane = place_of(e)
                    element = kind.element(values[e], index)
                    if kind.follow is not None:
                        self._put(slot, kind.follow(self[slot], element, inside_plane))
                    else:
                        self.take(slot, element, inside_plane)

    def _unless(self, inside: Boolean, element: Values) -> Values:
        parts = zip(element, self._kind.types, self._kind.identity, strict=True)
        return tuple(math.where(inside, part, kind(identity)) for part, kind, identity in parts)

    def across(self, lanes: Sequence[int]) -> None:
        """Combines with the lanes whose numbers differ by these powers of two. All lanes get the result."""
        for offset in lanes:
            for slot in range(self._count):
                self._combine(slot, tuple(cute.arch.shuffle_sync_bfly(part, offset) for part in self[slot]))

    def _combine(self, slot: int, other: Values) -> None:
        self._put(slot, self._kind.combine(self[slot], other))

    def _put(self, slot: int, partial: Values) -> None:
        for part, value in zip(self._parts, partial, strict=True):
            part[slot] = value
