"""Planes: brought to shared memory where they are aligned, by TMA or cp.async, else read by element."""

from __future__ import annotations

from functools import partial

from cute_backend.planning.placements.placement import ByElement, Carrier, Need, Placement, takes_nothing
from cute_backend.planning.shared_memory import ring_bytes
from cute_backend.planning.tiles import Alignment, TileConfig
from cute_backend.spec import BColumns, Load, LoadKind, Stride


def _stages_of_a_plane(load: Load, config: TileConfig, alignment: Alignment, tma: bool) -> Need | None:
    if alignment is not Alignment.TMA or config.target.planes_by_tma is not tma:
        return None
    in_table = load.blocks is not None and load.is_table and load.blocks.fits_boxes(config.subtile_n)
    if load.order is None and not (tma and in_table):
        return None
    if tma and not config.has_whole_runs(load.order, load.dtype):
        return None
    return Need(smem_bytes=ring_bytes(config.stage_elements, load.dtype, config.load_stages))


TMA = Placement(
    "tma",
    LoadKind.EXACT,
    "a subtile at a time by TMA, ahead of the accumulator wait",
    element="{}[e]",
    takes=partial(_stages_of_a_plane, tma=True),
    ring=Carrier.PLANE,
)

CP_ASYNC = Placement(
    "cp_async",
    LoadKind.EXACT,
    "a subtile at a time by cp.async, the first ones ahead of the products",
    element="{}[e]",
    takes=partial(_stages_of_a_plane, tma=False),
    ring=Carrier.PLANE,
)


def _in_runs(load: Load, config: TileConfig, alignment: Alignment) -> Need | None:
    blocks = load.blocks
    if (
        blocks is None
        or blocks.period
        or blocks.inner is not Stride.ONE
        or config.b_columns is not BColumns.APART
    ):
        return None
    return Need() if blocks.columns % config.subtile_n == 0 else None


RUNS = Placement(
    "runs",
    LoadKind.EXACT,
    "when needed, from one address for each row",
    element="{}[e]",
    takes=_in_runs,
    copy="copy_runs",
)


def _of_first_columns(load: Load, config: TileConfig, alignment: Alignment) -> Need | None:
    return Need() if load.blocks is not None and load.blocks.period else None


FIRST_COLUMNS = Placement(
    "first_columns",
    LoadKind.EXACT,
    "when needed, by element, the columns that it has of each block",
    element="{}[e]",
    takes=_of_first_columns,
    copy="copy_first",
)

VECTOR = Placement(
    "vector",
    LoadKind.EXACT,
    "by element when needed",
    element="{}[e]",
    takes=takes_nothing,
    visit=ByElement("sub.elements", "e", "sub.row(e), sub.column(e)"),
)
