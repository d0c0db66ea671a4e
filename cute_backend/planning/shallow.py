"""Decides how a tile with few k tiles divides its shared memory.

The epilogue of such a tile takes longer than its MMA, and waits for planes on their way to and from memory.
So planes get the memory of a stage of A and B.
"""

from __future__ import annotations

from dataclasses import replace

from cute_backend.planning.mainloops import mainloop_of
from cute_backend.planning.shared_memory import (
    Rings,
    ab_stages,
    has_planes,
    left_bytes,
    plane_bits,
    stage_bytes,
)
from cute_backend.planning.tiles import (
    ENOUGH_AB_STAGES,
    EPILOGUE_STAGES,
    MAX_STAGES,
    SHALLOW_AB_STAGES,
    TileConfig,
)
from cute_backend.planning.transposing import Tiled
from cute_backend.spec import EpilogueSpec


def can_be_shallow(chosen: Tiled) -> bool:
    """Whether a kernel with `shallow` has more stages of planes, on a target that has such kernels.

    It has if the fewest stages of planes leave A and B more than `SHALLOW_AB_STAGES`, and what is left beside
    `ENOUGH_AB_STAGES` does not hold the most stages of planes anyway.
    """
    config, spec = chosen.tile, chosen.computed
    if not config.target.shallow_k_bytes or config.split_k > 1 or not has_planes(spec):
        return False
    scales = mainloop_of(spec, config.target).scales
    beside = left_bytes(config, Rings.of_all(config, spec), scales)
    beside -= ENOUGH_AB_STAGES * stage_bytes(config, scales)
    wanted = (MAX_STAGES - EPILOGUE_STAGES) * config.stage_elements * plane_bits(spec) // 8
    return ab_stages(config, spec) > SHALLOW_AB_STAGES and beside < wanted


def shallowed(config: TileConfig, spec: EpilogueSpec, k: int) -> TileConfig:
    """Returns the configuration for a problem of depth `k`, which is shallow if K is short and planes then
    get further stages."""
    short = k * spec.product.a_dtype.bits // 8 <= config.target.shallow_k_bytes
    short = short and mainloop_of(spec, config.target).makes_planes_wait
    return replace(config, shallow=short and can_be_shallow(Tiled(spec, config)))
