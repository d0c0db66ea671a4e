"""Scalars and vectors: read before the accumulator wait, or brought to shared memory ahead of it."""

from __future__ import annotations

from cute_backend.planning.placements.placement import ByElement, Carrier, Need, Placement, takes_nothing
from cute_backend.planning.registers import hoisted_registers
from cute_backend.planning.tiles import Alignment, Rowvecs, TileConfig
from cute_backend.spec import Load, LoadKind

SCALAR = Placement(
    "scalar",
    LoadKind.SCALAR,
    "read once, before the accumulator wait",
    element="held.{}[0]",
    takes=takes_nothing,
    begin=ByElement("1", "i", "i"),
)

ROW_READ = Placement(
    "row_read",
    LoadKind.COLVEC,
    "one value for each row of a thread, before the accumulator wait",
    element="held.{}[r]",
    takes=takes_nothing,
    begin=ByElement("tile.rows", "r", "tile.row(r)"),
)


def _columns_of_a_thread(load: Load, config: TileConfig, alignment: Alignment) -> Need | None:
    """The need of a register for each column of a thread, from the budget. If `config.rowvec_placement` asks
    for hoists, the need is 0, so that the budget does not limit them."""
    if config.rowvecs is Rowvecs.SMEM_STAGED:
        return None
    return Need(registers=0 if config.rowvecs is Rowvecs.REGISTER_HOIST else hoisted_registers(load, config))


REGISTER_HOIST = Placement(
    "register_hoist",
    LoadKind.ROWVEC,
    "the columns of a thread, before the accumulator wait",
    element="{}[c]",
    takes=_columns_of_a_thread,
    begin=ByElement("tile.columns", "c", "tile.column(c)"),
    part="sub.columns_of(held.{})",
)

SMEM_STAGED = Placement(
    "smem_staged",
    LoadKind.ROWVEC,
    "the tile's columns in shared memory, ahead of the accumulator wait",
    element="{}[c]",
    takes=takes_nothing,  # room for every rowvec is kept before anything else is placed
    ring=Carrier.ROW,
)

GROUP_STAGED = Placement(
    "group_staged",
    LoadKind.GROUPVEC,
    "the tile's columns of its group in shared memory, ahead of the accumulator wait",
    element="{}[c]",
    takes=takes_nothing,
    ring=Carrier.ROW,
)
