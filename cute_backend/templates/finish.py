"""The second stage of reductions: one kernel that combines the partials of a GEMM into every reducing store.

If rows have few tiles, the GEMM itself does so, and this kernel is not launched (`last_tile.py`).

Partials are (parts, results), results contiguous. A CTA computes a few neighbouring results of one store, and
deals their parts round-robin to its threads:

           each thread     combines its parts, with several loads in flight  -> one partial
           each warp       combines its partials by shuffles  -> one of each result, in shared memory
           warp 0          combines the partials of all warps by shuffles  -> elements of the store

The order in which partials are combined depends on their number alone, so equal partials give equal bits
whatever the number of other results.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import mul

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from cute_backend.planning import TileConfig
from cute_backend.signature import WORKSPACE_ALIGN
from cute_backend.spec import ProductKind
from cute_backend.templates.entry import named
from cute_backend.templates.last_tile import finish_rows, has_last_tile, is_counted
from cute_backend.templates.overlap import await_earlier_kernels
from cute_backend.templates.results import Held, Result
from cute_backend.templates.tile import Tile
from cute_backend.templates.workspace import partials_bytes, partials_shape, sums_bytes

LANES = 32
WARPS = 16
THREADS = LANES * WARPS

UNROLL = 8
"""Parts that a thread loads before it combines them. A row of a vocabulary of 128256 takes one such step."""


class Finish:
    """The second stage for the stores `results` of a region whose kernel has the tile `config`, and computes
    a product of `kind`."""

    name = ""
    """The name of the entry; see `entry.named`."""

    def __init__(self, config: TileConfig, *results: Result, kind: ProductKind = ProductKind.DENSE):
        self.config = config
        self.kind = kind
        self.results = results

    def partials(self, workspace: cute.Tensor, m: Int32, n: Int32) -> list[cute.Tensor]:
        """The tensors of partials in a buffer of bytes, one for each component of each result.

        The buffer `workspace` is aligned to WORKSPACE_ALIGN bytes. It begins with `workspace.sums_bytes`
        bytes of sums, which the tensors follow, each of `workspace.partials_bytes` bytes.
        """
        m, n = Int64(m), Int64(n)
        tensors, offset, tile = [], Int64(sums_bytes(self.config, m, n)), self.config.summing
        for result in self.results:
            parts, extent = partials_shape(result.axis, tile, m, n)
            layout = cute.make_layout((Int32(parts), Int32(extent)), stride=(extent, 1))
            if result.rows:
                parts, batches = result.rows // tile.warp_rows, Int32(m // result.rows)
                layout = cute.make_layout((parts, (Int32(n), batches)), stride=(n, (1, parts * n)))
            for kind in result.types:
                start = workspace.iterator + cute.assume(offset, divby=WORKSPACE_ALIGN)
                tensors.append(cute.make_tensor(cute.recast_ptr(start, dtype=kind), layout))
                offset += partials_bytes(result.axis, tile, m, n, kind.width)
        return tensors

    @cute.jit
    def rows(self, tile: Tile, counters: cute.Tensor, partials: list, outputs: list):
        """Finishes the reductions of a warp's rows in the GEMM, if the launch counts the tiles of rows and
        the warp has the last one. Every warp of the epilogue calls this after it has written the partials of
        its rows.

        `counters` are those that `planning.counters_needed` counts, 0 before and after the launch. If there
        are none, tiles are not counted. The other arguments are those of a call, of reductions of rows.
        """
        parts = cute.size(partials[0], mode=[0])
        if is_counted(counters, parts):
            if has_last_tile(tile, counters, parts, self.kind):
                of_results = [parts for _, parts in self._parts(partials)]
                finish_rows(tile, self.results, of_results, outputs)

    @cute.jit
    def __call__(
        self,
        partials: list,
        outputs: list,
        m: Int32,
        n: Int32,
        stream: cuda.CUstream,
        counters: cute.Tensor | None = None,
    ):
        """Launches the kernel after the GEMM, unless the GEMM calls `rows` with these `counters` and finishes
        the reductions itself. `partials` are the tensors of the method `partials`, and `outputs` a vector for
        each result."""
        if cutlass.const_expr(counters is None):
            self._launch(partials, outputs, m, n, stream)
        else:
            if not is_counted(counters, cute.size(partials[0], mode=[0])):
                self._launch(partials, outputs, m, n, stream)

    @cute.jit
    def _launch(self, partials: list, outputs: list, m: Int32, n: Int32, stream: cuda.CUstream):
        blocks = Int32(1)
        for result, output in zip(self.results, outputs, strict=True):
            blocks = cutlass.max(blocks, cute.ceil_div(output.shape[0], result.axis.width))
        named(self.kernel, self.name)(partials, outputs, m, n).launch(
            grid=(blocks, len(self.results), 1),
            block=(THREADS, 1, 1),
            use_pdl=self.config.target.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, partials: list, outputs: list, m: Int32, n: Int32):
        block, store, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.config.target.pdl):
            await_earlier_kernels()
        counts = [_count(result, m, n) for result in self.results]
        for i, (result, parts) in enumerate(self._parts(partials)):
            if store == i:
                self._combine(result, parts, outputs[i], block, counts[i])

    def _parts(self, partials: list) -> Iterator[tuple[Result, list[cute.Tensor]]]:
        """Each result with its tensors of partials."""
        rest = iter(partials)
        for result in self.results:
            yield result, [next(rest) for _ in result.types]

    @cute.jit
    def _combine(self, result: Result, parts: list, output: cute.Tensor, block: Int32, count: Int64):
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % LANES, thread // LANES
        width = result.axis.width
        lanes = [offset for offset in (16, 8, 4, 2, 1) if offset >= width]
        total, extent = (cute.size(parts[0], mode=[mode]) for mode in (0, 1))
        place = block * width + lane % width
        column = cutlass.min(place, extent - 1)

        held, step = result.identity(), THREADS // width
        for first in cutlass.range(thread // width, total, step * UNROLL):
            _take(held, parts, column, first, step, UNROLL)
        held.across(lanes)

        smem, layout = SmemAllocator(), cute.make_layout((WARPS, width), stride=(width, 1))
        shared = [smem.allocate_tensor(kind, layout) for kind in result.types]
        if lane < width:
            for i in cutlass.range_constexpr(len(parts)):
                shared[i][warp, lane] = held[0][i]
        cute.arch.sync_threads()
        if warp == 0:
            whole, step = result.identity(), LANES // width
            _take(whole, shared, lane % width, lane // width, step, -(-WARPS // step))
            whole.across(lanes)
            if (lane < width) & (place < extent):
                output[place] = result.element(whole[0], count)


def _count(result: Result, m: Int32, n: Int32) -> Int64:
    """The elements of each result."""
    first, *others = (result.rows,) if result.rows else result.axis.reduced(m, n)
    return reduce(mul, others, Int64(first))


def _take(held: Held, parts: list, column: Int32, first: Int32, step: int, count: int) -> None:
    """Combines `count` partials of a column, `step` apart from `first` on. Places beyond the last part are
    ignored. All partials are loaded before the first is combined, so that several loads are in flight."""
    total = cute.size(parts[0], mode=[0])
    places = [first + i * step for i in range(count)]
    loaded = [tuple(part[cutlass.min(place, total - 1), column] for part in parts) for place in places]
    for place, partial in zip(places, loaded, strict=True):
        held.take(0, partial, place < total)
