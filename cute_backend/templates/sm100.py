"""The Blackwell kernel: a warp-specialised, persistent GEMM on tcgen05 with an epilogue plugged in.

Each warp has one job, and rings of stages in shared memory or tensor memory connect the warps. If the
epilogue stages a rowvec, loads a plane and stores one, a CTA of tile 256x128_2x1_2cta has:

    warps   role      job
    0 to 3  epilogue  begin | accumulator wait | visit each subtile, store by TMA
    4       multiply  tcgen05.mma over all k tiles into one of two accumulators
    5       load      A and B of a k tile, by TMA with multicast
    6       staging   staged rowvecs of a tile
    7       exact     exact loads of a subtile, by TMA

    ring   stages  filled by                            emptied by
    ab     6       1 warp of load                       1 warp of multiply
    acc    2       1 warp of multiply                   4 warps of epilogue x 2 CTAs = 8
    row    2       1 warp of staging x 32 threads = 32  4 warps of epilogue x 32 threads = 128
    exact  4       1 warp of exact                      4 warps of epilogue

    barrier  of                    threads
    1        the end of a subtile  128
    2        tensor memory         160

The table counts the arrivals at a ring's barriers in one phase. Tensor memory holds two accumulators, so the
epilogue of one tile runs during the MMA of the next.

With `ctas` = 2, a pair of CTAs shares one MMA. Each loads half of A's rows and half of B's columns, the even
CTA issues the instruction, and each finds the accumulators of its own half of the rows in its own tensor
memory.

With `column_groups` = 2, a second warpgroup runs the epilogue of the other half of the tile's columns, with
its own shared memory and TMA stores. The warps with other roles give up registers to both.

With split-K, only the first CTA of a cluster runs the epilogue; the warpgroups of the others publish their
sums to it (`split_k.py`).

Block scales that the MMA applies are loaded with A and B, into the same stages. In tensor memory they lie
behind the accumulators (`mma_scaled.py`). Where the warps of the epilogue scale the sums of each k tile, the
accumulators are these sums, four of them at most, and the load warp also brings scales, by cp.async, into a
ring of their own (`partial_sums.py`).
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
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_backend.planning import TILE_K_BYTES, Stages, TileConfig
from cute_backend.planning.sum_scales import SumScales
from cute_backend.planning.tiles import STARTING_REGISTERS
from cute_backend.spec import SCALE_TILE, ProductKind
from cute_backend.templates import batch as batches
from cute_backend.templates.crew import WARP, WARPS, Arrivals, Crew, Meeting, Ring, Role, one
from cute_backend.templates.drain import Position, Work
from cute_backend.templates.epilogue import Epilogue
from cute_backend.templates.loading import Source, Tiles
from cute_backend.templates.mainloop import Sm100Mainloop, Sm100Plain, check_face
from cute_backend.templates.mma_scaled import ScaleBoxes
from cute_backend.templates.mma_warp import MmaWarp
from cute_backend.templates.overlap import await_earlier_kernels
from cute_backend.templates.partial_sums import PartialSums, ScaleRing
from cute_backend.templates.rings import (
    advanced,
    agents,
    check_stage,
    consumer_state,
    named_barrier,
    producer_state,
    stages_of,
    swizzled,
)
from cute_backend.templates.row_tile import Sm100Tile
from cute_backend.templates.scheduler import Place
from cute_backend.templates.segments import Segment, allocate_buffers, dealt
from cute_backend.templates.sums import sums_of
from cute_backend.templates.tensor_memory import WARPGROUP, Copy, TensorMemorySeat, Thread
from cute_backend.templates.tile import Corner
from cute_backend.templates.tma_gemm import Arguments, TmaShared
from cute_backend.templates.warpgroup_planes import CTA_M


class Sm100Gemm(MmaWarp):
    """D = epilogue(A B) for A (M, K) and B (K, N), any of whose sizes may be dynamic.

    Several products of one A take either a B each, all of one layout, or one B (K, 2 N), in which the
    columns of two products alternate. Each stage of the pipeline holds the columns of all products, and the
    MMA is as wide as they are together. Where a pair of CTAs shares the MMA, each loads its part of the
    columns of every B, and its stage holds these parts one after another.

    fp8 operands are K-major; 16-bit operands are contiguous along either mode. Base addresses are multiples
    of 16 bytes, and so are the strides of both operands and of everything in `shared_loads` and
    `shared_stores`. `config.tile_m` is 128 with one CTA per MMA and 256 with two. Raises ValueError for any
    other tile, or if shared memory runs out.

    A BATCHED product has A (B, M, K) and B (B, K, N); D and the epilogue's operands have B * M rows in all.
    A GROUPED product has A (M, K) and B (G, K, N), and `offsets` (G,) that only the device reads. Rows beyond
    the last group are not written, nor is anything else, whatever `offsets` holds. A K_GROUPED product has A
    (M, K) and B (K, N), contiguous along K in fp8 and not in 16 bits, and `offsets` (G,) of K. D is (G * M,
    N); the part of an empty group is the epilogue of zeros.
    """

    def __init__(
        self,
        epilogue: Epilogue,
        config: TileConfig,
        stages: Stages,
        mainloop: Sm100Mainloop | None = None,
        *,
        kind: ProductKind = ProductKind.DENSE,
    ):
        if config.cta_rows != CTA_M or config.cluster_m % config.ctas:
            raise ValueError(
                f"tile {config.name} gives each of {config.ctas} CTAs {config.cta_rows} rows in clusters "
                f"{config.cluster_m} high; it takes {CTA_M} rows, and heights that the CTAs of an MMA divide"
            )
        self.mainloop = mainloop or Sm100Plain()
        check_face(self.mainloop, Sm100Mainloop)
        super().__init__(epilogue, config, stages, kind=kind, scaling=self.mainloop.scaling)
        self.acc_stages = self.scaling.acc_stages(config)
        self.block_scales = cast(SumScales, self.scaling) if self.scaling.by_warps else None
        self.scale_rows = SCALE_TILE[0] if self.scaling.by_tma else 0
        self.group = tcgen05.CtaGroup.TWO if config.ctas == 2 else tcgen05.CtaGroup.ONE
        self._set_boxes()
        self.crew = self._crew()

    def _crew(self) -> Crew:
        """The roles of a CTA and their rings. The module's docstring lists them for one tile."""
        config, stages = self.config, self.stages
        # The epilogue's warps come first: a warp's number decides which lanes of tensor memory it can read.
        groups, warps = config.warpgroups, WARPS * config.warpgroups
        self.visitors = Role(
            "epilogue",
            0,
            warps,
            "begin | accumulator wait | visit each subtile, store by TMA",
            self._visit_tiles,
        )
        self.multiply = Role(
            "multiply",
            warps,
            1,
            "tcgen05.mma over all k tiles into one of two accumulators",
            self._multiply,
        )
        self.load = Role("load", warps + 1, 1, "A and B of a k tile, by TMA with multicast", self._load)
        self.staging = Role("staging", warps + 2, 1, "staged rowvecs of a tile", self._stage_rows)
        exact = warps + 2 + bool(stages.row)
        self.exact = Role("exact", exact, 1, "exact loads of a subtile, by TMA", self._load_exact)
        # A stage is free once every MMA that reads what the CTA loads is done: those of its row and column.
        readers = config.cluster_m // config.ctas + config.cluster_n - 1
        self.ab_ring = Ring("ab", stages.ab, one(self.load), Arrivals(self.multiply, 1, 1, readers))
        finished = Arrivals(self.visitors, warps, 1, config.ctas)
        self.acc_ring = Ring("acc", self.acc_stages, one(self.multiply), finished)
        roles, rings = [self.load, self.multiply], [self.ab_ring, self.acc_ring]
        self.scale_ring = None
        if self.block_scales is not None:
            filled, emptied = Arrivals(self.load, 1, WARP), Arrivals(self.visitors, warps, 1)
            self.scale_ring = Ring("scales", stages.ab + self.block_scales.ahead(config), filled, emptied)
        rings += self._epilogue_rings(self.visitors, warps)
        rings += [self.scale_ring] if self.scale_ring else []
        optional = ((self.staging, self.row_ring), (self.exact, self.exact_ring))
        roles += [*[role for role, ring in optional if ring], self.visitors]
        of_group = [f" of half {i}" * (groups > 1) for i in range(groups)]
        self.subtile_meetings = tuple(
            Meeting(f"the end of a subtile{half}", 1 + i, ((self.visitors, WARPS),))
            for i, half in enumerate(of_group)
        )
        self.tmem_meeting = Meeting("tensor memory", 1 + groups, ((self.visitors, warps), (self.multiply, 1)))
        meetings, self.last_meeting = (*self.subtile_meetings, self.tmem_meeting), self.subtile_meetings[0]
        if groups > 1:
            self.last_meeting = Meeting("the end", 2 + groups, ((self.visitors, warps),))
            meetings += (self.last_meeting,)
        dealt: tuple[int, ...] = ()
        if groups > 1:
            dealt = (config.epilogue_registers(self.kind, len(self.epilogue.staged)),) * groups
            dealt += (STARTING_REGISTERS * (groups + 1) - sum(dealt),)
        return Crew(tuple(roles), tuple(rings), meetings, dealt)

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
        """Launches the kernel for A (M, K), each B (K, N) and the epilogue's operands, in its names' order.
        `scales` are those of the blocks of A, then of each B; `offsets` are those of a grouped product."""
        config, mainloop = self.config, self.mainloop
        a, bs = mainloop.values(a), [mainloop.values(b) for b in bs]
        self.a_dtype, self.b_dtype = a.element_type, bs[0].element_type
        self.sum_type = sums_of(self.a_dtype)
        self.tile_k = TILE_K_BYTES * 8 // self.a_dtype.width
        self.tile = (config.tile_m, config.mma_n, self.tile_k)
        self.group_step = 1 if offsets is None else batches.group_step(a, self.is_k_grouped)
        a, bs = batches.operands(a, bs, self.kind, self.tile_k)
        m, n = cute.size(a, mode=[0]), self._width(cute.size(bs[0], mode=[0]))
        self.piece = (config.tile_m, config.piece_n * config.ctas, self.tile_k)
        # The first multiplies; the second only gives the part of one B's tile that a CTA loads.
        majors = [LayoutEnum.from_tensor(operand).mma_major_mode() for operand in (a, bs[0])]
        tiled_mma, piece_mma = [
            mainloop.instruction((self.a_dtype, self.b_dtype), majors, self.group, tile[:2])
            for tile in (self.tile, self.piece)
        ]
        # (CTAs of one MMA, MMAs along M, along N, 1)
        cluster_shape = (config.cluster_m, config.cluster_n, 1)
        cluster = cute.tiled_divide(cute.make_layout(cluster_shape), (tiled_mma.thr_id.shape,))
        a_smem = blackwell.make_smem_layout_a(tiled_mma, self.tile, self.a_dtype, self.stages.ab)
        b_smem = blackwell.make_smem_layout_b(tiled_mma, self.tile, self.b_dtype, self.stages.ab)
        a_tma = cute.nvgpu.make_tiled_tma_atom_A(
            blackwell.cluster_shape_to_tma_atom_A(cluster_shape[:2], tiled_mma.thr_id),
            a,
            cute.slice_(a_smem, (None, None, None, 0)),
            self.tile,
            tiled_mma,
            cluster.shape,
        )
        piece_smem = blackwell.make_smem_layout_b(piece_mma, self.piece, self.b_dtype, self.stages.ab)
        b_tmas = [
            cute.nvgpu.make_tiled_tma_atom_B(
                blackwell.cluster_shape_to_tma_atom_B(cluster_shape[:2], tiled_mma.thr_id),
                b,
                cute.slice_(piece_smem, (None, None, None, 0)),
                self.piece,
                piece_mma,
                cluster.shape,
            )
            for b in bs
        ]

        planes, products = dealt(self._epilogues, loads, stores), batches.products(a, offsets)
        parts = self._parts(planes, blackwell.make_smem_layout_epi, m, products)
        lines = [m, *[cute.size(b, mode=[0]) for b in bs]]
        scale_tmas = mainloop.maps(scales, lines, a.shape[1], config)
        given = Sm100Arguments(
            a=a_tma,
            further_as=[],
            bs=b_tmas,
            a_smem=a_smem,
            b_smem=b_smem,
            parts=parts,
            scale_tmas=scale_tmas,
            scales=list(scales) if self.block_scales else [],
            m=m,
            n=n,
            offsets=offsets,
            tiled_mma=tiled_mma,
            piece_mma=piece_mma,
            cluster=cluster,
            piece_smem=piece_smem,
        )
        self._launch(given, max_active_clusters, stream)

    @cute.kernel
    def kernel(self, given: Sm100Arguments):
        config, stages = self.config, self.stages
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        # The CTAs of a split share only sums: each loads and multiplies like a cluster of one.
        cta_coord = given.cluster.get_flat_coord(Int32(0) if self.in_cluster else rank)

        self._prefetch(given, warp)

        smem = SmemAllocator()
        # Barriers come last: ahead of buffers, which are aligned to 1024 bytes, they would take 1024 bytes.
        s_a = swizzled(smem, self.a_dtype, given.a_smem)
        s_b = swizzled(smem, self.b_dtype, given.b_smem)
        buffers = allocate_buffers(smem, self.epilogue, given.parts, config.staged_n, stages.row)
        s_scales = self.mainloop.allocate(smem, given.tiled_mma, self.tile, stages.ab, config.pieces)
        ab_bytes = cute.size_in_bytes(self.a_dtype, cute.slice_(given.a_smem, (None, None, None, 0)))
        ab_bytes += cute.size_in_bytes(self.b_dtype, cute.slice_(given.b_smem, (None, None, None, 0)))
        check_stage(config, ab_bytes)
        if cutlass.const_expr(self.scaling.by_tma):
            ab_bytes += self.scaling.stage_bytes(config)
        scales_in_ring = ScaleRing.allocate(smem, self.scale_ring, self.block_scales, config)
        ab_pipeline = pipeline.PipelineTmaUmma.create(
            **stages_of(smem, self.ab_ring), tx_count=ab_bytes * config.ctas, cta_layout_vmnk=given.cluster
        )
        tails = self._tails(smem, warp, ab_pipeline, [s_a, s_b])
        acc_pipeline = pipeline.PipelineUmmaAsync.create(
            **stages_of(smem, self.acc_ring), cta_layout_vmnk=given.cluster
        )
        of_epilogue = self._epilogue_state(smem, given, buffers)
        tmem = TmemAllocator(
            smem.allocate(Int32, 8),
            barrier_for_retrieve=named_barrier(self.tmem_meeting),
            is_two_cta=config.ctas == 2,
            two_cta_tmem_dealloc_mbar_ptr=smem.allocate(cutlass.Int64, 8),
        )
        sums = self._sums(smem, warp, self.visitors.warps * WARP)
        in_step = cute.make_layout(config.split_k) if self.in_cluster else given.cluster
        pipeline.pipeline_init_arrive(cluster_shape_mn=in_step, is_relaxed=True)
        await_earlier_kernels()
        items = self._items(given, self._start(given), rank)
        shared = Sm100Shared(
            items=items,
            given=given,
            warp=warp,
            lane=cute.arch.lane_idx(),
            cta_coord=cta_coord,
            s_a=s_a,
            s_b=s_b,
            s_scales=s_scales,
            tails=tails,
            tmem=tmem,
            **of_epilogue,
            ab_pipeline=ab_pipeline,
            acc_pipeline=acc_pipeline,
            rank=rank,
            sums=sums,
            scales=scales_in_ring,
        )
        pipeline.pipeline_init_wait(cluster_shape_mn=in_step)

        if cutlass.const_expr(config.warpgroups > 1):
            if warp >= self.visitors.numbers.stop:
                cute.arch.setmaxregister_decrease(self.crew.registers[-1])
        self.crew.run(self.crew.roles, warp, shared)

    def _piece_stages(self, s_b: cute.Tensor, piece: cute.ComposedLayout, index: int) -> cute.Tensor:
        """The part of each stage of B that one tensor fills."""
        layout, elements = piece.outer, self.config.piece_n * self.tile_k
        stages = cute.make_layout(self.stages.ab, stride=elements * self.config.pieces)
        stage = cute.slice_(layout, (None, None, None, 0))
        return cute.make_tensor(s_b.iterator + index * elements, cute.append(stage, stages))

    def _tile(self, shared: Sm100Shared, place: Place, thread: Thread) -> Sm100Tile:
        """The part of the CTA's tile that an epilogue thread owns, among all rows of the output."""
        row, column = self._cta_tile(place)
        m0, columns = place.first + row * CTA_M, self.config.group_n
        n0 = column * self.config.tile_n + thread.group * columns
        return Sm100Tile(self.config, Corner(m0, n0, place.end, shared.n), thread.thread, columns)

    def _row_tile(self, shared: Sm100Shared, place: Place, lane: Int32) -> Sm100Tile:
        row, column = self._cta_tile(place)
        m0, columns = place.first + row * CTA_M, self.config.tile_n
        return Sm100Tile(self.config, Corner(m0, column * columns, place.end, shared.n), lane, columns)

    def _sources(self, shared: Sm100Shared) -> list[Source]:
        """A, of which the CTAs in a row of the cluster load parts for each other, and each B, whose parts
        MMAs in a column of the cluster share."""
        config, given, coord = self.config, shared.given, shared.cta_coord
        mma, piece_mma = [each.get_slice(coord[0]) for each in (given.tiled_mma, given.piece_mma)]
        masks: list[Any] = [None, None]
        if config.cluster_m * config.cluster_n > 1:
            masks = [
                cpasync.create_tma_multicast_mask(given.cluster, coord, mcast_mode=mode) for mode in (2, 1)
            ]
        box_a, box_b = (self.tile[0], self.tile_k), (self.piece[1], self.tile_k)

        def boxes_of_a(tensor: cute.Tensor) -> cute.Tensor:
            return cute.group_modes(mma.partition_A(batches.boxes(tensor, box_a)), 0, 3)

        def boxes_of_b(tensor: cute.Tensor) -> cute.Tensor:
            return cute.group_modes(piece_mma.partition_B(batches.boxes(tensor, box_b)), 0, 3)

        a = Source(
            given.a,
            cute.group_modes(shared.s_a, 0, 3),
            boxes_of_a,
            lambda place: self._cta_tile(place)[0] // config.ctas,
            coord[2],
            config.cluster_n,
            follows=True,
            options={"mcast_mask": masks[0]},
        )
        bs = [
            Source(
                tma,
                cute.group_modes(self._piece_stages(shared.s_b, given.piece_smem, piece), 0, 3),
                boxes_of_b,
                partial(self._column, segment),
                coord[1],
                config.cluster_m // config.ctas,
                has=segment.has,
                options={"mcast_mask": masks[1]},
            )
            for tma, (segment, piece) in zip(given.bs, self.parts_of_b, strict=True)
        ]
        return [a, *bs]

    def _column(self, segment: Segment, place: Place) -> Int32:
        """The CTA's column of tiles, counted from the segment's first."""
        return self._cta_tile(place)[1] - segment.first * self.config.cluster_n

    def _beside(self, shared: Sm100Shared, place: Place, a: Tiles) -> ScaleBoxes:
        tmas, tile = shared.given.scale_tmas, self._cta_tile(place)
        return ScaleBoxes(tmas, self.mainloop.boxes(tmas, shared.s_scales, place, tile, self.config))

    def _first_apart(self) -> pipeline.PipelineState:
        return producer_state(self.scale_ring.stages if self.scale_ring else 0)

    def _load_apart(
        self, shared: Sm100Shared, place: Place, k: Int32, state: pipeline.PipelineState
    ) -> pipeline.PipelineState:
        """Brings the scales of a k tile that the epilogue applies."""
        if self.block_scales is None:
            return state
        ring, scales = cast(ScaleRing, shared.scales), shared.given.scales
        row, column = self._cta_tile(place)
        origin = (row * CTA_M, column * self.config.tile_n)
        ring.pipeline.producer_acquire(state)
        ring.stages.bring_tile(state.index, scales, origin, k, shared.lane)
        ring.pipeline.producer_commit(state)
        return advanced(state)

    @cute.jit
    def _visit_tiles(self, shared: Sm100Shared):
        """The epilogue warps: they read accumulators from tensor memory, call the epilogue's hooks, and store
        by TMA."""
        config, stages = self.config, self.stages
        items, of_segments, tmem = shared.items, shared.of_segments(), shared.tmem
        if cutlass.const_expr(config.warpgroups > 1):
            cute.arch.setmaxregister_increase(self.crew.registers[0])
        tmem.allocate(self.scaling.tmem_columns(config))
        tmem.wait_for_alloc()
        tmem_ptr = tmem.retrieve_ptr(self.sum_type)
        sums, row = consumer_state(self.acc_stages), consumer_state(stages.row)
        seat = self._seat(shared, self._accumulators(shared, tmem_ptr), sums)
        free = consumer_state(self.acc_stages)
        for _ in cutlass.range_constexpr(self.acc_stages):
            with cute.arch.elect_one():
                shared.acc_pipeline.consumer_release(free)
            free.advance()
        planes = Position(consumer_state(stages.exact), producer_state(stages.store))
        scales = consumer_state(self.scale_ring.stages if self.scale_ring else 0)
        item = items.epilogue
        if cutlass.const_expr(self.in_cluster):
            if shared.rank > 0:
                self._publish(shared, seat, scales)
        while items.is_valid(item):
            place = items.place(item)
            before = Tally(sums, scales, planes)
            after = before
            for i in cutlass.range_constexpr(len(self.segments)):
                if self.segments[i].has(place):
                    after = self.by_segment[i]._visit_tile(
                        of_segments[i], seat, self.segments[i].within(place), row, before
                    )
            sums, scales, planes = after
            if cutlass.const_expr(stages.row > 0):
                row.advance()
            sums.advance()
            item += items.step
        if seat.thread.warp == 0:
            seat.stores.producer_tail()
        # Tensor memory may be freed once all warps have read their part of it.
        named_barrier(self.last_meeting).arrive_and_wait()
        tmem.relinquish_alloc_permit()
        tmem.free(tmem_ptr)

    @cute.jit
    def _visit_tile(
        self,
        shared: Sm100Shared,
        seat: TensorMemorySeat,
        place: Place,
        row: pipeline.PipelineState,
        at: Tally,
    ):
        """Runs the epilogue on a tile, with the staged rowvecs of the stage `row`. Returns the stage that had
        the tile's sums, and the next ones of scales and of planes."""
        tile = self._tile(shared, place, seat.thread)
        held = self.epilogue.begin(tile, shared.glob)
        if cutlass.const_expr(self.stages.row > 0):
            shared.row_pipeline.consumer_wait(row)
        part = (self.config.group_n,)
        rows = [
            cute.local_tile(s_row[(None, row.index)], part, (seat.thread.group,)) for s_row in shared.rows
        ]
        sums, scales = self._await_sums(shared, seat, at.sums, at.scales)
        if cutlass.const_expr(self.in_cluster):
            shared.sums.wait()
        work = Work(shared, replace(seat, sums=sums), place, tile, held, rows, self.config.products)
        planes = self._drain(work, at.planes)
        if cutlass.const_expr(self.in_cluster):
            shared.sums.release(self.config.split_k)
        self._end(work)
        if cutlass.const_expr(self.stages.row > 0):
            shared.row_pipeline.consumer_release(row)
        return Tally(sums, scales, planes)

    @cute.jit
    def _await_sums(
        self,
        shared: Sm100Shared,
        seat: TensorMemorySeat,
        sums: pipeline.PipelineState,
        scales: pipeline.PipelineState,
    ) -> tuple[pipeline.PipelineState, pipeline.PipelineState]:
        """Waits for the sums of a tile, and adds up those of its k tiles where the epilogue scales these.
        Returns the stage that has the sums, and the next stage of scales."""
        if cutlass.const_expr(self.block_scales is None):
            shared.acc_pipeline.consumer_wait(sums)
        else:
            own = PartialSums.of(seat.acc, self.config, seat.thread.group, seat.thread.thread)
            sums, scales = own.add_up(
                shared.acc_pipeline, sums, cast(ScaleRing, shared.scales), scales, shared.items.k_tiles
            )
        return sums, scales

    @cute.jit
    def _publish(self, shared: Sm100Shared, seat: TensorMemorySeat, scales: pipeline.PipelineState):
        """The epilogue warps of a CTA that publishes the sums of its only tile to the first CTA."""
        sums, _ = self._await_sums(shared, seat, seat.sums.clone(), scales.clone())
        seat = replace(seat, sums=sums)
        for visit in cutlass.range(self.visits, unroll=1):
            _, _, registers = seat.begin(visit, 0, self.config.products)
            cute.arch.fence_view_async_tmem_load()
            shared.sums.write(registers, seat.thread.thread_of_all, visit)
        with cute.arch.elect_one():
            shared.acc_pipeline.consumer_release(sums)
        shared.sums.hand_over()

    def _seat(self, shared: Sm100Shared, acc: cute.Tensor, sums: pipeline.PipelineState) -> TensorMemorySeat:
        """The seat of a thread of the epilogue."""
        index, _, _ = cute.arch.thread_idx()
        warp, first = shared.warp, self.subtile_meetings[0]
        thread = Thread(0, index, warp, named_barrier(first))
        if self.config.warpgroups > 1:
            group = warp // WARPS
            barrier = pipeline.NamedBarrier(first.barrier + group, first.threads)
            thread = Thread(group, index % WARPGROUP, warp % WARPS, barrier)
        arrivals = agents(Arrivals(self.visitors, WARPS, WARP))
        return TensorMemorySeat(
            config=self.config,
            thread=thread,
            acc=acc,
            read=Copy.of(acc, thread.thread, self.config.subtile_n),
            parts=shared.sums,
            ring=shared.acc_pipeline,
            stores=pipeline.PipelineTmaStore.create(
                num_stages=max(self.stages.store - 1, 1), producer_group=arrivals
            ),
            sums=sums,
        )


class Tally(NamedTuple):
    """The stages of a warp of the epilogue: that of the sums of a tile, the next one of scales, and the next
    position of planes."""

    sums: pipeline.PipelineState
    scales: pipeline.PipelineState
    planes: Position


@dataclass(frozen=True)
class Sm100Arguments(Arguments):
    """`Arguments`, with the MMA and that of a piece of B, which only divides its tile, the layout of a
    `cluster`, and that of a piece of B."""

    tiled_mma: cute.TiledMma
    piece_mma: cute.TiledMma
    cluster: cute.Layout
    piece_smem: cute.ComposedLayout


@dataclass(frozen=True)
class Sm100Shared(TmaShared):
    """`TmaShared`, with the CTA's coordinates in its cluster, the stages of the scales that the MMA applies,
    and tensor memory and the ring of its accumulators."""

    cta_coord: tuple
    s_scales: list
    tmem: TmemAllocator
    acc_pipeline: pipeline.PipelineUmmaAsync
