"""The parts of a tile and of a subtile that a thread owns as it reads tensor memory: one row."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_backend.philox import SHARED_BITS
from cute_backend.planning import TileConfig
from cute_backend.spec import BColumns
from cute_backend.templates.tile import Corner, Subtile, Tile


class Sm100Tile(Tile):
    """A thread's elements as tcgen05.ld.32x32b reads tensor memory: one row, all its columns (PTX ISA).

    The tile has `columns` columns: a warpgroup's, or those of the whole tile for the
    warp that stages vectors. `thread` is the thread's number in its warpgroup.
    """

    rows = 1
    row_lanes = ()
    warp_rows = 32
    strips = 1

    def __init__(self, config: TileConfig, corner: Corner, thread: Int32, columns: int):
        super().__init__(config, corner, thread)
        self.tile_n = self.columns = columns

    def row_target(self, r: int) -> tuple[Int32, Int32, Boolean]:
        row = self.raw_row(r)
        return self.n0 // self.tile_n, row, self._in_plane(row)

    def warp(self) -> Int32:
        return self.thread // 32

    def raw_row(self, r: int) -> Int32:
        return self.m0 + self.thread

    def warp_row(self) -> Int32:
        """The first row that the thread's warp has."""
        return self.raw_row(0) - self.lane

    def column_offset(self, c: int) -> int:
        return c


class Sm100Subtile(Subtile):
    """The `step`-th 128 x `subtile_n` piece of a warpgroup's columns of a CTA's tile."""

    tile: Sm100Tile

    def __init__(self, config: TileConfig, tile: Sm100Tile, step: int | Int32):
        self.elements = self.columns = config.subtile_n
        self._interleaved = config.b_columns is BColumns.INTERLEAVED
        super().__init__(config, tile, step)

    def accumulators(self, registers: cute.Tensor, index: int) -> cute.Tensor:
        """The elements of the `index`-th product in `registers`, which have those of all products, as read
        from tensor memory for this subtile."""
        first, stride = (index, 2) if self._interleaved else (index * self.elements, 1)
        return cute.make_tensor(registers.iterator + first, cute.make_layout(self.elements, stride=stride))

    def line_of(self, plane: cute.Tensor) -> cute.Tensor:
        """The thread's elements in a plane in global memory in which they lie side by side, from one address:
        that of a column in heads takes a division."""
        row, column, _ = self.target(0)
        first = plane.iterator + cute.crd2idx((row, column), plane.layout)
        return cute.make_tensor(first, cute.make_layout(self.elements))

    column_lanes = (1, 2, 4, 8, 16)

    def column_target(self, c: int) -> tuple[Int32, Int32, Boolean]:
        column, first_row = self.raw_column(c), self.tile.warp_row()
        mine = self.tile.lane == c % 32
        return first_row // 32, column, mine & (column < self.tile.n) & (first_row < self.tile.m)

    def row_of(self, e: int) -> int:
        return 0

    def column_of(self, e: int) -> int:
        return e

    def _word_of(self, c: int) -> tuple[int, int] | None:
        return c & ~SHARED_BITS, (c & 1) + (c >> 3 & 1) * 2

    def _neighbour(self, values: cute.Tensor, e: int, distance: int) -> Float32:
        return values[min(max(e + distance, 0), self.elements - 1)]

    def row_slice(self, vector: Any) -> cute.Tensor:
        return cute.make_tensor(vector.iterator + self.column_offset(0), cute.make_layout(self.columns))

    def partition(self, plane: cute.Tensor) -> cute.Tensor:
        return plane[(self.tile.thread, None)]

    def copy_runs(self, plane: cute.Tensor, fragment: cute.Tensor) -> None:
        line = self._line(plane, 0)
        cute.autovec_copy(line, cute.make_tensor(fragment.iterator, cute.make_layout(line.shape)))
