"""The planes of the Blackwell kernel: TMA loads and stores a subtile of 128 rows for a warpgroup at a
time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32

from cute_backend.templates.drain import Position, Visit, Work
from cute_backend.templates.epilogue import release_planes
from cute_backend.templates.rings import advanced
from cute_backend.templates.scheduler import Place
from cute_backend.templates.tensor_memory import subtile_of
from cute_backend.templates.tma_gemm import TmaGemm, TmaShared

CTA_M = 128
"""Rows of a CTA's tile: one for each lane of tensor memory, and for each thread of an epilogue warpgroup."""


class WarpgroupPlanes(TmaGemm):
    """A kernel each of whose threads of the epilogue holds one of 128 rows. The columns of a tile are shared
    out to the warpgroups of the epilogue, with `visits` of the `subtiles` for each."""

    subtiles: int

    def _set_boxes(self) -> None:
        """Sets the shapes and numbers of boxes, for the configuration."""
        config = self.config
        self.subtiles = config.tile_n // config.subtile_n
        self.visits = self.boxes = config.group_n // config.subtile_n
        self.exact_box = self.store_box = (CTA_M, config.subtile_n)
        self.stores_a_warpgroup, self.exact_parts = 1, config.warpgroups
        self.exact_elements = config.stage_elements

    def _cta_tile(self, place: Place) -> tuple[Int32, Int32]:
        """The coordinates of the CTA's (128, tile_n) tile of its product."""
        if self.in_cluster:
            return Int32(place.row), Int32(place.column)
        x, y, _ = cute.arch.block_idx()
        return place.row * self.config.cluster_m + x, place.column * self.config.cluster_n + y

    @cute.jit
    def _boxes_in_turn(
        self, count: cutlass.Constexpr[int], body: cutlass.Constexpr[Callable], state: pipeline.PipelineState
    ):
        for index in cutlass.range(count, unroll=1):
            state = body(state, index)
        return state

    def _exact_coord(self, shared: TmaShared, place: Place, index: Int32, part: int) -> tuple[Int32, Int32]:
        row, column = self._cta_tile(place)
        return row, column * self.subtiles + subtile_of(self.config, part, index)

    @cute.jit
    def _visit_rows(
        self, sweep: Visit, work: Work, smem: SimpleNamespace, sub: Any, *accumulators: cute.Tensor
    ):
        """With planes in shared memory every warp visits, since all wait for the planes and release them."""
        every = self.stages.exact + self.stages.store > 0 or sweep.pads_rows
        if Boolean(every) | (work.tile.warp_row() < work.tile.m):
            self.epilogue.visit(sub, *accumulators, work.shared.glob, work.held, smem)

    def _loaded(
        self, work: Work, at: Position, visit: Any, of_round: int
    ) -> tuple[list[cute.Tensor], Callable[[], None]]:
        loads, ring = work.shared.loads, work.shared.exact_pipeline
        ring.consumer_wait(at.exact)
        plane = self._plane(at.exact, work.seat.thread.group)
        return [s_load[(None, None, plane)] for s_load in loads], partial(release_planes, ring, at.exact)

    def _stores(self, work: Work, at: Position, visit: Any) -> list[cute.Tensor]:
        plane = self._plane(at.store, work.seat.thread.group)
        return [s_store[(None, None, plane)] for s_store in work.shared.stores]

    @cute.jit
    def _leave(self, work: Work, at: Position, visit: Any):
        """Stores planes by TMA. One barrier for each subtile suffices. Before it, the warp that issues the
        stores waits until TMA has read the next buffer. So the barrier that hands it the full buffer also
        frees the next one to be written."""
        thread, stores = work.seat.thread, work.seat.stores
        row, column = self._cta_tile(work.place)
        subtile = subtile_of(self.config, thread.group, visit)
        cute.arch.fence_proxy("async.shared", space="cta")
        if thread.warp == 0:
            stores.producer_acquire()
        thread.barrier.arrive_and_wait()
        if thread.warp == 0:
            coord = (row, column * self.subtiles + subtile)
            self._store(work, self._plane(at.store, thread.group), coord)
            stores.producer_commit()
        return at._replace(store=advanced(at.store))
