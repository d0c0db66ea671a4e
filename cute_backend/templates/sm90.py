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
    row    2       1 warp of staging x 32 threads = 32  4 warps of consume x 32 threads = 128
    exact  8       1 warp of exact                      4 warps of consume

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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warpgroup import OperandSource
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_backend.planning import TILE_K_BYTES, Stages, TileConfig
from cute_backend.planning.sum_scales import SumScales
from cute_backend.spec import ProductKind
from cute_backend.templates import batch as batches
from cute_backend.templates.block_scales import ScaleStages
from cute_backend.templates.converted import HELD_VALUES, WARP_ROWS
from cute_backend.templates.crew import WARP, WARPS, Arrivals, Crew, Meeting, Ring, Role, one
from cute_backend.templates.drain import Position, Work
from cute_backend.templates.epilogue import Epilogue
from cute_backend.templates.few_rows import A_BOXES, FurtherBoxes, clear
from cute_backend.templates.fragment_tile import FragmentTile
from cute_backend.templates.fragments import FragmentGemm
from cute_backend.templates.loading import Source, Tiles, all_boxes
from cute_backend.templates.mainloop import (
    Sm90Converting,
    Sm90Mainloop,
    Sm90Plain,
    WarpgroupOperands,
    check_face,
)
from cute_backend.templates.opaque import opaque
from cute_backend.templates.overlap import await_earlier_kernels
from cute_backend.templates.rings import (
    agents,
    check_stage,
    consumer_state,
    of_one_stage,
    producer_state,
    stages_of,
    swizzled,
)
from cute_backend.templates.scheduler import Place
from cute_backend.templates.segments import Segment, allocate_buffers, dealt
from cute_backend.templates.sums import sums_of
from cute_backend.templates.tma_gemm import Arguments, TmaShared
from cute_backend.templates.warp_planes import BLOCK_M, EVICT_FIRST, EVICT_LAST, WARPGROUP, WarpPlanes
from cute_backend.templates.warpgroups import Seat, Turn

ALONE_REGISTERS = 248
"""Registers per thread of a warpgroup that alone converts the weights of segments, each of which has a
mainloop of its own. With 232, nibbles in groups of 128 spilled 24 bytes in 64 x 32 and in 64 x 64. No thread
has more than 255."""

LOAD_REGISTERS = 40
"""Registers per thread of the loading warpgroup if each other thread has `Target.epilogue_registers`. It has
those, too, that the others leave (`TileConfig.epilogue_registers`)."""


class Sm90Gemm(WarpPlanes, FragmentGemm):
    """D = epilogue(A B) for A (M, K) and B (K, N), any of whose sizes may be dynamic.

    Several products may share one A. Each then has its own B, all in the same layout, or they share one B of
    (K, 2 N) with interleaved columns. Each pipeline stage holds the columns of all products, and one MMA
    spans all of them. Or several products share one B, and each has its own A, all in the same layout
    (`TileConfig.stacked`): a stage then holds the rows of all products.

    fp8 and int8 operands must be K-major; 16-bit operands may be K-major or not. Base addresses, the strides
    of A and B, and the strides of every operand in `shared_loads` and `shared_stores` must be multiples of 16
    bytes. If `mainloop` is omitted, the tensor cores add up all k tiles.

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
        if self.mainloop.converts:
            check_face(self.mainloop, Sm90Converting)
        super().__init__(epilogue, config, stages, kind=kind, scaling=self.mainloop.scaling)
        pieces = self.mainloop.pieces
        self.by_rows = 1 < pieces == self.blocks
        self.column_pieces = 1 if self.by_rows else pieces
        if self.column_pieces > 1 and self.blocks > 1:
            raise ValueError(
                f"tile {config.name} gives a warpgroup {self.blocks} blocks of 64 rows, and its mainloop "
                f"multiplies {pieces} pieces: of the columns, which takes one block, or blocks of rows"
            )
        if (self.is_grouped or self.is_k_grouped) and config.split_k > 1:
            raise ValueError(f"tile {config.name} has split-K, which a grouped product does not support")
        self._set_boxes()
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
        scales = Arrivals(self.scales, 1, WARP) if self.scaling.by_warps else None
        emptied = Arrivals(self.consume, warps, 1, readers)
        self.ab_ring = Ring("ab", stages.ab, one(self.load), emptied, scales)
        rings = (self.ab_ring, *self._epilogue_rings(self.consume, warps))
        optional = ((self.exact, self.exact_ring), (self.staging, self.row_ring), (self.scales, scales))
        self.turns = tuple(Meeting(f"turn {i}", 1 + i, ((self.consume, 2 * WARPS),)) for i in range(2))
        self.groups = tuple(
            Meeting(f"warpgroup {i}", 3 + i, ((self.consume, WARPS),)) for i in range(config.warpgroups)
        )
        dealt = config.epilogue_registers(self.kind, len(self.epilogue.staged))
        loading = LOAD_REGISTERS + (config.target.epilogue_registers - dealt) * config.warpgroups
        if self.mainloop.converts and len(self.segments) > 1 and config.warpgroups == 1:
            dealt = ALONE_REGISTERS
        return Crew(
            roles=(self.load, *(role for role, needed in optional if needed), self.consume),
            rings=rings,
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
        further_as: Sequence[cute.Tensor] = (),
    ):
        """Launches the kernel for A (M, K), each B (K, N) and the epilogue's operands, in the order of its
        names. Stacked products, or segments of rows, after the first have `further_as`. `scales` lists the
        scales of A's blocks, (rows, k), then those of each B's, (k, columns); `offsets` are the offsets of a
        grouped product."""
        config = self.config
        self.a_dtype, self.b_dtype = a.element_type, bs[0].element_type
        # The operand that is not converted has the values that are multiplied.
        multiplied = self.b_dtype if self.mainloop.converts else self.a_dtype
        self.sum_type = sums_of(self.a_dtype, self.b_dtype)
        self.tile_k = tile_k = TILE_K_BYTES * 8 // self.a_dtype.width
        b_k = tile_k * config.packing
        self.group_step = 1 if offsets is None else batches.group_step(a, self.is_k_grouped)
        a, bs = batches.operands(a, bs, self.kind, tile_k)
        m, n = self._height(a.shape[0]), self._width(cute.size(bs[0], mode=[0]))
        a_layout, b_layout = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(bs[0])
        tile = (config.mma_m, config.mma_n, tile_k)
        b_tile, piece = (config.mma_m, config.mma_n, b_k), (config.tile_m, config.piece_n, b_k)
        # Two identical MMAs: the first will add to the accumulators, the second will overwrite them.
        add_mma, set_mma = [
            hopper.make_trivial_tiled_mma(
                multiplied,
                self.b_dtype,
                a_layout.sm90_mma_major_mode(),
                b_layout.sm90_mma_major_mode(),
                self.sum_type,
                (config.sharing, 1, 1),
                (BLOCK_M, config.mma_n // self.column_pieces),
                OperandSource.RMEM if self.mainloop.converts else OperandSource.SMEM,
            )
            for _ in range(2)
        ]
        a_smem = hopper.make_smem_layout_a(a_layout, tile, self.a_dtype, self.stages.ab)
        b_smem = hopper.make_smem_layout_b(b_layout, b_tile, self.b_dtype, self.stages.ab)
        apart = config.tile_m == BLOCK_M and config.cluster_n == 1 and a_layout.is_k_major_a()
        apart = apart and not self.is_k_grouped and len(further_as) == 0
        self.a_boxes = A_BOXES if cutlass.const_expr(apart) else 1
        box_m = config.tile_m // self.a_boxes
        _check_shares("A", box_m if a_layout.is_k_major_a() else tile_k, config.cluster_n)
        _check_shares("B", config.piece_n if b_layout.is_k_major_b() else b_k, config.cluster_m)
        a_box = hopper.make_smem_layout_a(a_layout, (box_m, config.tile_n, tile_k), self.a_dtype, 1)
        a_tmas = [_tma_load(each, a_box, (box_m, tile_k), config.cluster_n) for each in (a, *further_as)]
        piece_smem = hopper.make_smem_layout_b(b_layout, piece, self.b_dtype, self.stages.ab)
        b_tmas = [_tma_load(b, piece_smem, piece[1:], config.cluster_m) for b in bs]

        parts = self._parts(
            dealt(self._epilogues, loads, stores),
            hopper.make_smem_layout_epi,
            m,
            batches.products(a, offsets),
        )
        given = Sm90Arguments(
            a=a_tmas[0],
            further_as=a_tmas[1:],
            bs=b_tmas,
            a_smem=a_smem,
            b_smem=b_smem,
            parts=parts,
            scale_tmas=[],
            scales=list(scales),
            m=m,
            n=n,
            offsets=offsets,
            add_mma=add_mma,
            set_mma=set_mma,
        )
        self._launch(given, max_active_clusters, stream)

    @cute.kernel
    def kernel(self, given: Sm90Arguments):
        config, stages = self.config, self.stages
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta_layout = cute.make_layout((config.cluster_m, config.cluster_n, 1))
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cta_m, cta_n, _ = cta_layout.get_flat_coord(Int32(0) if self.in_cluster else rank)
        start = self._start(given)
        self._prefetch(given, warp)

        smem = SmemAllocator()
        # Barriers come last: ahead of buffers aligned to 1024 bytes, they would take up 1024 bytes.
        s_a = swizzled(smem, self.a_dtype, given.a_smem)
        s_b = swizzled(smem, self.b_dtype, given.b_smem)
        buffers = allocate_buffers(smem, self.epilogue, given.parts, config.staged_n, stages.row)
        scale_stages = None
        if cutlass.const_expr(self.scaling.by_warps):
            scale_stages = ScaleStages.allocate(smem, stages.ab, cast(SumScales, self.scaling), config)
        sums = self._sums(smem, warp, WARPGROUP * config.sharing)
        a_bytes = cute.size_in_bytes(self.a_dtype, of_one_stage(given.a_smem))
        self.box_bytes = a_bytes // self.a_boxes
        b_bytes = cute.size_in_bytes(self.b_dtype, of_one_stage(given.b_smem))
        check_stage(config, a_bytes + b_bytes)
        ab_pipeline = pipeline.PipelineTmaAsync.create(
            **stages_of(smem, self.ab_ring),
            tx_count=self.box_bytes + b_bytes,
            cta_layout_vmnk=cute.make_layout((1, *cta_layout.shape)),
        )
        tails = self._tails(smem, warp, ab_pipeline, [s_a, s_b])
        of_epilogue = self._epilogue_state(smem, given, buffers)
        if cutlass.const_expr(self.a_boxes > 1):
            # The last CTAs of a cluster may lie wholly beyond A's last row.
            if Boolean(self.is_grouped) | (given.m % (config.tile_m * config.cluster_m) != 0):
                clear(s_a, thread, self.threads)
        in_step = cute.make_layout(config.cluster_size)
        pipeline.pipeline_init_arrive(cluster_shape_mn=in_step, is_relaxed=True)
        await_earlier_kernels()
        pipeline.pipeline_init_wait(cluster_shape_mn=in_step)
        items = self._items(given, start, rank)
        shared = Sm90Shared(
            items=items,
            given=given,
            warp=warp,
            lane=thread % WARP,
            s_a=s_a,
            s_b=s_b,
            tails=tails,
            **of_epilogue,
            ab_pipeline=ab_pipeline,
            cta_m=cta_m,
            cta_n=cta_n,
            rank=rank,
            sums=sums,
            scales=scale_stages,
        )

        if warp < WARPS:
            cute.arch.setmaxregister_decrease(self.crew.registers[0])
        self.crew.run(self.crew.roles, warp, shared)

    @cute.jit
    def _sources(self, shared: Sm90Shared):
        config, given, grid = self.config, shared.given, shared.items.schedule
        cta_m, cta_n = shared.cta_m, shared.cta_n
        a_priority, b_priority = Int64(EVICT_FIRST), Int64(EVICT_FIRST)
        if grid.grid_n > 1:
            a_priority = Int64(EVICT_LAST)
        if grid.grid_m > 1:
            b_priority = Int64(EVICT_LAST)
        box_a = (config.tile_m // self.a_boxes, self.tile_k)
        box_b = (config.piece_n, cute.size(shared.s_b, mode=[1]))
        layout, coord = cute.make_layout((config.cluster_m, config.cluster_n, 1)), (cta_m, cta_n, 0)
        masks = [
            cute.make_layout_image_mask(layout, coord, mode=mode) if ctas > 1 else None
            for mode, ctas in ((0, config.cluster_m), (1, config.cluster_n))
        ]
        every_a = [
            Source(
                tma,
                self._rows_of(shared.s_a, product, box_a),
                partial(all_boxes, box_a),
                partial(self._row, shared, segment),
                cta_n,
                config.cluster_n,
                has=segment.has,
                follows=True,
                options={"mcast_mask": masks[1], "cache_policy": a_priority},
            )
            for tma, (segment, product) in zip([given.a, *given.further_as], self.parts_of_a, strict=True)
        ]
        stages_b = (*box_b, self.stages.ab)
        bs = [
            Source(
                tma,
                cute.group_modes(cute.local_tile(shared.s_b, stages_b, (piece, 0, 0)), 0, 2),
                partial(all_boxes, box_b),
                partial(self._column, shared, segment),
                cta_m,
                config.cluster_m,
                has=segment.has,
                options={"mcast_mask": masks[0], "cache_policy": b_priority},
            )
            for tma, (segment, piece) in zip(given.bs, self.parts_of_b, strict=True)
        ]
        return [*every_a, *bs]

    def _rows_of(self, s_a: cute.Tensor, product: int, box: tuple[int, int]) -> cute.Tensor:
        """The boxes of a product's rows in all stages of A, (box, index, stage)."""
        shape = (self.config.tile_m, self.tile_k, self.stages.ab)
        rows = cute.local_tile(s_a, shape, (product, 0, 0))
        return cute.group_modes(cute.local_tile(rows, box, (None, 0, None)), 0, 2)

    def _row(self, shared: Sm90Shared, segment: Segment, place: Place) -> Int32:
        """The first of the CTA's boxes of rows, counted from the segment's first."""
        row = segment.within(place).row
        return (row * self.config.cluster_m + shared.cta_m) * self.a_boxes

    def _column(self, shared: Sm90Shared, segment: Segment, place: Place) -> Int32:
        """The CTA's column of tiles, counted from the segment's first."""
        width = self.config.cluster_n
        return place.column * width + shared.cta_n - segment.first * width

    def _beside(self, shared: Sm90Shared, place: Place, a: Tiles) -> Any:
        if self.a_boxes == 1:
            return super()._beside(shared, place, a)
        rows = shared.items.of_a(place)
        box_m = self.config.tile_m // self.a_boxes
        count = cutlass.min(cute.ceil_div(rows.end - rows.first, box_m) - a.line, self.a_boxes)
        return FurtherBoxes(a, count, self.box_bytes)

    @cute.jit
    def _load_scales(self, shared: Sm90Shared):
        """The scale warp: loads the scales of every k tile into the stage of its A and B. The copies of each
        lane count as an arrival at the stage's barrier."""
        stages, items, ring = cast(ScaleStages, shared.scales), shared.items, shared.ab_pipeline
        state = producer_state(self.stages.ab)
        item = Int32(items.first)
        while items.is_valid(item):
            place = items.place(item)
            origin, begin = self._origin(shared, place), items.begin_k(place.batch)
            for k_tile in cutlass.range(items.k_tiles_of(place), unroll=1):
                ring.sync_object_empty.wait(state.index, state.phase)
                k = begin + k_tile
                stages.bring_tile(state.index, shared.given.scales, origin, k, shared.lane)
                ring.sync_object_full.arrive_cp_async_mbarrier(state.index)
                state.advance()
            item += items.step

    @cute.jit
    def _consume(self, shared: Sm90Shared):
        """A consumer warpgroup: multiplies one of its tiles after another and runs the epilogue on each."""
        cute.arch.setmaxregister_increase(self.crew.registers[1])
        config, stages, items = self.config, self.stages, shared.items
        seat = self._seat(shared)
        ab, row = consumer_state(stages.ab), consumer_state(stages.row)
        planes, of_segments = Position(consumer_state(stages.exact), Int32(0)), shared.of_segments()
        item = items.epilogue
        if cutlass.const_expr(self.in_cluster):
            if shared.rank > 0:
                place = items.place(items.first)
                tile = self._tile(shared, place, seat.thread, seat.share)
                self._multiply(self._at(shared, seat, place), tile, ab, items.k_tiles)
                shared.sums.publish(seat.acc, seat.thread_of_all)
        if cutlass.const_expr(config.pingpong):
            ab.advance(seat.ring * items.k_tiles_at(item))
            item += seat.ring * items.step
            if seat.ring == 1:
                seat.turn.pass_on()
            row.advance(seat.ring)
        while items.is_valid(item):
            place = items.place(item)
            before = Progress(ab, row, planes)
            for i in cutlass.range_constexpr(len(self.segments)):
                if self.segments[i].has(place):
                    ab, planes = self.by_segment[i]._compute(
                        of_segments[i], seat, self.segments[i].within(place), before
                    )
            if cutlass.const_expr(stages.row > 0):
                row.advance()
            item += items.step
            if cutlass.const_expr(config.pingpong):
                # The next tile is the other warpgroup's.
                ab.advance(items.k_tiles_at(item))
                item += items.step
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
            a=self._of_a(shared, thr_mma, share),
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
            acc=cute.make_rmem_tensor(thr_mma.partition_shape_C((config.mma_m, config.mma_n)), self.sum_type),
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
            traced_once=self._traces_once(),
        )

    def _traces_once(self) -> bool:
        """Whether one visit is traced, for all. It isn't in a kernel that

        - writes nothing by TMA. The addresses of its elements lie at constant distances, which the compiler
          finds only in visits that were traced one by one: up to 9 percent of the kernel's instructions.
        - has boxes of several subtiles. One of these waits for a box, and another leaves it.
        - converts A. Its mainloop needs nearly all registers, and one such kernel spilled.
        """
        return self.stages.store > 0 and self.config.box_subtiles == 1 and not self.mainloop.converts

    def _of_a(self, shared: Sm90Shared, mma: cute.ThrMma, share: Int32) -> Any:
        """The fragments of all stages of A, or A itself, as a thread converts it."""
        if not self.mainloop.converts:
            return mma.make_fragment_A(mma.partition_A(shared.s_a))
        products = self.config.stacked
        shape = mma.partition_shape_A((self.config.mma_m, HELD_VALUES // products))
        fragments = cute.make_rmem_tensor(shape, self.b_dtype)
        row = share * BLOCK_M + shared.warp % WARPS * WARP_ROWS
        mainloop = cast(Sm90Converting, self.mainloop)
        given, block_rows = shared.given, self.config.sharing * BLOCK_M
        rows = Int32(given.m)
        return mainloop.stored(shared.s_a, fragments, row, block_rows, rows, products)

    def _at(self, shared: Sm90Shared, seat: Seat, place: Place) -> Seat:
        """The seat of a thread at a place, where A in groups of K has scales and zeros of its own."""
        if not self.mainloop.converts:
            return seat
        row, _ = self._origin(shared, place)
        begin = shared.items.begin_k(place.batch)
        if len(self.segments) > 1:
            # Else the addresses of the first groups of all segments would be computed ahead of all tiles, and
            # kept: 40 bytes were spilled for nibbles in 64 x 16.
            begin = opaque(Int32(begin))
        stored = seat.operands.a.at(row, begin, shared.beside)
        return replace(seat, operands=replace(seat.operands, a=stored))

    @cute.jit
    def _compute(self, shared: Sm90Shared, seat: Seat, place: Place, at: Progress):
        """Multiplies a tile and runs the epilogue on it. Returns the next stage of A and B and the next
        position of planes."""
        ab, row, planes = at
        seat = self._at(shared, seat, place)
        tile = self._tile(shared, place, seat.thread, seat.share)
        held = self.epilogue.begin(tile, shared.glob)

        if cutlass.const_expr(self.config.pingpong):
            seat.turn.wait()
        k_tiles = shared.items.k_tiles_of(place)
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
        work = Work(shared, seat, place, tile, held, rows, self.config.products)
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

    def _piece(self, s_b: cute.Tensor, index: int) -> cute.Tensor:
        """The columns of one piece, which an MMA multiplies at once, in all stages of B."""
        columns = self.config.mma_n // self.column_pieces
        return cute.local_tile(s_b, (columns, cute.size(s_b, mode=[1]), self.stages.ab), (index, 0, 0))

    def _origin(self, shared: Sm90Shared, place: Place) -> tuple[Int32, Int32]:
        """The first row and column of a CTA's tile, among those of its product."""
        config = self.config
        m0 = (place.row * config.cluster_m + shared.cta_m) * config.tile_m
        return m0, (place.column * config.cluster_n + shared.cta_n) * config.tile_n


class Progress(NamedTuple):
    """The stages of a warp that multiplies: the next ones of A and B and of staged rowvecs, and the next
    position of planes."""

    ab: pipeline.PipelineState
    row: pipeline.PipelineState
    planes: Position


@dataclass(frozen=True)
class Sm90Arguments(Arguments):
    """`Arguments`, with the MMA that adds to the accumulators and the one that overwrites them."""

    add_mma: cute.TiledMma
    set_mma: cute.TiledMma


@dataclass(frozen=True)
class Sm90Shared(TmaShared):
    """`TmaShared`, with the CTA's place in its cluster."""

    cta_m: Int32
    cta_n: Int32


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
    return cpasync.make_tiled_tma_atom(op, tensor, of_one_stage(staged), box, num_multicast=multicast)
