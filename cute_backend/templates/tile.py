"""The parts of a tile and of a subtile that one epilogue thread owns: the interfaces of generated epilogues.

r counts the thread's rows of a tile, and c its columns. Element e of a subtile's fragment lies in row
`row_of(e)` of the thread's rows of the tile, and in column `column_of(e)` of its columns of the subtile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16

from cute_backend.planning import TileConfig


@dataclass(frozen=True)
class Corner:
    """The first row and column of a box in a plane, and those at which the plane's accessible part ends."""

    row: Int32
    column: Int32
    end_row: Int32
    end_column: Int32


class Tile(ABC):
    """The rows and columns in which a thread has elements of an output tile, which begins at (m0, n0).

    `rows` and `columns` count them, and `lane` is the thread's index in its warp. The warp has `strips`
    strips of `warp_rows` neighbouring rows. `group` is the group of a grouped product that the rows belong
    to; the warp that stages vectors knows it.
    """

    rows: int
    columns: int
    warp_rows: int
    strips: int
    group: Any
    lanes = (1, 2, 4, 8, 16)
    """The differences between the numbers of lanes that exchange partials, to combine those of a whole warp:
    powers of two."""

    def __init__(self, config: TileConfig, corner: Corner, thread: Int32):
        self.m0, self.n0, self.m, self.n = corner.row, corner.column, corner.end_row, corner.end_column
        self.tile_n = config.tile_n
        self.thread = thread
        self.lane = thread % 32
        self._config = config

    row_lanes: tuple[int, ...]
    """The same for partials of rows: only lanes that share rows exchange them."""

    @abstractmethod
    def row_target(self, r: int) -> tuple[Int32, Int32, Boolean]:
        """The place for the partial of the thread's r-th row, as (tile of columns, row), and whether this
        thread writes it."""

    @abstractmethod
    def warp(self) -> Int32:
        """The index of the thread's warp among those that work on the tile."""

    def plane_target(self) -> tuple[Int32, Boolean]:
        """The place for the partial of the warp's elements of the tile, and whether this thread writes it."""
        rows = cute.ceil_div(self.m, self._config.cta_rows)
        index = self.n0 // self.tile_n * rows + self.m0 // self._config.cta_rows
        inside = (self.lane == 0) & (self.m0 < self.m) & (self.n0 < self.n)
        return index * self._config.row_warps + self.warp(), inside

    @abstractmethod
    def raw_row(self, r: int) -> Int32:
        """The global row of the thread's r-th row, which may lie beyond M."""

    @abstractmethod
    def column_offset(self, c: int) -> int | Int32:
        """The thread's c-th column within the tile."""

    def _in_plane(self, row: Int32) -> Boolean:
        """Whether the tile lies within the plane's columns: clusters may have tiles beyond the last one."""
        return (row < self.m) & (self.n0 < self.n)

    def row(self, r: int) -> Int32:
        """The global row of the thread's r-th row, clamped to the last."""
        return cutlass.min(self.raw_row(r), self.m - 1)

    def column(self, c: int) -> Int32:
        """The global column of the thread's c-th column, clamped to the last."""
        return self.clamp_column(self.column_offset(c))

    def clamp_column(self, offset: int | Int32) -> Int32:
        """The global column of a column of the tile, clamped to the last."""
        return cutlass.min(self.n0 + offset, self.n - 1)


class Subtile(ABC):
    """The part of a tile that one visit covers: as many rows as one MMA instruction gives a warpgroup, and
    `subtile_n` columns.

    The thread has `elements` elements of it, in `columns` columns. It is the `step`-th subtile along N;
    `step` is a number of Python only if each visit is traced.
    """

    elements: int
    columns: int

    def __init__(self, config: TileConfig, tile: Tile, step: int | Int32):
        self.tile = tile
        self._step = step
        self._offset = step * config.subtile_n
        self._columns = config.subtile_n
        self._row_threads = config.target.accumulators.row_threads

    @abstractmethod
    def row_of(self, e: int) -> int:
        """The index of the thread's row that element e lies in."""

    @abstractmethod
    def column_of(self, e: int) -> int:
        """The index of the thread's column of this subtile that element e lies in."""

    def columns_of(self, held: cute.Tensor) -> cute.Tensor:
        """The thread's columns of this subtile in `held`, which has its columns of the whole tile in
        registers. Visits must be unrolled, since a run-time value can't index registers."""
        first = self._step * self.columns
        view = cute.make_tensor(held.iterator + first, cute.make_layout(self.columns))
        if view.element_type is held.element_type:
            return view
        # A pointer to uint8 with an offset is one to int8 (DSL 4.8), from which values would be negative.
        columns = cute.make_rmem_tensor(self.columns, held.element_type)
        for c in range(self.columns):
            columns[c] = held[first + c]
        return columns

    def block_of(self, e: int, columns: int) -> int:
        """The index, in the subtile, of the block of `columns` columns that element e lies in. The threads
        that share a row have equally many of every eight columns, and `columns` is a multiple of eight."""
        return self.column_of(e) * self._row_threads // columns

    def begins_block(self, e: int, columns: int) -> bool:
        """Whether element e may be the first of a block of `columns` columns in one of the threads that share
        its row. The answer is the same in all of them. A subtile narrower than a block begins at most one."""
        return self.column_of(e) * self._row_threads % min(columns, self._columns) == 0

    def part_of(self, e: int, block: int, part: int) -> int | Int32:
        """The number of the part that element e lies in, where blocks of `block` columns consist of parts of
        `part` columns. If `pair_halves` has ordered the columns, that leaves each in its part.

        If a subtile has whole blocks, the number is a constant. If a block has whole subtiles, it is one
        number for every eight columns. Parts that are no multiple of eight columns divide these.
        """
        width, eights = self._columns, part % 8 == 0
        if width % block == 0 and block % 8 == 0:
            return self.block_of(e, 8) * 8 % block // part if eights else self._place(e, block) // part
        if block % width == 0:
            first = (self.tile.n0 + self._offset) % block
            within = self.block_of(e, 8) * 8 if eights else self.tile.column_offset(self.column_of(e))
            return (first + within) // part
        return self.raw_column(self.column_of(e)) % block // part

    def noise_word(self, e: int) -> tuple[int, int] | None:
        """The place of element e among the four elements of its row that share one block of noise
        (`philox.gumbel`): the thread's column, in this subtile, of the first of the four, and the index of
        e's word in the block. None if the thread doesn't have all four, or can't know whether it does."""
        known = self._columns % 16 == 0 and self.tile.tile_n % 16 == 0
        return self._word_of(self.column_of(e)) if known else None

    @abstractmethod
    def _word_of(self, c: int) -> tuple[int, int] | None:
        """`noise_word` of a column, if subtiles begin at multiples of 16 columns."""

    def rotate_half(self, values: cute.Tensor, block: int) -> cute.Tensor:
        """Rotates the thread's elements of blocks with halves (x, y) to (-y, x). A subtile has whole blocks,
        or `pair_halves` has ordered the columns so that its halves come from the two halves of one block. The
        halves have a multiple of eight columns, of which each thread has equally many."""
        rotated = cute.make_rmem_tensor_like(values)
        half = self.elements * min(block, self._columns) // self._columns // 2
        for first in range(0, self.elements, 2 * half):
            for e in range(first, first + half):
                rotated[e], rotated[e + half] = -values[e + half], values[e]
        return rotated

    def rotate_pairs(self, values: cute.Tensor) -> cute.Tensor:
        """Rotates pairs (x, y) of neighbouring columns to (-y, x). The thread has both elements of a pair."""
        rotated = cute.make_rmem_tensor_like(values)
        for e in range(0, self.elements, 2):
            rotated[e], rotated[e + 1] = -values[e + 1], values[e]
        return rotated

    def rotate_first(self, values: cute.Tensor, block: int, columns: int) -> cute.Tensor:
        """Rotates the halves (x, y) of the first `columns` columns of each block to (-y, x), and leaves the
        other columns as they are. A subtile has whole blocks, of a multiple of eight columns, or a block has
        whole subtiles, of which the first has all columns that are rotated. A half is an even number of
        columns. Columns that are no multiple of eight apart are in other lanes."""
        rotated = cute.make_rmem_tensor_like(values)
        half = columns // 2
        for e in range(self.elements):
            first, last = self._span(e, block)
            place = self._place(e, block)
            if block > self._columns:
                place = place + (self.tile.n0 + self._offset) % block
            rotated[e] = values[e]
            if first < columns and last >= half:
                behind = self._neighbour(values, e, -half)
                is_second = (place >= half) & (place < columns)
                whole = half <= first and last < columns and block <= self._columns
                rotated[e] = behind if whole else cutlass.select_(is_second, behind, rotated[e])
            if first < half:
                ahead = -self._neighbour(values, e, half)
                whole = last < half and block <= self._columns
                rotated[e] = ahead if whole else cutlass.select_(place < half, ahead, rotated[e])
        return rotated

    def _span(self, e: int, block: int) -> tuple[int, int]:
        """The first and the last of the columns of a block in which the threads that share a row have element
        e of their fragments."""
        column = self.column_of(e) * self._row_threads
        if self._row_threads == 1:
            return column % block, column % block
        first = column // 8 * 8 % block
        return first, first + 7

    def _place(self, e: int, block: int) -> int | Int32:
        """The column of element e within its block, of a multiple of eight columns. The subtile has whole
        blocks, or it is the first of a block."""
        column = self.column_of(e) * self._row_threads // 8 * 8
        return self.tile.column_offset(self.column_of(e)) - column // block * block

    @abstractmethod
    def _neighbour(self, values: cute.Tensor, e: int, distance: int) -> Float32:
        """The value `distance` columns behind element e in its row, an even number. It is not defined if the
        subtile has no such column."""

    def copy_first(self, plane: cute.Tensor, fragment: cute.Tensor) -> None:
        """Reads the thread's elements of a plane in global memory that has the first columns of each block,
        (M, (columns, N / period), period), as the view `first_columns` has it. Elements of other columns are
        not defined."""
        columns, period = plane.shape[1][0], plane.shape[2]
        for e in range(self.elements):
            if self._columns % period and period % self._columns:
                place = self.column(e) % period
                fragment[e] = plane[self.row(e), (cutlass.min(place, columns - 1), 0), 0]
                continue
            first, last = self._span(e, period)
            if first < columns:
                place = self._place(e, period)
                place = place if last < columns else cutlass.min(place, columns - 1)
                fragment[e] = plane[self.row(e), (place, 0), 0]
            else:
                fragment[e] = plane.element_type(0)

    @abstractmethod
    def row_slice(self, vector: Any) -> cute.Tensor:
        """The thread's columns of this subtile in a shared vector of the tile's columns."""

    @abstractmethod
    def partition(self, plane: cute.Tensor) -> cute.Tensor:
        """The thread's elements of a shared plane of the subtile's shape."""

    def copy_from(self, plane: cute.Tensor, fragment: cute.Tensor) -> None:
        """Reads the thread's elements of a shared plane, by vectors."""
        cute.autovec_copy(self.partition(plane), fragment)

    def copy_to(self, fragment: cute.Tensor, plane: cute.Tensor) -> None:
        """Writes the thread's elements of a shared plane, by vectors."""
        cute.autovec_copy(in_words(fragment), self.partition(plane))

    @abstractmethod
    def copy_runs(self, plane: cute.Tensor, fragment: cute.Tensor) -> None:
        """Reads the thread's elements of a plane in global memory, where the subtile's columns of a row lie
        at constant distances from the first one. A subtile that reaches beyond the last column of the plane
        reads the last subtile's columns instead."""

    def _line(self, plane: cute.Tensor, r: int) -> cute.Tensor:
        """The subtile's columns of the thread's r-th row in a plane in global memory."""
        columns = self._columns
        first = cutlass.min(self.tile.n0 + self._offset, self.tile.n - columns)
        return cute.local_tile(plane[(self.tile.row(r), None)], (columns,), (first // columns,))

    column_lanes: tuple[int, ...]
    """The differences between the numbers of lanes that exchange partials of columns: powers of two."""

    @abstractmethod
    def column_target(self, c: int) -> tuple[Int32, Int32, Boolean]:
        """The place for the partial of the thread's c-th column, as (piece of rows, column), and whether this
        thread writes it."""

    def along_row(self, e: int) -> tuple[Int32, Boolean]:
        """The place of element e in its row, and whether it belongs to the plane."""
        column = self.raw_column(self.column_of(e))
        return column, column < self.tile.n

    def along_column(self, e: int) -> tuple[Int32, Boolean]:
        """The place of element e in its column, and whether it belongs to the plane."""
        row = self.tile.raw_row(self.row_of(e))
        return row, row < self.tile.m

    def along_plane(self, e: int) -> tuple[Int64, Boolean]:
        """The place of element e in the plane, by rows, and whether it belongs to it."""
        (column, in_row), (row, in_column) = self.along_row(e), self.along_column(e)
        return Int64(row) * self.tile.n + column, in_row & in_column

    def row(self, e: int) -> Int32:
        """The global row of element e, clamped to the last."""
        return self.tile.row(self.row_of(e))

    def column(self, e: int) -> Int32:
        """The global column of element e, clamped to the last."""
        return self.tile.clamp_column(self.column_offset(self.column_of(e)))

    def column_offset(self, c: int) -> int | Int32:
        """The thread's c-th column of this subtile within the tile."""
        return self.tile.column_offset(c) + self._offset

    def raw_column(self, c: int) -> Int32:
        """The global column of the thread's c-th column of this subtile, which may lie beyond N."""
        return self.tile.n0 + self.column_offset(c)

    def target(self, e: int) -> tuple[Int32, Int32, Boolean]:
        """The global row and column of element e, and whether they belong to the output.

        They are not clamped, so that the addresses of a row's elements differ by constants. Clamped addresses
        took two registers each, and spilled.
        """
        row = self.tile.raw_row(self.row_of(e))
        column = self.raw_column(self.column_of(e))
        return row, column, (row < self.tile.m) & (column < self.tile.n)


def in_words(fragment: cute.Tensor) -> cute.Tensor:
    """Values of 16 bits that were taken out of words, of which each has two. So they are converted in pairs.
    Behind a conversion of one value to bf16, ptxas makes all products of wgmma wait for each other."""
    if fragment.element_type.width != 16 or cute.size(fragment) % 2:
        return fragment
    words = cute.recast_tensor(fragment, Int32)
    halves = cute.make_rmem_tensor_like(fragment, Uint16)
    for i in range(cute.size(words)):
        halves[2 * i], halves[2 * i + 1] = Uint16(words[i] & 0xFFFF), Uint16(words[i] >> 16)
    return cute.recast_tensor(halves, fragment.element_type)
