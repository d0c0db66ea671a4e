"""The registers that a thread of the epilogue has for its values of a tile."""

from __future__ import annotations

from cute_backend.planning.tiles import TileConfig
from cute_backend.spec import EpilogueSpec

MARGIN = 40
"""Registers of a thread beside those that `Registers` counts, for addresses and the ops of the chain, if
accumulators are in registers, whose place the results of a visit take."""

MARGIN_OF_TENSOR_MEMORY = 56
"""The same if accumulators are in tensor memory."""


def register_budget(config: TileConfig, spec: EpilogueSpec) -> int:
    """The registers of a thread but those of the margin."""
    margin = MARGIN if config.target.accumulators.in_registers else MARGIN_OF_TENSOR_MEMORY
    return config.epilogue_registers(spec.product.kind, len(spec.staged_loads)) - margin
