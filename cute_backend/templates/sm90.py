"""The Hopper kernel: a warp-specialised, persistent GEMM on wgmma with an epilogue plugged in.

One warpgroup loads: warp 0 brings A and B tiles by TMA, warps 1 and 2 the epilogue's operands. The other one
or two warpgroups multiply; each owns 64-row blocks of the tile, keeps their accumulators in registers and
runs the epilogue on them, a subtile of 64 rows at a time, with shared memory and TMA stores of its own.

           warp 0          A, B of a k tile  -> ab pipeline
           warp 1          exact loads of a subtile  -> exact pipeline
           warp 2          staged rowvecs of a tile  -> row pipeline
           warpgroup 1, 2  begin | wgmma over all k tiles | visit each subtile -> shared memory -> TMA store

With K in parts only the first CTA of a cluster has an epilogue; the others' warpgroups leave it their sums
(`split_k.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from ..planning import TILE_K_BYTES, TileConfig
from . import batch as batches
from .epilogue import Epilogue, SmemOperand, by_name, release_planes
from .overlap import await_earlier_kernels
from .scheduler import BatchSchedule, TileSchedule
from .split_k import Sums
from .stages import Stages
from .tile import Sm90NeighboursSubtile, Sm90NeighboursTile, Sm90Subtile, Sm90Tile

PRODUCER, CONSUMER = pipeline.PipelineUserType.Producer, pipeline.PipelineUserType.Consumer

WARPGROUP = 128
WARPS = 4
"""Warps of a warpgroup."""
BLOCK_M = 64
"""Rows of one wgmma instruction."""
WARP_M = BLOCK_M // WARPS
"""Rows of one wgmma instruction whose accumulators one warp has (PTX ISA, wgmma register fragments)."""

SMEM_ALIGN = 1024
"""The 128-byte swizzle repeats every 1024 bytes."""

A_BOXES = 4
"""Boxes by which a tile of 64 rows comes, so that those beyond A's last row can be left out: TMA fills what
lies beyond a tensor with zeros more slowly than it loads. M = 16, N = K = 8192 in fp8 took 22.0 us with them
and 17.9 without. Tiles of 128 rows come at once: by boxes, M = N = K = 4096 took 2 percent longer (H200)."""

LOAD_REGISTERS, MMA_REGISTERS = 40, 232

EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000
"""L2 priorities of all that a copy touches, as `createpolicy.fractional` makes them (PTX ISA). What is read
once goes first, so that operands which several tiles read stay: worth 3 percent at M = N = 8192, K = 1024 on
an H200."""


@dataclass(frozen=True)
class Turn:
    """The right of one of two warpgroups to go on, under ping-pong.

    Both walk the same ring of A and B, each skipping what is the other's. A waiter knows a barrier's phase
    only by its parity, so it may wait for its fill of a stage only once the other has taken the one before.
    """

    own: pipeline.NamedBarrier
    other: pipeline.NamedBarrier

    @staticmethod
    def of(first_barrier: int, group: Int32) -> Turn:
        """The turn of warpgroup 0 or 1, on the named barriers `first_barrier` and the next."""
        own, other = first_barrier + group, first_barrier + 1 - group
        return Turn(pipeline.NamedBarrier(own, 2 * WARPGROUP), pipeline.NamedBarrier(other, 2 * WARPGROUP))

    def wait(self) -> None:
        """Until the other warpgroup has passed the turn on."""
        self.own.arrive_and_wait()

    def pass_on(self) -> None:
        """Lets the other warpgroup go on."""
        self.other.arrive()


class Sm90Gemm:
    """D = epilogue(A B) for A (M, K) and B (K, N), any of whose sizes may be dynamic.

    Of several products of one A there is a B for each, of one layout, or one of (K, 2 N) for neighbouring
    columns; each stage of the pipeline has the columns of all, and the MMA is as wide as they are together.

    fp8 operands are K-major, 16-bit ones either. Base addresses are multiples of 16 bytes and so are the
    strides of both operands and of everything in `tma_loads` and `tma_stores`. Without `fast_accum`, the sums
    of each k tile are added to the accumulators in fp32 registers instead of inside the tensor cores.

    A `batched` product has A (B, M, K) and B (B, K, N); all rows of D, and of the epilogue's operands, are
    (B * M).
    """

    def __init__(
        self, epilogue: Epilogue, config: TileConfig, *, fast_accum: bool = True, batched: bool = False
    ):
        self.epilogue = epilogue
        if config.rolled and (config.products > 1 or epilogue.tma_loads or epilogue.tma_stores):
            raise ValueError(
                f"tile {config.name} has visits in a loop, of one product and no plane in shared memory, but "
                f"products are {config.products} and planes {len(epilogue.tma_loads + epilogue.tma_stores)}"
            )
        self.config = config
        self.fast_accum = fast_accum
        self.batched = batched
        self.stages = Stages.of(config, epilogue)
        self.blocks = config.tile_m // (BLOCK_M * config.sharing)
        self.steps = config.tile_n // config.subtile_n
        self.subtiles = self.blocks * self.steps
        self.threads = WARPGROUP * (1 + config.warpgroups)
        self.rings = config.warpgroups // config.sharing
        neighbours = config.neighbours
        self.tile_type = Sm90NeighboursTile if neighbours else Sm90Tile
        self.subtile_type = Sm90NeighboursSubtile if neighbours else Sm90Subtile

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        bs: Sequence[cute.Tensor],
        loads: Sequence[cute.Tensor],
        stores: Sequence[cute.Tensor],
        max_active_clusters: Int32,
        stream: cuda.CUstream,
    ):
        """Launches the kernel for A (M, K), each B (K, N) and the epilogue's operands in its names' order."""
        config, epilogue = self.config, self.epilogue
        a, bs = batches.operands(a, bs, self.batched)
        m, n = a.shape[0], bs[0].shape[0] * config.pieces // config.products
        a_layout, b_layout = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(bs[0])
        self.a_dtype, self.b_dtype = a.element_type, bs[0].element_type
        tile_k = TILE_K_BYTES * 8 // self.a_dtype.width
        tile = (config.tile_m, config.mma_n, tile_k)
        piece = (config.tile_m, config.piece_n, tile_k)
        # Two of a kind: one adds to the accumulators, the other overwrites them.
        add_mma, set_mma = [
            hopper.make_trivial_tiled_mma(
                self.a_dtype,
                self.b_dtype,
                a_layout.sm90_mma_major_mode(),
                b_layout.sm90_mma_major_mode(),
                Float32,
                (config.sharing, 1, 1),
                (BLOCK_M, config.mma_n),
            )
            for _ in range(2)
        ]
        a_smem = hopper.make_smem_layout_a(a_layout, tile, self.a_dtype, self.stages.ab)
        b_smem = hopper.make_smem_layout_b(b_layout, tile, self.b_dtype, self.stages.ab)
        apart = config.tile_m == BLOCK_M and config.cluster_n == 1 and a_layout.is_k_major_a()
        self.a_boxes = A_BOXES if cutlass.const_expr(apart) else 1
        box_m = config.tile_m // self.a_boxes
        _check_shares("A", box_m if a_layout.is_k_major_a() else tile_k, config.cluster_n)
        _check_shares("B", config.piece_n if b_layout.is_k_major_b() else tile_k, config.cluster_m)
        a_box = hopper.make_smem_layout_a(a_layout, (box_m, config.tile_n, tile_k), self.a_dtype, 1)
        a_tma = _tma_load(a, a_box, (box_m, tile_k), config.cluster_n)
        piece_smem = hopper.make_smem_layout_b(b_layout, piece, self.b_dtype, self.stages.ab)
        b_tmas = [_tma_load(b, piece_smem, piece[1:], config.cluster_m) for b in bs]

        groups = config.warpgroups
        load_planes = [
            self._planes(operand, BLOCK_M, self.stages.exact * groups) for operand in epilogue.tma_loads
        ]
        store_planes = [
            self._planes(operand, WARP_M, self.stages.store * groups * WARPS)
            for operand in epilogue.tma_stores
        ]
        load_of = dict(zip(epilogue.loads, loads, strict=True))
        store_of = dict(zip(epilogue.stores, stores, strict=True))
        load_tmas = [
            _tma_load(batches.plane(load_of[operand.name], m, a), planes, (BLOCK_M, config.subtile_n), 1)
            for operand, planes in zip(epilogue.tma_loads, load_planes, strict=True)
        ]
        store_tmas = [
            cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(),
                batches.plane(store_of[operand.name], m, a),
                cute.slice_(planes, (None, None, 0)),
                (WARP_M, config.subtile_n),
            )
            for operand, planes in zip(epilogue.tma_stores, store_planes, strict=True)
        ]

        schedule = batches.schedule(config, m, n, a)
        if cutlass.const_expr(config.split_k > 1):
            # A cluster a tile, along the axis of the grid that has room for any number.
            grid, cluster = (config.split_k * schedule.items, 1, 1), (config.split_k, 1, 1)
        else:
            clusters = cutlass.min(schedule.items, max_active_clusters)
            grid, cluster = (
                (config.cluster_m, config.cluster_n, clusters),
                (config.cluster_m, config.cluster_n, 1),
            )
        self.kernel(
            add_mma,
            set_mma,
            a_tma,
            b_tmas,
            a_smem,
            b_smem,
            list(loads),
            list(stores),
            load_tmas,
            store_tmas,
            load_planes,
            store_planes,
            m,
            n,
        ).launch(
            grid=grid,
            block=(self.threads, 1, 1),
            cluster=cluster,
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    def _planes(self, operand: SmemOperand, rows: int, count: int) -> cute.ComposedLayout:
        """Shared memory for what travels in boxes of so many rows: (rows, subtile_n, count)."""
        box = (rows, self.config.subtile_n)
        return hopper.make_smem_layout_epi(operand.dtype, operand.layout, box, count)

    @cute.kernel
    def kernel(
        self,
        add_mma: cute.TiledMma,
        set_mma: cute.TiledMma,
        a_tma: cpasync.TmaInfo,
        b_tmas: list,
        a_smem: cute.ComposedLayout,
        b_smem: cute.ComposedLayout,
        loads: list,
        stores: list,
        load_tmas: list,
        store_tmas: list,
        load_planes: list,
        store_planes: list,
        m: Int32,
        n: Int32,
    ):
        config, epilogue, stages = self.config, self.epilogue, self.stages
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, first_item = cute.arch.block_idx()
        _, _, item_step = cute.arch.grid_dim()
        cta_layout = cute.make_layout((config.cluster_m, config.cluster_n, 1))
        cta_rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cta_m, cta_n, _ = cta_layout.get_flat_coord(cta_rank)
        a_atom, a_global = a_tma.atom, a_tma.tma_tensor
        schedule = batches.schedule(config, m, n, a_global)
        if cutlass.const_expr(config.split_k > 1):
            cta_m = cta_n = Int32(0)
            first_item, item_step = block // config.split_k, schedule.items
        epilogue_item = Int32(first_item)
        if cutlass.const_expr(config.split_k > 1):
            if cta_rank > 0:
                epilogue_item = schedule.items  # beyond the last: no epilogue here

        if warp == 0:
            cpasync.prefetch_descriptor(a_atom)
            for tma in b_tmas + load_tmas + store_tmas:
                cpasync.prefetch_descriptor(tma.atom)

        smem = SmemAllocator()
        # Barriers come last: ahead of buffers that are aligned to 1024 bytes they would take as much.
        s_a = smem.allocate_tensor(self.a_dtype, a_smem.outer, SMEM_ALIGN, a_smem.inner)
        s_b = smem.allocate_tensor(self.b_dtype, b_smem.outer, SMEM_ALIGN, b_smem.inner)
        s_loads = [
            smem.allocate_tensor(operand.dtype, planes.outer, SMEM_ALIGN, planes.inner)
            for operand, planes in zip(epilogue.tma_loads, load_planes, strict=True)
        ]
        s_stores = [
            smem.allocate_tensor(operand.dtype, planes.outer, SMEM_ALIGN, planes.inner)
            for operand, planes in zip(epilogue.tma_stores, store_planes, strict=True)
        ]
        s_rows = [
            smem.allocate_tensor(operand.dtype, cute.make_layout((config.tile_n, stages.row)), 128)
            for operand in epilogue.staged
        ]
        if cutlass.const_expr(config.split_k > 1):
            sums = Sums.allocate(smem, config.thread_accumulators, WARPGROUP * config.sharing)
            if warp == 0:
                sums.init(config.split_k)
        a_bytes = cute.size_in_bytes(self.a_dtype, cute.slice_(a_smem, (None, None, 0)))
        self.box_bytes = a_bytes // self.a_boxes
        b_bytes = cute.size_in_bytes(self.b_dtype, cute.slice_(b_smem, (None, None, 0)))
        consumer_warps = 4 * config.sharing
        ab_pipeline = pipeline.PipelineTmaAsync.create(
            barrier_storage=smem.allocate_array(cutlass.Int64, 2 * stages.ab),
            num_stages=stages.ab,
            producer_group=_agents(1),
            consumer_group=_agents(consumer_warps * (config.cluster_m + config.cluster_n - 1)),
            tx_count=self.box_bytes + b_bytes,
            cta_layout_vmnk=cute.make_layout((1, *cta_layout.shape)),
            defer_sync=True,
        )
        if cutlass.const_expr(stages.exact > 0):
            box = BLOCK_M * config.subtile_n * config.sharing
            exact_pipeline = pipeline.PipelineTmaAsync.create(
                barrier_storage=smem.allocate_array(cutlass.Int64, 2 * self.rings * stages.exact),
                num_stages=self.rings * stages.exact,
                producer_group=_agents(1),
                consumer_group=_agents(consumer_warps),
                tx_count=sum(operand.bytes(box) for operand in epilogue.tma_loads),
                cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
                defer_sync=True,
            )
        if cutlass.const_expr(stages.row > 0):
            row_pipeline = pipeline.PipelineAsync.create(
                barrier_storage=smem.allocate_array(cutlass.Int64, 2 * stages.row),
                num_stages=stages.row,
                producer_group=_agents(32),
                consumer_group=_agents(WARPGROUP * config.sharing),
                defer_sync=True,
            )
        if cutlass.const_expr(self.a_boxes > 1):
            # A cluster's last CTAs may have no row at all.
            if m % (config.tile_m * config.cluster_m) != 0:
                self._clear(s_a, thread)
        in_step = cute.make_layout(config.cluster_size)
        pipeline.pipeline_init_arrive(cluster_shape_mn=in_step, is_relaxed=True)
        await_earlier_kernels()

        glob = by_name(epilogue.loads + epilogue.stores, loads + stores)
        pipeline.pipeline_init_wait(cluster_shape_mn=in_step)

        # (rows, k tile, index of the rows, k index) partitions of the operands for TMA
        tile_k = cute.size(a_smem, mode=[1])
        box_m = config.tile_m // self.a_boxes
        g_a = batches.boxes(a_global, (box_m, tile_k))
        k_tiles = cute.ceil_div(cute.size(g_a, mode=[3]), config.split_k)

        if warp < 4:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)

        if warp == 0:
            t_sa, t_ga = cpasync.tma_partition(
                a_atom,
                cta_n,
                cute.make_layout(config.cluster_n),
                cute.group_modes(cute.local_tile(s_a, (box_m, tile_k), (None, 0, None)), 0, 2),
                cute.group_modes(g_a, 0, 2),
            )
            t_bs = [self._partition_b(b_tmas[i], s_b, i, cta_m) for i in range(config.pieces)]
            cta_coord = (cta_m, cta_n, 0)
            a_mask = b_mask = None
            if cutlass.const_expr(config.cluster_n > 1):
                a_mask = cute.make_layout_image_mask(cta_layout, cta_coord, mode=1)
            if cutlass.const_expr(config.cluster_m > 1):
                b_mask = cute.make_layout_image_mask(cta_layout, cta_coord, mode=0)
            a_priority, b_priority = Int64(EVICT_FIRST), Int64(EVICT_FIRST)
            if schedule.grid_n > 1:
                a_priority = Int64(EVICT_LAST)
            if schedule.grid_m > 1:
                b_priority = Int64(EVICT_LAST)
            ab_state = _state(PRODUCER, stages.ab)
            # Parts of K are equally long: TMA makes zeros of k tiles beyond the last.
            first_k = cta_rank * k_tiles if cutlass.const_expr(config.split_k > 1) else 0
            item = Int32(first_item)
            while schedule.is_valid(item):
                cluster_row, cluster_column = schedule.cluster_coord(item)
                first_box = (cluster_row * config.cluster_m + cta_m) * self.a_boxes
                boxes = cutlass.min(cute.ceil_div(m, box_m) - first_box, self.a_boxes)
                column = cluster_column * config.cluster_n + cta_n
                batch = schedule.batch(item)
                boxes_of_a = batches.of_batch(t_ga, batch)
                for k_tile in cutlass.range(k_tiles, unroll=1):
                    k = first_k + k_tile
                    ab_pipeline.producer_acquire(ab_state)
                    barrier = ab_pipeline.producer_get_barrier(ab_state)
                    if cutlass.const_expr(self.a_boxes > 1):
                        stage_a = t_sa[(None, None, ab_state.index)]
                        self._load_more(a_atom, boxes_of_a, stage_a, first_box, boxes, k, barrier, a_priority)
                    cute.copy(
                        a_atom,
                        boxes_of_a[(None, first_box, k)],
                        t_sa[(None, 0, ab_state.index)],
                        tma_bar_ptr=barrier,
                        mcast_mask=a_mask,
                        cache_policy=a_priority,
                    )
                    for i in cutlass.range_constexpr(config.pieces):
                        t_sb, t_gb = t_bs[i]
                        cute.copy(
                            b_tmas[i].atom,
                            batches.of_batch(t_gb, batch)[(None, column, k)],
                            t_sb[(None, ab_state.index)],
                            tma_bar_ptr=barrier,
                            mcast_mask=b_mask,
                            cache_policy=b_priority,
                        )
                    ab_state.advance()
                item += item_step
            ab_pipeline.producer_tail(ab_state)

        if cutlass.const_expr(stages.exact > 0):
            if warp == 1:
                exact_state = _state(PRODUCER, stages.exact)
                item = epilogue_item
                while schedule.is_valid(item):
                    for ring in cutlass.range_constexpr(self.rings):
                        if schedule.is_valid(item + ring * item_step):
                            m0, n0 = self._origin(schedule, item + ring * item_step, cta_m, cta_n)
                            batch = schedule.batch(item + ring * item_step)
                            ring_state = exact_state.clone()
                            for subtile in cutlass.range_constexpr(self.subtiles):
                                stage = _in_ring(ring_state, ring)
                                exact_pipeline.producer_acquire(stage)
                                barrier = exact_pipeline.producer_get_barrier(stage)
                                for i in cutlass.range_constexpr(len(load_tmas)):
                                    for share in cutlass.range_constexpr(config.sharing):
                                        plane = stage.index * config.sharing + share
                                        coord = self._plane_coord(m0, n0, subtile, share)
                                        source = self._box(load_tmas[i], s_loads[i], coord, batch)
                                        self._copy_plane(load_tmas[i], source, plane, barrier)
                                ring_state.advance()
                    exact_state.advance(self.subtiles)
                    item += self.rings * item_step

        if cutlass.const_expr(stages.row > 0):
            if warp == 2:
                row_state = _state(PRODUCER, stages.row)
                item = epilogue_item
                while schedule.is_valid(item):
                    m0, n0 = self._origin(schedule, item, cta_m, cta_n)
                    first, end = self._rows(schedule, item, m)
                    tile = Sm90Tile(config, first + m0, n0, end, n, thread % 32, Int32(0))
                    row_pipeline.producer_acquire(row_state)
                    rows = [s_row[(None, row_state.index)] for s_row in s_rows]
                    self.epilogue.stage(tile, glob, by_name([o.name for o in epilogue.staged], rows))
                    row_pipeline.producer_commit(row_state)
                    row_state.advance()
                    item += item_step

        if warp >= 4:
            cute.arch.setmaxregister_increase(MMA_REGISTERS)
            group = cute.arch.warp_redux_sync(Int32(thread // WARPGROUP), "max") - 1
            group_thread = thread % WARPGROUP
            group_warp = warp % WARPS
            add_mma.set(warpgroup.Field.ACCUMULATE, True)
            set_mma.set(warpgroup.Field.ACCUMULATE, False)
            share, ring = group % config.sharing, group // config.sharing
            thr_mma = add_mma.get_slice(share * WARPGROUP)
            fragments_a = add_mma.make_fragment_A(thr_mma.partition_A(s_a))
            fragments_b = add_mma.make_fragment_B(thr_mma.partition_B(s_b))
            acc_shape = thr_mma.partition_shape_C((config.tile_m, config.mma_n))
            acc = cute.make_rmem_tensor(acc_shape, Float32)
            mma_turn = Turn.of(1, group)
            group_barrier = pipeline.NamedBarrier(barrier_id=3 + group, num_threads=WARPGROUP)
            store_group = pipeline.PipelineTmaStore.create(
                num_stages=max(stages.store, 1), producer_group=_agents(32)
            )

            ab_state = _state(CONSUMER, stages.ab)
            row_state = _state(CONSUMER, stages.row)
            exact_state = _state(CONSUMER, stages.exact)
            store_plane = Int32(0)
            warp_box = (WARP_M, config.subtile_n)
            item = epilogue_item
            multiply = self._multiply if cutlass.const_expr(self.fast_accum) else self._multiply_promoted
            if cutlass.const_expr(config.split_k > 1):
                mma_thread = thread - WARPGROUP
                if cta_rank > 0:
                    start = ab_state.clone()
                    multiply(
                        add_mma, set_mma, acc, fragments_a, fragments_b, ab_pipeline, start, k_tiles, mma_turn
                    )
                    sums.leave(acc, mma_thread)
            if cutlass.const_expr(config.pingpong):
                item += ring * item_step
                if ring == 1:
                    mma_turn.pass_on()
                ab_state.advance(ring * k_tiles)
                row_state.advance(ring)
            while schedule.is_valid(item):
                m0, n0 = self._origin(schedule, item, cta_m, cta_n)
                first, end = self._rows(schedule, item, m)
                tile = self.tile_type(config, first + m0, n0, end, n, group_thread, share)
                held = self.epilogue.begin(tile, glob)

                if cutlass.const_expr(config.pingpong):
                    mma_turn.wait()
                ab_state = multiply(
                    add_mma, set_mma, acc, fragments_a, fragments_b, ab_pipeline, ab_state, k_tiles, mma_turn
                )
                if cutlass.const_expr(config.split_k > 1):
                    sums.gather(acc, mma_thread, config.split_k)

                rows = []
                if cutlass.const_expr(stages.row > 0):
                    row_pipeline.consumer_wait(row_state)
                    rows = [s_row[(None, row_state.index)] for s_row in s_rows]
                if cutlass.const_expr(config.rolled):
                    rows_by_name = by_name([operand.name for operand in epilogue.staged], rows)
                    for block in cutlass.range_constexpr(self.blocks):
                        self._roll(block, acc, tile, glob, held, rows_by_name)
                for subtile in cutlass.range_constexpr(0 if config.rolled else self.subtiles):
                    block, step = divmod(subtile, self.steps)
                    sub = self.subtile_type(config, tile, block, step)
                    pieces = [sub.accumulators(acc, i, step) for i in range(config.products)]
                    if cutlass.const_expr(stages.store > 0):
                        store_group.producer_acquire()
                        cute.arch.sync_warp()
                    else:
                        # Keeps the assembler from working out the addresses of all visits at once: a spill.
                        group_barrier.arrive_and_wait()
                    if cutlass.const_expr(stages.exact > 0):
                        exact_stage = _in_ring(exact_state, ring)
                        exact_pipeline.consumer_wait(exact_stage)
                    load_plane = (ring * stages.exact + exact_state.index) * config.sharing + share
                    plane = (store_plane * config.warpgroups + group) * WARPS + group_warp
                    planes = [
                        cute.local_tile(s_load[(None, None, load_plane)], warp_box, (group_warp, 0))
                        for s_load in s_loads
                    ]
                    planes += [s_store[(None, None, plane)] for s_store in s_stores]
                    names = [o.name for o in epilogue.staged + epilogue.tma_loads + epilogue.tma_stores]
                    planes_by_name = by_name(names, rows + planes)
                    if cutlass.const_expr(stages.exact > 0):
                        planes_by_name.release = partial(release_planes, exact_pipeline, exact_stage)
                    self.epilogue.visit(sub, *pieces, glob, held, planes_by_name)
                    if cutlass.const_expr(stages.exact > 0):
                        exact_state.advance()
                    if cutlass.const_expr(stages.store > 0):
                        cute.arch.fence_proxy("async.shared", space="cta")
                        cute.arch.sync_warp()
                        row, column = self._plane_coord(m0, n0, subtile, share)
                        for i in cutlass.range_constexpr(len(store_tmas)):
                            coord = (row * WARPS + group_warp, column)
                            target = self._box(store_tmas[i], s_stores[i], coord, schedule.batch(item))
                            self._store_plane(store_tmas[i], target, plane)
                        store_group.producer_commit()
                        store_plane = (store_plane + 1) % stages.store
                if cutlass.const_expr(hasattr(epilogue, "end")):
                    self.epilogue.end(tile, glob, held)
                if cutlass.const_expr(stages.row > 0):
                    row_pipeline.consumer_release(row_state)
                    row_state.advance()
                item += item_step
                if cutlass.const_expr(config.pingpong):
                    # The next tile is the other warpgroup's.
                    item += item_step
                    ab_state.advance(k_tiles)
                    row_state.advance(Int32(1))
            if cutlass.const_expr(stages.store > 0):
                store_group.producer_tail()

    @cute.jit
    def _load_more(
        self,
        atom: cute.CopyAtom,
        boxes_of_a: cute.Tensor,
        stage: cute.Tensor,
        first: Int32,
        count: Int32,
        k: Int32,
        barrier: cute.Pointer,
        priority: Int64,
    ):
        """The boxes of a tile of A after the first, as many as there are in A.

        Comes before the copies that the barrier already expects, and whose arrival would complete its phase.
        """
        nbytes = self.box_bytes * cutlass.max(count - 1, 0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_expect_tx(barrier, nbytes)
        for box in cutlass.range_constexpr(1, self.a_boxes):
            if box < count:
                source, target = boxes_of_a[(None, first + box, k)], stage[(None, box)]
                cute.copy(atom, source, target, tma_bar_ptr=barrier, cache_policy=priority)

    @cute.jit
    def _clear(self, s_a: cute.Tensor, thread: Int32):
        """Zeros in every stage of A, for rows that are multiplied but never loaded."""
        vectors = cute.cosize(s_a) * s_a.element_type.width // 128
        words = cute.make_tensor(
            cute.recast_ptr(s_a.iterator, dtype=Int32), cute.make_layout((4, vectors), stride=(1, 4))
        )
        zeros = cute.make_rmem_tensor(4, Int32)
        zeros.fill(0)
        for i in cutlass.range(thread, vectors, self.threads, unroll=1):
            cute.autovec_copy(zeros, words[(None, i)])
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def _multiply(
        self,
        add_mma: cute.TiledMma,
        set_mma: cute.TiledMma,
        acc: cute.Tensor,
        fragments_a: cute.Tensor,
        fragments_b: cute.Tensor,
        ab_pipeline: pipeline.PipelineTmaAsync,
        ab_state: pipeline.PipelineState,
        k_tiles: Int32,
        turn: Turn,
    ):
        """The product over all k tiles, one at the least; returns the pipeline state after them.

        Under ping-pong the turn passes on as soon as the last k tile is with the tensor cores.
        """
        release_state = ab_state.clone()
        self._multiply_tile(set_mma, add_mma, acc, fragments_a, fragments_b, ab_pipeline, ab_state)
        ab_state.advance()
        for _ in cutlass.range(k_tiles - 1, unroll=1):
            self._multiply_tile(add_mma, add_mma, acc, fragments_a, fragments_b, ab_pipeline, ab_state)
            # One k tile stays in flight; the one before it has been read and its stage may go.
            warpgroup.wait_group(1)
            ab_pipeline.consumer_release(release_state)
            release_state.advance()
            ab_state.advance()
        if cutlass.const_expr(self.config.pingpong):
            turn.pass_on()
        warpgroup.wait_group(0)
        ab_pipeline.consumer_release(release_state)
        return ab_state

    @cute.jit
    def _multiply_promoted(
        self,
        add_mma: cute.TiledMma,
        set_mma: cute.TiledMma,
        acc: cute.Tensor,
        fragments_a: cute.Tensor,
        fragments_b: cute.Tensor,
        ab_pipeline: pipeline.PipelineTmaAsync,
        ab_state: pipeline.PipelineState,
        k_tiles: Int32,
        turn: Turn,
    ):
        """As `_multiply`, but each k tile's sums are added to the accumulators here, in fp32.

        K tiles go in pairs: while the first's sums are added, the tensor cores are at work on the second's.
        None is under way where the loop turns, for there the registers of sums would be moved.
        """
        acc.fill(0.0)
        sums = [cute.make_rmem_tensor(acc.shape, Float32) for _ in range(2)]
        release_state = ab_state.clone()
        for _ in cutlass.range(k_tiles // 2, unroll=1):
            for one in cutlass.range_constexpr(2):
                self._multiply_tile(
                    set_mma, add_mma, sums[one], fragments_a, fragments_b, ab_pipeline, ab_state
                )
                ab_state.advance()
            for one in cutlass.range_constexpr(2):
                warpgroup.wait_group(1 - one)
                ab_pipeline.consumer_release(release_state)
                release_state.advance()
                _add(acc, sums[one])
        if k_tiles % 2 == 1:
            self._multiply_tile(set_mma, add_mma, sums[0], fragments_a, fragments_b, ab_pipeline, ab_state)
            ab_state.advance()
            warpgroup.wait_group(0)
            ab_pipeline.consumer_release(release_state)
            _add(acc, sums[0])
        if cutlass.const_expr(self.config.pingpong):
            turn.pass_on()
        return ab_state

    def _multiply_tile(
        self,
        first_mma: cute.TiledMma,
        add_mma: cute.TiledMma,
        sums: cute.Tensor,
        fragments_a: cute.Tensor,
        fragments_b: cute.Tensor,
        ab_pipeline: pipeline.PipelineTmaAsync,
        ab_state: pipeline.PipelineState,
    ) -> None:
        """Gives a stage's k tile to the tensor cores, as one group; `first_mma` is for its first product."""
        ab_pipeline.consumer_wait(ab_state)
        warpgroup.fence()
        for k_block in range(cute.size(fragments_a, mode=[2])):
            stage = (None, None, k_block, ab_state.index)
            mma = first_mma if k_block == 0 else add_mma
            cute.gemm(mma, sums, fragments_a[stage], fragments_b[stage], sums)
        warpgroup.commit_group()

    @cute.jit
    def _roll(self, block: int, acc: cute.Tensor, tile: Sm90Tile, glob: Any, held: Any, smem: Any):
        """The visits of a block as loops, of no planes; a warp whose rows lie beyond M makes none."""
        if tile.warp_row(block) < tile.m:
            self._visits(self.steps, Int32(0), block, acc, tile, glob, held, smem)

    @cute.jit
    def _visits(
        self,
        count: int,
        first: Int32,
        block: int,
        acc: cute.Tensor,
        tile: Sm90Tile,
        glob: Any,
        held: Any,
        smem: Any,
    ):
        """So many visits from step `first` on, whose accumulators lie where the block's begin.

        Registers can't be indexed by a loop. So loops of two turns lie one within the other, and each moves
        what its second turn is of to where the first had its own: an accumulator moves once a loop, at most.
        """
        sub = self.subtile_type(self.config, tile, block, first)
        piece = sub.accumulators(acc, 0, 0)
        if cutlass.const_expr(count == 1):
            self.epilogue.visit(sub, piece, glob, held, smem)
        else:
            turns = 2 if count % 2 == 0 else count
            part = count // turns
            row = cute.make_tensor(piece.iterator, cute.make_layout(count * sub.elements))
            for turn in cutlass.range(turns, unroll=1):
                self._visits(part, first + turn * part, block, acc, tile, glob, held, smem)
                if turn < turns - 1:
                    for i in cutlass.range_constexpr((count - part) * sub.elements):
                        row[i] = row[i + part * sub.elements]

    def _partition_b(self, tma: cpasync.TmaInfo, s_b: cute.Tensor, index: int, cta_m: Int32) -> tuple:
        """The stages of a piece of B, and the tiles that it is brought from, partitioned for TMA."""
        box = (self.config.piece_n, cute.size(s_b, mode=[1]))
        s_piece = cute.local_tile(s_b, (*box, self.stages.ab), (index, 0, 0))
        g_piece = batches.boxes(tma.tma_tensor, box)
        return cpasync.tma_partition(
            tma.atom,
            cta_m,
            cute.make_layout(self.config.cluster_m),
            cute.group_modes(s_piece, 0, 2),
            cute.group_modes(g_piece, 0, 2),
        )

    def _origin(
        self, schedule: TileSchedule | BatchSchedule, item: Int32, cta_m: Int32, cta_n: Int32
    ) -> tuple[Int32, Int32]:
        """The first row and column of a CTA's tile of a work item."""
        config = self.config
        row, column = schedule.cluster_coord(item)
        m0 = (row * config.cluster_m + cta_m) * config.tile_m
        return m0, (column * config.cluster_n + cta_n) * config.tile_n

    def _rows(self, schedule: Any, item: Int32, m: Int32) -> tuple[Int32, Int32]:
        """The rows of the output that a work item's batch has: the first, and the one after the last."""
        if not self.batched:
            return Int32(0), m
        first = schedule.batch(item) * m
        return first, first + m

    def _plane_coord(self, m0: Int32, n0: Int32, subtile: int, share: Any) -> tuple[Int32, Int32]:
        """Where a warpgroup's subtile lies, counted in (64, subtile_n) boxes of the output."""
        block, step = divmod(subtile, self.steps)
        row = m0 // BLOCK_M + block * self.config.sharing + share
        return row, n0 // self.config.subtile_n + step

    def _box(self, tma: cpasync.TmaInfo, planes: cute.Tensor, coord: tuple, batch: Any) -> tuple:
        """The stages of an operand's planes and one of its boxes, partitioned for TMA."""
        box = (cute.size(planes, mode=[0]), self.config.subtile_n)
        boxes = batches.box_at(tma.tma_tensor, box, coord, batch)
        return cpasync.tma_partition(
            tma.atom, 0, cute.make_layout(1), cute.group_modes(planes, 0, 2), cute.group_modes(boxes, 0, 2)
        )

    def _copy_plane(self, tma: cpasync.TmaInfo, source: tuple, index: Int32, barrier: cute.Pointer) -> None:
        t_s, t_g = source
        priority = Int64(EVICT_FIRST)
        cute.copy(tma.atom, t_g, t_s[(None, index)], tma_bar_ptr=barrier, cache_policy=priority)

    def _store_plane(self, tma: cpasync.TmaInfo, target: tuple, index: Int32) -> None:
        t_s, t_g = target
        cute.copy(tma.atom, t_s[(None, index)], t_g)


def _agents(count: int) -> pipeline.CooperativeGroup:
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)


def _state(user: pipeline.PipelineUserType, stages: int) -> pipeline.PipelineState:
    """Where a warp stands in a ring; in a ring without stages, nowhere that matters."""
    return pipeline.make_pipeline_state(user, max(stages, 1))


def _add(acc: cute.Tensor, sums: cute.Tensor) -> None:
    for i in range(cute.size(acc)):
        acc[i] = acc[i] + sums[i]


def _in_ring(state: pipeline.PipelineState, ring: Any) -> pipeline.PipelineState:
    """The stage of one of several rings that lie one behind another in a pipeline."""
    return pipeline.PipelineState(state.stages, state.count, ring * state.stages + state.index, state.phase)


def _check_shares(operand: str, extent: int, ctas: int) -> None:
    """Raises ValueError where CTAs can't bring equal shares of a stage, each for all of them.

    What they share out is an operand's rows, or where these are contiguous its rows of K, of which each of
    TMA's boxes has all.
    """
    if extent % ctas:
        raise ValueError(
            f"{extent} rows of a stage of {operand} have no equal shares for {ctas} CTAs of a cluster"
        )


def _tma_load(
    tensor: cute.Tensor, staged: cute.ComposedLayout, box: tuple[int, int], multicast: int
) -> cpasync.TmaInfo:
    """The TMA atom and coordinate tensor that bring boxes of `tensor` to one stage of shared memory."""
    op = cpasync.CopyBulkTensorTileG2SOp() if multicast == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    stage = cute.slice_(staged, (None, None, 0))
    return cpasync.make_tiled_tma_atom(op, tensor, stage, box, num_multicast=multicast)
