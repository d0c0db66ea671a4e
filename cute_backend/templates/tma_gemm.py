"""The common part of kernels of wgmma and of tcgen05: clusters of CTAs, and TMA for operands and outputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Numeric
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_backend.spec import Order
from cute_backend.templates import batch as batches
from cute_backend.templates.crew import WARP, Arrivals, Ring, Role, one
from cute_backend.templates.drain import Work
from cute_backend.templates.entry import named
from cute_backend.templates.epilogue import SmemOperand, by_name
from cute_backend.templates.gemm import Gemm
from cute_backend.templates.loading import Source, Tiles
from cute_backend.templates.rings import (
    SegmentState,
    Shared,
    advanced,
    in_ring,
    make_rows,
    partition_box,
    partition_for_tma,
    producer_state,
)
from cute_backend.templates.scheduler import GroupSchedule, Place
from cute_backend.templates.segments import Boxes, Buffers, Operands, Part, expecting, make_exacts
from cute_backend.templates.split_k import Sums
from cute_backend.templates.tails import Tails, is_cut
from cute_backend.templates.work_items import WorkItems

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Arguments:
    """The arguments of a kernel: maps and layouts of A and of each B, maps of the `further_as` of stacked
    products (`TileConfig.stacked`) or of segments of rows, the `parts` of the segments, the maps of scales
    that TMA brings, or the `scales` that warps copy, and the rest as the host has it."""

    a: cpasync.TmaInfo
    further_as: list[cpasync.TmaInfo]
    bs: list[cpasync.TmaInfo]
    a_smem: cute.ComposedLayout
    b_smem: cute.ComposedLayout
    parts: list[Part]
    scale_tmas: list[cpasync.TmaInfo]
    scales: list[cute.Tensor]
    m: Int32
    n: Int32
    offsets: cute.Tensor | None


@dataclass(frozen=True)
class TmaShared(Shared):
    """`Shared`, with the kernel's arguments, the stages of A and B, the CTA's number in its cluster, and the
    sums that a cluster exchanges.

    The fields of `SegmentState` are those of the first segment. `of_segments` returns the state with those of
    each."""

    given: Any
    beside: list[cute.Tensor]
    exact_pipeline: Any
    load_tmas: list[cpasync.TmaInfo]
    store_tmas: list[cpasync.TmaInfo]
    segment_states: list[SegmentState]
    s_a: cute.Tensor
    s_b: cute.Tensor
    tails: Tails | None
    rank: Int32
    sums: Any
    scales: Any

    def of_segments(self) -> list[Self]:
        """The state for tiles of each segment."""
        return [replace(self, segment_states=[], **vars(state)) for state in self.segment_states]


@dataclass(frozen=True)
class NothingBeside:
    """Nothing that TMA would load beside the k tiles of A and B."""

    def bring(self, k: Int32, stage: Int32, barrier: cute.Pointer) -> None:
        """Begins to load what belongs to a k tile to its stage."""


class TmaGemm(Gemm):
    """A kernel whose load warp brings A and B by TMA, and whose cluster may share them or split K."""

    load: Role
    exact: Role
    staging: Role
    exact_ring: Ring | None
    row_ring: Ring | None
    sum_ring: Ring | None
    exact_box: tuple[int, int]
    store_box: tuple[int, int]
    stores_a_warpgroup: int
    """Boxes of an output, each of `store_box`, that a warpgroup stores at a time."""
    rings: int = 1
    """Tiles that are in work at a time, each with a ring of exact loads."""
    boxes: int
    """Boxes of an exact load for a warpgroup's part of a tile."""
    exact_parts: int
    exact_elements: int
    """Elements of an exact load in one stage of its ring, in `exact_parts` boxes of `exact_box`, one for each
    warpgroup that shares the tile."""
    tile_k: int
    sum_type: type[Numeric]
    """The type of the accumulators."""
    group_step: int
    kernel: Any
    scale_rows = 0
    """Rows of a tile of scales, if groups of rows have scales in tiles."""

    @property
    def in_cluster(self) -> bool:
        """Whether the CTAs of a cluster split K."""
        return self.config.split_k > 1 and not self.config.sums_in_memory

    def _epilogue_rings(self, visitors: Role, warps: int) -> list[Ring]:
        """The rings between the epilogue and the warps that load for it, of which `warps` empty a stage.
        `rings` of exact loads, one after another, have one pipeline."""
        config, stages = self.config, self.stages
        emptied = Arrivals(visitors, warps, 1)
        self.exact_ring = self.row_ring = self.sum_ring = None
        if stages.row:
            filled = Arrivals(self.staging, 1, WARP)
            self.row_ring = Ring("row", stages.row, filled, Arrivals(visitors, warps, WARP))
        if stages.exact:
            self.exact_ring = Ring("exact", self.rings * stages.exact, one(self.exact), emptied)
        if self.in_cluster:
            self.sum_ring = Ring("sums", 1, replace(emptied, ctas=config.split_k - 1), emptied)
        return [ring for ring in (self.row_ring, self.exact_ring, self.sum_ring) if ring]

    def _parts(
        self, dealt: Sequence[Operands], layout_of: Callable[..., cute.ComposedLayout], m: Int32, count: Any
    ) -> list[Part]:
        """The arguments for each segment, whose planes have `m` rows for each of `count` products.
        `layout_of` lays boxes out."""
        groups = self.config.warpgroups
        come, go = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        loaded = Boxes(come, self.exact_box, self.stages.exact * groups, layout_of)
        stored = Boxes(go, self.store_box, self.stages.store * groups * self.stores_a_warpgroup, layout_of)
        plane = partial(batches.plane, m=m, count=count)
        ragged = partial(batches.ragged, rows=self.store_box[0])
        return [
            Part(
                each.loads,
                each.stores,
                *loaded.maps(each.epilogue.shared_loads, each.load_of, lambda operand: plane),
                *stored.maps(
                    each.epilogue.shared_stores,
                    each.store_of,
                    lambda operand: ragged if self._is_ragged(operand) else plane,
                ),
            )
            for each in dealt
        ]

    def _epilogue_state(
        self, smem: SmemAllocator, given: Arguments, buffers: Sequence[Buffers]
    ) -> dict[str, Any]:
        """The fields of the state for the tiles of each segment, and the pipelines of its epilogue."""
        exacts = make_exacts(smem, self.exact_ring, self._epilogues, self.exact_elements)
        states = [
            SegmentState(
                n=segment.columns(given.n),
                beside=given.scales[index :: len(self.segments)],
                glob=by_name(epilogue.loads + epilogue.stores, part.loads + part.stores),
                exact_pipeline=exact,
                loads=memory.loads,
                stores=memory.stores,
                rows=memory.rows,
                load_tmas=part.load_tmas,
                store_tmas=part.store_tmas,
            )
            for index, (epilogue, segment, part, memory, exact) in enumerate(
                zip(self._epilogues, self.segments, given.parts, buffers, exacts, strict=True)
            )
        ]
        return vars(states[0]) | {
            "segment_states": states,
            "row_pipeline": make_rows(smem, self.row_ring),
        }

    def _is_ragged(self, operand: SmemOperand) -> bool:
        """Whether TMA cuts boxes of an output off at the end of a group. It can't along the contiguous
        axis."""
        return self.is_grouped and operand.order is Order.ROW

    def _schedule(self, given: Arguments) -> Any:
        """The schedule of all products."""
        groups = None
        if given.offsets is not None:
            groups = batches.Groups(given.offsets, self.group_step, self.scale_rows)
        return batches.schedule(self.config, given.m, given.n, given.a.tma_tensor, groups)

    def _launch(self, given: Arguments, max_active_clusters: Int32, stream: cuda.CUstream) -> None:
        """Launches the kernel. A cluster that splits K has one tile, along the axis of the grid that has room
        for any number."""
        config, schedule = self.config, self._schedule(given)
        items = cast(GroupSchedule, schedule).most_items if self.is_grouped else schedule.items
        cluster = (config.cluster_m, config.cluster_n, 1)
        grid = (*cluster[:2], cutlass.min(items, max_active_clusters))
        if self.in_cluster:
            grid, cluster = (config.split_k * items, 1, 1), (config.split_k, 1, 1)
        named(self.kernel, self.name)(given).launch(
            grid=grid,
            block=(self.threads, 1, 1),
            cluster=cluster,
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.jit
    def _prefetch(self, given: Arguments, warp: Int32):
        """Fetches the descriptors of all maps."""
        maps = [part.load_tmas for part in given.parts] + [part.store_tmas for part in given.parts]
        if warp == self.load.first:
            for tma in [given.a, *given.further_as, *given.bs, *chain(*maps), *given.scale_tmas]:
                cpasync.prefetch_descriptor(tma.atom)

    def _tails(
        self, smem: SmemAllocator, warp: Int32, ring: Any, operands: Sequence[cute.Tensor]
    ) -> Tails | None:
        """The barriers of k tiles whose tails are cleared, of the stages of A and B in a ring."""
        if not (self.is_k_grouped and self.group_step > 1):
            return None
        tails = Tails.allocate(smem, self.crew, ring, operands, self.config.ctas)
        tails.init(warp == self.load.first)
        return tails

    @cute.jit
    def _sums(self, smem: SmemAllocator, warp: Int32, threads: int):
        """The sums that `threads` threads of each CTA exchange, if a cluster splits K."""
        sums = None
        if cutlass.const_expr(self.in_cluster):
            sums = Sums.allocate(smem, self.sum_type, self.config.thread_accumulators, threads)
            if warp == self.load.first:
                sums.init(cast(Ring, self.sum_ring))
        return sums

    def _start(self, given: Arguments) -> tuple[tuple, tuple, Any]:
        """The place of the CTA in the grid, the grid's size, and the schedule."""
        return cute.arch.block_idx(), cute.arch.grid_dim(), self._schedule(given)

    @cute.jit
    def _items(self, given: Arguments, start: tuple, rank: Int32):
        """The work items of a CTA, from its `_start`. If warps copy scales of k tiles, those beyond the last
        have none. Kernels that leave the offsets of groups must have ended."""
        (block, _, first), (_, _, step), schedule = start
        config = self.config
        if cutlass.const_expr(self.is_grouped):
            schedule = cast(GroupSchedule, schedule).counted()
        epilogue, first_k = first, 0
        all_k_tiles = cute.ceil_div(given.a.tma_tensor.shape[1], self.tile_k)
        # Without scales all parts of K are equally long: TMA fills k tiles beyond the last with zeros.
        k_tiles = cute.ceil_div(all_k_tiles, config.split_k)
        if cutlass.const_expr(self.in_cluster):
            first, step, first_k = block // config.split_k, schedule.items, rank * k_tiles
            if cutlass.const_expr(self.scaling.by_warps):
                k_tiles = cutlass.max(cutlass.min(k_tiles, all_k_tiles - first_k), 0)
            epilogue = Int32(first)
            if rank > 0:
                epilogue = schedule.items  # beyond the last: no epilogue here
        rows = given.m if config.sums_in_memory else None
        return WorkItems(schedule, first, step, epilogue, self.tile_k, k_tiles, first_k, rows)

    @abstractmethod
    def _sources(self, shared: Any) -> list[Source]:
        """A, and each B."""

    def _beside(self, shared: Any, place: Place, a: Tiles) -> Any:
        """The operands that TMA loads beside the k tiles of a work item."""
        return NothingBeside()

    def _first_apart(self) -> Any:
        """The first stage of a ring of its own for what the load warp brings apart from A and B."""
        return Int32(0)

    def _load_apart(self, shared: Any, place: Place, k: Int32, state: Any) -> Any:
        """Loads what has a ring of its own for a k tile. Returns the next stage of that ring."""
        return state

    @cute.jit
    def _load(self, shared: Any):
        """The load warp: A and B of every k tile."""
        items, ring, tails, apart = shared.items, shared.ab_pipeline, shared.tails, self._first_apart()
        sources = self._sources(shared)
        state, item, phases = producer_state(self.stages.ab), Int32(items.first), Int32(0)
        while items.is_valid(item):
            place = items.place(item)
            tiles = [source.at(items.of_a(place) if source.follows else place) for source in sources]
            beside = self._beside(shared, place, tiles[0])
            begin, k_tiles = items.begin_k(place.batch), items.k_tiles_of(place)
            for k_tile in cutlass.range(k_tiles, unroll=1):
                k = begin + k_tile
                if cutlass.const_expr(tails is not None):
                    barrier = cast(Tails, tails).acquire(state, is_cut(place, k_tile, k_tiles))
                else:
                    ring.producer_acquire(state)
                    barrier = ring.producer_get_barrier(state)
                beside.bring(k, state.index, barrier)
                for i in cutlass.range_constexpr(len(sources)):
                    if sources[i].has(place):
                        tiles[i].bring(k, state.index, barrier)
                if cutlass.const_expr(tails is not None):
                    if is_cut(place, k_tile, k_tiles):
                        phases = cast(Tails, tails).clear(state, place, phases)
                state.advance()
                apart = self._load_apart(shared, place, k, apart)
            item += items.step
        ring.producer_tail(state)

    @cute.jit
    def _load_exact(self, shared: TmaShared):
        """The exact warp: the exact loads of one tile after another, for `rings` tiles that are in work at a
        time."""
        items, of_segments = shared.items, shared.of_segments()
        state, item = producer_state(self.stages.exact), items.epilogue
        while items.is_valid(item):
            for ring in cutlass.range_constexpr(self.rings):
                if items.is_valid(item + ring * items.step):
                    place = items.place(item + ring * items.step)
                    for i in cutlass.range_constexpr(len(self.segments)):
                        if self.segments[i].has(place):
                            self.by_segment[i]._load_planes(
                                of_segments[i], self.segments[i].within(place), state, ring
                            )
            state.advance(self.boxes * len(self.by_segment[0].rounds))
            item += self.rings * items.step

    def _load_planes(self, shared: TmaShared, place: Place, state: pipeline.PipelineState, ring: int) -> None:
        """Loads the exact operands of each box of a tile, from the stage `state` of a ring on. If several
        sweeps wait for some, the boxes of a block of columns come once for each."""
        rounds = self.rounds
        whole = self.boxes if len(rounds) == 1 else self.block_subtiles // self.config.box_subtiles

        def load(operands: Sequence[int], block: Any, state: Any, within: Any) -> pipeline.PipelineState:
            self._load_boxes(shared, place, operands, block * whole + within, in_ring(state, ring))
            return advanced(state)

        def load_block(state: Any, block: Any) -> pipeline.PipelineState:
            for operands in rounds:
                state = self._boxes_in_turn(whole, partial(load, operands, block), state)
            return state

        self._boxes_in_turn(self.boxes // whole, load_block, state)

    @abstractmethod
    def _boxes_in_turn(self, count: int, body: Callable, state: pipeline.PipelineState) -> Any:
        """Calls `body` with the next stage and an index, for each of `count` indices. Returns the stage after
        the last."""

    @cute.jit
    def _load_boxes(
        self,
        shared: Any,
        place: Place,
        operands: cutlass.Constexpr[Sequence[int]],
        index: Any,
        stage: pipeline.PipelineState,
    ):
        """Loads the `index`-th boxes of exact `operands` of a tile to a stage."""
        exact, every = shared.exact_pipeline, self.epilogue.shared_loads
        if cutlass.const_expr(len(self.rounds) > 1):
            exact = expecting(exact, sum(every[i].bytes(self.exact_elements) for i in operands))
        exact.producer_acquire(stage)
        barrier = exact.producer_get_barrier(stage)
        for i in operands:
            tma, repeats, priority = shared.load_tmas[i], every[i].repeats, self._priority(every[i])
            for part in cutlass.range_constexpr(self.exact_parts):
                coord = self._exact_coord(shared, place, index, part)
                t_s, t_g = partition_box(tma, shared.loads[i], self.exact_box, coord, place, repeats)
                target = t_s[(None, self._plane(stage, part))]
                cute.copy(tma.atom, t_g, target, tma_bar_ptr=barrier, **priority)

    def _plane(self, stage: pipeline.PipelineState, part: Any) -> Any:
        """The index of a part's plane of a stage among an operand's planes in shared memory."""
        return stage.index * self.exact_parts + part

    @abstractmethod
    def _exact_coord(self, shared: Any, place: Place, index: Any, part: int) -> tuple[Int32, Int32]:
        """The coordinate of the `index`-th box of one of the `exact_parts` of a tile."""

    def _priority(self, operand: SmemOperand) -> dict[str, Any]:
        """The options of the copies of an exact load."""
        return {}

    @cute.jit
    def _store(self, work: Work, plane: Int32, coord: tuple[Int32, Int32]):
        """Starts the TMA stores of one `plane` of every output, at `coord` counted from the first box of one
        product. In a grouped product, only the rows that belong to the group are written. The warp writes a
        plane by columns by element where the group ends within the box."""
        shared, place, box = work.shared, work.place, self.store_box
        outputs = zip(self.epilogue.shared_stores, shared.store_tmas, shared.stores, strict=True)
        if cutlass.const_expr(self.is_grouped):
            row = place.first + coord[0] * box[0]
            count = cutlass.min(place.end - row, box[0])
            if count > 0:
                for operand, tma, planes in outputs:
                    if cutlass.const_expr(self._is_ragged(operand)):
                        g_box = batches.ragged_box_at(tma.tma_tensor, box, row, coord[1], count)
                        t_s, t_g = partition_for_tma(tma, planes, g_box)
                        cute.copy(tma.atom, t_s[(None, plane)], t_g)
                    else:
                        if count == box[0]:
                            t_s, t_g = partition_box(tma, planes, box, coord, place)
                            cute.copy(tma.atom, t_s[(None, plane)], t_g)
                        else:
                            self._store_rows(
                                planes[(None, None, plane)],
                                getattr(shared.glob, operand.name),
                                (row, coord[1] * box[1]),
                                count,
                            )
        else:
            for operand, tma, planes in outputs:
                if cutlass.const_expr(operand.by_heads):
                    target = getattr(shared.glob, operand.name)
                    self._store_heads(tma, planes[(None, None, plane)], target, coord)
                else:
                    t_s, t_g = partition_box(tma, planes, box, coord, place)
                    cute.copy(tma.atom, t_s[(None, plane)], t_g)

    @cute.jit
    def _store_heads(
        self,
        tma: cpasync.TmaInfo,
        plane: cute.Tensor,
        target: cute.Tensor,
        coord: tuple[Int32, Int32],
    ):
        """Starts the TMA store of a box to an output that is viewed `by_heads`. TMA cuts the box off where
        the rows of its first batch end, and the warp writes the rows of later batches by element: a box that
        TMA stores can't begin before row 0 (CUDA Programming Guide, "Multi-dimensional arrays")."""
        (rows, _), (columns, heads) = target.shape
        box = self.store_box
        width = cute.size(columns)
        row, column = coord[0] * box[0], coord[1] * box[1]
        end = cutlass.min(row + box[0], cute.size(target, mode=[0]))
        if (column < cute.size(target, mode=[1])) & (row < end):
            batch = row // rows
            origin = (row - batch * rows, 0, batch * heads + column // width)
            inside = cute.domain_offset(origin, tma.tma_tensor)
            g_box = cute.local_tile(inside, box, (0, column % width // box[1], 0))
            t_s, t_g = partition_for_tma(tma, plane, g_box)
            cute.copy(tma.atom, t_s, t_g)
            done = (batch + 1) * rows - row
            for step in cutlass.range(cute.ceil_div((end - row - done) * box[1], WARP), unroll=1):
                index = step * WARP + cute.arch.lane_idx()
                place = done + index // box[1]
                if place < end - row:
                    target[row + place, column + index % box[1]] = plane[place, index % box[1]]

    @cute.jit
    def _store_rows(self, plane: cute.Tensor, target: cute.Tensor, first: tuple[Int32, Int32], count: Int32):
        """A warp writes the first `count` rows of a box in shared memory, by element, to `target` from the
        row and column `first` on. Lanes have neighbouring rows."""
        rows = cute.size(plane, mode=[0])
        for step in cutlass.range(cute.ceil_div(cute.size(plane), WARP), unroll=1):
            index = step * WARP + cute.arch.lane_idx()
            row, column = index % rows, index // rows
            if (row < count) & (first[1] + column < target.shape[1]):
                target[first[0] + row, first[1] + column] = plane[row, column]
