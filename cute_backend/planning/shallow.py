"""Decides how a tile with few k tiles divides its shared memory.

The epilogue of such a tile takes longer than its MMA, and waits for planes on their way to and from memory.
So planes get the memory of a stage of A and B.
"""

from __future__ import annotations

from dataclasses import replace

from cute_backend.planning.shared_memory import can_be_shallow
from cute_backend.planning.tiles import TileConfig
from cute_backend.planning.transposing import multiplied
from cute_backend.spec import EpilogueSpec


def shallowed(config: TileConfig, spec: EpilogueSpec, k: int) -> TileConfig:
    """Returns the configuration for a problem of depth `k`, which is shallow if K is short and planes then
    get further stages.

    Scales of blocks make the MMA of a k tile take longer, and planes don't wait: 4096 x 24576 x 768 with a
    bias and a residual took 207 us, and 219 with a stage of A and B less (H200).
    """
    short = k * spec.product.a_dtype.bits // 8 <= config.target.shallow_k_bytes
    short = short and not spec.product.is_block_scaled
    return replace(config, shallow=short and can_be_shallow(config, multiplied(spec, config)))
