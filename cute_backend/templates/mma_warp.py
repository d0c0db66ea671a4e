"""The warp of a CTA that issues tcgen05.mma: one accumulator in tensor memory after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline

from cute_backend.planning.sum_scales import SumScales
from cute_backend.templates.mainloop import Sm100Mainloop, Sm100Operands
from cute_backend.templates.rings import advanced, consumer_state
from cute_backend.templates.warpgroup_planes import WarpgroupPlanes

if TYPE_CHECKING:
    from cute_backend.templates.sm100 import Sm100Shared


class Issue(NamedTuple):
    """The state of the MMA warp: the instruction to issue next, and the next stages of A and B and of
    accumulators."""

    mma: cute.TiledMma
    ab: pipeline.PipelineState
    acc: pipeline.PipelineState


class MmaWarp(WarpgroupPlanes):
    """A kernel with such a warp. Its `tile` is that of the MMA, of which there are `acc_stages` accumulators;
    each has the sums of a whole tile or, with `block_scales`, of one k tile."""

    mainloop: Sm100Mainloop
    tile: tuple[int, int, int]
    acc_stages: int
    block_scales: SumScales | None

    def _accumulators(self, shared: Sm100Shared, start: cute.Pointer) -> cute.Tensor:
        """The accumulators (MMA, MMA_M, MMA_N, stage) in tensor memory, from `start` on: at most 512 columns
        of it."""
        mma = shared.given.tiled_mma
        shape = cute.append(mma.partition_shape_C(self.tile[:2]), self.acc_stages)
        return cute.make_tensor(start, mma.make_fragment_C(shape).layout)

    @cute.jit
    def _multiply(self, shared: Sm100Shared):
        """The MMA warp. The even CTA of a pair multiplies for both."""
        config, tiled_mma = self.config, shared.given.tiled_mma
        shared.tmem.wait_for_alloc()
        start = shared.tmem.retrieve_ptr(self.sum_type)
        after = start + self.acc_stages * config.mma_n
        operands = Sm100Operands(
            tiled_mma.make_fragment_A(shared.s_a),
            tiled_mma.make_fragment_B(shared.s_b),
            self.mainloop.scale_operands(shared.s_scales, tiled_mma, self.tile, after, config),
        )
        if shared.cta_coord[0] == 0:
            self._multiply_tiles(shared, operands, self._accumulators(shared, start))

    @cute.jit
    def _multiply_tiles(self, shared: Sm100Shared, operands: Sm100Operands, acc: cute.Tensor):
        """Fills one accumulator after the other, with the sums of a whole tile or, where the epilogue scales
        these, of one k tile."""
        items, acc_pipeline = shared.items, shared.acc_pipeline
        # The epilogue warps of both CTAs release the accumulators once their tensor memory is allocated. So
        # the producer, too, starts as if all buffers were in use.
        at = Issue(shared.given.tiled_mma, consumer_state(self.stages.ab), consumer_state(self.acc_stages))
        item = items.first
        while items.is_valid(item):
            _, column = self._cta_tile(items.place(item))
            of_tile = self.mainloop.of_tile(operands, column, self.config)
            k_tiles = items.k_tiles_at(item)
            if cutlass.const_expr(self.block_scales is None):
                at = self._fill(shared, of_tile, acc, k_tiles, at)
            else:
                for _ in cutlass.range(k_tiles, unroll=1):
                    at = self._fill(shared, of_tile, acc, 1, at)
            item += items.step
        acc_pipeline.producer_tail(at.acc)

    @cute.jit
    def _fill(self, shared: Sm100Shared, operands: Sm100Operands, acc: cute.Tensor, k_tiles: Any, at: Issue):
        """Fills one accumulator with the sums of the next `k_tiles` k tiles. Returns the instruction to issue
        next, and the next stages."""
        ab_pipeline, acc_pipeline = shared.ab_pipeline, shared.acc_pipeline
        acc_pipeline.producer_acquire(at.acc)
        tile_acc, ab = acc[(None, None, None, at.acc.index)], at.ab
        mma = self.mainloop.begin(at.mma)
        for _ in cutlass.range(k_tiles, unroll=1):
            ab_pipeline.consumer_wait(ab)
            mma = self.mainloop.step(mma, tile_acc, operands, ab.index)
            ab_pipeline.consumer_release(ab)
            ab.advance()
        acc_pipeline.producer_commit(at.acc)
        return Issue(mma, ab, advanced(at.acc))
