"""The placements of loads: each is one object in a file of its kind, and has a row here.

    kind     placement
    scalar   scalar          once, before the accumulator wait
    colvec   row_read        one value for each row that a thread owns, before the accumulator wait
    rowvec   register_hoist  the thread's columns in registers before the accumulator wait, while a budget
                             lasts; never under ping-pong or where visits are the iterations of a loop
             smem_staged     else a warp brings the tile's columns to shared memory ahead of the wait
    groupvec group_staged    the same for the row of the tile's group
    exact    tma             into shared memory ahead of the wait, while planes fit beside the operand stages
             cp_async        the same on targets that don't move planes by TMA, by the warps that read it
             runs            when needed, from one address for each row, where the columns of a block lie side
                             by side, or a thread has a whole block of a row (`placing.is_one_block`)
             first_columns   when needed, by element, if it has only the first columns of each block
             vector          else each thread reads its elements when it needs them

Register hoists are budgeted by the estimate of `registers`; planes in shared memory are budgeted because they
take stages from the MMA's operands.
"""

from __future__ import annotations

from cute_backend.planning.placements import planes, vectors
from cute_backend.planning.placements.placement import ByElement, Carrier, Need, Placement, Room

__all__ = ["PLACEMENTS", "ByElement", "Carrier", "Need", "Placement", "Room"]

PLACEMENTS: tuple[Placement, ...] = (
    vectors.SCALAR,
    vectors.ROW_READ,
    vectors.REGISTER_HOIST,
    vectors.SMEM_STAGED,
    vectors.GROUP_STAGED,
    planes.TMA,
    planes.CP_ASYNC,
    planes.RUNS,
    planes.FIRST_COLUMNS,
    planes.VECTOR,
)
"""In order of preference among those of a kind; the last of each kind takes any load."""
