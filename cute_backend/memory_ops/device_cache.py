"""The rows of a cache of keys or values to which a kernel writes the rows of a plane.

The plane's rows are (B, S), and the cache is (B, H, L, D). Its rows are numbered from 0 to B * L: row p of
batch b is b * L + p. A position p < 0 stands for p + L, as in torch.
"""

from __future__ import annotations

import builtins

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

_LEAST, _MOST = -(2**31), 2**31 - 1


def saturated(positions: cute.Tensor) -> cute.Tensor:
    """Positions that are i64, in int32 registers: a new fragment of the same layout. Numbers that int32 does
    not hold become its smallest or largest one, neither of which is a position."""
    held = cute.make_rmem_tensor(positions.shape, Int32)
    for i in builtins.range(cute.size(positions)):
        held[i] = Int32(cutlass.max(cutlass.min(positions[i], Int64(_MOST)), Int64(_LEAST)))
    return held


def place_in_cache(position: Int32, row: Int32, rows: int, length: int) -> tuple[Int32, Boolean]:
    """The row of a cache at a `position` of the batch of `row`, which has `rows` rows of the plane and
    `length` rows of the cache; and whether there is such a row."""
    position = cutlass.select_(position < 0, position + length, position)
    return row // rows * length + position, (position >= 0) & (position < length)


def follow_in_cache(first: Int32, row: Int32, rows: int, length: int) -> tuple[Int32, Boolean]:
    """The same for the position of `row` if the first row of each batch has the position `first`, and the
    others follow it."""
    # Through i64, as the row of a plane may be a coordinate: the compiler takes the sum of a bounded number
    # and a constant coordinate, such as `row % 1`, for one that is not negative.
    within = Int32(Int64(row % rows))
    # No sum exceeds int32: a position from `length` on is beyond the cache, however far.
    return place_in_cache(cutlass.min(first, Int32(length)) + within, row, rows, length)
