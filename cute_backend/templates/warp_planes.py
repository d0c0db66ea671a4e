"""The planes of the Hopper kernel: TMA loads boxes of 64 rows for a warpgroup, and each of its warps stores
boxes of 16 rows by itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64

from cute_backend.templates.crew import WARP, WARPS
from cute_backend.templates.drain import Position, Work
from cute_backend.templates.epilogue import SmemOperand, in_subtiles, release_planes
from cute_backend.templates.rings import in_ring
from cute_backend.templates.scheduler import Place
from cute_backend.templates.tma_gemm import TmaGemm, TmaShared

WARPGROUP = WARPS * WARP
"""Threads of a warpgroup."""
BLOCK_M = 64
"""Rows of one wgmma instruction."""
WARP_M = BLOCK_M // WARPS
"""Rows of one wgmma instruction whose accumulators a warp holds (PTX ISA, wgmma register fragments)."""

EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000
"""L2 cache policies, as `createpolicy.fractional` encodes them for all of a copy's data (PTX ISA). Data that
is read once is evicted first, so that operands read by several tiles stay in L2. This gains 3 percent at
M = N = 8192, K = 1024 on an H200."""


class WarpPlanes(TmaGemm):
    """A kernel whose warps hold 16 rows of each block of 64. Each tile that is in work at a time has one of
    `rings` rings of exact loads."""

    blocks: int

    def _set_boxes(self) -> None:
        """Sets the shapes and numbers of boxes, for the configuration."""
        config = self.config
        self.rings = config.warpgroups // config.sharing
        self.exact_box, self.store_box = (BLOCK_M, config.box_n), (WARP_M, config.box_n)
        self.stores_a_warpgroup, self.exact_parts = WARPS, config.sharing
        self.exact_elements = BLOCK_M * config.box_n * config.sharing

    @abstractmethod
    def _origin(self, shared: Any, place: Place) -> tuple[Int32, Int32]:
        """The first row and column of a CTA's tile, among those of its product."""

    @cute.jit
    def _boxes_in_turn(
        self, count: cutlass.Constexpr[int], body: cutlass.Constexpr[Callable], state: pipeline.PipelineState
    ):
        for index in cutlass.range(count, unroll_full=True):
            state = body(state, index)
        return state

    def _priority(self, operand: SmemOperand) -> dict[str, Any]:
        return {"cache_policy": Int64(EVICT_LAST if operand.repeats else EVICT_FIRST)}

    def _exact_coord(self, shared: TmaShared, place: Place, index: Any, part: Any) -> tuple[Int32, Int32]:
        """The place of a box of a warpgroup's part of a tile, counted in (64, box_n) boxes of its product."""
        (m0, n0), of_block = self._origin(shared, place), self.boxes // self.blocks
        row = m0 // BLOCK_M + index // of_block * self.config.sharing + part
        return row, n0 // self.config.box_n + index % of_block

    def _box(self, work: Work, visit: Any) -> tuple[Any, int, bool]:
        """The box of a subtile among those of a warpgroup's part of the tile, the subtile's place in it, and
        whether it is the last there."""
        subtile = work.seat.block * self.visits + visit
        if self.config.box_subtiles == 1:
            return subtile, 0, True
        box, part = divmod(subtile, self.config.box_subtiles)
        return box, part, part == self.config.box_subtiles - 1

    def _make_room(self, work: Work, visit: Any) -> None:
        if self.stages.store == 0:
            self._pace(work)
        elif self._box(work, visit)[1] == 0:
            work.seat.stores.producer_acquire()
            cute.arch.sync_warp()

    def _pace(self, work: Work) -> None:
        """Keeps the assembler from computing the addresses of all visits at once, which spills."""
        if not self.config.rolled:
            work.seat.barrier.arrive_and_wait()

    def _loaded(
        self, work: Work, at: Position, visit: Any, of_round: int
    ) -> tuple[list[cute.Tensor], Callable[[], None]]:
        """A warp's exact loads of a subtile. It waits at the first subtile of a box, and releases the box
        after the last."""
        shared, seat, stage = work.shared, work.seat, in_ring(at.exact, work.seat.ring)
        _, part, ends = self._box(work, visit)
        if part == 0:
            shared.exact_pipeline.consumer_wait(stage)
        plane = (seat.ring * self.stages.exact + at.exact.index) * self.config.sharing + seat.share
        loads = [self._part_of_box(s_load, plane, (seat.warp, part)) for s_load in shared.loads]
        return loads, partial(release_planes, shared.exact_pipeline, stage) if ends else _keep_box

    def _loads_read(self, work: Work, at: Position, visit: Any) -> Position:
        return super()._loads_read(work, at, visit) if self._box(work, visit)[2] else at

    def _stores(self, work: Work, at: Position, visit: Any) -> list[cute.Tensor]:
        if self.stages.store == 0:
            return []
        place = (0, self._box(work, visit)[1])
        return [
            self._part_of_box(s_store, self._output_plane(work, at), place) for s_store in work.shared.stores
        ]

    def _output_plane(self, work: Work, at: Position) -> Int32:
        """The index of a warp's plane of outputs."""
        return (at.store * self.config.warpgroups + work.seat.group) * WARPS + work.seat.warp

    def _part_of_box(self, planes: cute.Tensor, plane: Int32, place: tuple) -> cute.Tensor:
        """A warp's rows of a subtile in one of the boxes of planes."""
        width = self.config.subtile_n
        return cute.local_tile(in_subtiles(planes[(None, None, plane)], width), (WARP_M, width), place)

    def _leave(self, work: Work, at: Position, visit: Any) -> Position:
        box, _, ends = self._box(work, visit)
        if not ends:
            return at
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        row, column = self._exact_coord(work.shared, work.place, box, work.seat.share)
        coord = (row * WARPS + work.seat.warp, column)
        self._store(work, self._output_plane(work, at), coord)
        work.seat.stores.producer_commit()
        return at._replace(store=(at.store + 1) % self.stages.store)


def _keep_box() -> None:
    """Keeps a box of planes that the next subtile reads, too."""
