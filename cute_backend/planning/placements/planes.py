"""Planes: brought by TMA where its rules are met, else read by element."""

from __future__ import annotations

from ...spec import Load, LoadKind
from ..shared_memory import ring_bytes
from ..tiles import TileConfig, Variant
from .placement import ByElement, Need, Placement, Ring, takes_nothing


def _stages_of_a_plane(load: Load, config: TileConfig, variant: Variant) -> Need | None:
    if variant is not Variant.TMA or not config.target.tma or load.order is None:
        return None
    return Need(smem_bytes=ring_bytes(config.stage_elements, load.dtype))


TMA = Placement(
    "tma",
    LoadKind.EXACT,
    "a subtile at a time by TMA, ahead of the accumulator wait",
    element="{}[e]",
    takes=_stages_of_a_plane,
    ring=Ring.PLANE,
)

VECTOR = Placement(
    "vector",
    LoadKind.EXACT,
    "by element when needed",
    element="{}[e]",
    takes=takes_nothing,
    visit=ByElement("sub.elements", "e", "sub.row(e), sub.column(e)"),
)
