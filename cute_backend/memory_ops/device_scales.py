"""Stores scales of blocks as the next product's MMA reads them: in tiles of 128 rows by 4 scales.

A tile has 512 bytes, and tiles of the same rows follow each other (cuBLAS, "1D Block Scaling"). Zeros pad the
rows of the last tiles, and the scales of each row.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8

from cute_backend.spec import SCALE_TILE

_ROWS, _SCALES = SCALE_TILE
_COLUMN_ROWS = 32
"""Rows whose scales are 16 bytes apart; the next ones follow within these 16 bytes."""


@cute.jit
def store_scale(
    scales: cute.Tensor,
    code: Uint8,
    row: Int32,
    column: Int32,
    m: Int32,
    n: Int32,
    block: cutlass.Constexpr[int],
):
    """Stores the scale of a row and of the block of columns that begins at `column`, in a plane (m, n) whose
    blocks have `block` columns.

    Rows between M and the end of its last tile get zeros. The thread of a row's last block also stores the
    zeros behind it. For rows of further tiles, and for columns from N on, nothing is stored.
    """
    blocks, first = n // block, column // block
    words = cute.ceil_div(blocks, _SCALES)
    if (column < n) & (row < cute.ceil_div(m, _ROWS) * _ROWS):
        tile = Int64(row // _ROWS) * words + first // _SCALES
        in_tile = row % _COLUMN_ROWS * (_ROWS // _COLUMN_ROWS * _SCALES)
        in_tile += row % _ROWS // _COLUMN_ROWS * _SCALES
        word = tile * (_ROWS * _SCALES) + in_tile
        value = code
        if row >= m:
            value = Uint8(0)
        scales[word + first % _SCALES] = value
        if first == blocks - 1:
            for i in cutlass.range(first % _SCALES + 1, _SCALES, unroll=1):
                scales[word + i] = Uint8(0)
