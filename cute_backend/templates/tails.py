"""The last group of K in fp8 may end anywhere: what lies behind its end counts as zeros.

TMA moves multiples of 16 bytes along contiguous memory, so the 16 bytes in which the last group ends arrive
whole. They are the last 16 bytes of every line of their k tile, because a short k tile has its zeros in front
(`batch.of_k_tile`). The copies of that k tile signal another barrier than the stage's own. The load warp
waits for them, clears in every row of A and every column of B what lies behind the end, and arrives at the
stage's barrier in place of TMA. Both operands are cleared, since each may hold NaN there. The warps that
multiply wait for the stage's barrier, as for any k tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32, Int64
from cutlass.memory import SmemAllocator

from cute_backend.planning import TILE_K_BYTES
from cute_backend.templates.crew import WARP, Crew
from cute_backend.templates.scheduler import KPlace, Place

_WORDS = 4
"""The 32-bit words of 16 bytes."""
_LINE = TILE_K_BYTES // (4 * _WORDS)
"""The 16 bytes of a line, one row of A or column of B, in a stage."""


@dataclass(frozen=True)
class Tails:
    """A barrier for each stage of A and B, which the copies of a k tile signal if its tail is to be cleared.

    `operands` are the stages of A and of B, as (words, 16 bytes, stage). If `ctas` CTAs share an MMA, the
    copies of all of them signal the barrier of the CTA that `leads`, and it clears the stages of all.
    """

    ring: Any
    barriers: cute.Pointer
    operands: list[cute.Tensor]
    ctas: int
    leads: Any

    @staticmethod
    def allocate(
        smem: SmemAllocator,
        crew: Crew,
        ring: Any,
        stages: Sequence[cute.Tensor],
        ctas: int = 1,
    ) -> Tails:
        """Allocates the barriers beside those of `crew`, for the `stages` of A and of B in `ring`. These are
        K-major, with lines of 128 bytes."""
        crew.check_further(ring.num_stages)
        operands = []
        for each in stages:
            shape = (_WORDS, cute.cosize(each) // (4 * _WORDS * ring.num_stages), ring.num_stages)
            words = cute.recast_ptr(each.iterator, dtype=Int32)
            operands.append(cute.make_tensor(words, cute.make_layout(shape)))
        leads = True if ctas == 1 else ring.is_leader_cta
        return Tails(ring, smem.allocate_array(Int64, ring.num_stages), operands, ctas, leads)

    @cute.jit
    def init(self, loads: Boolean):
        """Initializes the barriers, in the warp that `loads`, before the cluster synchronizes."""
        if loads:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.ring.num_stages):
                    cute.arch.mbarrier_init(self.barriers + stage, 1)

    @cute.jit
    def acquire(self, state: pipeline.PipelineState, is_cut: Boolean) -> cute.Pointer:
        """Waits until a stage is free. Returns the barrier that its copies signal."""
        self.ring.sync_object_empty.wait(state.index, state.phase)
        barrier = self.ring.producer_get_barrier(state)
        if is_cut:
            barrier = self.barriers + state.index
        if self.leads:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.ring.sync_object_full.tx_count)
        return barrier

    @cute.jit
    def clear(self, state: pipeline.PipelineState, place: Place, phases: Int32) -> Int32:
        """Waits for the copies to a stage, clears what lies behind the end of the group in the last 16 bytes
        of its lines, and hands it to the warps that multiply. Bit i of `phases` is the phase of the barrier
        of stage i. Returns the phases after this wait."""
        index, kept = state.index, cast(KPlace, place).tail
        if self.leads:
            cute.arch.mbarrier_wait(self.barriers + index, (phases >> index) & 1)
            if cutlass.const_expr(self.ctas > 1):
                cute.arch.fence_acq_rel_cluster()
            masks = cute.make_rmem_tensor(_WORDS, Int32)
            for word in cutlass.range_constexpr(_WORDS):
                bits = cutlass.min(cutlass.max(kept - 4 * word, 0) * 8, 31)
                masks[word] = cutlass.select_(kept >= 4 * word + 4, Int32(-1), (Int32(1) << bits) - 1)
            rank = cute.arch.block_idx_in_cluster()
            for cta in cutlass.range_constexpr(self.ctas):
                for i in cutlass.range_constexpr(len(self.operands)):
                    self._clear(self._of_cta(i, rank, cta)[(None, None, index)], masks)
            cute.arch.fence_proxy("async.shared", space="cta" if self.ctas == 1 else "cluster")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.ring.producer_get_barrier(state))
        return phases ^ (Int32(1) << index)

    def _of_cta(self, operand: int, rank: Int32, cta: int) -> cute.Tensor:
        """The stages of an operand in the CTA that is the `cta`-th after this one, whose rank is `rank`."""
        own = self.operands[operand]
        if cta == 0:
            return own
        return cute.make_tensor(cute.arch.map_dsmem_ptr(own.iterator, rank + cta), own.layout)

    @cute.jit
    def _clear(self, stage: cute.Tensor, masks: cute.Tensor):
        """Clears all bits but those of `masks` in the last 16 bytes of each line of a stage. The swizzle
        moves them: in line i they are 16 bytes number 7 ^ i % 8 (PTX ISA, "Swizzling Modes", 128 bytes)."""
        lines = cute.size(stage, mode=[1]) // _LINE
        words = cute.make_rmem_tensor(_WORDS, Int32)
        for line in cutlass.range(cute.arch.lane_idx(), lines, WARP, unroll=1):
            piece = stage[(None, line * _LINE + ((_LINE - 1) ^ (line % _LINE)))]
            cute.autovec_copy(piece, words)
            for word in cutlass.range_constexpr(_WORDS):
                words[word] = words[word] & masks[word]
            cute.autovec_copy(words, piece)


def is_cut(place: Place, k_tile: Int32, k_tiles: Int32) -> Boolean:
    """Whether a group ends within the last 16 bytes of a k tile."""
    return (cast(KPlace, place).tail > 0) & (k_tile == k_tiles - 1)
