"""How a CTA's shared memory is dealt out among the rings of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .config import EPILOGUE_STAGES, MIN_AB_STAGES, SMEM_BYTES, SMEM_RESERVE, TileConfig
from .epilogue import Epilogue, SmemOperand

ENOUGH_AB_STAGES = 4
"""Stages of A and B that hide the latency of memory; more are worth less than exact loads in flight."""

MAX_EXACT_STAGES = 4
"""Stages of the exact loads, of each warpgroup's ring, that hide the latency of memory."""


@dataclass(frozen=True)
class Stages:
    """The number of stages of each ring; 0 where the epilogue has no use for it."""

    ab: int
    exact: int
    row: int
    store: int

    @staticmethod
    def of(config: TileConfig, epilogue: Epilogue) -> Stages:
        """Two stages for each ring of the epilogue, then A and B and the exact loads share the rest.

        Raises ValueError where fewer than MIN_AB_STAGES are left for A and B.
        """

        def ring(operands: Sequence[SmemOperand], elements: int) -> tuple[int, int]:
            return sum(operand.bytes(elements) for operand in operands), EPILOGUE_STAGES if operands else 0

        row_bytes, rows = ring(epilogue.staged, config.tile_n)
        store_bytes, store = ring(epilogue.tma_stores, config.stage_elements)
        exact_bytes, exact = ring(epilogue.tma_loads, config.stage_elements)
        free = SMEM_BYTES - SMEM_RESERVE - rows * row_bytes - store * store_bytes
        ab = (free - exact * exact_bytes) // config.ab_stage_bytes
        if ab < MIN_AB_STAGES:
            raise ValueError(
                f"tile {config.name} leaves shared memory for {ab} stages of A and B, which take "
                f"{MIN_AB_STAGES}, beside {exact_bytes} bytes of exact loads, {row_bytes} of rowvecs and "
                f"{store_bytes} of outputs in each of their stages"
            )
        if exact:
            left = free - min(ab, ENOUGH_AB_STAGES) * config.ab_stage_bytes
            exact = min(left // exact_bytes, MAX_EXACT_STAGES)
            ab = (free - exact * exact_bytes) // config.ab_stage_bytes
        return Stages(ab, exact, rows, store)
