"""Split-K through memory: independent CTAs multiply the parts of K, and a second kernel adds up their sums
and runs the epilogue.

    parts   a CTA multiplies a part of K of a tile      -> sums in the workspace, (split_k * M, N)
    sum     a CTA adds the parts of a tile, in order    -> begin | visits | end, as behind a product

The second kernel adds the parts in a fixed order, so equal operands give bitwise equal results. It reads the
sums from L2, where the first kernel has just written them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from cute_backend.planning import Stages, TileConfig
from cute_backend.planning.naming import PARTS
from cute_backend.templates import batch as batches
from cute_backend.templates.crew import WARP
from cute_backend.templates.drain import Sweep, Visit
from cute_backend.templates.entry import named
from cute_backend.templates.epilogue import Epilogue, SmemOperand, by_name
from cute_backend.templates.feed import Feed, Sm80Shared
from cute_backend.templates.fragment_tile import FragmentSubtile, FragmentTile
from cute_backend.templates.fragments import RegisterSeat
from cute_backend.templates.overlap import await_earlier_kernels
from cute_backend.templates.scheduler import Place
from cute_backend.templates.sm80 import ALL_SHARED, Sm80Gemm
from cute_backend.templates.sums import sums_of
from cute_backend.templates.warp_mainloop import Copies, Sm80Mainloop
from cute_backend.templates.work_items import WorkItems
from cute_backend.templates.workspace import sums_pitch

PAIR = 2
"""The number of neighbouring columns that a thread holds in each block of eight columns of a row."""

PAIRS_AT_ONCE = 64
"""Pairs of sums that a thread reads before it adds the first, to hide L2's latency of some 600 cycles."""


class WriteSums:
    """The epilogue of `parts`: each thread writes its accumulators unchanged, two columns at a time.

    `sums` is (split_k * M, N). Its row stride is even, so that a pair that begins within a row also ends
    within the row's memory. If there are several products, a row holds the sums of one after the other,
    each in an equal share of the row stride.
    """

    loads: tuple[str, ...] = ()
    stores: tuple[str, ...] = ("sums",)
    staged: tuple[SmemOperand, ...] = ()
    shared_loads: tuple[SmemOperand, ...] = ()
    shared_stores: tuple[SmemOperand, ...] = ()
    sweeps: tuple[Sweep, ...] = (Visit(),)

    @cute.jit
    def begin(self, tile: FragmentTile, glob: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace()

    @cute.jit
    def visit(
        self,
        sub: FragmentSubtile,
        acc: cute.Tensor,
        glob: SimpleNamespace,
        held: SimpleNamespace,
        smem: SimpleNamespace,
    ):
        for e in cutlass.range_constexpr(0, sub.elements, PAIR):
            row, column, inside = sub.target(e)
            if inside:
                cute.autovec_copy(_pair(acc, e), _pair_at(glob.sums, row, column))


class WriteSumsOfTwo(WriteSums):
    """The epilogue of `parts` for a pair, which writes the accumulators of both products unchanged."""

    @cute.jit
    def visit(
        self,
        sub: FragmentSubtile,
        acc0: cute.Tensor,
        acc1: cute.Tensor,
        glob: SimpleNamespace,
        held: SimpleNamespace,
        smem: SimpleNamespace,
    ):
        further = glob.sums.stride[0] // 2
        for e in cutlass.range_constexpr(0, sub.elements, PAIR):
            row, column, inside = sub.target(e)
            if inside:
                cute.autovec_copy(_pair(acc0, e), _pair_at(glob.sums, row, column))
                cute.autovec_copy(_pair(acc1, e), _pair_at(glob.sums, row, column, further))


class SplitGemm:
    """D = epilogue(A B), as `template` computes it, in two kernels, for a tile with split-K through memory.

    The operands are those of `template`, with a workspace after the stores: `workspace.sums_bytes` bytes,
    aligned to WORKSPACE_ALIGN. The second kernel's entry is called `name`, the first kernel's `name` + PARTS.

    Raises ValueError if the tile leaves no sums in memory, or if `template` raises it.
    """

    def __init__(
        self,
        template: type[Sm80Gemm],
        epilogue: Epilogue,
        config: TileConfig,
        stages: Stages,
        mainloop: Sm80Mainloop | None = None,
    ):
        if not config.sums_in_memory:
            raise ValueError(f"tile {config.name} leaves no sums in memory for a second kernel")
        self.config = config
        write = WriteSums() if config.products == 1 else WriteSumsOfTwo()
        self.parts = template(write, config, Stages(stages.ab), mainloop)
        self.sum = SumGemm(epilogue, config.summing, stages, config.split_k)

    @property
    def name(self) -> str:
        """The name of the second kernel's entry; see `entry.named`."""
        return self.sum.name

    @name.setter
    def name(self, name: str) -> None:
        self.sum.name, self.parts.name = name, name + PARTS

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        bs: Sequence[cute.Tensor],
        loads: Sequence[cute.Tensor],
        stores: Sequence[cute.Tensor],
        workspace: cute.Tensor,
        max_active_clusters: Int32,
        stream: cuda.CUstream,
        *scales: Sequence[cute.Tensor],
        **further: Any,
    ):
        """Launches both kernels for A (M, K), each B (K, N) and the epilogue's operands, in the order of its
        names. `scales`, if there are any, and `further` are further arguments of `template`."""
        m, n = a.shape[0], bs[0].shape[1]
        pitch = self.config.products * sums_pitch(Int64(n))
        layout = cute.make_layout((m * self.config.split_k, n), stride=(cute.assume(pitch, divby=PAIR), 1))
        sum_type = sums_of(a.element_type, bs[0].element_type)
        sums = cute.make_tensor(cute.recast_ptr(workspace.iterator, dtype=sum_type), layout)
        self.parts(a, bs, [], [sums], max_active_clusters, stream, *scales, **further)
        self.sum(sums, loads, stores, max_active_clusters, stream)


class StoredSums(Feed):
    """The feed of `sum`, which has no A or B to load. The first warp stages rowvecs itself."""

    def begin(self, shared: Sm80Shared) -> tuple[Int32, Int32]:
        return Int32(0), Int32(0)

    def wait(self, shared: Sm80Shared, at: Int32) -> Int32:
        return at

    def multiply(self, shared: Sm80Shared, at: Int32, step: Callable[[Copies], None]) -> Int32:
        return at

    def planes_begun(self) -> None:
        cute.arch.cp_async_commit_group()

    def await_first_planes(self, shared: Sm80Shared, later: int) -> None:
        cute.arch.cp_async_wait_group(later)

    def rows(self, shared: Sm80Shared, rows_at: Int32) -> list[cute.Tensor]:
        if shared.rows:
            cute.arch.sync_threads()
        return [s_row[(None, rows_at)] for s_row in shared.rows]

    def rows_read(self, shared: Sm80Shared, rows_at: Int32) -> Int32:
        return rows_at


class SumGemm(Sm80Gemm):
    """D = epilogue(the sum of `parts` parts of K), for sums (parts * M, N) that `WriteSums` has
    written. Raises ValueError if the epilogue loads a table by TMA."""

    feed_type = StoredSums

    def __init__(self, epilogue: Epilogue, config: TileConfig, stages: Stages, parts: int):
        tables = [operand.name for operand in epilogue.shared_loads if operand.repeats]
        if tables:
            raise ValueError(
                f"the tables {', '.join(tables)} are loaded by TMA, but warps copy all planes in the kernel "
                "that adds up parts of K"
            )
        super().__init__(epilogue, config, replace(stages, ab=0))
        self.parts = parts
        pairs = config.thread_accumulators // self.blocks // PAIR
        self.parts_at_once = min(parts, max(1, PAIRS_AT_ONCE // pairs))

    @cute.jit
    def __call__(
        self,
        sums: cute.Tensor,
        loads: Sequence[cute.Tensor],
        stores: Sequence[cute.Tensor],
        max_active_clusters: Int32,
        stream: cuda.CUstream,
    ):
        """Launches the kernel for the sums and the epilogue's operands, in the order of its names."""
        self.sum_type = sums.element_type
        m, n = sums.shape[0] // self.parts, sums.shape[1]
        grid = batches.schedule(self.config, m, n, sums).items
        named(self.kernel, self.name)(sums, list(loads), list(stores), m, n).launch(
            grid=(grid, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.config.occupancy,
            preferred_smem_carveout=ALL_SHARED if self.config.occupancy > 1 else None,
            use_pdl=self.config.target.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, sums: cute.Tensor, loads: list, stores: list, m: Int32, n: Int32):
        thread, _, _ = cute.arch.thread_idx()
        first_item, _, _ = cute.arch.block_idx()
        item_step, _, _ = cute.arch.grid_dim()
        if cutlass.const_expr(self.config.target.pdl):
            await_earlier_kernels()
        shared = Sm80Shared(
            items=WorkItems(
                schedule=batches.schedule(self.config, m, n, sums),
                first=first_item,
                step=item_step,
                epilogue=first_item,
                tile_k=1,
                k_tiles=Int32(0),
            ),
            n=n,
            glob=by_name(self.epilogue.loads + self.epilogue.stores, loads + stores),
            **self._planes(SmemAllocator()),
            ab_pipeline=None,
            row_pipeline=None,
            mma=None,
            every_a=(sums,),
            bs=(),
            s_a=None,
            s_b=None,
            thread=thread,
            warp=thread // WARP,
            lane=thread % WARP,
        )
        self._work(shared)

    def _summing(self, shared: Sm80Shared, acc: cute.Tensor) -> Callable[[FragmentTile, Place, Any], Any]:
        return partial(self._add_up, shared, acc)

    @cute.jit
    def _add_up(self, shared: Sm80Shared, acc: cute.Tensor, tile: FragmentTile, place: Place, at: Int32):
        """Adds up the sums of all parts, in order. Warps whose rows lie beyond M read nothing."""
        acc.fill(0)
        products = self.config.products
        last = (shared.n - 1) // PAIR * PAIR
        for block in cutlass.range_constexpr(self.blocks):
            seat = RegisterSeat(config=self.config, acc=acc, block=block)
            if tile.warp_row(block) < tile.m:
                for part in cutlass.range(self.parts, unroll=self.parts_at_once):
                    for step in cutlass.range_constexpr(self.visits):
                        sub, *pieces = seat.finish(tile, seat.begin(0, step, products))
                        for product in cutlass.range_constexpr(products):
                            piece = pieces[product]
                            further = product * (shared.every_a[0].stride[0] // products)
                            for e in cutlass.range_constexpr(0, sub.elements, PAIR):
                                row = part * tile.m + sub.row(e)
                                column = cutlass.min(sub.raw_column(sub.column_of(e)), last)
                                read = cute.make_rmem_tensor(PAIR, self.sum_type)
                                cute.autovec_copy(_pair_at(shared.every_a[0], row, column, further), read)
                                piece[e] = piece[e] + read[0]
                                piece[e + 1] = piece[e + 1] + read[1]
        return at


def _pair(registers: cute.Tensor, e: int) -> cute.Tensor:
    """A thread's elements e and e + 1."""
    return cute.make_tensor(registers.iterator + e, cute.make_layout(PAIR))


def _pair_at(sums: cute.Tensor, row: Int32, column: Int32, further: Any = 0) -> cute.Tensor:
    """Two neighbouring columns of a row of the sums, of the product whose sums begin `further` elements
    behind the row's first. `column`, the first of the two, and `further` must be even."""
    place = Int64(row) * sums.stride[0] + further + column
    return cute.make_tensor(sums.iterator + cute.assume(place, divby=PAIR), cute.make_layout(PAIR))
