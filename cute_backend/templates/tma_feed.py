"""The feed by TMA. One warp loads A and B of every k tile for the warps that multiply, as far ahead as stages
are free, and another stages rowvecs. The warps that multiply don't synchronise with each other for a k
tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_backend.templates import batch as batches
from cute_backend.templates.crew import WARP, Arrivals, Ring, Role, one
from cute_backend.templates.feed import Feed
from cute_backend.templates.rings import consumer_state, make_rows, producer_state, stages_of
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
        layout = cute.slice_(stage.layout(1), (None, None, 0))
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
        schedule, ring = shared.schedule, shared.ab_pipeline
        cpasync.prefetch_descriptor(shared.a.atom)
        for b in shared.bs:
            cpasync.prefetch_descriptor(b.atom)
        s_a, g_a = _partition(shared.a, shared.s_a, self.gemm.a_stage, 0)
        pieces = [_partition(b, shared.s_b, self.gemm.piece, i) for i, b in enumerate(shared.bs)]
        state = producer_state(self.stages.ab)
        item = Int32(shared.first_item)
        while schedule.is_valid(item):
            place = schedule.place(item)
            a_boxes = batches.of_place(g_a, place)
            first_k = self.first_k(shared, Int32(place.batch))
            for k in cutlass.range(first_k, first_k + shared.k_tiles, unroll=1):
                ring.producer_acquire(state)
                barrier = ring.producer_get_barrier(state)
                cute.copy(
                    shared.a.atom,
                    a_boxes[(None, place.row, k)],
                    s_a[(None, state.index)],
                    tma_bar_ptr=barrier,
                )
                for i in cutlass.range_constexpr(len(pieces)):
                    s_b, g_b = pieces[i]
                    cute.copy(
                        shared.bs[i].atom,
                        batches.of_place(g_b, place)[(None, place.column, k)],
                        s_b[(None, state.index)],
                        tma_bar_ptr=barrier,
                    )
                state.advance()
            item += shared.item_step
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


def _partition(tma: cpasync.TmaInfo, staged: cute.Tensor, part: Stage, index: int) -> tuple:
    """The `index`-th part of every stage of an operand, and all boxes that it is loaded from, partitioned for
    TMA."""
    box = (part.rows, part.columns)
    s_part = cute.local_tile(staged, (*box, cute.size(staged, mode=[2])), (index, 0, 0))
    return cpasync.tma_partition(
        tma.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(s_part, 0, 2),
        cute.group_modes(batches.boxes(tma.tma_tensor, box), 0, 2),
    )
