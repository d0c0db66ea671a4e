"""Kernels whose accumulators lie in registers, as wgmma and mma.sync distribute them: a warp has 16 rows of
every 64, and all columns of the tile."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_backend.planning import Stages, TileConfig
from cute_backend.planning.shared_memory import SumScales
from cute_backend.spec import BColumns, ProductKind
from cute_backend.templates.epilogue import Epilogue, Keeping
from cute_backend.templates.gemm import Gemm
from cute_backend.templates.opaque import opaque
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
        stages: Stages,
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
        super().__init__(epilogue, config, stages, kind=kind, scaling=scaling)
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

    def _begins_block(self, step: int) -> bool:
        """Whether a subtile is the first of a block of columns that the epilogue reduces ahead of visits."""
        return self.block_subtiles > 0 and step % self.block_subtiles == 0

    def _reduced(
        self,
        block: int,
        step: int | Int32,
        place: int,
        acc: cute.Tensor,
        tile: FragmentTile,
        glob: Any,
        held: Any,
        rows: Sequence[cute.Tensor],
    ) -> Any:
        """Reduces the block of columns that begins with the subtile `step` of a block of rows, whose
        accumulators are those of the subtile `place`. Returns what its visits hold.

        If visits are the iterations of a loop, which needs all accumulators, the compiler must not keep what
        a pass computes from each of them for a later pass: a softmax over blocks of 256 columns spilled 128
        bytes (128 x 256 on sm_90a).
        """
        passed = set()

        def read(i: int) -> tuple[Any, ...]:
            sub = self.subtile_type(self.config, tile, block, step + i)
            pieces = [sub.accumulators(acc, j, place + i) for j in range(self.values)]
            if self.config.rolled and i in passed:
                for piece in pieces:
                    for e in range(cute.size(piece)):
                        piece[e] = opaque(piece[e])
            passed.add(i)
            return sub, *pieces

        return self._reduce_blocks(tile, read, glob, held, rows)

    def _keep(
        self,
        block: int,
        step: Any,
        place: int,
        acc: cute.Tensor,
        tile: FragmentTile,
        glob: Any,
        held: Any,
        smem: Any,
    ) -> None:
        """Puts the value that the epilogue keeps of the subtile `step` of a block of rows in the place of its
        first product's accumulators, which are those of the subtile `place`."""
        sub = self.subtile_type(self.config, tile, block, step)
        pieces = [sub.accumulators(acc, i, place) for i in range(self.config.products)]
        values = cast(Keeping, self.epilogue).keep(sub, *pieces, glob, held, smem)
        for e in range(sub.elements):
            pieces[0][e] = values[e]

    @cute.jit
    def _keep_in_turns(
        self,
        count: int,
        first: Int32,
        block: int,
        acc: cute.Tensor,
        tile: FragmentTile,
        glob: Any,
        held: Any,
        rows: list,
    ):
        """Keeps the values of `count` subtiles from step `first` on, whose accumulators are the first ones of
        the block of rows. Like `_visits`, it nests loops, but each turn moves all accumulators round, so that
        the values are in order after the last turn."""
        if cutlass.const_expr(count == 1):
            self._keep(block, first, 0, acc, tile, glob, held, self._smem(rows, [], []))
        else:
            turns = 2 if count % 2 == 0 else count
            part = count // turns
            sub = self.subtile_type(self.config, tile, block, first)
            size = count * sub.elements
            row = cute.make_tensor(sub.accumulators(acc, 0, 0).iterator, cute.make_layout(size))
            for turn in cutlass.range(turns, unroll=1):
                self._keep_in_turns(part, first + turn * part, block, acc, tile, glob, held, rows)
                _move_round(row, part * sub.elements)

    @cute.jit
    def _roll(self, block: int, acc: cute.Tensor, tile: FragmentTile, glob: Any, held: Any, rows: list):
        """Visits the subtiles of a block of rows in loops, without planes in shared memory but the staged
        `rows`. A warp whose rows lie beyond M makes no visits."""
        if tile.warp_row(block) < tile.m:
            whole = max(self.block_subtiles, 1)
            self._visits(self.steps, whole, Int32(0), block, acc, tile, glob, held, rows)

    @cute.jit
    def _visits(
        self,
        count: int,
        whole: int,
        first: Int32,
        block: int,
        acc: cute.Tensor,
        tile: FragmentTile,
        glob: Any,
        held: Any,
        rows: list,
    ):
        """Makes `count` visits from step `first` on. Their accumulators are the first ones of the block of
        rows. Of every `whole` visits, blocks of columns are reduced first if these are more than one.

        A loop can't index registers by its counter. So this nests loops of two iterations, and each loop
        moves the accumulators of its second iteration to the place of the first one's. An accumulator moves
        at most once per loop.
        """
        sub = self.subtile_type(self.config, tile, block, first)
        piece = sub.accumulators(acc, 0, 0)
        if cutlass.const_expr(count == whole and whole > 1):
            if cutlass.const_expr(self.keeps_value):
                self._keep_in_turns(count, first, block, acc, tile, glob, held, rows)
            found = self._reduced(block, first, 0, acc, tile, glob, held, rows)
            self._visits(count, 1, first, block, acc, tile, glob, found, rows)
        elif cutlass.const_expr(count == 1):
            self.epilogue.visit(sub, piece, glob, held, self._smem(rows, [], []))
        else:
            parts = count // whole
            turns = 2 if parts % 2 == 0 else parts
            part = count // turns
            row = cute.make_tensor(piece.iterator, cute.make_layout(count * sub.elements))
            for turn in cutlass.range(turns, unroll=1):
                self._visits(part, whole, first + turn * part, block, acc, tile, glob, held, rows)
                if turn < turns - 1:
                    for step in cutlass.range_constexpr(count - part):
                        for e in cutlass.range_constexpr(sub.elements):
                            row[step * sub.elements + e] = row[(step + part) * sub.elements + e]


def _move_round(row: cute.Tensor, places: int) -> None:
    """Moves every element this many places towards the first, and the first ones to the end."""
    size = cute.size(row)
    moved = [row[(e + places) % size] for e in range(size)]
    for e, value in enumerate(moved):
        row[e] = value
