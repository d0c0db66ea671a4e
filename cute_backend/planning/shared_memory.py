"""The loads and outputs that pass through shared memory, and the bytes that they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TypeVar

from cute_backend.planning.mma_scales import MmaScales, acc_stages
from cute_backend.planning.tiles import EPILOGUE_STAGES, SMEM_RESERVE, TileConfig
from cute_backend.spec import DType, EpilogueSpec, Scaling

T = TypeVar("T")

SCALE_ALIGN = 16
"""Alignment of each stage of scales in bytes, so that no gap precedes the next buffer."""


@dataclass(frozen=True)
class SumScales:
    """The blocks of A and B whose fp32 scales multiply the sums of k tiles, as in DeepSeek's fp8. Scales that
    the MMA applies (MXFP8, MXFP4 and NVFP4) are `MmaScales`."""

    a: Scaling
    b: Scaling

    most_accumulators = 4
    """Stages of tensor memory for the sums of k tiles. While the epilogue reads those of the last k tile, the
    MMA fills the others with those of the next tile."""

    @staticmethod
    def of(spec: EpilogueSpec) -> SumScales | None:
        """The scales of a spec's sums, or None if it has no scales of blocks or the MMA applies them."""
        product = spec.product
        by_sums = product.is_block_scaled and not product.a_scaling.by_mma
        return SumScales(product.a_scaling, product.b_scaling) if by_sums else None

    def widths(self, config: TileConfig) -> tuple[int, int]:
        """Returns how many neighbouring rows, and columns of one B, share a scale wherever a tile begins.

        For a tile of 192 columns it is 64, since the tile may begin in the middle of a block of 128.
        """
        return gcd(config.cta_rows, self.a.lines), gcd(config.mma_n // config.pieces, self.b.lines)

    def counts(self, config: TileConfig) -> tuple[int, int]:
        """Returns how many scales a k tile has: for the tile's rows, and for the columns of all Bs
        together."""
        rows, columns = self.widths(config)
        return config.cta_rows // rows, config.mma_n // columns

    def pitch(self, count: int) -> int:
        """Returns the distance from one stage of scales to the next, in scales."""
        step = SCALE_ALIGN * 8 // DType.F32.bits
        return -(-count // step) * step

    def stage_bytes(self, config: TileConfig) -> int:
        """Shared memory for the scales of a k tile."""
        return sum(map(self.pitch, self.counts(config))) * DType.F32.bits // 8

    def ahead(self, config: TileConfig) -> int:
        """Returns how many more stages the scales have than A and B. In tensor memory, the sums of a k tile
        wait for their scales after its stage of A and B was released. With one stage more, the load warp
        would never wait for scales: it waits for A and B, and the MMA for these sums."""
        return 0 if config.target.accumulators.in_registers else acc_stages(config, self) - 1

    def columns(self, config: TileConfig) -> int:
        """Columns of tensor memory for scales: none, as threads read them from shared memory."""
        return 0


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
    scaling = scaling_of(spec)
    return left_bytes(config, Rings.of_all(config, spec), scaling) // stage_bytes(config, scaling)


def left_bytes(config: TileConfig, rings: Rings, scaling: SumScales | MmaScales | None) -> int:
    """The shared memory for stages of A and B beside the fewest stages of the epilogue's rings."""
    fewest = (
        config.load_stages * rings.exact + EPILOGUE_STAGES * rings.row + config.store_stages * rings.store
    )
    return config.smem_bytes - SMEM_RESERVE - config.sum_bytes - fewest - ahead_bytes(config, scaling)


def room_bytes(config: TileConfig, rings: Rings, scaling: SumScales | MmaScales | None) -> int:
    """The shared memory that is left for further rings beside these and the fewest stages of A and B."""
    return left_bytes(config, rings, scaling) - config.least_ab_stages * stage_bytes(config, scaling)


def stage_bytes(config: TileConfig, scaling: SumScales | MmaScales | None) -> int:
    """The shared memory of a stage of A and B with their scales."""
    return config.ab_stage_bytes + (scaling.stage_bytes(config) if scaling else 0)


def scaling_of(spec: EpilogueSpec) -> SumScales | MmaScales | None:
    """The scales of blocks of A and B that come with a k tile, or None if a spec has none."""
    return SumScales.of(spec) or MmaScales.of(spec)


def ahead_bytes(config: TileConfig, scaling: SumScales | MmaScales | None) -> int:
    """Returns the bytes of shared memory for stages of scales beyond those of A and B."""
    return scaling.ahead(config) * scaling.stage_bytes(config) if isinstance(scaling, SumScales) else 0
