"""The plan of a kernel: when and where it reads each operand of its epilogue, decided before any text is
written."""

from __future__ import annotations

from dataclasses import dataclass

from cute_backend.planning.placements import PLACEMENTS, Need, Placement, Ring, Room
from cute_backend.planning.placements.planes import RUNS, VECTOR
from cute_backend.planning.registers import NARROW_SUBTILE_N, hoist_budget
from cute_backend.planning.rules import moved, subtiled
from cute_backend.planning.shared_memory import ring_bytes
from cute_backend.planning.tiles import Alignment, TileConfig
from cute_backend.planning.transposing import multiplied
from cute_backend.spec import BColumns, EpilogueSpec, Load, LoadKind, ProductKind, Store


@dataclass(frozen=True)
class Plan:
    """The placement of every load, by name, and the stores that go through shared memory."""

    placements: dict[str, Placement]
    shared_stores: tuple[str, ...]

    def in_ring(self, ring: Ring, spec: EpilogueSpec) -> tuple[Load, ...]:
        """The spec's loads that one of the rings brings, in order."""
        return tuple(load for load in spec.loads if self.placements[load.name].ring is ring)


def plan(spec: EpilogueSpec, config: TileConfig, alignment: Alignment) -> Plan:
    """Places the loads and stores of a spec for one configuration and alignment, in the kernel that runs the
    epilogue.

    Shared memory is reserved for all vectors along N first, then given to outputs, then to loads, in order.
    """
    config = subtiled(spec, config.summing, alignment)
    spec = multiplied(spec, config)
    alignment = moved(spec, config, alignment)
    rowvecs = sum(
        ring_bytes(config.staged_n, load.dtype) for load in spec.loads_of(LoadKind.ROWVEC, LoadKind.GROUPVEC)
    )
    room = Room(hoist_budget(spec, config, alignment), config.epilogue_smem_bytes - rowvecs)
    shared_stores = []
    for store in spec.planes:
        need = Need(smem_bytes=ring_bytes(config.stage_elements, store.dtype, config.store_stages))
        if alignment is Alignment.TMA and room.holds(need) and _in_boxes(store, spec, config):
            shared_stores.append(store.name)
            room = room.without(need)
    placements = {}
    for load in spec.loads:
        # In a batch or in groups, the rows of a table may start over in the middle of a TMA box.
        apart = load.is_table and spec.product.kind is not ProductKind.DENSE
        placement, room = _place(load, config, Alignment.PLAIN if apart else alignment, room)
        in_runs = placement is VECTOR and load.blocks is None and is_one_block(spec, config)
        placements[load.name] = RUNS if in_runs else placement
    return Plan(placements, tuple(shared_stores))


def is_one_block(spec: EpilogueSpec, config: TileConfig) -> bool:
    """Whether the elements that a thread has of a subtile are one whole block of one row, or, in a wide
    subtile, a part of one. N is a multiple of blocks, so either all of these elements belong to a plane or
    none does.

    Without TMA, a kernel then asks once for all elements whether it writes them, and reads them from one
    address. With a predicate and a clamped address for each of 64 columns, a norm by head spilled 16 to 272
    bytes beside a plane that is read, and 32 to 568 beside two; with one predicate and clamped addresses, 24
    to 120 beside two (sm_100a). With a predicate for each column, two tables for 64 of a head's 128 columns
    spilled 64 bytes.
    """
    alone = config.target.accumulators.row_threads == 1 and spec.b_columns is BColumns.APART
    part = config.subtile_n > NARROW_SUBTILE_N and spec.block_columns % config.subtile_n == 0
    return alone and (part or config.subtile_n == spec.whole_columns)


_TMA_AXES = 5
"""The most axes of a tensor that TMA copies boxes of."""


def _in_boxes(store: Store, spec: EpilogueSpec, config: TileConfig) -> bool:
    """Whether a subtile of a plane is one box in memory: never in a cache, and with heads only if its columns
    are of one head and TMA, which cuts boxes off where the rows of a head end, writes it.

    A plane by heads has axes for rows, columns and heads. If `pair_halves` orders the columns, those of a
    head are up to four axes: of a run, of both halves, of the runs in a half, and of the blocks in a head.
    """
    if store.cache is not None:
        return False
    if store.heads is None:
        return True
    block, axes = spec.reordered_columns, 3
    if block > config.subtile_n:
        axes += 1 + (block > config.box_n) + (store.heads.columns > block)
    return config.target.planes_by_tma and store.heads.columns % config.subtile_n == 0 and axes <= _TMA_AXES


def _place(load: Load, config: TileConfig, alignment: Alignment, room: Room) -> tuple[Placement, Room]:
    """Returns the first placement that accepts the load and has room, and the room that is left."""
    for placement in PLACEMENTS:
        if placement.kind is load.kind:
            need = placement.takes(load, config, alignment)
            if need is not None and room.holds(need):
                return placement, room.without(need)
    raise ValueError(
        f"no placement takes {load.name}, a {load.kind.value} of {load.dtype.value}; the last one of each "
        "kind takes any"
    )
