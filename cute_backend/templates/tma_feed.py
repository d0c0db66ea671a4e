"""The feed by TMA. One warp loads A and B of every k tile for the warps that multiply, as far ahead as stages
are free, and another stages rowvecs. The warps that multiply don't synchronise with each other for a k
tile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_backend.templates.crew import WARP, Arrivals, Ring, Role, one
from cute_backend.templates.feed import Feed
from cute_backend.templates.loading import Source, all_boxes
from cute_backend.templates.rings import consumer_state, make_rows, of_one_stage, producer_state, stages_of
from cute_backend.templates.scheduler import Place
from cute_backend.templates.staged import Stage
from cute_backend.templates.warp_mainloop import Copies

if TYPE_CHECKING:
    from cute_backend.templates.feed import Sm80Shared
    from cute_backend.templates.sm80 import Sm80Gemm


class TmaFeed(Feed):
    """TMA loads boxes, swizzled as ldmatrix reads them, through a ring of mbarriers. Exact loads are copied
    by the warps that read them, with a group of cp.async for each subtile."""

    def __init__(self, gemm: Sm80Gemm, work: Role):
        super().__init__(gemm, work)
        load = Role("load", work.numbers.stop, 1, "A and B of a k tile, by TMA", self._load)
        rows = Role("staging", work.numbers.stop + 1, 1, "staged rowvecs of a tile", gemm._stage_rows)
        self.roles = (load, rows) if self.stages.row else (load,)
        self.ab_ring = Ring("ab", self.stages.ab, one(load), Arrivals(work, work.warps, 1))
        self.row_ring = None
        self.rings = (self.ab_ring,)
        if self.stages.row:
            filled, emptied = Arrivals(rows, 1, WARP), Arrivals(work, work.warps, WARP)
            self.row_ring = Ring("row", self.stages.row, filled, emptied)
            self.rings = (self.ab_ring, self.row_ring)

    def given(self, operand: cute.Tensor, stage: Stage) -> cpasync.TmaInfo:
        layout = of_one_stage(stage.layout(1))
        box = (stage.rows, stage.columns)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), operand, layout, box)

    def tensor(self, given: cpasync.TmaInfo) -> cute.Tensor:
        return given.tma_tensor

    def open(self, smem: SmemAllocator) -> tuple[Any, Any]:
        ring = pipeline.PipelineTmaAsync.create(
            **stages_of(smem, self.ab_ring),
            tx_count=self.gemm.a_stage.bytes + self.gemm.b_stage.bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )
        rows = make_rows(smem, self.row_ring)
        pipeline.pipeline_init_arrive(cluster_shape_mn=cute.make_layout(1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=cute.make_layout(1))
        return ring, rows

    @cute.jit
    def _load(self, shared: Sm80Shared):
        """The load warp: loads A and B of every k tile."""
        items, ring = shared.items, shared.ab_pipeline
        sources = [
            *[
                _source(a, shared.s_a, self.gemm.a_piece, i, lambda place: place.row)
                for i, a in enumerate(shared.every_a)
            ],
            *[
                _source(b, shared.s_b, self.gemm.piece, i, lambda place: place.column)
                for i, b in enumerate(shared.bs)
            ],
        ]
        for source in sources:
            cpasync.prefetch_descriptor(source.tma.atom)
        state = producer_state(self.stages.ab)
        item = Int32(items.first)
        while items.is_valid(item):
            place = items.place(item)
            tiles, begin = [source.at(place) for source in sources], items.begin_k(place.batch)
            for k in cutlass.range(begin, begin + items.k_tiles, unroll=1):
                ring.producer_acquire(state)
                barrier = ring.producer_get_barrier(state)
                for i in cutlass.range_constexpr(len(tiles)):
                    tiles[i].bring(k, state.index, barrier)
                state.advance()
            item += items.step
        ring.producer_tail(state)

    def begin(self, shared: Sm80Shared) -> tuple[pipeline.PipelineState, pipeline.PipelineState]:
        return consumer_state(self.stages.ab), consumer_state(self.stages.row)

    def wait(self, shared: Sm80Shared, at: pipeline.PipelineState) -> Int32:
        shared.ab_pipeline.consumer_wait(at)
        return at.index

    def multiply(
        self,
        shared: Sm80Shared,
        at: pipeline.PipelineState,
        step: Callable[[Copies], None],
    ) -> pipeline.PipelineState:
        step(())
        cute.arch.sync_warp()  # one lane hands the stage back, for all that have read it
        shared.ab_pipeline.consumer_release(at)
        at.advance()
        return at

    def planes_begun(self) -> None:
        cute.arch.cp_async_commit_group()

    def await_first_planes(self, shared: Sm80Shared, later: int) -> None:
        cute.arch.cp_async_wait_group(later)

    def stage_rows(self, shared: Sm80Shared, place: Place, rows_at: Any) -> None:
        """Does nothing, because the staging warp stages rowvecs."""

    def rows(self, shared: Sm80Shared, rows_at: pipeline.PipelineState) -> list[cute.Tensor]:
        if self.stages.row:
            shared.row_pipeline.consumer_wait(rows_at)
        return [s_row[(None, rows_at.index)] for s_row in shared.rows]

    def rows_read(self, shared: Sm80Shared, rows_at: pipeline.PipelineState) -> pipeline.PipelineState:
        if self.stages.row:
            shared.row_pipeline.consumer_release(rows_at)
            rows_at.advance()
        return rows_at


def _source(
    tma: cpasync.TmaInfo, staged: cute.Tensor, part: Stage, index: int, line: Callable[[Place], Int32]
) -> Source:
    """An operand that fills the `index`-th part of every stage."""
    box = (part.rows, part.columns)
    stages = cute.local_tile(staged, (*box, cute.size(staged, mode=[2])), (index, 0, 0))
    return Source(tma, cute.group_modes(stages, 0, 2), partial(all_boxes, box), line)
