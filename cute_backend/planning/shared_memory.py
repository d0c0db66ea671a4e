"""The loads and outputs that pass through shared memory, and the bytes that they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cute_backend.planning.mainloops import mainloop_of
from cute_backend.planning.stage_scales import NO_SCALES, StageScales
from cute_backend.planning.tiles import EPILOGUE_STAGES, SMEM_RESERVE, TileConfig
from cute_backend.spec import DType, EpilogueSpec

T = TypeVar("T")


def has_planes(spec: EpilogueSpec) -> bool:
    """Whether a spec reads or writes an (M, N) plane."""
    return bool(spec.planes or spec.loaded_planes)


def plane_bits(spec: EpilogueSpec) -> int:
    """Returns the bits of one element, summed over all planes that a spec reads and writes."""
    exact = sum(load.dtype.bits for load in spec.loaded_planes)
    return exact + sum(store.dtype.bits for store in spec.planes)


def ring_bytes(elements: int, dtype: DType, stages: int = EPILOGUE_STAGES) -> int:
    """Returns the bytes of shared memory for `stages` stages of `elements` elements each."""
    return stages * elements * dtype.bits // 8


def holds_planes(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether shared memory holds every load and output that the epilogue may pass through it."""
    return ab_stages(config, spec) >= config.least_ab_stages


def shared_buffers(operands: Sequence[Sequence[T]], bits: Callable[[T], int]) -> list[T]:
    """One operand for each buffer of shared memory that the operands of segments share. For each size of
    elements, `bits`, there are as many buffers as the segment with the most operands of that size has."""
    found: list[T] = []
    for size in sorted({bits(operand) for each in operands for operand in each}):
        alike = [[operand for operand in each if bits(operand) == size] for each in operands]
        found += sorted(alike, key=len)[-1]
    return found


@dataclass(frozen=True)
class Rings:
    """The bytes of one stage of each ring of an epilogue: planes that are read, staged vectors along N, and
    planes that are written."""

    exact: int = 0
    row: int = 0
    store: int = 0

    @staticmethod
    def of(
        config: TileConfig,
        exact: Sequence[Sequence[DType]],
        row: Sequence[Sequence[DType]],
        store: Sequence[Sequence[DType]],
    ) -> Rings:
        """The rings of operands of these dtypes, listed for each segment of columns. Segments share
        buffers."""

        def nbytes(operands: Sequence[Sequence[DType]], elements: int) -> int:
            buffers = shared_buffers([[dtype.bits for dtype in each] for each in operands], int)
            return sum(buffers) * elements // 8

        elements = config.stage_elements
        return Rings(nbytes(exact, elements), nbytes(row, config.staged_n), nbytes(store, elements))

    @staticmethod
    def of_all(config: TileConfig, spec: EpilogueSpec) -> Rings:
        """The rings of a spec of which all that may pass through shared memory does."""
        segments = spec.segments
        return Rings.of(
            config,
            [[load.dtype for load in each.loaded_planes] for each in segments],
            [[load.dtype for load in each.staged_loads] for each in segments],
            [[store.dtype for store in each.planes] for each in segments],
        )


def ab_stages(config: TileConfig, spec: EpilogueSpec) -> int:
    """Returns how many stages of A and B, with their scales, fit in shared memory beside the epilogue's
    buffers, which have their fewest stages here."""
    scales = mainloop_of(spec, config.target).scales
    return left_bytes(config, Rings.of_all(config, spec), scales) // stage_bytes(config, scales)


def left_bytes(config: TileConfig, rings: Rings, scales: StageScales = NO_SCALES) -> int:
    """The shared memory for stages of A and B beside the fewest stages of the epilogue's rings."""
    fewest = (
        config.load_stages * rings.exact + EPILOGUE_STAGES * rings.row + config.store_stages * rings.store
    )
    return config.smem_bytes - SMEM_RESERVE - config.sum_bytes - fewest - scales.ahead_bytes(config)


def room_bytes(config: TileConfig, rings: Rings, scales: StageScales = NO_SCALES) -> int:
    """The shared memory that is left for further rings beside these and the fewest stages of A and B."""
    return left_bytes(config, rings, scales) - config.least_ab_stages * stage_bytes(config, scales)


def stage_bytes(config: TileConfig, scales: StageScales) -> int:
    """The shared memory of a stage of A and B with their scales."""
    return config.ab_stage_bytes + scales.stage_bytes(config)
