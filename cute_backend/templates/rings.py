"""Rings of stages in shared memory, through which some warps of a CTA pass data to others.

The kernels of all architectures have them around their mainloops: here are the buffers and barriers, and the
boxes that TMA moves.
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
from cute_backend.templates.scheduler import Place, Schedule

ROW_ALIGN = 128
"""Bytes to which staged rowvecs are aligned: more than the 16 of the widest vector that reads them."""


@dataclass
class Shared:
    """State that the warps of a CTA share: the problem, the pipelines between them and their buffers."""

    schedule: Schedule
    m: Int32
    n: Int32
    glob: SimpleNamespace
    ab_pipeline: Any
    exact_pipeline: Any
    row_pipeline: Any
    loads: list[cute.Tensor]
    stores: list[cute.Tensor]
    rows: list[cute.Tensor]


def agents(arrivals: Arrivals) -> pipeline.CooperativeGroup:
    """The threads that arrive at a barrier in one phase, by their number."""
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals.count)


def named_barrier(meeting: Meeting) -> pipeline.NamedBarrier:
    """The named barrier of a meeting."""
    return pipeline.NamedBarrier(meeting.barrier, meeting.threads)


def check_stage(config: TileConfig, nbytes: int) -> None:
    """Raises ValueError if a stage of A and B hasn't the size for which shared memory was allocated."""
    if nbytes != config.ab_stage_bytes:
        raise ValueError(
            f"a stage of A and B has {nbytes} bytes by its layouts, {config.ab_stage_bytes} by tile "
            f"{config.name}"
        )


def producer_state(stages: int) -> pipeline.PipelineState:
    """The stage that is filled first; of a ring without stages, none that is used."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, max(stages, 1))


def consumer_state(stages: int) -> pipeline.PipelineState:
    """The stage that is emptied first; of a ring without stages, none that is used."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, max(stages, 1))


def in_ring(state: pipeline.PipelineState, ring: Any) -> pipeline.PipelineState:
    """The stage of one of several rings that lie one behind another in a pipeline."""
    return pipeline.PipelineState(state.stages, state.count, ring * state.stages + state.index, state.phase)


def swizzled(smem: SmemAllocator, dtype: type[cutlass.Numeric], layout: cute.ComposedLayout) -> cute.Tensor:
    """A buffer whose layout is swizzled, as TMA and the tensor cores address it."""
    return smem.allocate_tensor(dtype, layout.outer, SMEM_ALIGN, layout.inner)


def allocate_planes(
    smem: SmemAllocator, operands: Sequence[SmemOperand], layouts: Sequence[cute.ComposedLayout]
) -> list[cute.Tensor]:
    """Shared memory for what travels by TMA: for each operand its (rows, columns, stages)."""
    return [swizzled(smem, operand.dtype, layout) for operand, layout in zip(operands, layouts, strict=True)]


def allocate_rows(
    smem: SmemAllocator, operands: Sequence[SmemOperand], columns: int, stages: int
) -> list[cute.Tensor]:
    """Shared memory for staged rowvecs: for each its (columns of a tile, stages)."""
    return [
        smem.allocate_tensor(operand.dtype, cute.make_layout((columns, stages)), ROW_ALIGN)
        for operand in operands
    ]


def stages_of(smem: SmemAllocator, ring: Ring) -> dict[str, Any]:
    """The arguments that create a pipeline: two mbarriers for each stage, one for full and one for empty, and
    the groups of threads that arrive at them."""
    return {
        "barrier_storage": smem.allocate_array(cutlass.Int64, ring.barrier_bytes // MBARRIER_BYTES),
        "num_stages": ring.stages,
        "producer_group": agents(ring.filled),
        "consumer_group": agents(ring.emptied),
        "defer_sync": True,
    }


def make_exact(
    smem: SmemAllocator, ring: Ring | None, operands: Sequence[SmemOperand], elements: int
) -> pipeline.PipelineTmaAsync | None:
    """The ring of exact loads that TMA brings, with `elements` of each operand in a stage; None without."""
    if ring is None:
        return None
    return pipeline.PipelineTmaAsync.create(
        **stages_of(smem, ring),
        tx_count=sum(operand.bytes(elements) for operand in operands),
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
    )


def make_rows(smem: SmemAllocator, ring: Ring | None) -> pipeline.PipelineAsync | None:
    """The ring by which a warp's threads stage rowvecs; or none."""
    return None if ring is None else pipeline.PipelineAsync.create(**stages_of(smem, ring))


def partition_box(
    tma: cpasync.TmaInfo,
    planes: cute.Tensor,
    shape: tuple,
    coord: tuple,
    place: Place,
    repeats: bool = False,
) -> tuple:
    """The stages of an operand's planes and one of its boxes, partitioned for TMA. A table `repeats`, and has
    whole boxes."""
    if repeats:
        sizes = (cute.size(tma.tma_tensor, mode=[axis]) for axis in range(2))
        counts = (cute.ceil_div(size, box) for size, box in zip(sizes, shape, strict=True))
        coord = tuple(place % count for place, count in zip(coord, counts, strict=True))
    return partition_for_tma(tma, planes, batches.box_at(tma.tma_tensor, shape, coord, place))


def partition_for_tma(tma: cpasync.TmaInfo, planes: cute.Tensor, g_box: cute.Tensor) -> tuple:
    """The stages of an operand's planes and a box, partitioned for TMA."""
    return cpasync.tma_partition(
        tma.atom, 0, cute.make_layout(1), cute.group_modes(planes, 0, 2), cute.group_modes(g_box, 0, 2)
    )
