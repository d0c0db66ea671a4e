"""Kernels whose columns are in segments, each with its own epilogue, B, loads and stores, or whose rows are
if the product is transposed, each with an A of its own.

The tiles of all segments are in one schedule, one segment's columns after another's. So the column of a tile
determines its segment, on which all threads of a CTA, and of a cluster, agree. Each segment begins with a new
tile, whatever the width of the segment before it, and its rows and columns count from its first one.

A CTA works on tiles of several segments, one after another, with the same rings. Every tile takes the same
number of stages of each ring, whether or not its epilogue uses them, so that the counts of all warps agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_backend.planning import TileConfig
from cute_backend.planning.shared_memory import shared_buffers
from cute_backend.templates.crew import SMEM_ALIGN, Ring
from cute_backend.templates.epilogue import Epilogue, SmemOperand, heads_apart, of_runs, one_stage, run_box
from cute_backend.templates.rings import allocate_rows, make_exact
from cute_backend.templates.scheduler import Place


class Segments:
    """The epilogues of segments of columns, which have `widths`, in the place of one epilogue.

    `loads` and `stores` are the names of all epilogues, one after another. A tensor that several epilogues
    load is passed for each of them. `staged`, `shared_loads` and `shared_stores` are buffers of shared
    memory, as many as the epilogue with the most operands needs. Operands of different epilogues share a
    buffer if their elements have the same size.
    """

    def __init__(self, epilogues: Sequence[Epilogue], widths: Sequence[int]) -> None:
        self.epilogues = tuple(epilogues)
        self.widths = tuple(widths)
        self.loads = tuple(name for each in self.epilogues for name in each.loads)
        self.stores = tuple(name for each in self.epilogues for name in each.stores)
        self.staged = tuple(shared_buffers([each.staged for each in self.epilogues], _width))
        self.shared_loads = tuple(shared_buffers([each.shared_loads for each in self.epilogues], _width))
        self.shared_stores = tuple(shared_buffers([each.shared_stores for each in self.epilogues], _width))

    def segments(self, config: TileConfig) -> tuple[Segment, ...]:
        """The segments, each in whole clusters of tiles."""
        found, first = [], 0
        for width in self.widths:
            end = first + -(-width // self._at_once(config))
            found.append(self._segment(first, end, width))
            first = end
        return tuple(found)

    def _at_once(self, config: TileConfig) -> int:
        """The lines of a segment that a cluster computes at a time."""
        return config.tile_n * config.cluster_n

    def _segment(self, first: int, end: int, width: int) -> Segment:
        return ColumnSegment(first, end, width)


class RowSegments(Segments):
    """The epilogues of segments of rows, which have `widths` rows. Each has an A of its own, and they share
    one B."""

    def _at_once(self, config: TileConfig) -> int:
        return config.cta_rows * config.cluster_m

    def _segment(self, first: int, end: int, width: int) -> Segment:
        return RowSegment(first, end, width)


@dataclass(frozen=True)
class Segment:
    """A segment of `width` columns or rows: those of clusters from `first` on and before `end`. This is the
    one segment of a kernel with one epilogue: a whole plane, however large."""

    first: int = 0
    end: int = 0
    width: int = 0

    def has(self, place: Place) -> bool | Boolean:
        """Whether a work item lies in this segment."""
        return True

    def within(self, place: Place) -> Place:
        """The place of a work item, counted from this segment's first row and column."""
        return place

    def columns(self, n: Int32) -> int | Int32:
        """Its columns, in a plane of `n` columns."""
        return n


class ColumnSegment(Segment):
    """A segment of columns."""

    def has(self, place: Place) -> bool | Boolean:
        return (place.column >= self.first) & (place.column < self.end)

    def within(self, place: Place) -> Place:
        return replace(place, column=place.column - self.first)

    def columns(self, n: Int32) -> int | Int32:
        return self.width


class RowSegment(Segment):
    """A segment of rows."""

    def has(self, place: Place) -> bool | Boolean:
        return (place.row >= self.first) & (place.row < self.end)

    def within(self, place: Place) -> Place:
        return replace(place, row=place.row - self.first, end=self.width)


def epilogues_of(epilogue: Epilogue) -> tuple[Epilogue, ...]:
    """The epilogue of each segment."""
    return epilogue.epilogues if isinstance(epilogue, Segments) else (epilogue,)


def segments_of(epilogue: Epilogue, config: TileConfig) -> tuple[Segment, ...]:
    """The segments, of which there is always one."""
    return epilogue.segments(config) if isinstance(epilogue, Segments) else (Segment(),)


@dataclass(frozen=True)
class Operands:
    """The tensors of one epilogue, in the order of its names."""

    epilogue: Epilogue
    loads: list[cute.Tensor]
    stores: list[cute.Tensor]

    @property
    def load_of(self) -> dict[str, cute.Tensor]:
        """The loads by name."""
        return dict(zip(self.epilogue.loads, self.loads, strict=True))

    @property
    def store_of(self) -> dict[str, cute.Tensor]:
        """The stores by name."""
        return dict(zip(self.epilogue.stores, self.stores, strict=True))


def dealt(
    epilogues: Sequence[Epilogue], loads: Sequence[cute.Tensor], stores: Sequence[cute.Tensor]
) -> list[Operands]:
    """The tensors of each epilogue, taken from those of all epilogues."""
    left, right, found = list(loads), list(stores), []
    for epilogue in epilogues:
        found.append(Operands(epilogue, left[: len(epilogue.loads)], right[: len(epilogue.stores)]))
        left, right = left[len(epilogue.loads) :], right[len(epilogue.stores) :]
    if left or right:
        raise ValueError(f"{len(left)} loads and {len(right)} stores belong to no epilogue")
    return found


@dataclass(frozen=True)
class Boxes:
    """The boxes in which TMA moves planes by `op`: `count` of `shape` lie in shared memory, as `layout_of`
    the architecture lays them out."""

    op: Any
    shape: tuple[int, int]
    count: int
    layout_of: Callable[..., cute.ComposedLayout]

    def layout(self, operand: SmemOperand, plane: cute.Tensor) -> cute.ComposedLayout:
        """The layout (rows, columns, count) of the boxes of a plane."""
        box, runs = run_box(self.shape, self.count, plane)
        return of_runs(self.layout_of(operand.dtype, operand.layout, box, runs), self.count)

    def maps(
        self,
        operands: Sequence[SmemOperand],
        planes: Mapping[str, cute.Tensor],
        view_of: Callable[[SmemOperand], Callable[[cute.Tensor], cute.Tensor]],
    ) -> tuple[list[cpasync.TmaInfo], list[cute.ComposedLayout]]:
        """For each operand, the TMA atom and tensor that move boxes of a view of its plane, and the layout of
        its boxes."""
        layouts = [self.layout(operand, planes[operand.name]) for operand in operands]
        views = [heads_apart if operand.by_heads else view_of(operand) for operand in operands]
        return [
            cpasync.make_tiled_tma_atom(self.op, view(planes[operand.name]), one_stage(layout), self.shape)
            for view, operand, layout in zip(views, operands, layouts, strict=True)
        ], layouts


@dataclass(frozen=True)
class Part:
    """The arguments of a kernel that belong to one segment of columns: its operands, and the maps and layouts
    of its planes that TMA moves."""

    loads: list[cute.Tensor]
    stores: list[cute.Tensor]
    load_tmas: list[cpasync.TmaInfo]
    load_planes: list[cute.ComposedLayout]
    store_tmas: list[cpasync.TmaInfo]
    store_planes: list[cute.ComposedLayout]


@dataclass(frozen=True)
class Buffers:
    """The stages in shared memory of one epilogue: of planes, (rows, columns, stages), and of staged rowvecs,
    (columns of a tile, stages)."""

    loads: list[cute.Tensor]
    stores: list[cute.Tensor]
    rows: list[cute.Tensor]


def allocate_buffers(
    smem: SmemAllocator,
    epilogue: Epilogue,
    parts: Sequence[Part],
    columns: int,
    row_stages: int,
) -> list[Buffers]:
    """Allocates shared memory for the planes and staged rowvecs of all segments, which share it."""
    come = _allocate_slots(smem, epilogue.shared_loads, [part.load_planes for part in parts])
    go = _allocate_slots(smem, epilogue.shared_stores, [part.store_planes for part in parts])
    rows = allocate_rows(smem, epilogue.staged, columns, row_stages)
    return [
        Buffers(
            _planes(come, epilogue.shared_loads, each.shared_loads, part.load_planes),
            _planes(go, epilogue.shared_stores, each.shared_stores, part.store_planes),
            [
                cute.make_tensor(cute.recast_ptr(rows[slot].iterator, dtype=operand.dtype), rows[slot].layout)
                for slot, operand in zip(_taken(epilogue.staged, each.staged), each.staged, strict=True)
            ],
        )
        for each, part in zip(epilogues_of(epilogue), parts, strict=True)
    ]


def make_exacts(
    smem: SmemAllocator, ring: Ring | None, epilogues: Sequence[Epilogue], elements: int
) -> list[pipeline.PipelineTmaAsync | None]:
    """The pipeline of exact loads as each epilogue fills it, with `elements` of each operand in a stage. An
    epilogue without exact loads expects no bytes. None if there is no ring."""
    loads = [each.shared_loads for each in epilogues]
    made = make_exact(smem, ring, loads[0], elements)
    return [
        made,
        *(made and expecting(made, sum(each.bytes(elements) for each in own)) for own in loads[1:]),
    ]


def expecting(ring: pipeline.PipelineTmaAsync, nbytes: int) -> pipeline.PipelineTmaAsync:
    """A ring with `nbytes` that TMA brings to each stage."""
    full = copy(ring.sync_object_full)
    full.tx_count = nbytes
    return replace(ring, sync_object_full=full)


def _width(operand: SmemOperand) -> int:
    """Bits of an element."""
    return int(operand.dtype.width)


def _taken(every: Sequence[SmemOperand], operands: Sequence[SmemOperand]) -> list[int]:
    """The slot that each operand of an epilogue takes, of `every` slot."""
    free, taken = list(range(len(every))), []
    for operand in operands:
        taken.append(next(i for i in free if _width(every[i]) == _width(operand)))
        free.remove(taken[-1])
    return taken


def _allocate_slots(
    smem: SmemAllocator,
    every: Sequence[SmemOperand],
    layouts: Sequence[Sequence[cute.ComposedLayout]],
) -> list[cute.Pointer]:
    """Allocates a slot of shared memory for each operand, aligned as the swizzles of TMA require. All layouts
    have the same number of elements."""
    elements = max((cute.size(each.outer) for of_one in layouts for each in of_one), default=0)
    return [smem.allocate(slot.bytes(elements), SMEM_ALIGN) for slot in every]


def _planes(
    pointers: Sequence[cute.Pointer],
    every: Sequence[SmemOperand],
    operands: Sequence[SmemOperand],
    layouts: Sequence[cute.ComposedLayout],
) -> list[cute.Tensor]:
    """The planes of an epilogue, in their buffers."""
    return [
        cute.make_tensor(cute.recast_ptr(pointers[slot], layout.inner, dtype=operand.dtype), layout.outer)
        for slot, operand, layout in zip(_taken(every, operands), operands, layouts, strict=True)
    ]
