"""The kernel on mma.sync, where each warp multiplies by itself: a persistent GEMM with an epilogue plugged
in.

One or two warpgroups share the blocks of 64 rows of a tile. A warp has 16 rows of each block of its
warpgroup, and all their columns. wgmma distributes rows to warps alike, so the epilogue is that of sm_90a. A
and B pass through a ring of stages that continues from one tile to the next. Either every warp copies its
share of them by cp.async (`warp_copies.py`), or a separate warp loads them by TMA (`tma_feed.py`).

    tile      begin | exact loads of the first subtiles | rowvecs | its k tiles | its subtiles
    k tile    wait for it | ldmatrix and mma.sync, while copies of a later k tile begin
    subtile   wait for its exact loads | visit, which starts those of a later subtile | write the outputs

Each warp has its own planes in shared memory, and copies to and from them without the other warps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_backend.planning import TILE_K_BYTES, Stages, TileConfig
from cute_backend.spec import Order, ProductKind
from cute_backend.templates import batch as batches
from cute_backend.templates.crew import WARP, WARPS, Crew, Meeting, Role
from cute_backend.templates.drain import Position, Work
from cute_backend.templates.entry import named
from cute_backend.templates.epilogue import Epilogue, by_name
from cute_backend.templates.feed import Feed, Sm80Shared
from cute_backend.templates.fragment_tile import FragmentTile
from cute_backend.templates.fragments import FragmentGemm, RegisterSeat
from cute_backend.templates.mainloop import check_face
from cute_backend.templates.rings import allocate_rows, check_stage
from cute_backend.templates.scheduler import Place
from cute_backend.templates.staged import Planes, Stage
from cute_backend.templates.sums import sums_of
from cute_backend.templates.tile import Corner
from cute_backend.templates.warp_columns import (
    MMA_M,
    MMA_N,
    exchange_sums,
    pair_arrangement,
    pair_sums,
    pairs_pay,
)
from cute_backend.templates.warp_copies import WarpCopies
from cute_backend.templates.warp_instructions import instruction
from cute_backend.templates.warp_mainloop import MMA_K_BYTES, Sm80Mainloop, Sm80Plain
from cute_backend.templates.work_items import WorkItems

WARPGROUP = WARPS * WARP
"""Threads of a warpgroup, which works on 64 rows of a tile at a time."""

ALL_SHARED = 100
"""The percentage of a multiprocessor's L1 to use as shared memory if several CTAs run on it. Without an
explicit percentage the DSL asks the driver, which needs a GPU."""


class Sm80Gemm(FragmentGemm):
    """D = epilogue(A B) for A (M, K) and B (K, N), any of whose sizes may be dynamic.

    Several products of one A take either a B each, all of one layout, or one B (K, 2 N), in which the
    columns of two products alternate. Each stage holds the columns of all products, and a warp multiplies
    them together, as one wide product. Or several products share one B, and each has its own A, whose rows
    lie below each other in a stage (`TileConfig.stacked`), if the mainloop converts A.

    With split-K, the schedule treats the parts of K like the products of a batch, but there is one A and one
    B. D has split_k * M rows: M rows of sums for each part (`split_sums.py`).

    Both operands have the same dtype, unless the mainloop converts A to B's, with scales of groups of K if it
    takes such. A 16-bit operand is contiguous
    along K or along its other mode, an fp8 or int8 operand along K, as are both if A is converted. Without a
    `mainloop` the tensor cores add up all k tiles. Base addresses are
    multiples of 16 bytes, and so are the strides of both operands and of everything in `shared_loads` and
    `shared_stores`. A BATCHED product has A (B, M, K) and B (B, K, N); D and the epilogue's operands have
    B * M rows in all.

    Raises ValueError for a tile with ping-pong or in a cluster, for a GROUPED product, and for a BATCHED
    product with column-major exact loads.
    """

    feed_type: type[Feed] = WarpCopies
    """The feed that brings A and B to shared memory."""

    def __init__(
        self,
        epilogue: Epilogue,
        config: TileConfig,
        stages: Stages,
        mainloop: Sm80Mainloop | None = None,
        *,
        kind: ProductKind = ProductKind.DENSE,
    ):
        if config.pingpong or config.cluster_size > 1:
            raise ValueError(
                f"tile {config.name} has ping-pong or a cluster of {config.cluster_size} CTAs; warps that "
                "multiply by themselves have neither"
            )
        if kind is ProductKind.GROUPED:
            raise ValueError("rows in groups have no schedule here; a product is dense or batched")
        columns = [operand.name for operand in epilogue.shared_loads if operand.order is Order.COLUMN]
        if columns and kind is ProductKind.BATCHED:
            raise ValueError(
                f"{', '.join(columns)} of a batched product has columns in memory, where a batch may begin "
                "anywhere; copies begin at multiples of 16 bytes"
            )
        self.mainloop = mainloop or Sm80Plain()
        check_face(self.mainloop, Sm80Mainloop)
        super().__init__(epilogue, config, stages, kind=kind)
        self.work = Role(
            "work", 0, WARPS * config.warpgroups, "begin | mma.sync over all k tiles | visit", self._work
        )
        self.feed = self.feed_type(self, self.work)
        self.side_by_side = self.feed.leaves_a_stage and pairs_pay(config)
        self.groups = tuple(
            Meeting(f"warpgroup {i}", 1 + i, ((self.work, WARPS),)) for i in range(config.warpgroups)
        )
        self.crew = Crew((self.work, *self.feed.roles), self.feed.rings, self.groups)
        self.load_planes = [Planes(operand, config.subtile_n) for operand in epilogue.shared_loads]
        self.store_planes = [Planes(operand, config.subtile_n) for operand in epilogue.shared_stores]

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        bs: Sequence[cute.Tensor],
        loads: Sequence[cute.Tensor],
        stores: Sequence[cute.Tensor],
        max_active_clusters: Int32,
        stream: cuda.CUstream,
        scales: Sequence[cute.Tensor] = (),
        further_as: Sequence[cute.Tensor] = (),
    ):
        """Launches the kernel for A (M, K), each B (K, N) and the epilogue's operands in its names' order.
        Stacked products after the first have `further_as`. `scales` are those of groups of K of each A, then
        their zeros, (rows, groups)."""
        config = self.config
        multiplied = bs[0].element_type
        self.sum_type = sums_of(a.element_type, multiplied)
        tile_k = TILE_K_BYTES * 8 // a.element_type.width
        a, bs = batches.operands(a, bs, self.kind, tile_k)
        m, n = a.shape[0], bs[0].shape[0] * config.pieces // config.abreast
        self.a_stage = Stage(a.element_type, config.mma_m, tile_k, _is_k_major(a))
        self.a_piece = Stage(a.element_type, config.tile_m, tile_k, _is_k_major(a))
        b_k_major = _is_k_major(bs[0])
        b_k = tile_k * config.packing
        self.b_stage = Stage(multiplied, config.mma_n, b_k, b_k_major)
        self.piece = Stage(multiplied, config.piece_n, b_k, b_k_major)
        check_stage(config, self.a_stage.bytes + self.b_stage.bytes)
        mma_k = MMA_K_BYTES * 8 // multiplied.width
        warps = cute.make_layout((WARPS * config.sharing, 1, 1))
        order = (MMA_M * WARPS * config.sharing, math.gcd(config.mma_n, 2 * MMA_N), mma_k)
        if cutlass.const_expr(self.side_by_side):
            warps, order = pair_arrangement(config, mma_k)
        mma = cute.make_tiled_mma(
            instruction(multiplied, (MMA_M, MMA_N, mma_k)), warps, permutation_mnk=order
        )
        at_once = max_active_clusters * config.occupancy
        grid = cutlass.min(batches.schedule(config, m, n, a).items, at_once)
        as_given = [self.feed.given(each, self.a_piece) for each in (a, *further_as)]
        bs_given = [self.feed.given(b, self.piece) for b in bs]
        given = Sm80Arguments(mma, as_given, bs_given, list(loads), list(stores), list(scales), m, n)
        named(self.kernel, self.name)(given).launch(
            grid=(grid, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=config.occupancy,
            preferred_smem_carveout=ALL_SHARED if config.occupancy > 1 else None,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, given: Sm80Arguments):
        item_step, _, _ = cute.arch.grid_dim()
        first_item, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        s_a = self.a_stage.allocate(smem, self.stages.ab)
        s_b = self.b_stage.allocate(smem, self.stages.ab)
        left = self.feed.tensor(given.every_a[0])
        planes = self._planes(smem)
        ab_pipeline, row_pipeline = self.feed.open(smem)
        shared = Sm80Shared(
            items=WorkItems(
                schedule=batches.schedule(self.config, given.m, given.n, left),
                first=first_item,
                step=item_step,
                epilogue=first_item,
                tile_k=s_a.shape[1],
                k_tiles=cute.ceil_div(cute.ceil_div(left.shape[1], s_a.shape[1]), self.config.split_k),
                rows=given.m if self.config.split_k > 1 else None,
            ),
            n=given.n,
            glob=by_name(self.epilogue.loads + self.epilogue.stores, given.loads + given.stores),
            **planes,
            ab_pipeline=ab_pipeline,
            row_pipeline=row_pipeline,
            mma=given.mma,
            every_a=tuple(given.every_a),
            bs=tuple(given.bs),
            s_a=s_a,
            s_b=s_b,
            thread=thread,
            warp=warp,
            lane=thread % WARP,
            scales=tuple(given.scales),
        )
        if self.crew.has_role(warp, self.work):
            self._work(shared)
        else:
            self.crew.run(self.feed.roles, warp, shared)

    def _planes(self, smem: SmemAllocator) -> dict[str, tuple[cute.Tensor, ...]]:
        """Shared memory for exact loads, outputs and staged rowvecs."""
        stages, warps = self.stages, self.work.warps
        return {
            "loads": tuple(planes.allocate(smem, stages.exact * warps) for planes in self.load_planes),
            "stores": tuple(planes.allocate(smem, stages.store * warps) for planes in self.store_planes),
            "rows": tuple(allocate_rows(smem, self.epilogue.staged, self.config.staged_n, stages.row)),
        }

    @cute.jit
    def _work(self, shared: Sm80Shared):
        """All tiles of a CTA, one after the other."""
        config, stages = self.config, self.stages
        items, glob, thread = shared.items, shared.glob, shared.thread
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        # `FragmentSubtile` expects this order: the four sums of an instruction, then the columns of a block.
        fragments = ((2, 2), self.blocks * config.stacked, config.mma_n // MMA_N)
        acc = cute.make_rmem_tensor(
            cute.make_layout(fragments, stride=((1, 2), config.mma_n // 2, 4)), self.sum_type
        )
        sum_up = self._summing(shared, acc)
        at, rows_at = self.feed.begin(shared)
        item = Int32(items.first)
        while items.is_valid(item):
            place = items.place(item)
            tile = self._tile(shared, place, thread % WARPGROUP, group)
            held = self.epilogue.begin(tile, glob)
            if cutlass.const_expr(stages.exact > 0):
                cute.arch.sync_warp()
                for turn in cutlass.range_constexpr(min(stages.exact, self.subtiles * len(self.rounds))):
                    self._bring(shared, tile, turn)
                    self.feed.planes_begun()
            self._fetch_planes(shared, tile)
            if cutlass.const_expr(stages.row > 0):
                self.feed.stage_rows(shared, place, rows_at)
            at = sum_up(tile, place, at)
            rows = self.feed.rows(shared, rows_at)
            seat = RegisterSeat(config=config, acc=acc)
            work = Work(shared, seat, place, tile, held, rows, config.products)
            self._drain(work, Position(None, None))
            self._end(work)
            rows_at = self.feed.rows_read(shared, rows_at)
            item += items.step
        self.feed.end()

    def _summing(self, shared: Sm80Shared, acc: cute.Tensor) -> Callable[[FragmentTile, Place, Any], Any]:
        """Returns a function that fills a thread's accumulators for a tile. It takes the tile, its place and
        the feed's position of its first k tile, and returns the position of the next tile's first one."""
        stages = self.a_stage, self.b_stage
        operands = self.mainloop.operands(shared.mma, *stages, shared.s_a, shared.s_b, shared.thread)
        multiplied = pair_sums(self.config, self.blocks, self.sum_type) if self.side_by_side else acc
        return partial(self._multiply, shared, operands, (multiplied, acc))

    @cute.jit
    def _multiply(
        self,
        shared: Sm80Shared,
        operands: Any,
        sums: tuple[cute.Tensor, cute.Tensor],
        tile: FragmentTile,
        place: Place,
        at: Any,
    ):
        """Multiplies all k tiles of a tile to the first of two `sums`. Warps that multiply side by side then
        exchange their sums, whose places are the second."""
        multiplied, acc = sums
        row, _ = self._origin(shared, place)
        k_tile = Int32(shared.items.begin_k(place.batch))
        held = self.mainloop.begin(operands, multiplied, shared.scales, row, k_tile)
        for count in cutlass.range(shared.items.k_tiles, unroll=1):
            stage = self.feed.wait(shared, at)
            step = partial(self.mainloop.step, operands, multiplied, held, count, stage)
            at = self.feed.multiply(shared, at, step)
        if cutlass.const_expr(self.side_by_side):
            cute.arch.sync_threads()  # all warps must be done with the stage before it is overwritten
            stage = self._left_stage(shared, at)
            exchange_sums(multiplied, acc, stage, shared.thread, partial(self._meet, shared))
        return at

    def _turn(self, subtile: int, of_round: int) -> int:
        """The number of the stage that a subtile's exact loads of a round come in. If some are
        read ahead of passes and others by visits, all subtiles of a block come for either."""
        together = self.subtiles if len(self.rounds) == 1 else self.block_subtiles
        block, within = divmod(subtile, together)
        return (block * len(self.rounds) + of_round) * together + within

    def _of_turn(self, turn: int) -> tuple[int, tuple[int, ...]]:
        """The subtile of a stage, and its exact loads."""
        rounds = range(len(self.rounds))
        every = ((subtile, each) for subtile in range(self.subtiles) for each in rounds)
        subtile, of_round = next(each for each in every if self._turn(*each) == turn)
        return subtile, self.rounds[of_round]

    def _make_room(self, work: Work, visit: Any) -> None:
        if self.stages.store == 0:
            self._pace(work)

    def _pace(self, work: Work) -> None:
        """Keeps the assembler from working out the addresses of all visits at once, which spills."""
        if not self.config.rolled:
            self._meet(work.shared)

    def _loaded(
        self, work: Work, at: Position, visit: Any, of_round: int
    ) -> tuple[list[cute.Tensor], Callable[[], None]]:
        shared, turn = work.shared, self._turn(self._subtile(work, visit), of_round)
        index = self._index(shared, turn, self.stages.exact)
        self._await_loads(shared, turn)
        loads = [s_load[(None, None, index)] for s_load in shared.loads]
        return loads, partial(self._release, shared, work.tile, turn)

    def _loads_read(self, work: Work, at: Position, visit: Any) -> Position:
        return at

    def _stores(self, work: Work, at: Position, visit: Any) -> list[cute.Tensor]:
        if self.stages.store == 0:
            return []
        index = self._index(work.shared, self._subtile(work, visit), self.stages.store)
        return [s_store[(None, None, index)] for s_store in work.shared.stores]

    def _leave(self, work: Work, at: Position, visit: Any) -> Position:
        shared, tile, subtile = work.shared, work.tile, self._subtile(work, visit)
        cute.arch.sync_warp()
        index, corner = self._index(shared, subtile, self.stages.store), self._corner(shared, tile, subtile)
        for boxes, s_store in zip(self.store_planes, shared.stores, strict=True):
            boxes.write(getattr(shared.glob, boxes.operand.name), s_store, index, corner, tile.lane)
        if self.stages.store == 1:
            cute.arch.sync_warp()  # before the next visit fills the stage again
        return at

    def _subtile(self, work: Work, visit: int) -> int:
        """The index of a subtile among those of all blocks of rows."""
        return int(work.seat.block * self.visits + visit)

    def _meet(self, shared: Sm80Shared) -> None:
        """Synchronises the warps of a warpgroup."""
        first = self.groups[0]
        pipeline.NamedBarrier(first.barrier + shared.thread // WARPGROUP, first.threads).arrive_and_wait()

    def _left_stage(self, shared: Sm80Shared, at: Any) -> cute.Tensor:
        """The stage of A or of B, whichever is larger, that a tile's last k tile leaves to its warps, as
        sums."""
        staged = (self.a_stage, shared.s_a), (self.b_stage, shared.s_b)
        stage, tensor = max(staged, key=lambda each: each[0].bytes)
        words = stage.bytes * 8 // self.sum_type.width
        layout = cute.make_layout((words, self.stages.ab), stride=(1, words))
        every = cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=self.sum_type), layout)
        return every[(None, self.feed.left_stage(shared, at))]

    @cute.jit
    def _await_loads(self, shared: Sm80Shared, turn: int):
        """Waits until the exact loads of all lanes in a stage have arrived. Copies to later stages may still
        be in progress, one group of cp.async each."""
        later = min(self.stages.exact, self.subtiles * len(self.rounds) - turn) - 1
        if cutlass.const_expr(turn >= self.stages.exact):
            cute.arch.cp_async_wait_group(later)
        else:
            self.feed.await_first_planes(shared, later)
        cute.arch.sync_warp()

    @cute.jit
    def _release(self, shared: Sm80Shared, tile: FragmentTile, turn: int):
        """Called once a warp has read a stage's exact loads. Begins to copy those of a later turn to the same
        place, as one group of cp.async."""
        later = turn + self.stages.exact
        if cutlass.const_expr(later < self.subtiles * len(self.rounds)):
            cute.arch.sync_warp()
            self._bring(shared, tile, later)
            cute.arch.cp_async_commit_group()

    def _bring(self, shared: Sm80Shared, tile: FragmentTile, turn: int) -> None:
        """Begins to copy the exact loads of a stage."""
        subtile, operands = self._of_turn(turn)
        index, corner = self._index(shared, turn, self.stages.exact), self._corner(shared, tile, subtile)
        for planes, s_load in ((self.load_planes[i], shared.loads[i]) for i in operands):
            planes.bring(getattr(shared.glob, planes.operand.name), s_load, index, corner, tile.lane)

    def _fetch_planes(self, shared: Sm80Shared, tile: FragmentTile) -> None:
        """Asks L2 for a warp's exact loads of a tile, if copies of later subtiles begin only after the
        products. Then they wait for L2 instead of memory."""
        if self.subtiles <= self.stages.exact:
            return
        for block in range(self.blocks):
            corner = Corner(tile.warp_row(block), tile.n0, tile.m, shared.n)
            for planes in self.load_planes:
                if planes.operand.order is Order.ROW:
                    plane = getattr(shared.glob, planes.operand.name)
                    planes.fetch(plane, corner, self.config.tile_n, tile.lane)

    def _index(self, shared: Sm80Shared, turn: int, stages: int) -> Int32:
        """The index of the box with a warp's part of a subtile, in a turn. The stages of a warp are
        consecutive."""
        return shared.thread // WARP * stages + turn % max(stages, 1)

    def _corner(self, shared: Sm80Shared, tile: FragmentTile, subtile: int) -> Corner:
        """The corner of the warp's rows of a subtile in a plane."""
        block, step = divmod(subtile, self.visits)
        return Corner(tile.warp_row(block), tile.n0 + step * self.config.subtile_n, tile.m, shared.n)

    def _origin(self, shared: Sm80Shared, place: Place) -> tuple[Int32, Int32]:
        return place.row * self.config.tile_m, place.column * self.config.tile_n


@dataclass(frozen=True)
class Sm80Arguments:
    """The arguments of the kernel: its MMA, every A and B in the feed's form, and the rest as the host has
    it."""

    mma: cute.TiledMma
    every_a: list
    bs: list
    loads: list[cute.Tensor]
    stores: list[cute.Tensor]
    scales: list[cute.Tensor]
    m: Int32
    n: Int32


def _is_k_major(operand: cute.Tensor) -> bool:
    """Whether an operand (rows, K), or (rows, K, batch), is contiguous along K."""
    return bool(LayoutEnum.from_tensor(operand).is_k_major_a())
