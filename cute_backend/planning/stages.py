"""The number of stages of each ring in a CTA's shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from cute_backend.planning.shared_memory import Rings, left_bytes, stage_bytes
from cute_backend.planning.stage_scales import NO_SCALES, StageScales
from cute_backend.planning.tiles import EPILOGUE_STAGES, MAX_STAGES, TileConfig

MAX_AB_STAGES = 16
"""The most stages of A and B, of which 23 of 64 x 8 would fit: `SMEM_RESERVE` has room for the barriers of 31
stages of all rings, and 16 stages are 144 KiB at least."""

MAX_STAGES_BESIDE_SCALES = 8
"""The most stages of A and B beside a ring of scales, which has up to three more: `SMEM_RESERVE` has room for
no more barriers."""


@dataclass(frozen=True)
class Stages:
    """The number of stages of each ring; 0 if the epilogue does not use it. A stage of A and B includes the
    scales of their blocks, but scales that are applied to sums in tensor memory have a ring of their own.

    If parts of K leave their sums in memory, `ab` is of the kernel that multiplies, and the others are of the
    kernel that adds up the sums.
    """

    ab: int
    exact: int = 0
    row: int = 0
    store: int = 0

    @staticmethod
    def of(config: TileConfig, rings: Rings, scales: StageScales = NO_SCALES) -> Stages:
        """Divides the shared memory among the rings. Each ring of the epilogue first gets its fewest stages,
        and A and B get enough of them, or one if there is no room. The rest of the memory makes further
        stages of both.
        """
        of_ab, left = stage_bytes(config, scales), left_bytes(config, rings, scales)
        ab = max(left // of_ab, 1)
        left -= min(ab, config.enough_ab_stages) * of_ab

        def further(fewest: int, ring_bytes: int) -> int:
            return min(max(left, 0) // ring_bytes, MAX_STAGES - fewest) if ring_bytes else 0

        exact = config.load_stages + further(config.load_stages, rings.exact) if rings.exact else 0
        left -= (exact - config.load_stages) * rings.exact if exact else 0
        store = config.store_stages if rings.store else 0
        if store and config.target.planes_by_tma:
            store += further(store, rings.store)
            left -= (store - config.store_stages) * rings.store
        ab = min(ab, config.enough_ab_stages) + max(left, 0) // of_ab
        ab = min(ab, MAX_STAGES_BESIDE_SCALES if scales.ahead_bytes(config) else MAX_AB_STAGES)
        return Stages(ab, exact, EPILOGUE_STAGES if rings.row else 0, store)
