"""The number of stages of each ring in a CTA's shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cute_backend.planning import EPILOGUE_STAGES, SMEM_RESERVE, TileConfig
from cute_backend.planning.mma_scales import MmaScales
from cute_backend.planning.shared_memory import SumScales, ahead_bytes
from cute_backend.planning.tiles import MAX_STAGES
from cute_backend.templates.epilogue import Epilogue, SmemOperand

MAX_STAGES_BESIDE_SCALES = 8
"""The most stages of A and B beside a ring of scales, which has up to three more: `SMEM_RESERVE` has room for
no more barriers."""


@dataclass(frozen=True)
class Stages:
    """The number of stages of each ring; 0 if the epilogue does not use it. A stage of A and B includes the
    scales of their blocks, but scales that are applied to sums in tensor memory have a ring of their own."""

    ab: int
    exact: int
    row: int
    store: int

    @staticmethod
    def of(config: TileConfig, epilogue: Epilogue, scaling: SumScales | MmaScales | None = None) -> Stages:
        """Divides the shared memory among the rings. Each ring of the epilogue first gets its fewest stages,
        and A and B get enough of them. The rest of the memory makes further stages of both.

        Raises ValueError if fewer than the target's `least_ab_stages` are left for A and B.
        """

        def ring(
            operands: Sequence[SmemOperand], elements: int, stages: int = EPILOGUE_STAGES
        ) -> tuple[int, int]:
            return sum(operand.bytes(elements) for operand in operands), stages if operands else 0

        row_bytes, rows = ring(epilogue.staged, config.staged_n)
        store_bytes, store = ring(epilogue.shared_stores, config.stage_elements, config.store_stages)
        exact_bytes, exact = ring(epilogue.shared_loads, config.stage_elements, config.load_stages)
        free = config.smem_bytes - SMEM_RESERVE - rows * row_bytes - config.sum_bytes
        free -= ahead_bytes(config, scaling)
        stage_bytes = config.ab_stage_bytes + (scaling.stage_bytes(config) if scaling else 0)
        ab = (free - exact * exact_bytes - store * store_bytes) // stage_bytes
        least = config.least_ab_stages
        if ab < least:
            raise ValueError(
                f"tile {config.name} leaves shared memory for {ab} stages of A and B, which take "
                f"{least}, beside {exact_bytes} bytes of exact loads, {row_bytes} of rowvecs and "
                f"{store_bytes} of outputs in each of their stages, and {config.sum_bytes} of sums"
            )
        enough = min(ab, config.enough_ab_stages) * stage_bytes

        def grown(stages: int, stage_bytes: int, others: int) -> int:
            return min((free - enough - others) // stage_bytes, MAX_STAGES) if stages else 0

        exact = grown(exact, exact_bytes, store * store_bytes)
        if config.target.planes_by_tma:
            store = grown(store, store_bytes, exact * exact_bytes)
        ab = (free - exact * exact_bytes - store * store_bytes) // stage_bytes
        if ahead_bytes(config, scaling):
            ab = min(ab, MAX_STAGES_BESIDE_SCALES)
        return Stages(ab, exact, rows, store)
