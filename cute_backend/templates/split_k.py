"""Split-K over a cluster: each CTA multiplies a part of K of one tile, and the first CTA runs the epilogue.

With few tiles, most multiprocessors would be idle, so the CTAs of a cluster share a tile's K. All CTAs but
the first publish their sums in their own shared memory. The first CTA reads them there and adds them up,
always in the order of the parts.

    part 0      | MMAs over its k tiles | . . . . reads, adds | epilogue
    part 1 ...  | MMAs over its k tiles | publishes its sums . . . . |

Each CTA has only one tile, and exits once its sums have been read. If accumulators are in tensor memory, a
thread moves the accumulators of one visit at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Numeric
from cutlass.memory import SmemAllocator

from cute_backend.templates.crew import Ring

_VECTOR = 4
"""The number of sums that a thread moves at once."""


@dataclass(frozen=True)
class Sums:
    """The sums that each CTA of a cluster publishes to the first one: (4, fours of a thread, thread).

    The first four sums of every thread lie side by side, followed by the second four, and so on. The barrier
    `ready` completes in the first CTA once all other CTAs have published their sums; `read` completes in each
    other CTA once its sums have been read.
    """

    shared: cute.Tensor
    ready: cute.Pointer
    read: cute.Pointer

    @staticmethod
    def allocate(smem: SmemAllocator, dtype: type[Numeric], per_thread: int, threads: int) -> Sums:
        """Allocates two barriers and `per_thread` sums of 32 bits, a multiple of four, for each of `threads`
        threads."""
        layout = cute.make_layout(
            (_VECTOR, per_thread // _VECTOR, threads), stride=(1, _VECTOR * threads, _VECTOR)
        )
        barriers = smem.allocate_array(Int64, 2)
        return Sums(smem.allocate_tensor(dtype, layout, 16), barriers, barriers + 1)

    def init(self, ring: Ring) -> None:
        """Initializes the barriers. One warp calls this, before the cluster synchronizes."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(self.ready, ring.filled.count)
            cute.arch.mbarrier_init(self.read, ring.emptied.count)

    @cute.jit
    def publish(self, acc: cute.Tensor, thread: Int32):
        """Publishes a thread's accumulators to the first CTA, and waits until it has read them."""
        self.write(acc, thread, 0)
        self.hand_over()

    @cute.jit
    def write(self, acc: cute.Tensor, thread: Int32, visit: Any):
        """Writes a thread's accumulators of a visit; all visits must have equally many."""
        sums = _in_fours(acc)
        cute.autovec_copy(sums, _of_visit(self.shared, sums, thread, visit))

    @cute.jit
    def hand_over(self):
        """Publishes the sums that were written to the first CTA, and waits until it has read them."""
        _arrive(self.ready, 0)
        cute.arch.mbarrier_wait(self.read, 0)

    @cute.jit
    def reduce(self, acc: cute.Tensor, thread: Int32, parts: cutlass.Constexpr[int]):
        """Adds to a thread's accumulators those of the same thread in all other CTAs of the cluster."""
        self.wait()
        sums = _in_fours(acc)
        for part in cutlass.range(1, parts, unroll=1):
            self._add_part(sums, thread, 0, part)
            _arrive(self.read, part)

    @cute.jit
    def wait(self):
        """Waits until the sums of all other CTAs can be read."""
        cute.arch.mbarrier_wait(self.ready, 0)
        cute.arch.fence_acq_rel_cluster()

    @cute.jit
    def add(self, acc: cute.Tensor, thread: Int32, visit: Any, parts: cutlass.Constexpr[int]):
        """Adds to a thread's accumulators those that the same thread of all other CTAs wrote for a visit."""
        for part in cutlass.range(1, parts, unroll=1):
            self._add_part(_in_fours(acc), thread, visit, part)

    @cute.jit
    def release(self, parts: cutlass.Constexpr[int]):
        """Lets all other CTAs exit, once their sums have been read."""
        for part in cutlass.range(1, parts, unroll=1):
            _arrive(self.read, part)

    @cute.jit
    def _add_part(self, sums: cute.Tensor, thread: Int32, visit: Any, part: Int32):
        theirs = cute.make_rmem_tensor(sums.shape, sums.element_type)
        remote = cute.make_tensor(cute.arch.map_dsmem_ptr(self.shared.iterator, part), self.shared.layout)
        cute.autovec_copy(_of_visit(remote, sums, thread, visit), theirs)
        for i in cutlass.range_constexpr(cute.size(sums)):
            sums[i] = sums[i] + theirs[i]


def _arrive(barrier: cute.Pointer, part: int) -> None:
    """Arrives once for a warp at another CTA's barrier, after all lanes of the warp have written or read."""
    cute.arch.fence_acq_rel_cluster()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier, part)


def _of_visit(shared: cute.Tensor, sums: cute.Tensor, thread: Int32, visit: Any) -> cute.Tensor:
    """The part of a thread's published sums that belongs to a visit, in the shape of `sums`."""
    return cute.local_tile(shared[(None, None, thread)], sums.shape, (0, visit))


def _in_fours(acc: cute.Tensor) -> cute.Tensor:
    """Accumulators viewed as (4, count / 4)."""
    return cute.make_tensor(acc.iterator, cute.make_layout((_VECTOR, cute.size(acc) // _VECTOR)))
