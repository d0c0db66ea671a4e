"""The parts of a tile and of a subtile that a thread owns as accumulators of wgmma and mma.sync lie."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warp

from cute_backend.planning import TileConfig
from cute_backend.planning.tiles import WARP_COLUMNS
from cute_backend.templates.tile import Corner, Subtile, Tile


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


def _matrix_copy(op: Any, dtype: type[cutlass.Numeric]) -> cute.TiledCopy:
    """A warp's copy of 16 rows by `WARP_COLUMNS` columns at a time. They are laid out as the accumulators of
    mma, and as a warp's accumulators of wgmma (PTX ISA, mma.m16n8k16, matrix D)."""
    mma = cute.make_tiled_mma(
        warp.MmaF16BF16Op(cutlass.Float16, cutlass.Float32, (16, 8, 16)),
        permutation_mnk=(16, WARP_COLUMNS, 16),
    )
    return cute.make_tiled_copy_C(cute.make_copy_atom(op, dtype), mma)
