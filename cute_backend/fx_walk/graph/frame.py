"""The place of a value on the (M, N) plane: which of its axes are rows and which are columns.

A linear's result of (B, S, N) has leading axes that make up M. Viewed as heads, (B, S, H, D), its last two
axes make up N. Transposed to (B, H, S, D), H and D still do, but they are not adjacent any more. A reduction
over each head, (B, S, H, 1) or (B, S, H), has one element for every D columns. A frame records this, and is
passed from member to member, because it can't be derived from sizes: H may equal S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from torch import fx

from cute_backend.fx_walk.graph.static import (
    Size,
    arguments,
    fake,
    first_argument,
    known,
    product,
    target_name,
)
from cute_backend.spec import TABLE_COLUMNS

_REPEATS = "aten.expand.default"


@dataclass(frozen=True)
class BlockPart:
    """The columns `start` to `start + count` of each block of `columns` columns."""

    start: int
    count: int
    columns: int

    @property
    def is_regular(self) -> bool:
        """Whether blocks consist of parts of this size, and this is one of them."""
        return self.start % self.count == self.columns % self.count == 0

    @property
    def is_read_apart(self) -> bool:
        """Whether a table of this part's columns is read for it alone: for the first columns of a block, if
        parts of this size make up no blocks, or TMA could not read the table for all of them."""
        return self.start == 0 and (not self.is_regular or self.count % TABLE_COLUMNS > 0)

    def __str__(self) -> str:
        return f"[{self.start}:{self.start + self.count}] of {self.columns}"


@dataclass(frozen=True)
class Frame:
    """The axes that make up M and those that make up N, each outermost first. Axes of one element are in
    neither. If a value has one element for each block of columns, `n_axes` make up the blocks, and `block` is
    the number of columns in one. An axis that joins rows with blocks of columns is in both. If a value has
    only a `part` of each block, the last of `n_axes` make up that part."""

    m_axes: tuple[int, ...]
    n_axes: tuple[int, ...]
    block: int = 1
    part: BlockPart | None = None

    @staticmethod
    def of(shape: Sequence[Size], m: Size, n: Size, block: int = 1) -> Frame | None:
        """The frame of a value with leading axes M and last axes N or its blocks; None if no axis divides
        the two."""
        for start in reversed(range(len(shape) + 1)):
            if known(product(shape[start:]) * block == n) and known(product(shape[:start]) == m):
                rows, columns = _long(shape[:start]), _long(shape[start:])
                return Frame(tuple(rows), tuple(start + axis for axis in columns), block)
        return None

    @staticmethod
    def of_all(shape: Sequence[Size], n: Size, block: int) -> Frame | None:
        """The frame of a value that is known to have all elements of the plane, or of one for each block, if
        its last axes are N or its blocks. The others are M then, whether or not their sizes prove it."""
        for start in reversed(range(len(shape) + 1)):
            if known(product(shape[start:]) * block == n):
                rows, columns = _long(shape[:start]), _long(shape[start:])
                return Frame(tuple(rows), tuple(start + axis for axis in columns), block)
        return None

    @staticmethod
    def joined(shape: Sequence[Size], m: Size, n: Size, block: int) -> Frame | None:
        """The frame of a value whose first axis joins all rows with blocks of columns, whose columns are its
        other axes, if it has any; None if it has no such axis."""
        first, *within = _long(shape) or [0]
        columns = product(shape[axis] for axis in within) * block
        if not isinstance(columns, int) or columns < 2 or not known(n % columns == 0):
            return None
        whole = known(product(shape) * block == product((m, n)))
        return Frame((first,), (first, *within), block) if whole else None

    @staticmethod
    def meeting(frames: Iterable[Frame], shape: Sequence[Size]) -> Frame | None:
        """The frame of a value of this shape that is computed from values with these frames, all broadcast to
        it. None if the frames are incompatible. An element of a block is combined with all columns of its
        block."""
        finest, *others = sorted(set(frames), key=attrgetter("block"))
        for other in others:
            within = finest.n_axes[len(other.n_axes) :]
            columns = product(shape[axis] for axis in within) * finest.block
            if replace(finest, n_axes=(*other.n_axes, *within)) != finest or other.m_axes != finest.m_axes:
                return None
            if other.part != finest.part:
                return None
            if not known(columns == other.block):
                return None
        return finest.repeated(shape)

    def repeated(self, shape: Sequence[Size]) -> Frame:
        """The frame of the value broadcast to this shape. The additional axes are the columns of a block."""
        further = tuple(axis for axis in _long(shape) if axis not in self.axes)
        columns = product(shape[axis] for axis in further)
        if not further or not isinstance(columns, int) or self.block % columns:
            return self
        return Frame(self.m_axes, (*self.n_axes, *further), self.block // columns)

    def reduced(self, dims: Sequence[int], keeps: bool, shape: Sequence[Size]) -> Frame | None:
        """The frame of the result when the axes `dims` of a value of this shape are reduced, and are removed
        or kept with one element. None if they are not the last axes of N, with known sizes."""
        if self.block > 1 or self.part is not None:
            return None
        gone = [axis for axis in self.n_axes if axis in dims]
        left, last = self.n_axes[: len(self.n_axes) - len(gone)], self.n_axes[len(self.n_axes) - len(gone) :]
        columns = product(shape[axis] for axis in last)
        if list(last) != gone or not gone or set(dims) & set(self.m_axes) or not isinstance(columns, int):
            return None
        place = {
            axis: axis if keeps else axis - sum(dim < axis for dim in dims) for axis in range(len(shape))
        }
        return Frame(
            tuple(place[axis] for axis in self.m_axes),
            tuple(place[axis] for axis in left),
            columns,
        )

    @property
    def axes(self) -> tuple[int, ...]:
        """All axes, in the row-major order of the plane."""
        return self.m_axes + tuple(axis for axis in self.n_axes if axis not in self.m_axes)

    @property
    def is_plain(self) -> bool:
        """Whether it is (..., N)."""
        return len(self.n_axes) < 2 and self.block == 1 and self.part is None and self.is_in_order

    def taken(self, part: BlockPart | None) -> Frame:
        """The frame of a part of each block, or of whole blocks, with the same axes."""
        return replace(self, part=part)

    def within(self, shape: Sequence[Size]) -> int | None:
        """The number of the last axes of N that make up the part of a value of this shape; None if there are
        no such axes."""
        assert self.part is not None
        for axes in range(1, len(self.n_axes) + 1):
            if known(product(shape[axis] for axis in self.n_axes[-axes:]) == self.part.count):
                return axes
        return None

    def _of_part(self, n: Size) -> Size:
        """The columns of a value with this frame, of the N columns of the plane."""
        return n if self.part is None else n // self.part.columns * self.part.count

    @property
    def joins(self) -> bool:
        """Whether an axis joins rows with blocks of columns."""
        return not set(self.m_axes).isdisjoint(self.n_axes)

    @property
    def is_in_order(self) -> bool:
        """Whether no axis was moved, so that the elements are in the plane's row-major order."""
        return list(self.axes) == sorted(self.axes)

    def order(self, rank: int) -> list[int]:
        """All axes of a value of this rank in the plane's order. Axes of one element, whose place is
        arbitrary, stay in place if the others do."""
        if self.is_in_order:
            return list(range(rank))
        return [*(axis for axis in range(rank) if axis not in self.axes), *self.axes]

    @property
    def heads_first(self) -> tuple[int, ...] | None:
        """The axes in the order (B, H, S, D) of attention, if M is (B, S) and N is (H, D), each with any
        number of outer axes. None if N or M has no such axes."""
        (*outer, rows), (*heads, columns) = self.m_axes or (-1,), self.n_axes or (-1,)
        return None if self.joins or rows < 0 or not heads else (*outer, *heads, rows, columns)

    def memory_order(self, rank: int) -> list[int]:
        """All axes of a value of this rank in the order of memory with heads. Axes of one element come
        first."""
        assert self.heads_first is not None
        return [*(axis for axis in range(rank) if axis not in self.axes), *self.heads_first]

    def behind(self, axes: int) -> Frame:
        """The frame of the value when it is broadcast to `axes` more leading axes."""
        rows, columns = ((axis + axes for axis in group) for group in (self.m_axes, self.n_axes))
        return replace(self, m_axes=tuple(rows), n_axes=tuple(columns))

    def covers(self, shape: Sequence[Size], m: Size, n: Size) -> bool:
        """Whether a value of this shape has the plane's elements, those of a part of each block, or one for
        each block, and no others."""
        n = self._of_part(n)
        if self.joins:
            return known(product(shape) * self.block == product((m, n)))
        return (
            all(0 <= axis < len(shape) for axis in self.axes)
            and known(product(shape[axis] for axis in self.m_axes) == m)
            and known(product(shape[axis] for axis in self.n_axes) * self.block == n)
            and all(known(size == 1) for axis, size in enumerate(shape) if axis not in self.axes)
        )

    def reshaped(self, node: fx.Node, m: Size, n: Size) -> Frame | None:
        """The frame of a view or a reshape of the value, which gives all of its elements another shape. It is
        None if an axis would hold both rows and columns, or if elements are repeated that are not those of
        blocks."""
        before, after = fake(first_argument(node)).shape, fake(node).shape
        if target_name(node) == "aten.permute.default":
            if self.joins:
                return None
            moved = [axis % len(before) for axis in arguments(node)["dims"]]
            return self._moved(moved.index)
        if target_name(node) == _REPEATS:
            frame = self.behind(len(after) - len(before)).repeated(after)
            return frame if frame.covers(after, m, n) else None
        long, long_after = _long(before), _long(after)
        same = len(long) == len(long_after)
        if same and all(known(before[a] == after[b]) for a, b in zip(long, long_after, strict=True)):
            return self._moved(dict(zip(long, long_after, strict=True)).__getitem__)
        if self.part is not None:
            return self._reshaped_part(before, after, m, self._of_part(n))
        if not self.is_in_order:
            return self._regrouped(before, after)
        return Frame.of_all(after, n, self.block) or Frame.joined(after, m, n, self.block)

    def _reshaped_part(self, before: Sequence[Size], after: Sequence[Size], m: Size, n: Size) -> Frame | None:
        """The frame after axes of a part of each block are split or joined. None if the part is joined with
        the blocks."""
        frame = Frame.of(after, m, n) if self.is_in_order else self._regrouped(before, after)
        frame = None if frame is None else frame.taken(self.part)
        return None if frame is None or frame.within(after) is None else frame

    def _regrouped(self, before: Sequence[Size], after: Sequence[Size]) -> Frame | None:
        """The frame after axes are split or joined. None if axes are joined that were moved."""
        groups = list(_groups(before, after))
        rows, columns = (_replaced(axes, groups) for axes in (self.m_axes, self.n_axes))
        return None if rows is None or columns is None else replace(self, m_axes=rows, n_axes=columns)

    def _moved(self, place: Callable[[int], int]) -> Frame:
        """The frame after each axis is moved to `place` of that axis."""
        rows, columns = (tuple(map(place, axes)) for axes in (self.m_axes, self.n_axes))
        return replace(self, m_axes=rows, n_axes=columns)


_Group = tuple[list[int], list[int]]


def _groups(before: Sequence[Size], after: Sequence[Size]) -> Iterator[_Group]:
    """The smallest groups of consecutive axes of two shapes that have the same number of elements."""
    long, long_after = _long(before), _long(after)
    i = j = 0
    for left in range(1, len(long) + 1):
        for right in range(j + 1, len(long_after) + 1):
            group = long[i:left], long_after[j:right]
            if known(product(before[axis] for axis in group[0]) == product(after[axis] for axis in group[1])):
                yield group
                i, j = left, right
                break


def _replaced(axes: tuple[int, ...], groups: Iterable[_Group]) -> tuple[int, ...] | None:
    """The axes of a new shape that take the place of `axes`; None if a group has only some of them, or in
    another order."""
    found, left = list[int](), list(axes)
    firsts = {old[0]: (old, new) for old, new in groups}
    while left:
        old, new = firsts.get(left[0], ([], []))
        if not old or left[: len(old)] != old:
            return None
        found += new
        del left[: len(old)]
    return tuple(found)


def _long(shape: Sequence[Size]) -> list[int]:
    return [axis for axis, size in enumerate(shape) if not known(size == 1)]
