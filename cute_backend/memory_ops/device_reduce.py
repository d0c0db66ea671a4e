"""The reductions of generated epilogues: partial results in registers, combined in threads and across lanes.

Generated modules import this as `reduce`. It has a `DeviceKind` for each of `kinds.reductions`, named in
capitals.
The second stage combines the partials of all tiles by the same kinds, and makes a store's elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Union

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_backend.dtypes import DType
from cute_backend.kinds.reductions import REDUCTIONS, ReductionKind, Values
from cute_backend.memory_ops import device_math as math
from cute_backend.spec import Axis

Whole = Union[Int32, Int64]
"""A whole number, such as the place of an element in a row or column, or in the plane."""


@dataclass(frozen=True)
class DeviceKind:
    """A kind of reduction, on the registers of a kernel. Whole numbers have the type `whole`."""

    of: ReductionKind
    whole: type[Whole] = Int32

    @property
    def types(self) -> tuple[type[cutlass.Numeric], ...]:
        """The type of each part of a partial."""
        return tuple(Float32 if part.dtype is DType.F32 else self.whole for part in self.of.parts)

    @property
    def identity(self) -> tuple[float, ...]:
        return tuple(part.identity for part in self.of.parts)

    def element(self, value: Float32, place: Whole) -> Values:
        return self.of.element(math, value, place)

    def combine(self, a: Values, b: Values) -> Values:
        return self.of.combine(math, a, b)

    def result(self, whole: Values, count: Int64) -> Any:
        return self.of.result(math, whole, count)


_NAMES = {kind.name.upper(): kind for kind in REDUCTIONS}


def __getattr__(name: str) -> DeviceKind:
    if name not in _NAMES:
        raise AttributeError(f"{__name__} has no {name}; kinds of reductions are {', '.join(_NAMES)}")
    return DeviceKind(_NAMES[name])


def of_plane(kind: DeviceKind) -> DeviceKind:
    """The kind with whole numbers for the plane, whose places a thread does not meet in order."""
    return DeviceKind(kind.of, Int64)


def of_blocks(kind: DeviceKind, values: cute.Tensor, sub: Any, columns: int) -> cute.Tensor:
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

    def __init__(self, kind: DeviceKind, columns: int) -> None:
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


def _across(kind: DeviceKind, partial: Values, lanes: Sequence[int], columns: int) -> Any:
    """The reduction of a block of `columns` columns of which several lanes have partials: all whose numbers
    differ by `lanes`."""
    for offset in lanes:
        partial = kind.combine(partial, tuple(cute.arch.shuffle_sync_bfly(part, offset) for part in partial))
    return kind.result(partial, Int64(columns))


def _by_pairs(kind: DeviceKind, partials: list[Values]) -> Values:
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

    kind: DeviceKind
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
            return Int64(result)
        fragment = cute.make_rmem_tensor(2, Float32)  # conversions go by pairs
        fragment.fill(0.0)
        fragment[0] = self.after(result)
        return math.narrow(fragment, self.dtype, self.saturate)[0]


class Partials:
    """A thread's partials of `count` reductions: of its rows of a tile, or its columns of a subtile."""

    def __init__(self, kind: DeviceKind, count: int) -> None:
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
        place_of: Callable[[int], tuple[Whole, Boolean]],
    ) -> None:
        slots: dict[int, list[int]] = {}
        for e in range(cute.size(values)):
            slots.setdefault(slot_of(e), []).append(e)
        kind = self._kind
        for slot, elements in slots.items():
            if kind.of.several is not None:
                none = Float32(kind.identity[0])
                inside = [math.where(place_of(e)[1], values[e], none) for e in elements]
                self._combine(slot, kind.of.several(math, inside))
            else:
                for e in elements:
                    index, inside_plane = place_of(e)
                    element = kind.element(values[e], index)
                    if kind.of.follow is not None and kind.whole is Int32:
                        self._put(slot, kind.of.follow(math, self[slot], element, inside_plane))
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
