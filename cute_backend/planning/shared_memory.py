"""What of an epilogue may pass through shared memory, and how much of it that takes."""

from __future__ import annotations

from ..spec import DType, EpilogueSpec, LoadKind
from .tiles import EPILOGUE_STAGES, TileConfig


def has_planes(spec: EpilogueSpec) -> bool:
    """Whether a spec reads or writes an (M, N) plane."""
    return bool(spec.planes or spec.loads_of(LoadKind.EXACT))


def plane_bits(spec: EpilogueSpec) -> int:
    """Bits of one element of every plane that a spec reads and writes."""
    exact = sum(load.dtype.bits for load in spec.loads_of(LoadKind.EXACT))
    return exact + sum(store.dtype.bits for store in spec.planes)


def ring_bytes(elements: int, dtype: DType) -> int:
    """Shared memory for the fewest stages of something of `elements` a stage."""
    return EPILOGUE_STAGES * elements * dtype.bits // 8


def holds_planes(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether all that the epilogue may pass through shared memory fits there."""
    bits = config.stage_elements * plane_bits(spec)
    bits += config.tile_n * sum(load.dtype.bits for load in spec.loads_of(LoadKind.ROWVEC))
    return EPILOGUE_STAGES * bits // 8 <= config.epilogue_smem_bytes
