"""The axes and strides of tensors that kernels take: the words in which a kind says what its argument is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Stride(str, Enum):
    """A stride's class, which a kernel is compiled for; the stride itself arrives at launch."""

    ZERO = "0"
    ONE = "1"
    OTHER = "s"


class Order(str, Enum):
    """Memory order of a stored (M, N) plane, or of one value for each block of columns."""

    ROW = "row"
    COLUMN = "column"
    TILED = "tiled"
    """Scales of blocks in tiles of `SCALE_TILE`, in one vector (`Scaling.tiled`); zeros pad them."""


SCALE_TILE = (128, 4)
"""The rows, and the scales of each row, in one tile of scales, if scales are stored in tiles (cuBLAS, "1D
Block Scaling")."""


def padded(lines: Any, blocks: Any) -> tuple[Any, Any]:
    """Returns `lines` and `blocks`, the scales of each line, rounded up to whole tiles of `SCALE_TILE`."""
    rows, columns = SCALE_TILE
    return (lines + rows - 1) // rows * rows, (blocks + columns - 1) // columns * columns


Call = tuple[str, tuple[Any, ...]]
"""A function of `templates/epilogue.py` that makes a view of a tensor, and its other arguments."""


class Extent(Enum):
    """The size of an axis. Axes of one extent have the same size, except for MODE, and for BLOCKS and BLOCK
    if blocks differ."""

    M = "rows of the plane"
    N = "columns of the plane"
    K = "summed over"
    BATCHES = "products of a batch"
    GROUPS = "groups of rows, or of what is summed over"
    ROWS = "rows of one product of a batch"
    COLUMNS = "even and odd columns of B: 2 N"
    A_SCALES = "scales of rows of A, in tiles"
    B_SCALES = "scales of columns of B, in tiles"
    M_BLOCKS = "blocks of rows of the plane"
    N_BLOCKS = "blocks of columns of B"
    K_BLOCKS = "blocks of what is summed over"
    MODE = "one of several modes of M, of any size"
    BLOCKS = "blocks of columns: N by those of one block"
    BLOCK = "columns of a block, known when a kernel is compiled"
    TILES = "scales of blocks of columns, in tiles"
    COLUMNS_OF_BATCHES = "columns of all batches of rows"
    CACHE_ROWS = "rows of a cache, of all batches"
    BYTES = "bytes of the workspace"
    COUNTERS = "counters of the tiles of rows"


@dataclass(frozen=True)
class Dim:
    """An axis of an argument."""

    extent: Extent
    stride: Stride
    block: int = 0
    """Columns of a block, for BLOCKS, BLOCK and TILES; rows of a batch, for COLUMNS_OF_BATCHES and
    CACHE_ROWS."""
    width: int = 0
    """Columns of a segment, for N, BLOCKS and TILES of a tensor that belongs to one; 0 where N is the
    plane's. For CACHE_ROWS, the rows that the cache has for each batch."""
    values: int = 1
    """For K, the elements of the other operand for each element of this one."""

    def of_segment(self, width: int) -> Dim:
        """The axis in a segment of `width` columns, if that is not 0 and the axis is one of columns."""
        return replace(self, width=width) if self.extent is Extent.N else self

    def size(self, sizes: Mapping[Extent, Any]) -> Any:
        """The size of this axis for these sizes of extents. That of BLOCKS follows from N, that of CACHE_ROWS
        from M, those of TILES and COLUMNS_OF_BATCHES from M and N, and that of N from the width of a segment.
        Raises KeyError for an extent that is not among them."""
        if self.extent is Extent.CACHE_ROWS:
            return sizes[Extent.M] // self.block * self.width
        if self.extent is Extent.COLUMNS_OF_BATCHES:
            return sizes[Extent.M] // self.block * sizes[Extent.N]
        if self.extent is Extent.BLOCK:
            return self.block
        if self.extent is Extent.K and self.values > 1:
            return sizes[Extent.K] // self.values
        if self.extent is Extent.BLOCKS:
            return (self.width or sizes[Extent.N]) // self.block
        if self.extent is Extent.TILES:
            rows, columns = padded(sizes[Extent.M], (self.width or sizes[Extent.N]) // self.block)
            return rows * columns
        return self.width or sizes[self.extent]


def plane(extents: tuple[Extent, ...], row_major: bool, width: int = 0, block: int = 0) -> tuple[Dim, ...]:
    """Axes of which one of the last two is contiguous: the last one if `row_major`. Columns are those of a
    segment of `width` columns, if that is not 0, and may be blocks of `block` columns."""
    unit = len(extents) - (1 if row_major else 2)
    strides = (Stride.ONE if axis == unit else Stride.OTHER for axis in range(len(extents)))
    own = {Extent.N: (0, width), Extent.BLOCKS: (block, width)}
    return tuple(
        Dim(extent, stride, *own.get(extent, ())) for extent, stride in zip(extents, strides, strict=True)
    )
