"""How a value of a region lies on the (M, N) plane: which of its axes are rows and which are columns.

A linear's result of (B, S, N) has leading axes that make up M. Seen as heads, (B, S, H, D), its last two make
up N; transposed to (B, H, S, D) they do too, but no longer in order. A frame records this, and is carried
from member to member, because it can't be derived from sizes: H may equal S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from cute_backend.fx_walk.static import Size, arguments, fake, first_argument, known, product, target_name


@dataclass(frozen=True)
class Frame:
    """The axes that make up M and those that make up N, each outermost first. Axes of one element are in
    neither."""

    m_axes: tuple[int, ...]
    n_axes: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[Size], m: Size, n: Size) -> Frame | None:
        """The frame of a value with leading axes M and last axes N; None if no axis divides the two."""
        for start in reversed(range(len(shape) + 1)):
            if known(product(shape[start:]) == n) and known(product(shape[:start]) == m):
                rows, columns = _long(shape[:start]), _long(shape[start:])
                return Frame(tuple(rows), tuple(start + axis for axis in columns))
        return None

    @property
    def axes(self) -> tuple[int, ...]:
        """All of them, in the order in which the plane lies in memory by rows."""
        return self.m_axes + self.n_axes

    @property
    def is_plain(self) -> bool:
        """Whether it is (..., N)."""
        return len(self.n_axes) < 2 and self.is_in_order

    @property
    def is_in_order(self) -> bool:
        """Whether no axis was moved: the value's elements come in the plane's order, by rows."""
        return list(self.axes) == sorted(self.axes)

    def order(self, rank: int) -> list[int]:
        """All axes of a value of this rank in the plane's order; those of one element, which lie anywhere,
        stay where they are if the others do."""
        if self.is_in_order:
            return list(range(rank))
        return [*(axis for axis in range(rank) if axis not in self.axes), *self.axes]

    def behind(self, axes: int) -> Frame:
        """The frame of the value when it is broadcast to `axes` more leading axes."""
        return Frame(tuple(axis + axes for axis in self.m_axes), tuple(axis + axes for axis in self.n_axes))

    def covers(self, shape: Sequence[Size], m: Size, n: Size) -> bool:
        """Whether a value of this shape has the plane's elements and no others."""
        return (
            known(product(shape[axis] for axis in self.m_axes) == m)
            and known(product(shape[axis] for axis in self.n_axes) == n)
            and all(known(size == 1) for axis, size in enumerate(shape) if axis not in self.axes)
        )

    def reshaped(self, node: fx.Node, m: Size, n: Size) -> Frame | None:
        """The frame of a view or a reshape of the value, which gives its elements another shape. It is None
        if an axis would hold both rows and columns, or if elements are repeated."""
        before, after = fake(first_argument(node)).shape, fake(node).shape
        if target_name(node) == "aten.permute.default":
            moved = [axis % len(before) for axis in arguments(node)["dims"]]
            return Frame(tuple(map(moved.index, self.m_axes)), tuple(map(moved.index, self.n_axes)))
        if not known(product(before) == product(after)):
            return None
        long, long_after = _long(before), _long(after)
        same = len(long) == len(long_after)
        if same and all(known(before[a] == after[b]) for a, b in zip(long, long_after, strict=True)):
            place = dict(zip(long, long_after, strict=True))
            return Frame(tuple(place[a] for a in self.m_axes), tuple(place[a] for a in self.n_axes))
        return Frame.of(after, m, n) if self.is_in_order else None


def _long(shape: Sequence[Size]) -> list[int]:
    return [axis for axis, size in enumerate(shape) if not known(size == 1)]
