"""Tiles of A with few rows: TMA loads a tile of 64 rows in boxes, and none beyond A's last row.

TMA zero-fills rows beyond a tensor more slowly than it loads rows: M = 16, N = K = 8192 in fp8 took 22.0 us
with those boxes and 17.9 us without. A tile of 128 rows is loaded as one box: with several boxes, M = N = K =
4096 took 2 percent longer (H200).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_backend.templates.loading import Tiles

A_BOXES = 4
"""The number of boxes of a tile of 64 rows."""


@dataclass(frozen=True)
class FurtherBoxes:
    """The boxes of a tile of A after the first, of which `count` in all have rows of A. Each has `nbytes`."""

    tiles: Tiles
    count: Int32
    nbytes: int

    @cute.jit
    def bring(self, k: Int32, stage: Int32, barrier: cute.Pointer):
        """Begins to load the boxes of a k tile, except those beyond A's last row.

        Call this before the copies that the barrier already expects: their arrival would complete its phase.
        """
        nbytes = self.nbytes * cutlass.max(self.count - 1, 0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_expect_tx(barrier, nbytes)
        source = self.tiles.source
        for box in cutlass.range_constexpr(1, A_BOXES):
            if box < self.count:
                target = self.tiles.stages[(None, box, stage)]
                cute.copy(
                    source.tma.atom,
                    self.tiles.box(k, box),
                    target,
                    tma_bar_ptr=barrier,
                    cache_policy=source.options["cache_policy"],
                )


@cute.jit
def clear(s_a: cute.Tensor, thread: Int32, threads: int):
    """Zeroes every stage of A, because some rows are multiplied but never loaded."""
    vectors = cute.cosize(s_a) * s_a.element_type.width // 128
    words = cute.make_tensor(
        cute.recast_ptr(s_a.iterator, dtype=Int32), cute.make_layout((4, vectors), stride=(1, 4))
    )
    zeros = cute.make_rmem_tensor(4, Int32)
    zeros.fill(0)
    for i in cutlass.range(thread, vectors, threads, unroll=1):
        cute.autovec_copy(zeros, words[(None, i)])
    cute.arch.fence_proxy("async.shared", space="cta")
