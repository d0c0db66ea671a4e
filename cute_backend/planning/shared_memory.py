"""The loads and outputs that pass through shared memory, and the bytes that they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TypeVar

from cute_backend.planning.mma_scales import MmaScales, acc_stages
from cute_backend.planning.tiles import (
    ENOUGH_AB_STAGES,
    EPILOGUE_STAGES,
    MAX_STAGES,
    SHALLOW_AB_STAGES,
    SMEM_RESERVE,
    TileConfig,
)
from cute_backend.spec import DType, EpilogueSpec, LoadKind, Scaling

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
    return bool(spec.planes or spec.loads_of(LoadKind.EXACT))


def plane_bits(spec: EpilogueSpec) -> int:
    """Returns the bits of one element, summed over all planes that a spec reads and writes."""
    exact = sum(load.dtype.bits for load in spec.loads_of(LoadKind.EXACT))
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


def ab_stages(config: TileConfig, spec: EpilogueSpec) -> int:
    """Returns how many stages of A and B, with their scales, fit in shared memory beside the epilogue's
    buffers, which have their fewest stages here."""
    return _left_bytes(config, spec) // _stage_bytes(config, spec)


def can_be_shallow(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a kernel with `shallow` has more stages of planes, on a target that has such kernels.

    It has if the fewest stages of planes leave A and B more than `SHALLOW_AB_STAGES`, and what is left beside
    `ENOUGH_AB_STAGES` does not hold the most stages of planes anyway.
    """
    if not config.target.shallow_k_bytes or config.split_k > 1 or not has_planes(spec):
        return False
    beside = _left_bytes(config, spec) - ENOUGH_AB_STAGES * _stage_bytes(config, spec)
    wanted = (MAX_STAGES - EPILOGUE_STAGES) * config.stage_elements * plane_bits(spec) // 8
    return ab_stages(config, spec) > SHALLOW_AB_STAGES and beside < wanted


def _left_bytes(config: TileConfig, spec: EpilogueSpec) -> int:
    """The shared memory for stages of A and B beside the fewest stages of the epilogue's buffers."""
    kinds = (
        (lambda of: of.loads_of(LoadKind.EXACT), config.stage_elements, config.load_stages),
        (lambda of: of.planes, config.stage_elements, config.store_stages),
        (lambda of: of.loads_of(LoadKind.ROWVEC, LoadKind.GROUPVEC), config.staged_n, EPILOGUE_STAGES),
    )
    rings = [
        ring_bytes(elements, dtype, stages)
        for operands, elements, stages in kinds
        for dtype in shared_buffers(
            [[each.dtype for each in operands(segment)] for segment in spec.segments], _bits
        )
    ]
    ahead = ahead_bytes(config, SumScales.of(spec) or MmaScales.of(spec))
    return config.smem_bytes - SMEM_RESERVE - config.sum_bytes - sum(rings) - ahead


def _stage_bytes(config: TileConfig, spec: EpilogueSpec) -> int:
    """The shared memory of a stage of A and B with their scales."""
    scaling = SumScales.of(spec) or MmaScales.of(spec)
    return config.ab_stage_bytes + (scaling.stage_bytes(config) if scaling else 0)


def _bits(dtype: DType) -> int:
    return dtype.bits


def ahead_bytes(config: TileConfig, scaling: SumScales | MmaScales | None) -> int:
    """Returns the bytes of shared memory for stages of scales beyond those of A and B."""
    return scaling.ahead(config) * scaling.stage_bytes(config) if isinstance(scaling, SumScales) else 0
