"""An epilogue with one output and no loads, for templates that are not run."""

from __future__ import annotations

import cutlass

from cute_backend.planning import Stages, TileConfig
from cute_backend.planning.shared_memory import Rings
from cute_backend.planning.stage_scales import NO_SCALES, StageScales
from cute_backend.templates.drain import Sweep, Visit
from cute_backend.templates.epilogue import Epilogue, SmemOperand


class Bare:
    loads = staged = shared_loads = ()
    stores = ("out0",)
    shared_stores = (SmemOperand("out0", cutlass.BFloat16),)
    sweeps: tuple[Sweep, ...] = (Visit(),)


def stages_for(epilogue: Epilogue, config: TileConfig, scales: StageScales = NO_SCALES) -> Stages:
    """The stages that a plan has for such an epilogue."""

    def nbytes(operands: tuple[SmemOperand, ...], elements: int) -> int:
        return sum(operand.bytes(elements) for operand in operands)

    rings = Rings(
        nbytes(epilogue.shared_loads, config.stage_elements),
        nbytes(epilogue.staged, config.staged_n),
        nbytes(epilogue.shared_stores, config.stage_elements),
    )
    return Stages.of(config, rings, scales)
