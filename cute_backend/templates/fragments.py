"""Kernels whose accumulators lie in registers, as wgmma and mma.sync distribute them: a warp has 16 rows of
every 64, and all columns of the tile."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_backend.planning import Stages, TileConfig
from cute_backend.planning.stage_scales import NO_SCALES, StageScales
from cute_backend.spec import BColumns, ProductKind
from cute_backend.templates.drain import Position, Turns
from cute_backend.templates.epilogue import Epilogue
from cute_backend.templates.fragment_tile import (
    FragmentSubtile,
    FragmentTile,
    InterleavedSubtile,
    InterleavedTile,
)
from cute_backend.templates.gemm import Gemm
from cute_backend.templates.opaque import opaque
from cute_backend.templates.scheduler import Place
from cute_backend.templates.tile import Corner


class FragmentGemm(Gemm):
    """A kernel whose epilogue runs on the registers of the warps that multiply.

    A warpgroup has `blocks` blocks of 64 rows of a tile, each of `visits` subtiles; `subtiles` is their
    total, and `boxes` that of the boxes in which TMA moves planes.
    """

    def __init__(
        self,
        epilogue: Epilogue,
        config: TileConfig,
        stages: Stages,
        *,
        kind: ProductKind,
        scaling: StageScales = NO_SCALES,
    ):
        if config.rolled and (config.products > 1 or epilogue.shared_loads or epilogue.shared_stores):
            planes = len(epilogue.shared_loads + epilogue.shared_stores)
            raise ValueError(
                f"tile {config.name} has visits in a loop, of one product and no plane in shared memory, but "
                f"products are {config.products} and planes {planes}"
            )
        super().__init__(epilogue, config, stages, kind=kind, scaling=scaling)
        self.blocks = config.blocks
        self.visits = config.tile_n // config.subtile_n
        self.subtiles = self.blocks * self.visits
        self.boxes = self.subtiles // config.box_subtiles
        interleaved = config.b_columns is BColumns.INTERLEAVED
        self.tile_type = InterleavedTile if interleaved else FragmentTile

    @abstractmethod
    def _origin(self, shared: Any, place: Place) -> tuple[Int32, Int32]:
        """The first row and column of a CTA's tile, among those of its product."""

    def _tile(self, shared: Any, place: Place, thread: Int32, share: Any) -> FragmentTile:
        """The part of the CTA's tile that an epilogue thread owns, among all rows of the output. `thread` is
        its index in its warpgroup, and `share` the warpgroup's index among those that share the tile."""
        m0, n0 = self._origin(shared, place)
        corner = Corner(place.first + m0, n0, place.end, shared.n)
        return self.tile_type(self.config, corner, thread, share)

    def _row_tile(self, shared: Any, place: Place, lane: Int32) -> FragmentTile:
        m0, n0 = self._origin(shared, place)
        return FragmentTile(self.config, Corner(place.first + m0, n0, place.end, shared.n), lane, Int32(0))


@dataclass(frozen=True, kw_only=True)
class RegisterSeat:
    """The accumulators of a thread in registers, of which a subtile has those of the `block`-th 64 rows of
    its warpgroup's tile."""

    config: TileConfig
    acc: cute.Tensor
    block: int = 0

    @property
    def _subtile_type(self) -> type[FragmentSubtile]:
        interleaved = self.config.b_columns is BColumns.INTERLEAVED
        return InterleavedSubtile if interleaved else FragmentSubtile

    def blocks(self, tile: FragmentTile) -> list[tuple[RegisterSeat, Any]]:
        """The seat in each block of rows. If visits are in a loop, a warp whose rows lie beyond M makes
        none."""
        return [
            (replace(self, block=i), tile.warp_row(i) < tile.m if self.config.rolled else True)
            for i in range(self.config.blocks)
        ]

    def turns(self, turns: Turns, at: Position) -> Position:
        """Makes turns in an unrolled loop, or nested loops. Their accumulators are the first ones of the
        block of rows in the latter."""
        if self.config.rolled:
            return self._nested(turns, Int32(0), at)
        return self._unrolled(turns, at)

    def _unrolled(self, turns: Turns, at: Position) -> Position:
        for i in range(turns.count):
            at = turns.body(at, i * turns.size)
        return at

    @cute.jit
    def _nested(self, turns: cutlass.Constexpr[Turns], first: Int32, at: Position):
        """A loop at run time can't index registers by its counter. So this nests loops of two iterations, and
        each loop moves the accumulators of its second iteration to the place of the first one's. An
        accumulator moves at most once per loop. If turns write accumulators, each moves all of them round, so
        that they are in order after the last turn.
        """
        if cutlass.const_expr(turns.count == 1):
            at = turns.body(at, first)
        else:
            times = 2 if turns.count % 2 == 0 else turns.count
            part = replace(turns, count=turns.count // times)
            row = self._first(turns.count * turns.size)
            moved = cute.size(row) // times
            for turn in cutlass.range(times, unroll=1):
                at = self._nested(part, first + turn * (part.count * part.size), at)
                if cutlass.const_expr(turns.writes):
                    _move_round(row, moved)
                else:
                    if turn < times - 1:
                        for e in cutlass.range_constexpr(cute.size(row) - moved):
                            row[e] = row[e + moved]
        return at

    def _first(self, subtiles: int) -> cute.Tensor:
        """The accumulators of the first subtiles of the block of rows."""
        first = self.block * (self.config.mma_n // 2)
        return cute.make_tensor(
            self.acc.iterator + first, cute.make_layout(subtiles * self.config.subtile_n // 2)
        )

    def begin(self, first: Any, i: int, values: int) -> tuple[Any, int, int]:
        return first, i, values

    def finish(self, tile: FragmentTile, begun: tuple[Any, int, int], again: bool = False) -> tuple[Any, ...]:
        """The subtile and its accumulators. If visits are the iterations of a loop, which needs all
        accumulators, the compiler must not keep what a pass computes from each of them for a later pass,
        which reads them `again`: a softmax over blocks of 256 columns spilled 128 bytes (128 x 256 on
        sm_90a)."""
        first, i, values = begun
        sub = self._subtile_type(self.config, tile, self.block, first + i)
        pieces = [
            sub.accumulators(self.acc, j, i if self.config.rolled else first + i) for j in range(values)
        ]
        if self.config.rolled and again:
            for piece in pieces:
                for e in range(cute.size(piece)):
                    piece[e] = opaque(piece[e])
        return sub, *pieces

    def write(self, first: Any, accumulators: cute.Tensor, values: cute.Tensor) -> None:
        for e in range(cute.size(accumulators)):
            accumulators[e] = values[e]

    def end_writes(self) -> None:
        """Does nothing: registers are written at once."""

    def release(self, visit: Any) -> None:
        """Does nothing: the thread itself multiplies the next tile."""


def _move_round(row: cute.Tensor, places: int) -> None:
    """Moves every element this many places towards the first, and the first ones to the end."""
    size = cute.size(row)
    moved = [row[(e + places) % size] for e in range(size)]
    for e, value in enumerate(moved):
        row[e] = value
