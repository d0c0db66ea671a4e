"""The stretches of a graph that kernels span, which bound every search for a dependence."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field


@dataclass
class Stretches:
    """Stretches of positions in a graph, in order. None overlaps or touches another one."""

    _firsts: list[int] = field(default_factory=list)
    _lasts: list[int] = field(default_factory=list)

    def copy(self) -> Stretches:
        return Stretches(list(self._firsts), list(self._lasts))

    def add(self, first: int, last: int) -> None:
        """Adds the stretch from a kernel's first member to its last operand, unless that comes earlier."""
        if last < first:
            return
        start, stop = bisect_left(self._lasts, first), bisect_right(self._firsts, last)
        if start < stop:
            first, last = min(first, self._firsts[start]), max(last, self._lasts[stop - 1])
        self._firsts[start:stop], self._lasts[start:stop] = [first], [last]

    def bound(self, position: int) -> int:
        """The position before which no node depends on one at `position` or after it.

        The operands of a node outside of kernels come before it. A member of a kernel stands for all of the
        kernel's operands, and some may come after it, but none after the kernel's stretch. So no dependence
        leads from a node before a stretch into it, or beyond it.
        """
        index = bisect_left(self._lasts, position)
        return min([position, *self._firsts[index : index + 1]])
