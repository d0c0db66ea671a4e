"""The places of an epilogue's operands: when and where a kernel reads each of them, and the outputs that pass
through shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cute_backend.planning.mainloops import mainloop_of
from cute_backend.planning.placements import PLACEMENTS, Carrier, Need, Placement, Room
from cute_backend.planning.placements.planes import RUNS, VECTOR
from cute_backend.planning.registers import NARROW_SUBTILE_N, hoist_budget
from cute_backend.planning.shared_memory import Rings, ring_bytes, room_bytes
from cute_backend.planning.tiles import Alignment, TileConfig
from cute_backend.spec import BColumns, EpilogueSpec, Load, ProductKind, Store


@dataclass(frozen=True)
class Placing:
    """The placement of every load of a segment of columns, by name, and the stores that go through shared
    memory."""

    placements: Mapping[str, Placement]
    shared_stores: tuple[str, ...]

    def in_ring(self, ring: Carrier, spec: EpilogueSpec) -> tuple[Load, ...]:
        """The loads of a spec that one of the rings brings, in order."""
        return tuple(load for load in spec.loads if self.placements[load.name].ring is ring)


def placed(spec: EpilogueSpec, config: TileConfig, alignment: Alignment) -> Placing:
    """Places the loads and stores of one segment for the tile and alignment with which a kernel runs its
    epilogue. The spec is the transposed one if the tile is transposed, and planes move by the alignment.

    Shared memory is reserved for all vectors along N first, then given to outputs, then to loads, in order.
    """
    vectors = Rings.of(config, [], [[load.dtype for load in spec.staged_loads]], [])
    scales = mainloop_of(spec, config.target).scales
    room = Room(hoist_budget(spec, config, alignment), room_bytes(config, vectors, scales))
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
    return Placing(placements, tuple(shared_stores))


def is_one_block(spec: EpilogueSpec, config: TileConfig) -> bool:
    """Whether the elements that a thread has of a subtile are one whole block of one row, or, in a wide
    subtile, a part of one. N is a multiple of blocks, so either all of these elements belong to a plane or
    none does.

    Without TMA, a kernel then asks once for all elements whether it writes them, and reads them from one
    address. A predicate and a clamped address for each element would take registers.
    """
    alone = config.target.accumulators.row_threads == 1 and spec.b_columns is BColumns.APART
    part = config.subtile_n > NARROW_SUBTILE_N and spec.block_columns % config.subtile_n == 0
    return alone and (part or config.subtile_n == spec.whole_columns)


_TMA_AXES = 5
"""The most axes of a tensor that TMA copies boxes of."""


def _in_boxes(store: Store, spec: EpilogueSpec, config: TileConfig) -> bool:
    """Whether a subtile of a plane is one box in memory: never in a cache, only in runs that TMA copies, and
    with heads only if its columns are of one head and TMA, which cuts boxes off where the rows of a head end,
    writes it.

    A plane by heads has axes for rows, columns and heads. If `pair_halves` orders the columns, those of a
    head are up to four axes: of a run, of both halves, of the runs in a half, and of the blocks in a head.
    """
    columns = store.form.block_columns
    if not store.form.in_boxes or not config.has_whole_runs(store.form.order, store.dtype):
        return False
    if not columns:
        return True
    block, axes = spec.reordered_columns, 3
    if block > config.subtile_n:
        axes += 1 + (block > config.box_n) + (columns > block)
    return config.target.planes_by_tma and columns % config.subtile_n == 0 and axes <= _TMA_AXES


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
