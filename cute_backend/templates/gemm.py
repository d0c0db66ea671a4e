"""The base class of the kernels of all architectures, with their TMA stores and staging of rowvecs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from cute_backend.planning import SMEM_RESERVE, Stages, TileConfig
from cute_backend.planning.mma_scales import MmaScales
from cute_backend.planning.shared_memory import SumScales, ahead_bytes, stage_bytes
from cute_backend.spec import Order, ProductKind
from cute_backend.templates import batch as batches
from cute_backend.templates.crew import WARP, Crew
from cute_backend.templates.drain import Drain, Work
from cute_backend.templates.epilogue import (
    Epilogue,
    SmemOperand,
    Staging,
    by_name,
    heads_apart,
    one_stage,
)
from cute_backend.templates.rings import (
    SegmentState,
    Shared,
    partition_box,
    partition_for_tma,
    producer_state,
)
from cute_backend.templates.scheduler import KPlace, Place
from cute_backend.templates.segments import (
    Boxes,
    Buffers,
    Operands,
    Part,
    Segment,
    Segments,
    epilogues_of,
    expecting,
    segments_of,
)
from cute_backend.templates.tile import Tile

if TYPE_CHECKING:
    from typing_extensions import Self


class Gemm(Drain):
    """A kernel of one architecture, for an epilogue and a tile configuration. `crew` describes the warps of
    its CTAs, and `name` is the name of the entry (`entry.named`)."""

    crew: Crew
    name = ""

    def __init__(
        self,
        epilogue: Epilogue,
        config: TileConfig,
        stages: Stages,
        *,
        kind: ProductKind,
        scaling: SumScales | MmaScales | None = None,
    ):
        self.epilogue = epilogue
        self.config = config
        self.kind = kind
        self.is_grouped = kind is ProductKind.GROUPED
        self.is_k_grouped = kind is ProductKind.K_GROUPED
        self.scaling = scaling
        self.stages = stages
        _check_stages(epilogue, config, stages, scaling)
        self.segments = segments_of(epilogue, config)
        for each in self._epilogues:
            if bool(each.staged) != isinstance(each, Staging):
                has = "a method" if isinstance(each, Staging) else "no method"
                raise ValueError(f"an epilogue stages {len(each.staged)} rowvecs and has {has} `stage`")
        counts = {len(kernel.rounds) for kernel in self.by_segment}
        if len(counts) > 1:
            raise ValueError(
                "the segments of a tile take equally many stages of exact loads; here planes are read "
                "ahead of passes and by visits in some segments and not in others"
            )

    @property
    def _epilogues(self) -> tuple[Epilogue, ...]:
        """The epilogue of each segment of columns."""
        return epilogues_of(self.epilogue)

    @property
    def by_segment(self) -> tuple[Self, ...]:
        """For each segment of columns, this kernel with the epilogue of that segment."""
        kernels = []
        for epilogue in self._epilogues:
            kernels.append(copy(self))
            kernels[-1].epilogue = epilogue
        return tuple(kernels)

    def _parts(
        self,
        dealt: Sequence[Operands],
        come: Boxes,
        go: Boxes,
        plane: Callable[[cute.Tensor], cute.Tensor],
    ) -> list[Part]:
        """The arguments for each segment, whose planes `come` and `go` in boxes."""
        found = []
        for each in dealt:
            epilogue, loads, stores = each.epilogue, each.load_of, each.store_of
            loaded = [come.layout(operand, loads[operand.name]) for operand in epilogue.shared_loads]
            stored = [go.layout(operand, stores[operand.name]) for operand in epilogue.shared_stores]
            found.append(
                Part(
                    each.loads,
                    each.stores,
                    self._maps(come, epilogue.shared_loads, loads, loaded, plane),
                    self._maps(go, epilogue.shared_stores, stores, stored, plane, written=True),
                    loaded,
                    stored,
                )
            )
        return found

    @property
    def parts_of_b(self) -> list[tuple[Segment, int]]:
        """For each B, the segment whose tiles it is loaded for, and its place among the pieces of a stage."""
        pieces = range(1 if len(self.segments) > 1 else self.config.pieces)
        return [(segment, piece) for segment in self.segments for piece in pieces]

    def _width(self, columns: Any) -> Any:
        """The columns that are cut into tiles, where the first B has `columns`."""
        if isinstance(self.epilogue, Segments):
            return self.epilogue.columns(self.config)
        return columns * self.config.pieces // self.config.products

    def _segment_states(
        self, n: Any, parts: Sequence[Part], buffers: Sequence[Buffers], exacts: Sequence[Any]
    ) -> list[SegmentState]:
        """The state of tiles of each segment. A segment without a width has that of the plane, `n`."""
        return [
            SegmentState(
                n=segment.width or n,
                glob=by_name(epilogue.loads + epilogue.stores, part.loads + part.stores),
                exact_pipeline=exact,
                loads=memory.loads,
                stores=memory.stores,
                rows=memory.rows,
                load_tmas=part.load_tmas,
                store_tmas=part.store_tmas,
            )
            for epilogue, segment, part, memory, exact in zip(
                self._epilogues, self.segments, parts, buffers, exacts, strict=True
            )
        ]

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.crew.threads

    def _maps(
        self,
        boxes: Boxes,
        operands: Sequence[SmemOperand],
        tensors: Mapping[str, cute.Tensor],
        layouts: Sequence[cute.ComposedLayout],
        plane: Callable[[cute.Tensor], cute.Tensor],
        written: bool = False,
    ) -> list[cpasync.TmaInfo]:
        """For each operand, the TMA atom and tensor that copy boxes of its `plane` to or from one stage of
        shared memory. In a grouped product, outputs, which are `written`, are `ragged` by the rows of a box
        if they have rows."""
        ragged = partial(batches.ragged, rows=boxes.shape[0])
        views = [
            heads_apart if operand.by_heads else ragged if written and self._is_ragged(operand) else plane
            for operand in operands
        ]
        return [
            cpasync.make_tiled_tma_atom(boxes.op, view(tensors[operand.name]), one_stage(layout), boxes.shape)
            for view, operand, layout in zip(views, operands, layouts, strict=True)
        ]

    def _is_ragged(self, operand: SmemOperand) -> bool:
        """Whether TMA cuts boxes of an output off at the end of a group. It can't along the contiguous
        axis."""
        return self.is_grouped and operand.order is Order.ROW

    def _k_tiles(self, place: Place, tile_k: int, every: Int32) -> Int32:
        """The number of k tiles of a work item, at least one: `every` tile of K, or those of the item's group
        of K. An empty group gets one tile, which is wholly out of bounds and reads as zeros."""
        if isinstance(place, KPlace):
            return cutlass.max(cute.ceil_div(place.end_k - place.first_k, tile_k), 1)
        return every

    @cute.jit
    def _store(self, work: Work, plane: Int32, box: tuple[int, int], coord: tuple[Int32, Int32]):
        """Starts the TMA stores of one `plane` of every output, at `coord` counted from the first box of one
        product. In a grouped product, only the rows that belong to the group are written. The warp writes a
        plane by columns by element where the group ends within the box."""
        shared, place = work.shared, work.place
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
                    self._store_heads(tma, planes[(None, None, plane)], target, box, coord)
                else:
                    t_s, t_g = partition_box(tma, planes, box, coord, place)
                    cute.copy(tma.atom, t_s[(None, plane)], t_g)

    @cute.jit
    def _store_heads(
        self,
        tma: cpasync.TmaInfo,
        plane: cute.Tensor,
        target: cute.Tensor,
        box: tuple[int, int],
        coord: tuple[Int32, Int32],
    ):
        """Starts the TMA store of a box to an output that is viewed `by_heads`. TMA cuts the box off where
        the rows of its first batch end, and the warp writes the rows of later batches by element: a box that
        TMA stores can't begin before row 0 (CUDA Programming Guide, "Multi-dimensional arrays")."""
        (rows, _), (columns, heads) = target.shape
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

    def _stage(self, tile: Tile, glob: SimpleNamespace, smem: SimpleNamespace) -> None:
        assert isinstance(self.epilogue, Staging)
        self.epilogue.stage(tile, glob, smem)

    def _stage_of(self, exact_pipeline: Any, operands: Sequence[int], elements: int) -> Any:
        """The pipeline of exact loads as it is filled with these ones, of `elements` elements each."""
        if len(self.rounds) == 1:
            return exact_pipeline
        every = self.epilogue.shared_loads
        return expecting(exact_pipeline, sum(every[i].bytes(elements) for i in operands))

    @abstractmethod
    def _row_tile(self, shared: Any, place: Place, lane: Int32) -> Tile:
        """The tile of a work item, as seen by the warp that stages rowvecs."""

    @cute.jit
    def _stage_rows(self, shared: Shared) -> pipeline.PipelineState:
        """The staging warp: the staged rowvecs of one tile after another. Returns the stage after the
        last."""
        schedule, of_segments, lane = shared.schedule, shared.of_segments(), shared.lane
        row_state, item = producer_state(self.stages.row), Int32(shared.epilogue_item)
        while schedule.is_valid(item):
            place = schedule.place(item)
            for i in cutlass.range_constexpr(len(self.segments)):
                if self.segments[i].has(place):
                    self.by_segment[i]._stage_tile(
                        of_segments[i], self.segments[i].within(place), lane, row_state
                    )
            row_state.advance()
            item += shared.item_step
        return row_state

    def _stage_tile(self, shared: Shared, place: Place, lane: Int32, stage: pipeline.PipelineState) -> None:
        """Stages the rowvecs of a tile, if its epilogue has any."""
        tile = self._row_tile(shared, place, lane)
        tile.group = place.batch
        shared.row_pipeline.producer_acquire(stage)
        if self.epilogue.staged:
            names = [operand.name for operand in self.epilogue.staged]
            rows = [s_row[(None, stage.index)] for s_row in shared.rows]
            self._stage(tile, shared.glob, by_name(names, rows))
        shared.row_pipeline.producer_commit(stage)


def _check_stages(
    epilogue: Epilogue, config: TileConfig, stages: Stages, scaling: SumScales | MmaScales | None
) -> None:
    """Raises ValueError unless exactly the rings that the epilogue uses have stages, A and B have as many as
    the target demands, and shared memory holds all of them. A kernel without A and B has 0 of these."""
    if 0 < stages.ab < config.least_ab_stages:
        raise ValueError(
            f"tile {config.name} has {stages.ab} stages of A and B, which take {config.least_ab_stages}"
        )
    needed = SMEM_RESERVE + config.sum_bytes + ahead_bytes(config, scaling)
    needed += stages.ab * stage_bytes(config, scaling)
    for name, operands, elements in (
        ("exact", epilogue.shared_loads, config.stage_elements),
        ("row", epilogue.staged, config.staged_n),
        ("store", epilogue.shared_stores, config.stage_elements),
    ):
        count = getattr(stages, name)
        if bool(operands) != bool(count):
            names = ", ".join(operand.name for operand in operands) or "no operand"
            raise ValueError(
                f"{names} of the epilogue passes through the ring {name}, which has {count} stages"
            )
        needed += count * sum(operand.bytes(elements) for operand in operands)
    if needed > config.smem_bytes:
        raise ValueError(
            f"{stages} of tile {config.name} take {needed} bytes of shared memory, and a CTA has "
            f"{config.smem_bytes}"
        )
