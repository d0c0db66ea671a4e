"""The Hopper kernel: a warp-specialised, persistent GEMM on wgmma with an epilogue plugged in.

One warpgroup loads: warp 0 brings A and B tiles by TMA, warps 1 and 2 the epilogue's operands, warp 3 the
scales of blocks (`block_scales.py`). The other one or two warpgroups multiply; each owns 64-row blocks of the
tile, keeps their accumulators in registers and runs the epilogue on them, a subtile of 64 rows at a time,
with shared memory and TMA stores of its own.

For example, each CTA of tile 128x128_2x1_pingpong has these roles and barriers, if the epilogue stages a
rowvec, loads a plane and stores one:

    warps    role     job
    0        load     A and B of a k tile, by TMA with multicast
    1        exact    exact loads of a subtile, by TMA
    2        staging  staged rowvecs of a tile
    4 to 11  consume  begin | wgmma over all k tiles | visit each subtile, store by TMA

    ring   stages  filled by                            emptied by
    ab     5       1 warp of load                       4 warps of consume x 2 CTAs = 8
    exact  8       1 warp of exact                      4 warps of consume
    row    2       1 warp of staging x 32 threads = 32  4 warps of consume x 32 threads = 128

    barrier  of           threads
    1        turn 0       256
    2        turn 1       256
    3        warpgroup 0  128
    4        warpgroup 1  128

The table counts a ring's arrivals per barrier phase. With split-K over a cluster, only the first CTA runs
the epilogue; the warpgroups of the other CTAs publish their sums to it (`split_k.py`). With split-K through
memory, each part of K is a work item, like a product of a batch, and a second kernel runs the epilogue
(`split_sums.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, cast

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_backend.planning import TILE_K_BYTES, Stages, TileConfig
from cute_backend.planning.shared_memory import SumScales
from cute_backend.spec import ProductKind
from cute_backend.templates import batch as batches
from cute_backend.templates.block_scales import ScaleStages, bring_tile
from cute_backend.templates.crew import WARP, WARPS, Arrivals, Crew, Meeting, Ring, Role, one
from cute_backend.templates.drain import Position, Work
from cute_backend.templates.entry import named
from cute_backend.templates.epilogue import (
    Epilogue,
    in_subtiles,
    release_planes,
)
from cute_backend.templates.fragments import FragmentGemm, RegisterSeat
from cute_backend.templates.mainloop import (
    Sm90Mainloop,
    Sm90Plain,
    WarpgroupOperands,
    block_of,
    check_face,
)
from cute_backend.templates.overlap import await_earlier_kernels
from cute_backend.templates.rings import (
    Shared,
    agents,
    check_stage,
    consumer_state,
    in_ring,
    make_rows,
    partition_box,
    producer_state,
    stages_of,
    swizzled,
)
from cute_backend.templates.scheduler import GroupSchedule, Place
from cute_backend.templates.segments import Boxes, Part, allocate_buffers, dealt, make_exacts
from cute_backend.templates.split_k import Sums
from cute_backend.templates.tails import Tails, is_cut
from cute_backend.templates.tile import FragmentTile

WARPGROUP = WARPS * WARP
"""Threads of a warpgroup."""
BLOCK_M = 64
"""Rows of one wgmma instruction."""
WARP_M = BLOCK_M // WARPS
"""Rows of one wgmma instruction whose accumulators a warp holds (PTX ISA, wgmma register fragments)."""

A_BOXES = 4
"""The number of boxes in which TMA loads a tile of 64 rows. The kernel skips boxes beyond A's last row,
because TMA zero-fills rows beyond a tensor more slowly than it loads rows: M = 16, N = K = 8192 in fp8 took
22.0 us with those boxes and 17.9 us without. A tile of 128 rows is loaded as one box: with several boxes,
M = N = K = 4096 took 2 percent longer (H200)."""

LOAD_REGISTERS = 40
"""Registers per thread of the loading warpgroup if each other thread has `Target.epilogue_registers`. It has
those, too, that the others leave (`TileConfig.epilogue_registers`)."""

EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000
"""L2 cache policies, as `createpolicy.fractional` encodes them for all of a copy's data (PTX ISA). Data that
is read once is evicted first, so that operands read by several tiles stay in L2. This gains 3 percent at
M = N = 8192, K = 1024 on an H200."""


@dataclass(frozen=True)
class Turn:
    """The turn of one of two warpgroups to multiply, under ping-pong.

    Both warpgroups walk the same ring of A and B, and each skips the other's stages. A waiting thread knows a
    barrier's phase only by its parity. So a warpgroup may wait for its own fill of a stage only after the
    other warpgroup has consumed the previous fill.
    """

    own: pipeline.NamedBarrier
    other: pipeline.NamedBarrier

    @staticmethod
    def of(first: Meeting, group: Int32) -> Turn:
        """The turn of warpgroup 0 or 1, whose named barrier is `first` or the one after it."""
        own, other = first.barrier + group, first.barrier + 1 - group
        return Turn(pipeline.NamedBarrier(own, first.threads), pipeline.NamedBarrier(other, first.threads))

    def wait(self) -> None:
        """Waits until the other warpgroup has passed the turn on."""
        self.own.arrive_and_wait()

    def pass_on(self) -> None:
        """Lets the other warpgroup go on."""
        self.other.arrive()


class Sm90Gemm(FragmentGemm):
    """D = epilogue(A B) for A (M, K) and B (K, N), any of whose sizes may be dynamic.

    Several products may share one A. Each then has its own B, all in the same layout, or they share one B of
    (K, 2 N) with interleaved columns. Each pipeline stage holds the columns of all products, and one MMA
    spans all of them.

    fp8 operands must be K-major; 16-bit operands may be K-major or not. Base addresses, the strides of A and
    B, and the strides of every operand in `shared_loads` and `shared_stores` must be multiples of 16 bytes.
    If `mainloop` is omitted, the tensor cores add up all k tiles.

    A BATCHED product takes A (B, M, K) and B (B, K, N); D and the epilogue's operands have B * M rows. A
    GROUPED product takes A (M, K), B (G, K, N) and `offsets` (G,), which only the device reads. It writes no
    row beyond the last group, and nothing outside its outputs, whatever `offsets` holds. A K_GROUPED product
    takes A (M, K) and B (K, N), contiguous along K in fp8 and not in 16 bits, and `offsets` (G,) along K. Its
    D is (G * M, N); for an empty group, D is the epilogue applied to zeros.
    """

    def __init__(
        self,
        epilogue: Epilogue,
        config: TileConfig,
        stages: Stages,
        mainloop: Sm90Mainloop | None = None,
        *,
        kind: ProductKind = ProductKind.DENSE,
    ):
        self.mainloop = mainloop or Sm90Plain()
        check_face(self.mainloop, Sm90Mainloop)
        super().__init__(epilogue, config, stages, kind=kind, scaling=self.mainloop.scaling)
        pieces = self.mainloop.pieces
        self.by_rows = 1 < pieces == self.blocks
        self.column_pieces = 1 if self.by_rows else pieces
        if self.column_pieces > 1 and self.blocks > 1:
            raise ValueError(
                f"tile {config.name} gives a warpgroup {self.blocks} blocks of 64 rows, and its mainloop "
                f"multiplies {pieces} pieces: of the columns, which takes one block, or blocks of rows"
            )
        self.in_cluster = config.split_k > 1 and not config.sums_in_memory
        if (self.is_grouped or self.is_k_grouped) and config.split_k > 1:
            raise ValueError(f"tile {config.name} has split-K, which a grouped product does not support")
        self.rings = config.warpgroups // config.sharing
        self.crew = self._crew()

    def _crew(self) -> Crew:
        """The roles of a CTA and their rings; the module's docstring lists them for one tile."""
        config, stages, warps = self.config, self.stages, self.config.tile_warps
        self.load = Role("load", 0, 1, "A and B of a k tile, by TMA with multicast", self._load)
        self.exact = Role("exact", 1, 1, "exact loads of a subtile, by TMA", self._load_exact)
        self.staging = Role("staging", 2, 1, "staged rowvecs of a tile", self._stage_rows)
        self.scales = Role("scales", 3, 1, "scales of a k tile's blocks, by cp.async", self._load_scales)
        consume = "begin | wgmma over all k tiles | visit each subtile, store by TMA"
        self.consume = Role("consume", WARPS, WARPS * config.warpgroups, consume, self._consume)
        # A stage is free once every CTA that this one loads for has read it: the CTAs in its row and in its
        # column of the cluster.
        readers = config.cluster_m + config.cluster_n - 1
        scales = Arrivals(self.scales, 1, WARP) if self.scaling is not None else None
        emptied = Arrivals(self.consume, warps, 1, readers)
        self.ab_ring = Ring("ab", stages.ab, one(self.load), emptied, scales)
        self.exact_ring = self.row_ring = self.sum_ring = None
        if stages.exact:
            emptied = Arrivals(self.consume, warps, 1)
            self.exact_ring = Ring("exact", self.rings * stages.exact, one(self.exact), emptied)
        if stages.row:
            filled, emptied = Arrivals(self.staging, 1, WARP), Arrivals(self.consume, warps, WARP)
            self.row_ring = Ring("row", stages.row, filled, emptied)
        if self.in_cluster:
            filled, emptied = (
                Arrivals(self.consume, warps, 1, config.split_k - 1),
                Arrivals(self.consume, warps, 1),
            )
            self.sum_ring = Ring("sums", 1, filled, emptied)
        optional = ((self.exact, self.exact_ring), (self.staging, self.row_ring), (self.scales, scales))
        self.turns = tuple(Meeting(f"turn {i}", 1 + i, ((self.consume, 2 * WARPS),)) for i in range(2))
        self.groups = tuple(
            Meeting(f"warpgroup {i}", 3 + i, ((self.consume, WARPS),)) for i in range(config.warpgroups)
        )
        dealt = config.epilogue_registers(self.kind, len(self.epilogue.staged))
        loading = LOAD_REGISTERS + (config.target.epilogue_registers - dealt) * config.warpgroups
        return Crew(
            roles=(self.load, *(role for role, needed in optional if needed), self.consume),
            rings=tuple(
                ring for ring in (self.ab_ring, self.exact_ring, self.row_ring, self.sum_ring) if ring
            ),
            meetings=(*(self.turns if config.pingpong else ()), *self.groups),
            registers=(loading, *[dealt] * config.warpgroups),
        )

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
        offsets: cute.Tensor | None = None,
    ):
        """Launches the kernel for A (M, K), each B (K, N) and the epilogue's operands, in the order of its
        names. `scales` lists the scales of A's blocks, (rows, k), then those of each B's, (k, columns);
        `offsets` are the offsets of a grouped product."""
        config = self.config
        self.a_dtype, self.b_dtype = a.element_type, bs[0].element_type
        self.tile_k = tile_k = TILE_K_BYTES * 8 // self.a_dtype.width
        self.group_step = 1 if offsets is None else batches.group_step(a, self.is_k_grouped)
        a, bs = batches.operands(a, bs, self.kind, tile_k)
        m, n = a.shape[0], self._width(cute.size(bs[0], mode=[0]))
        a_layout, b_layout = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(bs[0])
        tile = (config.tile_m, config.mma_n, tile_k)
        piece = (config.tile_m, config.piece_n, tile_k)
        # Two identical MMAs: the first will add to the accumulators, the second will overwrite them.
        add_mma, set_mma = [
            hopper.make_trivial_tiled_mma(
                self.a_dtype,
                self.b_dtype,
                a_layout.sm90_mma_major_mode(),
                b_layout.sm90_mma_major_mode(),
                Float32,
                (config.sharing, 1, 1),
                (BLOCK_M, config.mma_n // self.column_pieces),
            )
            for _ in range(2)
        ]
        a_smem = hopper.make_smem_layout_a(a_layout, tile, self.a_dtype, self.stages.ab)
        b_smem = hopper.make_smem_layout_b(b_layout, tile, self.b_dtype, self.stages.ab)
        apart = config.tile_m == BLOCK_M and config.cluster_n == 1 and a_layout.is_k_major_a()
        apart = apart and not self.is_k_grouped
        self.a_boxes = A_BOXES if cutlass.const_expr(apart) else 1
        box_m = config.tile_m // self.a_boxes
        _check_shares("A", box_m if a_layout.is_k_major_a() else tile_k, config.cluster_n)
        _check_shares("B", config.piece_n if b_layout.is_k_major_b() else tile_k, config.cluster_m)
        a_box = hopper.make_smem_layout_a(a_layout, (box_m, config.tile_n, tile_k), self.a_dtype, 1)
        a_tma = _tma_load(a, a_box, (box_m, tile_k), config.cluster_n)
        piece_smem = hopper.make_smem_layout_b(b_layout, piece, self.b_dtype, self.stages.ab)
        b_tmas = [_tma_load(b, piece_smem, piece[1:], config.cluster_m) for b in bs]

        groups, layout_of = config.warpgroups, hopper.make_smem_layout_epi
        come, go = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        parts = self._parts(
            dealt(self._epilogues, loads, stores),
            Boxes(come, (BLOCK_M, config.box_n), self.stages.exact * groups, layout_of),
            Boxes(go, (WARP_M, config.box_n), self.stages.store * groups * WARPS, layout_of),
            partial(batches.plane, m=m, count=batches.products(a, offsets)),
        )

        schedule = batches.schedule(config, m, n, a, offsets, group_step=self.group_step)
        if cutlass.const_expr(self.is_grouped):
            items = cast(GroupSchedule, schedule).most_items
        else:
            items = schedule.items
        if cutlass.const_expr(self.in_cluster):
            # One cluster per tile, along the axis of the grid that has room for any number.
            grid, cluster = (config.split_k * items, 1, 1), (config.split_k, 1, 1)
        else:
            clusters = cutlass.min(items, max_active_clusters)
            grid, cluster = (
                (config.cluster_m, config.cluster_n, clusters),
                (config.cluster_m, config.cluster_n, 1),
            )
        given = Sm90Arguments(
            add_mma, set_mma, a_tma, b_tmas, a_smem, b_smem, parts, list(scales), m, n, offsets
        )
        named(self.kernel, self.name)(given).launch(
            grid=grid,
            block=(self.threads, 1, 1),
            cluster=cluster,
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, given: Sm90Arguments):
        config, stages = self.config, self.stages
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, first_item = cute.arch.block_idx()
        _, _, item_step = cute.arch.grid_dim()
        cta_layout = cute.make_layout((config.cluster_m, config.cluster_n, 1))
        cta_rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cta_m, cta_n, _ = cta_layout.get_flat_coord(cta_rank)
        schedule = batches.schedule(
            config, given.m, given.n, given.a.tma_tensor, given.offsets, group_step=self.group_step
        )
        if cutlass.const_expr(self.in_cluster):
            cta_m = cta_n = Int32(0)
            first_item, item_step = block // config.split_k, schedule.items
        epilogue_item = Int32(first_item)
        if cutlass.const_expr(self.in_cluster):
            if cta_rank > 0:
                epilogue_item = schedule.items  # beyond the last: no epilogue here

        maps = [part.load_tmas for part in given.parts] + [part.store_tmas for part in given.parts]
        if warp == self.load.first:
            cpasync.prefetch_descriptor(given.a.atom)
            for tma in [*given.bs, *chain(*maps)]:
                cpasync.prefetch_descriptor(tma.atom)

        smem = SmemAllocator()
        # Barriers come last: ahead of buffers aligned to 1024 bytes, they would take up 1024 bytes.
        s_a = swizzled(smem, self.a_dtype, given.a_smem)
        s_b = swizzled(smem, self.b_dtype, given.b_smem)
        buffers = allocate_buffers(smem, self.epilogue, given.parts, config.staged_n, stages.row)
        scale_stages = None
        if cutlass.const_expr(self.scaling is not None):
            scale_stages = ScaleStages.allocate(smem, stages.ab, cast(SumScales, self.scaling), config)
        sums = None
        if cutlass.const_expr(self.in_cluster):
            sums = Sums.allocate(smem, config.thread_accumulators, WARPGROUP * config.sharing)
            if warp == self.load.first:
                sums.init(cast(Ring, self.sum_ring))
        a_bytes = cute.size_in_bytes(self.a_dtype, cute.slice_(given.a_smem, (None, None, 0)))
        self.box_bytes = a_bytes // self.a_boxes
        b_bytes = cute.size_in_bytes(self.b_dtype, cute.slice_(given.b_smem, (None, None, 0)))
        check_stage(config, a_bytes + b_bytes)
        ab_pipeline = pipeline.PipelineTmaAsync.create(
            **stages_of(smem, self.ab_ring),
            tx_count=self.box_bytes + b_bytes,
            cta_layout_vmnk=cute.make_layout((1, *cta_layout.shape)),
        )
        tails = None
        if cutlass.const_expr(self.is_k_grouped and self.group_step > 1):
            tails = Tails.allocate(smem, self.crew, ab_pipeline, [s_a, s_b])
            tails.init(warp == self.load.first)
        box_elements = BLOCK_M * config.box_n * config.sharing
        exacts = make_exacts(smem, self.exact_ring, self._epilogues, box_elements)
        row_pipeline = make_rows(smem, self.row_ring)
        if cutlass.const_expr(self.a_boxes > 1):
            # The last CTAs of a cluster may lie wholly beyond A's last row.
            if Boolean(self.is_grouped) | (given.m % (config.tile_m * config.cluster_m) != 0):
                self._clear(s_a, thread)
        in_step = cute.make_layout(config.cluster_size)
        pipeline.pipeline_init_arrive(cluster_shape_mn=in_step, is_relaxed=True)
        await_earlier_kernels()
        pipeline.pipeline_init_wait(cluster_shape_mn=in_step)
        if cutlass.const_expr(self.is_grouped):
            schedule = cast(GroupSchedule, schedule).counted()
        all_k_tiles = cute.ceil_div(given.a.tma_tensor.shape[1], self.tile_k)
        k_tiles, first_k = cute.ceil_div(all_k_tiles, config.split_k), 0
        if cutlass.const_expr(self.in_cluster):
            first_k = cta_rank * k_tiles
        if cutlass.const_expr(self.in_cluster and self.scaling is not None):
            # K tiles beyond the last have no scales, so the last CTAs of a split may get fewer k tiles, or 0.
            k_tiles = cutlass.max(cutlass.min(k_tiles, all_k_tiles - first_k), 0)
        states = self._segment_states(given.n, given.parts, buffers, exacts)
        shared = Sm90Shared(
            schedule=schedule,
            m=given.m,
            given=given,
            warp=warp,
            lane=thread % WARP,
            s_a=s_a,
            s_b=s_b,
            tails=tails,
            **vars(states[0]),
            segment_states=states,
            ab_pipeline=ab_pipeline,
            row_pipeline=row_pipeline,
            k_tiles=k_tiles,
            first_k=first_k,
            cta_m=cta_m,
            cta_n=cta_n,
            cta_rank=cta_rank,
            first_item=first_item,
            epilogue_item=epilogue_item,
            item_step=item_step,
            sums=sums,
            scales=scale_stages,
        )

        if warp < WARPS:
            cute.arch.setmaxregister_decrease(self.crew.registers[0])
        self.crew.run(self.crew.roles, warp, shared)

    @cute.jit
    def _load(self, shared: Sm90Shared):
        """The load warp: loads A and B of every k tile."""
        config, schedule, ab_pipeline = self.config, shared.schedule, shared.ab_pipeline
        a_tma, b_tmas, s_a, s_b, tails = shared.given.a, shared.given.bs, shared.s_a, shared.s_b, shared.tails
        cta_layout = cute.make_layout((config.cluster_m, config.cluster_n, 1))
        cta_m, cta_n = shared.cta_m, shared.cta_n
        box_m = config.tile_m // self.a_boxes
        t_bs = [
            self._partition_b(tma, s_b, piece, cta_m)
            for tma, (_, piece) in zip(b_tmas, self.parts_of_b, strict=True)
        ]
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
        ab_state = producer_state(self.stages.ab)
        # Without scales all parts of K are equally long: TMA fills k tiles beyond the last with zeros.
        item, tail_phases = Int32(shared.first_item), Int32(0)
        while schedule.is_valid(item):
            place = schedule.place(item)
            first_box = (place.row * config.cluster_m + cta_m) * self.a_boxes
            boxes = cutlass.min(cute.ceil_div(place.end - place.first, box_m) - first_box, self.a_boxes)
            column = place.column * config.cluster_n + cta_n
            first_k = shared.first_k
            if cutlass.const_expr(config.sums_in_memory):
                # Each part of K writes its own rows of the sums, but reads all rows of A.
                first_k = place.batch * shared.k_tiles
                place = replace(place, first=0, end=shared.m)
            t_sa, t_ga = self._partition_a(a_tma, s_a, place, cta_n)
            boxes_of_a = batches.of_place(t_ga, place)
            k_tiles = self._k_tiles(place, self.tile_k, shared.k_tiles)
            for k_tile in cutlass.range(k_tiles, unroll=1):
                k = first_k + k_tile
                if cutlass.const_expr(self.is_k_grouped):
                    _, t_ga_of_k = self._partition_a(a_tma, s_a, place, cta_n, k_tile)
                    box_of_a = t_ga_of_k[(None, first_box, 0, 0)]
                else:
                    box_of_a = boxes_of_a[(None, first_box, k)]
                if cutlass.const_expr(tails is not None):
                    barrier = cast(Tails, tails).acquire(ab_state, is_cut(place, k_tile, k_tiles))
                else:
                    ab_pipeline.producer_acquire(ab_state)
                    barrier = ab_pipeline.producer_get_barrier(ab_state)
                to_b = {"tma_bar_ptr": barrier, "mcast_mask": b_mask, "cache_policy": b_priority}
                if cutlass.const_expr(self.a_boxes > 1):
                    stage_a = t_sa[(None, None, ab_state.index)]
                    self._load_more(a_tma.atom, boxes_of_a, stage_a, first_box, boxes, k, barrier, a_priority)
                cute.copy(
                    a_tma.atom,
                    box_of_a,
                    t_sa[(None, 0, ab_state.index)],
                    tma_bar_ptr=barrier,
                    mcast_mask=a_mask,
                    cache_policy=a_priority,
                )
                for i in cutlass.range_constexpr(len(b_tmas)):
                    t_sb, t_gb = t_bs[i]
                    stage_b = t_sb[(None, ab_state.index)]
                    if cutlass.const_expr(self.is_k_grouped):
                        _, t_gb_of_k = self._partition_b(b_tmas[i], s_b, i, cta_m, place, k_tile)
                        box_of_b = t_gb_of_k[(None, column, 0, 0)]
                        cute.copy(b_tmas[i].atom, box_of_b, stage_b, **to_b)
                    elif self.parts_of_b[i][0].has(place):
                        within = column - self.parts_of_b[i][0].first * config.cluster_n
                        box_of_b = batches.of_place(t_gb, place)[(None, within, k)]
                        cute.copy(b_tmas[i].atom, box_of_b, stage_b, **to_b)
                if cutlass.const_expr(tails is not None):
                    if is_cut(place, k_tile, k_tiles):
                        tail_phases = cast(Tails, tails).clear(ab_state, place, tail_phases)
                ab_state.advance()
            item += shared.item_step
        ab_pipeline.producer_tail(ab_state)

    @cute.jit
    def _load_exact(self, shared: Sm90Shared):
        """The exact warp: loads the exact operands of one box of subtiles after another."""
        schedule, item_step = shared.schedule, shared.item_step
        exact_state, of_segments = producer_state(self.stages.exact), shared.of_segments()
        item = shared.epilogue_item
        while schedule.is_valid(item):
            for ring in cutlass.range_constexpr(self.rings):
                if schedule.is_valid(item + ring * item_step):
                    place = schedule.place(item + ring * item_step)
                    for i in cutlass.range_constexpr(len(self.segments)):
                        if self.segments[i].has(place):
                            self.by_segment[i]._load_planes(
                                of_segments[i], self.segments[i].within(place), exact_state, ring
                            )
            exact_state.advance(self.boxes * len(self.by_segment[0].rounds))
            item += self.rings * item_step

    @cute.jit
    def _load_planes(
        self,
        shared: Sm90Shared,
        place: Place,
        exact_state: pipeline.PipelineState,
        ring: int,
    ):
        """Loads the exact operands of each box of a tile. If passes and visits both read some, the boxes of
        a block of columns come once for each."""
        config, box = self.config, (BLOCK_M, self.config.box_n)
        elements = BLOCK_M * config.box_n * config.sharing
        ring_state, rounds = exact_state.clone(), self.rounds
        together = self.boxes if len(rounds) == 1 else self.block_subtiles // config.box_subtiles
        for turn in cutlass.range_constexpr(self.boxes * len(rounds)):
            block, within = divmod(turn, together * len(rounds))
            operands, index = rounds[within // together], block * together + within % together
            exact_pipeline = self._stage_of(shared.exact_pipeline, operands, elements)
            stage = in_ring(ring_state, ring)
            exact_pipeline.producer_acquire(stage)
            barrier = exact_pipeline.producer_get_barrier(stage)
            for i in operands:
                for share in cutlass.range_constexpr(config.sharing):
                    coord = self._box_coord(shared, place, index, share)
                    repeats = self.epilogue.shared_loads[i].repeats
                    t_s, t_g = partition_box(shared.load_tmas[i], shared.loads[i], box, coord, place, repeats)
                    cute.copy(
                        shared.load_tmas[i].atom,
                        t_g,
                        t_s[(None, stage.index * config.sharing + share)],
                        tma_bar_ptr=barrier,
                        cache_policy=Int64(EVICT_LAST if repeats else EVICT_FIRST),
                    )
            ring_state.advance()

    @cute.jit
    def _load_scales(self, shared: Sm90Shared):
        """The scale warp: loads the scales of every k tile into the stage of its A and B. The copies of each
        lane count as an arrival at the stage's barrier."""
        stages, schedule, ring = cast(ScaleStages, shared.scales), shared.schedule, shared.ab_pipeline
        scaling, scales, lane = cast(SumScales, self.scaling), shared.given.scales, shared.lane
        state = producer_state(self.stages.ab)
        item = Int32(shared.first_item)
        while schedule.is_valid(item):
            origin = self._origin(shared, schedule.place(item))
            for k_tile in cutlass.range(shared.k_tiles, unroll=1):
                ring.sync_object_empty.wait(state.index, state.phase)
                k = shared.first_k + k_tile
                bring_tile(stages, state.index, scales, scaling, self.config, origin, k, lane)
                ring.sync_object_full.arrive_cp_async_mbarrier(state.index)
                state.advance()
            item += shared.item_step

    @cute.jit
    def _consume(self, shared: Sm90Shared):
        """A consumer warpgroup: multiplies one of its tiles after another and runs the epilogue on each."""
        cute.arch.setmaxregister_increase(self.crew.registers[1])
        config, stages, schedule, item_step = self.config, self.stages, shared.schedule, shared.item_step
        seat = self._seat(shared)
        ab, row = consumer_state(stages.ab), consumer_state(stages.row)
        planes, of_segments = Position(consumer_state(stages.exact), Int32(0)), shared.of_segments()
        item = shared.epilogue_item
        if cutlass.const_expr(self.in_cluster):
            if shared.cta_rank > 0:
                tile = self._tile(shared, schedule.place(shared.first_item), seat.thread, seat.share)
                self._multiply(seat, tile, ab, shared.k_tiles)
                shared.sums.publish(seat.acc, seat.thread_of_all)
        if cutlass.const_expr(config.pingpong):
            ab.advance(seat.ring * self._k_tiles_at(shared, item))
            item += seat.ring * item_step
            if seat.ring == 1:
                seat.turn.pass_on()
            row.advance(seat.ring)
        while schedule.is_valid(item):
            place = schedule.place(item)
            before = ab, planes
            for i in cutlass.range_constexpr(len(self.segments)):
                if self.segments[i].has(place):
                    ab, planes = self.by_segment[i]._compute(
                        of_segments[i], seat, self.segments[i].within(place), row, *before
                    )
            if cutlass.const_expr(stages.row > 0):
                row.advance()
            item += item_step
            if cutlass.const_expr(config.pingpong):
                # The next tile is the other warpgroup's.
                ab.advance(self._k_tiles_at(shared, item))
                item += item_step
                row.advance(Int32(1))
        if cutlass.const_expr(stages.store > 0):
            seat.stores.producer_tail()

    def _seat(self, shared: Sm90Shared) -> Seat:
        """The seat of a thread among the warpgroups that multiply."""
        config, add_mma, set_mma = self.config, shared.given.add_mma, shared.given.set_mma
        thread, _, _ = cute.arch.thread_idx()
        group = cute.arch.warp_redux_sync(Int32(thread // WARPGROUP), "max") - 1
        share = group % config.sharing
        add_mma.set(warpgroup.Field.ACCUMULATE, True)
        set_mma.set(warpgroup.Field.ACCUMULATE, False)
        thr_mma = add_mma.get_slice(share * WARPGROUP)
        operands = WarpgroupOperands(
            ring=shared.ab_pipeline,
            a=add_mma.make_fragment_A(thr_mma.partition_A(shared.s_a)),
            b=[
                add_mma.make_fragment_B(thr_mma.partition_B(self._piece(shared.s_b, i)))
                for i in range(self.column_pieces)
            ],
            adding=add_mma,
            setting=set_mma,
            scales=shared.scales,
            by_rows=self.by_rows,
        )
        return Seat(
            config=config,
            acc=cute.make_rmem_tensor(thr_mma.partition_shape_C((config.tile_m, config.mma_n)), Float32),
            operands=operands,
            group=group,
            thread=thread % WARPGROUP,
            thread_of_all=thread - WARPGROUP,
            warp=shared.warp % WARPS,
            share=share,
            ring=group // config.sharing,
            barrier=pipeline.NamedBarrier(self.groups[0].barrier + group, self.groups[0].threads),
            turn=Turn.of(self.turns[0], group),
            stores=pipeline.PipelineTmaStore.create(
                num_stages=max(self.stages.store, 1), producer_group=agents(Arrivals(self.consume, 1, WARP))
            ),
        )

    @cute.jit
    def _compute(
        self,
        shared: Sm90Shared,
        seat: Seat,
        place: Place,
        row: pipeline.PipelineState,
        ab: pipeline.PipelineState,
        planes: Position,
    ):
        """Multiplies a tile and runs the epilogue on it, with the staged rowvecs of the stage `row`. Returns
        the next stage of A and B and the next position of planes."""
        tile = self._tile(shared, place, seat.thread, seat.share)
        held = self.epilogue.begin(tile, shared.glob)

        if cutlass.const_expr(self.config.pingpong):
            seat.turn.wait()
        k_tiles = self._k_tiles(place, self.tile_k, shared.k_tiles)
        if cutlass.const_expr(self.is_grouped and self.blocks > 1):
            if tile.m - tile.m0 > BLOCK_M:
                ab = self._multiply(seat, tile, ab, k_tiles)
            else:
                # The last rows of a group are often few.
                ab = self._multiply(seat.first_block(), tile, ab, k_tiles)
        else:
            ab = self._multiply(seat, tile, ab, k_tiles)
        if cutlass.const_expr(self.in_cluster):
            shared.sums.reduce(seat.acc, seat.thread_of_all, self.config.split_k)

        rows = []
        if cutlass.const_expr(self.stages.row > 0):
            shared.row_pipeline.consumer_wait(row)
            rows = [s_row[(None, row.index)] for s_row in shared.rows]
        work = Work(shared, seat, place, tile, held, rows)
        planes = self._drain(work, planes)
        self._end(work)
        if cutlass.const_expr(self.stages.row > 0):
            shared.row_pipeline.consumer_release(row)
        return ab, planes

    @cute.jit
    def _multiply(self, seat: Seat, tile: FragmentTile, ab: pipeline.PipelineState, k_tiles: Int32):
        """Multiplies all k tiles, at least one, and returns the pipeline state after them.

        Under ping-pong it passes the turn on as soon as the last k tile has been issued to the tensor cores.
        """
        mainloop, operands, acc = self.mainloop, seat.operands, seat.acc
        release = ab.clone()
        held, ab = mainloop.begin(tile, operands, acc, ab.clone())
        left, most = k_tiles - mainloop.lead, mainloop.k_tiles_a_step
        for _ in cutlass.range(left // most, unroll=1):
            ab, release = self.mainloop.step(operands, acc, held, ab, release, most)
        for halving in cutlass.range_constexpr(1, most.bit_length()):
            count = most >> halving
            if left // count % 2 == 1:
                ab, release = self.mainloop.step(operands, acc, held, ab, release, count)
        if cutlass.const_expr(self.config.pingpong):
            seat.turn.pass_on()
        mainloop.end(operands, acc, held, release)
        return ab

    def _box(self, work: Work, visit: Any) -> tuple[int, int, bool]:
        """The box of a subtile among those of a warpgroup's part of the tile, the subtile's place in it, and
        whether it is the last there."""
        box, part = divmod(work.seat.block * self.visits + visit, self.config.box_subtiles)
        return box, part, part == self.config.box_subtiles - 1

    def _make_room(self, work: Work, visit: Any) -> None:
        if self.stages.store == 0:
            self._pace(work)
        elif self._box(work, visit)[1] == 0:
            work.seat.stores.producer_acquire()
            cute.arch.sync_warp()

    def _pace(self, work: Work) -> None:
        """Keeps the assembler from computing the addresses of all visits at once, which spills."""
        if not self.config.rolled:
            work.seat.barrier.arrive_and_wait()

    def _loaded(
        self, work: Work, at: Position, visit: Any, of_round: int
    ) -> tuple[list[cute.Tensor], Callable[[], None]]:
        """A warp's exact loads of a subtile. It waits at the first subtile of a box, and releases the box
        after the last."""
        shared, seat, stage = work.shared, work.seat, in_ring(at.exact, work.seat.ring)
        _, part, ends = self._box(work, visit)
        if part == 0:
            shared.exact_pipeline.consumer_wait(stage)
        plane = (seat.ring * self.stages.exact + at.exact.index) * self.config.sharing + seat.share
        loads = [self._part_of_box(s_load, plane, (seat.warp, part)) for s_load in shared.loads]
        return loads, partial(release_planes, shared.exact_pipeline, stage) if ends else _keep_box

    def _loads_read(self, work: Work, at: Position, visit: Any) -> Position:
        return super()._loads_read(work, at, visit) if self._box(work, visit)[2] else at

    def _stores(self, work: Work, at: Position, visit: Any) -> list[cute.Tensor]:
        if self.stages.store == 0:
            return []
        place = (0, self._box(work, visit)[1])
        return [self._part_of_box(s_store, self._plane(work, at), place) for s_store in work.shared.stores]

    def _plane(self, work: Work, at: Position) -> Int32:
        """The index of a warp's plane of outputs."""
        return (at.store * self.config.warpgroups + work.seat.group) * WARPS + work.seat.warp

    def _part_of_box(self, planes: cute.Tensor, plane: Int32, place: tuple) -> cute.Tensor:
        """A warp's rows of a subtile in one of the boxes of planes."""
        width = self.config.subtile_n
        return cute.local_tile(in_subtiles(planes[(None, None, plane)], width), (WARP_M, width), place)

    def _leave(self, work: Work, at: Position, visit: Any) -> Position:
        box, _, ends = self._box(work, visit)
        if not ends:
            return at
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        row, column = self._box_coord(work.shared, work.place, box, work.seat.share)
        coord = (row * WARPS + work.seat.warp, column)
        self._store(work, self._plane(work, at), (WARP_M, self.config.box_n), coord)
        work.seat.stores.producer_commit()
        return at._replace(store=(at.store + 1) % self.stages.store)

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
        """Loads the boxes of a tile of A after the first, except those beyond A's last row.

        Call this before the copies that the barrier already expects: their arrival would complete its phase.
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
        """Zeroes every stage of A, because some rows are multiplied but never loaded."""
        vectors = cute.cosize(s_a) * s_a.element_type.width // 128
        words = cute.make_tensor(
            cute.recast_ptr(s_a.iterator, dtype=Int32), cute.make_layout((4, vectors), stride=(1, 4))
        )
        zeros = cute.make_rmem_tensor(4, Int32)
        zeros.fill(0)
        for i in cutlass.range(thread, vectors, self.threads, unroll=1):
            cute.autovec_copy(zeros, words[(None, i)])
        cute.arch.fence_proxy("async.shared", space="cta")

    def _partition_a(
        self, tma: cpasync.TmaInfo, s_a: cute.Tensor, place: Place, cta_n: Int32, k_tile: Int32 | None = None
    ) -> tuple:
        """The boxes of A's stages and their sources in global memory, partitioned for TMA. With `k_tile`, the
        sources begin at that k tile of the group."""
        box = (self.config.tile_m // self.a_boxes, self.tile_k)
        if k_tile is None:
            source = batches.from_first(tma.tma_tensor, place)
        else:
            source = batches.of_k_tile(tma.tma_tensor, place, k_tile)
        return cpasync.tma_partition(
            tma.atom,
            cta_n,
            cute.make_layout(self.config.cluster_n),
            cute.group_modes(cute.local_tile(s_a, box, (None, 0, None)), 0, 2),
            cute.group_modes(batches.boxes(source, box), 0, 2),
        )

    def _piece(self, s_b: cute.Tensor, index: int) -> cute.Tensor:
        """The columns of one piece, which an MMA multiplies at once, in all stages of B."""
        columns = self.config.mma_n // self.column_pieces
        return cute.local_tile(s_b, (columns, cute.size(s_b, mode=[1]), self.stages.ab), (index, 0, 0))

    def _partition_b(
        self,
        tma: cpasync.TmaInfo,
        s_b: cute.Tensor,
        index: int,
        cta_m: Int32,
        place: Place | None = None,
        k_tile: Int32 | None = None,
    ) -> tuple:
        """The stages of a piece of B and its source tiles in global memory, partitioned for TMA. With `place`
        and `k_tile`, the sources begin at that k tile of the place's group."""
        box = (self.config.piece_n, cute.size(s_b, mode=[1]))
        s_piece = cute.local_tile(s_b, (*box, self.stages.ab), (index, 0, 0))
        source = tma.tma_tensor if place is None else batches.of_k_tile(tma.tma_tensor, place, k_tile)
        g_piece = batches.boxes(source, box)
        return cpasync.tma_partition(
            tma.atom,
            cta_m,
            cute.make_layout(self.config.cluster_m),
            cute.group_modes(s_piece, 0, 2),
            cute.group_modes(g_piece, 0, 2),
        )

    def _k_tiles_at(self, shared: Sm90Shared, item: Int32) -> Int32:
        """Like `_k_tiles`, for an item that may lie beyond the last."""
        if self.is_k_grouped:
            return self._k_tiles(shared.schedule.place(item), self.tile_k, shared.k_tiles)
        return shared.k_tiles

    def _origin(self, shared: Sm90Shared, place: Place) -> tuple[Int32, Int32]:
        """The first row and column of a CTA's tile, among those of its product."""
        config = self.config
        m0 = (place.row * config.cluster_m + shared.cta_m) * config.tile_m
        return m0, (place.column * config.cluster_n + shared.cta_n) * config.tile_n

    def _box_coord(self, shared: Sm90Shared, place: Place, index: int, share: Any) -> tuple[Int32, Int32]:
        """The place of a box of a warpgroup's part of a tile, counted in (64, box_n) boxes of its product."""
        (m0, n0), (block, step) = self._origin(shared, place), divmod(index, self.boxes // self.blocks)
        row = m0 // BLOCK_M + block * self.config.sharing + share
        return row, n0 // self.config.box_n + step


@dataclass(frozen=True)
class Sm90Arguments:
    """The arguments of the kernel: the MMA that adds to the accumulators and the one that overwrites them,
    maps and layouts of A and of each B, the `parts` of the segments, and the rest as the host has it."""

    add_mma: cute.TiledMma
    set_mma: cute.TiledMma
    a: cpasync.TmaInfo
    bs: list[cpasync.TmaInfo]
    a_smem: cute.ComposedLayout
    b_smem: cute.ComposedLayout
    parts: list[Part]
    scales: list[cute.Tensor]
    m: Int32
    n: Int32
    offsets: cute.Tensor | None


@dataclass(frozen=True)
class Sm90Shared(Shared):
    """`Shared`, with the kernel's arguments, the stages of A and B, the CTA's place in its cluster, and its
    part of K: `k_tiles` from `first_k` on."""

    given: Sm90Arguments
    s_a: cute.Tensor
    s_b: cute.Tensor
    tails: Tails | None
    k_tiles: Int32
    first_k: Int32
    cta_m: Int32
    cta_n: Int32
    cta_rank: Int32
    sums: Any
    scales: ScaleStages | None


@dataclass(frozen=True, kw_only=True)
class Seat(RegisterSeat):
    """The position of a thread among the warpgroups that multiply, and what it multiplies.

    `thread` and `warp` are indices within the warpgroup, `thread_of_all` is the thread's index among those of
    all warpgroups, and `group` is the warpgroup's index. `share` is the part of each tile that the warpgroup
    computes, `ring` the ring of exact loads that it reads, `barrier` the named barrier of its threads, and
    `turn` its turn to multiply. `stores` are the TMA stores of the warp.
    """

    operands: WarpgroupOperands
    group: Int32
    thread: Int32
    thread_of_all: Int32
    warp: Int32
    share: Any
    ring: Any
    barrier: pipeline.NamedBarrier
    turn: Turn
    stores: pipeline.PipelineTmaStore

    def first_block(self) -> Seat:
        """The seat of a thread that multiplies only the first block of 64 rows."""
        return replace(self, operands=self.operands.first_block(), acc=block_of(self.acc, 0))


def _keep_box() -> None:
    """Keeps a box of planes that the next subtile reads, too."""


def _check_shares(operand: str, extent: int, ctas: int) -> None:
    """Raises ValueError if the CTAs of a multicast can't each load an equal share of a stage.

    They divide an operand's rows among them. If the operand is contiguous along its rows, they divide its k
    indices instead, all of which every TMA box spans.
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
