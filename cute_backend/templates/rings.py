"""Rings of stages in shared memory, through which some warps of a CTA pass data to others.

The kernels of all architectures use rings around their mainloops. This module allocates the buffers and
barriers of the rings, and partitions the boxes that TMA moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_backend.planning import TileConfig
from cute_backend.templates import batch as batches
from cute_backend.templates.crew import MBARRIER_BYTES, SMEM_ALIGN, Arrivals, Meeting, Ring
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.scheduler import Place
from cute_backend.templates.work_items import WorkItems

ROW_ALIGN = 128
"""Alignment of staged rowvecs in bytes: more than the 16 bytes of the widest vector that reads them."""


@dataclass(frozen=True)
class SegmentState:
    """The state of a tile that depends on its segment: the segment's columns `n`, the scales and zeros
    `beside` its operands that warps load, its global tensors `glob`, the pipeline of its exact loads, and the
    buffers and maps of its exact loads (`loads`, `load_tmas`), the buffers and maps of its planes that are
    stored (`stores`, `store_tmas`), and the buffers of its staged rowvecs (`rows`)."""

    n: int | Int32
    beside: list[cute.Tensor]
    glob: SimpleNamespace
    exact_pipeline: Any
    loads: list[cute.Tensor]
    stores: list[cute.Tensor]
    rows: list[cute.Tensor]
    load_tmas: list[cpasync.TmaInfo]
    store_tmas: list[cpasync.TmaInfo]


@dataclass(frozen=True)
class Shared:
    """State that the warps of a CTA share: its work items, the pipelines between the warps and their buffers.
    `n` is the number of columns of the plane or segment. `warp` and `lane` are the numbers of the
    thread's warp in the CTA and of the thread in its warp."""

    items: WorkItems
    n: Int32
    glob: SimpleNamespace
    ab_pipeline: Any
    row_pipeline: Any
    loads: Sequence[cute.Tensor]
    stores: Sequence[cute.Tensor]
    rows: Sequence[cute.Tensor]
    warp: Int32
    lane: Int32

    def of_segments(self) -> list[Any]:
        """The state for tiles of each segment: there is one."""
        return [self]


def agents(*arrivals: Arrivals) -> pipeline.CooperativeGroup:
    """The cooperative group of the threads that arrive at a barrier in one phase."""
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, sum(each.count for each in arrivals))


def named_barrier(meeting: Meeting) -> pipeline.NamedBarrier:
    """The named barrier of a meeting."""
    return pipeline.NamedBarrier(meeting.barrier, meeting.threads)


def check_stage(config: TileConfig, nbytes: int) -> None:
    """Raises ValueError if the size of a stage of A and B differs from the size allocated for it."""
    if nbytes != config.ab_stage_bytes:
        raise ValueError(
            f"a stage of A and B has {nbytes} bytes by its layouts, {config.ab_stage_bytes} by tile "
            f"{config.name}"
        )


def producer_state(stages: int) -> pipeline.PipelineState:
    """The producer's state at the first stage of a ring; for a ring without stages, an unused placeholder."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, max(stages, 1))


def consumer_state(stages: int) -> pipeline.PipelineState:
    """The consumer's state at the first stage of a ring; for a ring without stages, an unused placeholder."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, max(stages, 1))


def advanced(state: pipeline.PipelineState, count: int | Int32 = 1) -> pipeline.PipelineState:
    """The state `count` stages later."""
    state = state.clone()
    state.advance(count)
    return state


def in_ring(state: pipeline.PipelineState, ring: Any) -> pipeline.PipelineState:
    """Moves a state to ring number `ring` of a pipeline that holds several rings one after another."""
    return pipeline.PipelineState(state.stages, state.count, ring * state.stages + state.index, state.phase)


def of_one_stage(layout: cute.ComposedLayout) -> cute.ComposedLayout:
    """The layout of the first stage of a swizzled buffer of (rows, columns, stages).

    `cute.slice_` of the whole layout aborts the process if the rows are 24, 40, 56, 72 or 88 (DSL 4.8).
    """
    return cute.make_composed_layout(layout.inner, layout.offset, cute.slice_(layout.outer, (None, None, 0)))


def swizzled(smem: SmemAllocator, dtype: type[cutlass.Numeric], layout: cute.ComposedLayout) -> cute.Tensor:
    """A buffer whose layout is swizzled, as TMA and the tensor cores address it."""
    return smem.allocate_tensor(dtype, layout.outer, SMEM_ALIGN, layout.inner)


def allocate_rows(
    smem: SmemAllocator, operands: Sequence[SmemOperand], columns: int, stages: int
) -> list[cute.Tensor]:
    """Allocates shared memory for staged rowvecs: (columns of a tile, stages) for each."""
    return [
        smem.allocate_tensor(operand.dtype, cute.make_layout((columns, stages)), ROW_ALIGN)
        for operand in operands
    ]


def stages_of(smem: SmemAllocator, ring: Ring) -> dict[str, Any]:
    """The arguments that create a pipeline: two mbarriers for each stage, a full and an empty one, and the
    groups of threads that arrive at them."""
    return {
        "barrier_storage": smem.allocate_array(cutlass.Int64, ring.barrier_bytes // MBARRIER_BYTES),
        "num_stages": ring.stages,
        "producer_group": agents(*ring.fills),
        "consumer_group": agents(ring.emptied),
        "defer_sync": True,
    }


def make_exact(
    smem: SmemAllocator, ring: Ring | None, operands: Sequence[SmemOperand], elements: int
) -> pipeline.PipelineTmaAsync | None:
    """The pipeline of exact loads, with `elements` of each operand in a stage; None if there is no ring."""
    if ring is None:
        return None
    return pipeline.PipelineTmaAsync.create(
        **stages_of(smem, ring),
        tx_count=sum(operand.bytes(elements) for operand in operands),
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
    )


def make_rows(smem: SmemAllocator, ring: Ring | None) -> pipeline.PipelineAsync | None:
    """The pipeline through which the threads of a warp stage rowvecs; None if there is no ring."""
    return None if ring is None else pipeline.PipelineAsync.create(**stages_of(smem, ring))


def partition_box(
    tma: cpasync.TmaInfo,
    planes: cute.Tensor,
    shape: tuple,
    coord: tuple,
    place: Place,
    repeats: bool = False,
) -> tuple:
    """Partitions an operand's stages in shared memory, `planes`, and one of its boxes for TMA.

    An operand that `repeats` is a table of whole boxes, around which `coord` wraps.
    """
    if repeats:
        sizes = (cute.size(tma.tma_tensor, mode=[axis]) for axis in range(2))
        counts = (cute.ceil_div(size, box) for size, box in zip(sizes, shape, strict=True))
        coord = tuple(place % count for place, count in zip(coord, counts, strict=True))
    return partition_for_tma(tma, planes, batches.box_at(tma.tma_tensor, shape, coord, place))


def partition_for_tma(tma: cpasync.TmaInfo, planes: cute.Tensor, g_box: cute.Tensor) -> tuple:
    """Partitions an operand's stages in shared memory, `planes`, and the box `g_box` for TMA."""
    return cpasync.tma_partition(
        tma.atom, 0, cute.make_layout(1), cute.group_modes(planes, 0, 2), cute.group_modes(g_box, 0, 2)
    )
