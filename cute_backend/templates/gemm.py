"""The base class of the kernels of all architectures, with their segments and their staging of rowvecs."""

from __future__ import annotations

from abc import abstractmethod
from copy import copy
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32

from cute_backend.planning import SMEM_RESERVE, Stages, TileConfig
from cute_backend.planning.shared_memory import stage_bytes
from cute_backend.planning.stage_scales import NO_SCALES, StageScales
from cute_backend.spec import ProductKind
from cute_backend.templates.crew import Crew
from cute_backend.templates.drain import Drain
from cute_backend.templates.epilogue import Epilogue, by_name
from cute_backend.templates.rings import Shared, producer_state
from cute_backend.templates.scheduler import Place
from cute_backend.templates.segments import ColumnSegment, RowSegment, Segment, epilogues_of, segments_of
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
        scaling: StageScales = NO_SCALES,
    ):
        config.check_visits()
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
            read = [name for sweep in each.sweeps for name in sweep.planes]
            loads = [operand.name for operand in each.shared_loads]
            if sorted(read) != sorted(loads):
                raise ValueError(
                    f"sweeps read the planes {', '.join(read) or 'none'}, and shared loads are "
                    f"{', '.join(loads) or 'none'}"
                )
        counts = {len(kernel.rounds) for kernel in self.by_segment}
        if len(counts) > 1:
            raise ValueError(
                "the segments of a tile take equally many stages of exact loads; here planes are read "
                "ahead of passes and by visits in some segments and not in others"
            )

    @property
    def _epilogues(self) -> tuple[Epilogue, ...]:
        """The epilogue of each segment."""
        return epilogues_of(self.epilogue)

    @property
    def by_segment(self) -> tuple[Self, ...]:
        """For each segment, this kernel with the epilogue of that segment."""
        kernels = []
        for epilogue in self._epilogues:
            kernels.append(copy(self))
            kernels[-1].epilogue = epilogue
        return tuple(kernels)

    @property
    def parts_of_a(self) -> list[tuple[Segment, int]]:
        """For each A, the segment whose tiles it is loaded for, and its place among the products of a
        stage."""
        return self._parts_of(RowSegment, self.config.stacked)

    @property
    def parts_of_b(self) -> list[tuple[Segment, int]]:
        """For each B, the segment whose tiles it is loaded for, and its place among the pieces of a stage."""
        return self._parts_of(ColumnSegment, self.config.pieces)

    def _parts_of(self, kind: type[Segment], count: int) -> list[tuple[Segment, int]]:
        """Each segment, if those are of a kind; otherwise `count` parts of a stage for all tiles."""
        own = [(segment, 0) for segment in self.segments if isinstance(segment, kind)]
        return own or [(Segment(), part) for part in range(count)]

    def _height(self, rows: Any) -> Any:
        """The rows that are cut into tiles, where the first A has `rows`."""
        return self._cut(RowSegment, self.config.cta_rows * self.config.cluster_m, rows)

    def _width(self, columns: Any) -> Any:
        """The columns that are cut into tiles, where the first B has `columns`."""
        of_first = columns * self.config.pieces // self.config.abreast
        return self._cut(ColumnSegment, self.config.tile_n * self.config.cluster_n, of_first)

    def _cut(self, kind: type[Segment], at_once: int, otherwise: Any) -> Any:
        """The lines of all segments in whole clusters, which have `at_once`, if those are of a kind."""
        *_, last = self.segments
        return last.end * at_once if isinstance(last, kind) else otherwise

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.crew.threads

    @abstractmethod
    def _row_tile(self, shared: Any, place: Place, lane: Int32) -> Tile:
        """The tile of a work item, as seen by the warp that stages rowvecs."""

    @cute.jit
    def _stage_rows(self, shared: Shared):
        """The staging warp: the staged rowvecs of one tile after another."""
        items, of_segments, lane = shared.items, shared.of_segments(), shared.lane
        row_state, item = producer_state(self.stages.row), Int32(items.epilogue)
        while items.is_valid(item):
            place = items.place(item)
            for i in cutlass.range_constexpr(len(self.segments)):
                if self.segments[i].has(place):
                    self.by_segment[i]._stage_tile(
                        of_segments[i], self.segments[i].within(place), lane, row_state
                    )
            row_state.advance()
            item += items.step

    def _stage(self, shared: Shared, tile: Tile, index: Any) -> None:
        """Fills a stage with the rowvecs of a tile."""
        epilogue: Any = self.epilogue
        names = [operand.name for operand in self.epilogue.staged]
        rows = by_name(names, [s_row[(None, index)] for s_row in shared.rows])
        epilogue.stage(tile, shared.glob, rows)

    def _stage_tile(self, shared: Shared, place: Place, lane: Int32, stage: pipeline.PipelineState) -> None:
        """Stages the rowvecs of a tile, if its epilogue has any."""
        tile = self._row_tile(shared, place, lane)
        tile.group = place.batch
        shared.row_pipeline.producer_acquire(stage)
        if self.epilogue.staged:
            self._stage(shared, tile, stage.index)
        shared.row_pipeline.producer_commit(stage)


def _check_stages(epilogue: Epilogue, config: TileConfig, stages: Stages, scaling: StageScales) -> None:
    """Raises ValueError unless exactly the rings that the epilogue uses have stages, A and B have as many as
    the target demands, and shared memory holds all of them. A kernel without A and B has 0 of these."""
    if 0 < stages.ab < config.least_ab_stages:
        raise ValueError(
            f"tile {config.name} has {stages.ab} stages of A and B, which take {config.least_ab_stages}"
        )
    needed = SMEM_RESERVE + config.sum_bytes + scaling.ahead_bytes(config)
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
