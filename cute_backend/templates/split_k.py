"""Split-K: each CTA of a cluster multiplies a part of K of one tile, and the first of them has the epilogue.

With few tiles most multiprocessors would be idle. So each CTA of a cluster multiplies a part of K. All but
the first publish their sums in their own shared memory. The first reads them there and adds them up, always
in the order of the parts.

    part 0      | wgmma over its k tiles | . . . . reads, adds | epilogue
    part 1 ...  | wgmma over its k tiles | publishes its sums . . . . |

A CTA has only one tile, and ends when its sums have been read.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cute_backend.templates.crew import Ring

_VECTOR = 4
"""fp32 sums that a thread moves at once."""


@dataclass(frozen=True)
class Sums:
    """The sums that each CTA of a cluster publishes to the first one: (4, fours of a thread, thread) in fp32.

    The first fours of all threads lie side by side, then the second ones. `ready` completes in the first CTA
    when the sums of all others are there, `read` in each other one when its own have been read.
    """

    shared: cute.Tensor
    ready: cute.Pointer
    read: cute.Pointer

    @staticmethod
    def allocate(smem: SmemAllocator, per_thread: int, threads: int) -> Sums:
        """Room for `per_thread` sums, a multiple of four, of each of `threads` threads; and two barriers."""
        layout = cute.make_layout(
            (_VECTOR, per_thread // _VECTOR, threads), stride=(1, _VECTOR * threads, _VECTOR)
        )
        barriers = smem.allocate_array(Int64, 2)
        return Sums(smem.allocate_tensor(Float32, layout, 16), barriers, barriers + 1)

    def init(self, ring: Ring) -> None:
        """Set the barriers up, by one warp, before the cluster is in step."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(self.ready, ring.filled.count)
            cute.arch.mbarrier_init(self.read, ring.emptied.count)

    @cute.jit
    def publish(self, acc: cute.Tensor, thread: Int32):
        """Publish a thread's accumulators to the first CTA, and wait until it has read them."""
        cute.autovec_copy(_in_fours(acc), self.shared[(None, None, thread)])
        _arrive(self.ready, 0)
        cute.arch.mbarrier_wait(self.read, 0)

    @cute.jit
    def reduce(self, acc: cute.Tensor, thread: Int32, parts: cutlass.Constexpr[int]):
        """Add the accumulators of the same thread in all other CTAs of the cluster to a thread's own."""
        cute.arch.mbarrier_wait(self.ready, 0)
        cute.arch.fence_acq_rel_cluster()
        sums = _in_fours(acc)
        for part in cutlass.range(1, parts, unroll=1):
            theirs = cute.make_rmem_tensor(sums.shape, Float32)
            remote = cute.make_tensor(cute.arch.map_dsmem_ptr(self.shared.iterator, part), self.shared.layout)
            cute.autovec_copy(remote[(None, None, thread)], theirs)
            for i in cutlass.range_constexpr(cute.size(sums)):
                sums[i] = sums[i] + theirs[i]
            _arrive(self.read, part)


def _arrive(barrier: cute.Pointer, part: int) -> None:
    """Arrive for a warp at another CTA's barrier, once all its lanes have written or read."""
    cute.arch.fence_acq_rel_cluster()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier, part)


def _in_fours(acc: cute.Tensor) -> cute.Tensor:
    """Accumulators as (4, fours)."""
    return cute.make_tensor(acc.iterator, cute.make_layout((_VECTOR, cute.size(acc) // _VECTOR)))
