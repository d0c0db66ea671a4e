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
from cutlass.cute.nvgpu import warp

from cute_backend.philox import SHARED_BITS
from cute_backend.planning import TileConfig
from cute_backend.planning.tiles import WARP_COLUMNS
from cute_backend.spec import BColumns


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
    `step` is a run-time value if visits are the iterations of a loop.
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


class FragmentTile(Tile):
    """A thread's elements as wgmma and mma.sync lay out accumulators: two rows, eight apart, of each 64-row
    block of the warpgroup, and two neighbouring columns of every eight (PTX ISA, wgmma register fragments,
    matrix D).

    `share` is the index of this warpgroup among those that share the tile. Their blocks alternate.
    """

    def __init__(self, config: TileConfig, corner: Corner, thread: Int32, share: int | Int32):
        super().__init__(config, corner, thread)
        self.rows = config.tile_m // (32 * config.sharing)
        self.columns = config.tile_n // 4
        self._block_step = config.block_m * config.sharing
        self._warp = share * 4 + thread // 32
        self._row0 = self.m0 + share * config.block_m + thread // 32 * 16 + self.lane // 4
        self._column0 = self.lane % 4 * 2

    row_lanes = (1, 2)
    warp_rows = 16

    @property
    def strips(self) -> int:  # type: ignore[override]
        return self.rows // 2

    def row_target(self, r: int) -> tuple[Int32, Int32, Boolean]:
        row = self.raw_row(r)
        return self.n0 // self.tile_n, row, (self.lane % 4 == 0) & self._in_plane(row)

    def warp(self) -> Int32:
        return self._warp

    def raw_row(self, r: int) -> Int32:
        return self._row0 + (r // 2 * self._block_step + r % 2 * 8)

    def warp_row(self, block: int) -> Int32:
        """The first row of a 64-row block that the thread's warp has."""
        return self.raw_row(2 * block) - self.lane // 4

    def column_offset(self, c: int) -> Int32:
        return self._column0 + (c // 2 * 8 + c % 2)


class FragmentSubtile(Subtile):
    """A warp's 16 rows of a 64 x `subtile_n` piece of its warpgroup's tile, in the `block`-th 64 rows."""

    tile: FragmentTile

    def __init__(self, config: TileConfig, tile: FragmentTile, block: int, step: int | Int32):
        self._block = block
        self.columns = config.subtile_n // 4
        self.elements = 2 * self.columns
        self._config = config
        super().__init__(config, tile, step)

    def accumulators(self, acc: cute.Tensor, index: int, step: int) -> cute.Tensor:
        """The thread's elements of the block's `step`-th subtile, of the `index`-th product, in the
        accumulators of a tile. The blocks of products that are stacked follow each other."""
        config = self._config
        apart = config.tile_n if config.stacked == 1 else config.blocks * config.tile_n
        first = self._block * (config.mma_n // 2) + index * (apart // 2) + step * self.elements
        return cute.make_tensor(acc.iterator + first, cute.make_layout(self.elements))

    column_lanes = (4, 8, 16)

    def column_target(self, c: int) -> tuple[Int32, Int32, Boolean]:
        column, first_row = self.raw_column(c), self.tile.warp_row(self._block)
        inside = (self.tile.lane < 4) & (column < self.tile.n) & (first_row < self.tile.m)
        return first_row // 16, column, inside

    def row_of(self, e: int) -> int:
        return 2 * self._block + e // 2 % 2

    def column_of(self, e: int) -> int:
        return e // 4 * 2 + e % 2

    def _word_of(self, c: int) -> tuple[int, int] | None:
        return c // 4 * 4, c % 4  # two adjacent columns, and the two that are eight columns further on

    def _neighbour(self, values: cute.Tensor, e: int, distance: int) -> Float32:
        # A lane has two columns of every eight. Of the lane that has the neighbour, which is `lanes` lanes
        # further on in the row, the lanes that would be beyond the fourth are in the next eight columns.
        lanes, eights = distance // 2 % 4, distance // 8
        near, far = (values[min(max(e + 4 * (eights + i), e % 4), self.elements - 4 + e % 4)] for i in (0, 1))
        if lanes == 0:
            return near
        lane = self.tile.lane % 4
        given = cutlass.select_(lane < lanes, far, near)
        return cute.arch.shuffle_sync(given, self.tile.lane - lane + (lane + lanes) % 4)

    def row_slice(self, vector: Any) -> cute.Tensor:
        layout = cute.make_layout((2, self.columns // 2), stride=(1, 8))
        return cute.make_tensor(vector.iterator + self.column_offset(0), layout)

    def partition(self, plane: cute.Tensor) -> cute.Tensor:
        # The lanes are (4 pairs of columns, 8 rows), a lane's elements (2 columns, 2 rows, every 8 columns).
        lanes_elements = cute.make_layout(((4, 8), (2, 2, self.columns // 2)), stride=((32, 1), (16, 8, 128)))
        elements = cute.composition(plane, lanes_elements)[(self.tile.lane, None)]
        return cute.group_modes(elements, 0, cute.rank(elements))

    def copy_from(self, plane: cute.Tensor, fragment: cute.Tensor) -> None:
        """Copies by ldmatrix if elements have 16 bits: one instruction moves 8 of a thread's elements. If the
        plane is column-major, it transposes them."""
        transposes = self._transposes(plane)
        if transposes is None:
            super().copy_from(plane, fragment)
            return
        copy = _matrix_copy(warp.LdMatrix8x8x16bOp(transposes, 4), plane.element_type)
        source = copy.get_slice(self.tile.lane).partition_S(plane)
        cute.copy(copy, source, cute.make_tensor(fragment.iterator, cute.make_layout(source.shape)))

    def copy_to(self, fragment: cute.Tensor, plane: cute.Tensor) -> None:
        """Copies in the way of `copy_from`, by stmatrix if the architecture has it."""
        transposes = self._transposes(plane)
        if transposes is None or not self._config.target.stmatrix:
            super().copy_to(fragment, plane)
            return
        copy = _matrix_copy(warp.StMatrix8x8x16bOp(transposes, 4), plane.element_type)
        target = copy.get_slice(self.tile.lane).partition_D(plane)
        cute.copy(copy, cute.make_tensor(fragment.iterator, cute.make_layout(target.shape)), target)

    def copy_runs(self, plane: cute.Tensor, fragment: cute.Tensor) -> None:
        pairs = cute.make_layout((2, self.columns // 2), stride=(1, 8))
        for r in range(2):
            line = cute.composition(self._line(plane, 2 * self._block + r), pairs)
            own = cute.make_tensor(line.iterator + self.tile.lane % 4 * 2, line.layout)
            row = cute.make_layout((2, self.columns // 2), stride=(1, 4))
            target = cute.composition(row, cute.make_layout(line.shape))
            cute.autovec_copy(own, cute.make_tensor(fragment.iterator + 2 * r, target))

    def _transposes(self, plane: cute.Tensor) -> bool | None:
        """Whether instructions that copy matrices transpose those of a plane, which has its rows or its
        columns contiguous. None if there is no such instruction."""
        if plane.element_type.width != 16 or self._columns % WARP_COLUMNS:
            return None
        row_step, column_step = (cute.flatten((stride,))[0] for stride in plane.stride)
        return False if column_step == 1 else True if row_step == 1 else None


class InterleavedTile(FragmentTile):
    """A tile of two products whose accumulators interleave: one product has B's even columns, the other the
    odd ones. Two neighbouring accumulators of a thread are the same column of either product."""

    def column_offset(self, c: int) -> Int32:
        return self.lane % 4 + c * 4


class InterleavedSubtile(FragmentSubtile):
    """A subtile of an InterleavedTile. Unlike in a FragmentSubtile, the two elements of a column are
    consecutive."""

    def accumulators(self, acc: cute.Tensor, index: int, step: int) -> cute.Tensor:
        first = self._block * (self._config.mma_n // 2) + step * 2 * self.elements + index
        return cute.make_tensor(acc.iterator + first, cute.make_layout(self.elements, stride=2))

    def row_of(self, e: int) -> int:
        return 2 * self._block + e % 2

    def column_of(self, e: int) -> int:
        return e // 2

    def _word_of(self, c: int) -> tuple[int, int] | None:
        return None  # another thread has the neighbouring column

    def row_slice(self, vector: Any) -> cute.Tensor:
        layout = cute.make_layout(self.columns, stride=4)
        return cute.make_tensor(vector.iterator + self.column_offset(0), layout)

    def partition(self, plane: cute.Tensor) -> cute.Tensor:
        # The lanes are (4 columns, 8 rows), a lane's elements (2 rows, every 4 columns).
        lanes_elements = cute.make_layout(((4, 8), (2, self.columns)), stride=((16, 1), (8, 64)))
        elements = cute.composition(plane, lanes_elements)[(self.tile.lane, None)]
        return cute.group_modes(elements, 0, cute.rank(elements))

    def _transposes(self, plane: cute.Tensor) -> bool | None:
        return None


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


def _matrix_copy(op: Any, dtype: type[cutlass.Numeric]) -> cute.TiledCopy:
    """A warp's copy of 16 rows by `WARP_COLUMNS` columns at a time. They are laid out as the accumulators of
    mma, and as a warp's accumulators of wgmma (PTX ISA, mma.m16n8k16, matrix D)."""
    mma = cute.make_tiled_mma(
        warp.MmaF16BF16Op(cutlass.Float16, cutlass.Float32, (16, 8, 16)),
        permutation_mnk=(16, WARP_COLUMNS, 16),
    )
    return cute.make_tiled_copy_C(cute.make_copy_atom(op, dtype), mma)


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
