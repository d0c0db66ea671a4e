"""What generated epilogues reduce with: partial results in registers, combined in threads and across lanes.

Generated modules import this as `reduce`. Each kind says what one element is, what nothing is, and how two
partials combine; all but sums combine to the same in any order (see `cute_backend.reduce` for the rules).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from . import device_math as math

Values = tuple[Any, ...]
"""A partial: a register scalar for each of its parts."""


@dataclass(frozen=True)
class Kind:
    """`types` and `nothing` have an entry for each part; `element` makes a partial of a value and its index.

    `several` makes one of several values at once, where that takes less than combining one by one.
    """

    types: tuple[type[cutlass.Numeric], ...]
    nothing: tuple[float | int, ...]
    element: Callable[[Float32, Int32], Values]
    combine: Callable[[Values, Values], Values]
    several: Callable[[Sequence[Float32]], Values] | None = None


def _largest(a: Values, b: Values) -> Values:
    """Of two keys the larger, of equal ones the one of the lower index."""
    later = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
    return math.where(later, b[0], a[0]), math.where(later, b[1], a[1])


def _key(value: Float32) -> Int32:
    """Integers that compare as numbers do, zeros equal and NaN above all (`cute_backend.reduce`)."""
    bits = (value + 0.0).bitcast(Int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return math.where(math.isnan(value), Int32(0x7FFFFFFF), key)


def _shift(top: Float32) -> Float32:
    """What is taken from exponents: the largest value, unless it is infinite."""
    return math.where(math.isinf(top), Float32(0.0), top)


def _exp(value: Float32) -> Float32:
    """exp of what is not positive, or not finite, by one approximate instruction: terms of sums, to 2 ulp
    or |value| of them."""
    return math.exp2(value * 1.4426950408889634, fastmath=True)


def _exponential(value: Float32, index: Int32) -> Values:
    return _exponentials([value])


def _exponentials(values: Sequence[Float32]) -> Values:
    top = functools.reduce(math.maximum, values)
    shift = _shift(top)
    return top, functools.reduce(operator.add, [_exp(value - shift) for value in values])


def _sum_of_exponentials(a: Values, b: Values) -> Values:
    top = math.maximum(a[0], b[0])
    shift = _shift(top)

    def shifted(part: Values) -> Float32:
        # An infinite top was not taken from its exponents; its total is 0 or infinite, and stays so.
        return part[1] * _exp(math.fmin(_shift(part[0]) - shift, 0.0))

    return top, shifted(a) + shifted(b)


_LOWEST, _HIGHEST = -(2**31), 2**31 - 1
_INFINITY = float("inf")

SUM = Kind((Float32,), (0.0,), lambda value, index: (value,), lambda a, b: (a[0] + b[0],))
MAX = Kind((Float32,), (-_INFINITY,), lambda value, index: (value,), lambda a, b: (math.maximum(a[0], b[0]),))
MIN = Kind((Float32,), (_INFINITY,), lambda value, index: (value,), lambda a, b: (math.minimum(a[0], b[0]),))
ARGMAX = Kind((Int32, Int32), (_LOWEST, _HIGHEST), lambda value, index: (_key(value), index), _largest)
ARGMIN = Kind((Int32, Int32), (_LOWEST, _HIGHEST), lambda value, index: (_key(-value), index), _largest)
LOGSUMEXP = Kind((Float32, Float32), (-_INFINITY, 0.0), _exponential, _sum_of_exponentials, _exponentials)


class Partials:
    """A thread's partials of `count` reductions: of its rows of a tile, or its columns of a subtile."""

    def __init__(self, kind: Kind, count: int) -> None:
        self._kind = kind
        self._count = count
        self._parts = [cute.make_rmem_tensor(count, kind_type) for kind_type in kind.types]
        for part, nothing in zip(self._parts, kind.nothing, strict=True):
            part.fill(nothing)

    def __getitem__(self, slot: int) -> Values:
        return tuple(part[slot] for part in self._parts)

    def take_rows(self, values: cute.Tensor, sub: Any) -> None:
        """The elements of a subtile, each into the partial of its row; none that lie beyond the plane."""
        self._take(values, sub.row_of, sub.along_row)

    def take_columns(self, values: cute.Tensor, sub: Any) -> None:
        """The elements of a subtile, each into the partial of its column; none that lie beyond the plane."""
        self._take(values, sub.column_of, sub.along_column)

    def _take(
        self,
        values: cute.Tensor,
        slot_of: Callable[[int], int],
        place_of: Callable[[int], tuple[Int32, Boolean]],
    ) -> None:
        slots: dict[int, list[int]] = {}
        for e in range(cute.size(values)):
            slots.setdefault(slot_of(e), []).append(e)
        kind = self._kind
        for slot, elements in slots.items():
            if kind.several is not None:
                none = Float32(kind.nothing[0])
                inside = [math.where(place_of(e)[1], values[e], none) for e in elements]
                self._combine(slot, kind.several(inside))
            else:
                for e in elements:
                    index, inside_plane = place_of(e)
                    self._combine(slot, self._unless(inside_plane, kind.element(values[e], index)))

    def _unless(self, inside: Boolean, element: Values) -> Values:
        parts = zip(element, self._kind.types, self._kind.nothing, strict=True)
        return tuple(math.where(inside, part, kind(nothing)) for part, kind, nothing in parts)

    def across(self, lanes: Sequence[int]) -> None:
        """Combine with the lanes whose numbers differ by these powers of two: all get the result."""
        for offset in lanes:
            for slot in range(self._count):
                self._combine(slot, tuple(cute.arch.shuffle_sync_bfly(part, offset) for part in self[slot]))

    def _combine(self, slot: int, other: Values) -> None:
        for part, value in zip(self._parts, self._kind.combine(self[slot], other), strict=True):
            part[slot] = value
