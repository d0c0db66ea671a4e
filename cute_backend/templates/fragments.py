"""Kernels whose accumulators lie in registers, as wgmma and mma.sync distribute them: a warp has 16 rows of
every 64, and all columns of the tile."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_backend.planning import TileConfig
from cute_backend.planning.shared_memory import SumScales
from cute_backend.spec import BColumns, ProductKind
from cute_backend.templates.epilogue import Epilogue
from cute_backend.templates.gemm import Gemm
from cute_backend.templates.scheduler import Place
from cute_backend.templates.tile import FragmentSubtile, FragmentTile, InterleavedSubtile, InterleavedTile


class FragmentGemm(Gemm):
    """A kernel whose epilogue runs on the registers of the warps that multiply.

    A warpgroup has `blocks` blocks of 64 rows of a tile, each of `steps` subtiles; `subtiles` is their total,
    and `boxes` that of the boxes in which TMA moves planes.
    """

    def __init__(
        self,
        epilogue: Epilogue,
        config: TileConfig,
        *,
        kind: ProductKind,
        scaling: SumScales | None = None,
    ):
        if config.rolled and (config.products > 1 or epilogue.shared_loads or epilogue.shared_stores):
            planes = len(epilogue.shared_loads + epilogue.shared_stores)
            raise ValueError(
                f"tile {config.name} has visits in a loop, of one product and no plane in shared memory, but "
                f"products are {config.products} and planes {planes}"
            )
        super().__init__(epilogue, config, kind=kind, scaling=scaling)
        self.blocks = config.tile_m // (config.block_m * config.sharing)
        self.steps = config.tile_n // config.subtile_n
        self.subtiles = self.blocks * self.steps
        self.boxes = self.subtiles // config.box_subtiles
        interleaved = config.b_columns is BColumns.INTERLEAVED
        self.tile_type = InterleavedTile if interleaved else FragmentTile
        self.subtile_type = InterleavedSubtile if interleaved else FragmentSubtile

    @abstractmethod
    def _origin(self, shared: Any, place: Place) -> tuple[Int32, Int32]:
        """The first row and column of a CTA's tile, among those of its product."""

    def _tile(self, shared: Any, place: Place, thread: Int32, share: Any) -> FragmentTile:
        """The part of the CTA's tile that an epilogue thread owns, among all rows of the output. `thread` is
        its index in its warpgroup, and `share` the warpgroup's index among those that share the tile."""
        m0, n0 = self._origin(shared, place)
        return self.tile_type(self.config, place.first + m0, n0, place.end, shared.n, thread, share)

    def _row_tile(self, shared: Any, place: Place, lane: Int32) -> FragmentTile:
        m0, n0 = self._origin(shared, place)
        return FragmentTile(self.config, place.first + m0, n0, place.end, shared.n, lane, Int32(0))

    @cute.jit
    def _roll(self, block: int, acc: cute.Tensor, tile: FragmentTile, glob: Any, held: Any, smem: Any):
        """Visits the subtiles of a block in loops, without planes in shared memory. A warp whose rows lie
        beyond M makes no visits."""
        if tile.warp_row(block) < tile.m:
            self._visits(self.steps, Int32(0), block, acc, tile, glob, held, smem)

    @cute.jit
    def _visits(
        self,
        count: int,
        first: Int32,
        block: int,
        acc: cute.Tensor,
        tile: FragmentTile,
        glob: Any,
        held: Any,
        smem: Any,
    ):
        """Makes `count` visits from step `first` on. Their accumulators are the first ones of the block.

        A loop can't index registers by its counter. So this nests loops of two iterations, and each loop
        moves the accumulators of its second iteration to the place of the first one's. An accumulator moves
        at most once per loop.
        """
        sub = self.subtile_type(self.config, tile, block, first)
        piece = sub.accumulators(acc, 0, 0)
        if cutlass.const_expr(count == 1):
            self.epilogue.visit(sub, piece, glob, held, smem)
        else:
            turns = 2 if count % 2 == 0 else count
            part = count // turns
            row = cute.make_tensor(piece.iterator, cute.make_layout(count * sub.elements))
            for turn in cutlass.range(turns, unroll=1):
                self._visits(part, first + turn * part, block, acc, tile, glob, held, smem)
                if turn < turns - 1:
                    for step in cutlass.range_constexpr(count - part):
                        for e in cutlass.range_constexpr(sub.elements):
                            row[step * sub.elements + e] = row[(step + part) * sub.elements + e]
