"""Bulk copies: the common part of the TMA unit's loads and stores, groups, consecutive bytes (PTX ISA
9.7.9.25.4)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_backend.simulator.boxes import unit_cells
from cute_backend.simulator.global_shadow import Event, Footprint, Lanes
from cute_backend.simulator.isa.atomics import atomic_function
from cute_backend.simulator.isa.barrier import each_lane, in_cluster, own_address, use_mbarrier
from cute_backend.simulator.isa.loads_stores import active
from cute_backend.simulator.memory import OFFSET_MASK, RANK_SHIFT, Range
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.scopes import Order, Scope
from cute_backend.simulator.shadow import IN_FLIGHT, Access
from cute_backend.simulator.simulation_errors import IllegalAccess
from cute_backend.simulator.syntax import Immediate, Instruction
from cute_backend.simulator.warp import Wait

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.cta import Cta
    from cute_backend.simulator.warp import Warp

WEAK = Order(0)
REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def reducing(size: int) -> Order:
    """The memory order of a bulk reduction on each of its elements (PTX ISA 9.7.9.25.4.2): .relaxed.gpu."""
    return Order(size, Scope.GPU, updates=True)


@dataclass(frozen=True)
class Destination:
    """One CTA that a load writes to, and the address (in the cluster) of the mbarrier that counts it."""

    cta: Cta
    offset: int
    barrier: int


def destinations(w: Warp, target: int, barrier: int, mask: int | None, pair: bool) -> list[Destination]:
    """The destinations of a load. With a multicast mask, they have the same offsets in each CTA of the mask.

    .cta_group::2 lets the barrier be in the other CTA of the pair: with multicast, in the CTA of each
    destination's pair that has the parity of the barrier's own (PTX ISA 9.7.9.25.5.2).
    """
    cluster = w.cta.cluster
    target, barrier = in_cluster(target), in_cluster(barrier)
    if mask is None:
        cta, offset = cluster.locate(target)
        rank = barrier >> RANK_SHIFT
        if rank != cta.rank and not (pair and rank ^ 1 == cta.rank):
            raise IllegalAccess(
                f"a bulk copy into CTA rank {cta.rank} that signals an mbarrier of rank {rank}; expected "
                "the same CTA, and with .cta_group::2 the other one of the pair"
            )
        return [Destination(cta, offset, barrier)]
    found = []
    for rank in range(16):
        if (mask >> rank) & 1:
            if rank >= len(cluster.ctas):
                raise IllegalAccess(f"multicast mask {mask:#x} in a cluster of {len(cluster.ctas)} CTAs")
            signal = (rank & ~1) | ((barrier >> RANK_SHIFT) & 1) if pair else rank
            address = (barrier & OFFSET_MASK) | (signal << RANK_SHIFT)
            found.append(Destination(cluster.ctas[rank], target & OFFSET_MASK, address))
    if not found:
        raise IllegalAccess("a multicast copy with an empty mask")
    return found


@dataclass(frozen=True)
class Touched:
    """The global memory that a bulk copy reads or writes, and the memory order of its accesses."""

    place: Range
    footprint: Footprint
    order: Order = WEAK


def start_load(
    w: Warp,
    goal: Destination,
    units: np.ndarray,
    fetch: Callable[[], np.ndarray],
    text: str,
    source: Touched | None = None,
    counted: int | None = None,
) -> None:
    """Begins one load into `units` of a CTA. It is in flight until the data lands and the mbarrier counts it:
    by `counted` bytes or, if that is None, by the bytes in shared memory."""
    barrier = use_mbarrier(w, goal.barrier)
    shared = goal.cta.shared
    shared.check(int(units.min()) * 16, int(units.max()) * 16 + 16)
    cells = unit_cells(units)
    access = w.issue(barrier.agent, IN_FLIGHT, text)
    shared.shadow.write(cells, access)
    event = _touch(w, source, access, writes=False) if source is not None else None
    nbytes = len(units) * 16 if counted is None else counted
    w.report.bytes["TMA load"] += nbytes

    def complete() -> None:
        shared.units[units] = fetch().reshape(-1, 16)
        shared.shadow.epoch[cells] = barrier.next_epoch
        if event is not None:
            event.epoch = barrier.next_epoch
        if barrier.cta.finished:
            raise IllegalAccess(f"a load counts on the {barrier.name}, all of whose warps have exited")
        barrier.complete_tx(nbytes)

    goal.cta.pipes["TMA load"].issue(text, complete)


def _touch(w: Warp, region: Touched, access: Access, *, writes: bool) -> Event:
    """Checks and records the accesses of a bulk copy to global memory."""
    cluster = w.cta.cluster
    who = w.name if writes else f"{cluster.agents.names[access.agent]}, of {w.name},"
    event = Event(
        w.cta.id,
        access.agent,
        access.epoch,
        0,
        "async",
        writes,
        region.order,
        who,
        access.text,
        region.footprint,
    )
    touch = cluster.global_shadow.write if writes else cluster.global_shadow.read
    touch(region.place, event, access.clock)
    return event


@dataclass
class BulkOperation:
    """A bulk store: event `epoch` of one agent ends its reads of shared memory, and the same event of another
    agent ends its writes."""

    reader: int
    writer: int
    epoch: int
    read: bool = False
    written: bool = False


class BulkGroups:
    """The bulk groups of one thread (PTX ISA 9.7.9.25.4.1)."""

    def __init__(self) -> None:
        self.open: list[BulkOperation] = []
        self.closed: list[list[BulkOperation]] = []


def _no_groups(w: Warp) -> defaultdict[int, BulkGroups]:
    return defaultdict(BulkGroups)


def groups_of(w: Warp, lane: int) -> BulkGroups:
    return w.own("bulk", _no_groups)[lane]


def begin_store(
    w: Warp,
    lanes: Any,
    units: np.ndarray,
    write: Callable[[np.ndarray], None],
    text: str,
    target: Touched | None,
) -> None:
    """Begins one bulk store from `units` of the CTA's shared memory. It reads them later, and writes its
    destination later still.
    """
    cta = w.cta
    names = f"a bulk store of {w.name}", f"the writing of a bulk store of {w.name}"
    state = w.own("bulk agent", lambda w: [*map(cta.cluster.agents.new, names), 0])
    state[2] += 1
    operation = BulkOperation(state[0], state[1], state[2])
    shared = cta.shared
    shared.check(int(units.min()) * 16, int(units.max()) * 16 + 16)
    access = w.issue(operation.reader, operation.epoch, text)
    shared.shadow.read(unit_cells(units), access)
    shared.shadow.note(operation.reader, operation.epoch, text)
    if target is not None:
        _touch(w, target, replace(access, agent=operation.writer), writes=True)
    for lane in lanes:
        groups_of(w, int(lane)).open.append(operation)
    w.report.bytes["TMA store"] += len(units) * 16
    w.report.stored()
    pipe = cta.pipes["TMA store"]

    def read() -> None:
        if cta.finished:
            raise IllegalAccess(
                f"all warps of {cta.name} have exited while this store still reads its shared memory"
            )
        data = shared.units[units].reshape(-1)
        operation.read = True
        cta.cluster.activity += 1

        def complete() -> None:
            write(data)
            operation.written = True
            cta.cluster.activity += 1

        pipe.issue(text, complete)

    pipe.issue(text, read)


@opcode("cp.async.bulk", section="9.7.9.25.4.1", meaning="Bulk copy of consecutive bytes")
def bind_bulk_copy(binder: Binder, instruction: Instruction) -> Step:
    spaces = [p for p in instruction.parts if p.startswith("shared") or p == "global"]
    if len(spaces) != 2:
        raise unsupported(instruction, "this form")
    if spaces[0] == "global":
        return _bind_bulk_store(binder, instruction, None)
    target, source, size, barrier, *rest = instruction.operands
    operands = [binder.address(each, instruction) for each in (target, source)]
    operands += [binder.get(size, "u32", instruction), binder.address(barrier, instruction)]
    multicast = instruction.has("multicast::cluster")
    operands.append(binder.get(rest[0] if multicast else Immediate(0), "u16", instruction))
    from_global, text = spaces[1] == "global", instruction.text

    def copy(w: Warp) -> None:
        memory = w.global_memory
        for goal_address, at, nbytes, signal, mask in each_lane(w, *(get(w) for get in operands)):
            _check_bulk(goal_address, at, nbytes)
            for goal in destinations(w, goal_address, signal, mask if multicast else None, False):
                units = (goal.offset >> 4) + np.arange(nbytes // 16)
                if from_global:
                    region = _bytes(memory.find(at, nbytes), at, nbytes)
                    start_load(w, goal, units, partial(memory.read, at, nbytes), text, region)
                else:
                    _copy_between(w, goal, units, own_address(w, at), nbytes, text)

    return copy


def _bytes(place: Range, address: int, nbytes: int, order: Order = WEAK) -> Touched:
    """Consecutive bytes."""
    return Touched(place, Lanes(np.array([address - place.address]), nbytes), order)


def _check_bulk(target: int, source: int, nbytes: int) -> None:
    if target % 16 or source % 16 or nbytes % 16:
        raise IllegalAccess(
            f"a bulk copy of {nbytes} bytes from {source:#x} to {target:#x}: multiples of 16 are allowed"
        )


def _copy_between(w: Warp, goal: Destination, units: np.ndarray, source: int, nbytes: int, text: str) -> None:
    """Shared memory of this CTA to shared memory of another one of the cluster."""
    shared = w.cta.shared
    shared.check(source, source + nbytes)
    cells = np.arange(source // 4, (source + nbytes) // 4)
    barrier = use_mbarrier(w, goal.barrier)
    shared.shadow.read(cells, w.issue(barrier.agent, barrier.next_epoch, text))
    start_load(w, goal, units, lambda: shared.data[source : source + nbytes].copy(), text)


@opcode("cp.reduce.async.bulk", section="9.7.9.25.4.2", meaning="Bulk reduction of consecutive elements")
def bind_bulk_reduce(binder: Binder, instruction: Instruction) -> Step:
    if not instruction.has("bulk_group"):
        raise unsupported(instruction, "a reduction into shared memory")
    return _bind_bulk_store(binder, instruction, next(p for p in instruction.parts if p in REDUCTIONS))


def _bind_bulk_store(binder: Binder, instruction: Instruction, reduction: str | None) -> Step:
    target, source = (binder.address(o, instruction) for o in instruction.operands[:2])
    size = binder.get(instruction.operands[2], "u32", instruction)
    kind = instruction.parts[-1]
    text = instruction.text
    dtype = {"f32": "f4", "f64": "f8", "s32": "i4", "s64": "i8"}.get(
        kind, f"u{ {'64': 8, '32': 4}.get(kind[-2:], 2) }"
    )
    function = atomic_function(reduction, kind) if reduction else None
    order = reducing(np.dtype(dtype).itemsize) if reduction else WEAK

    def store(w: Warp) -> None:
        memory = w.global_memory
        rows = each_lane(w, target(w), source(w), size(w))
        for (at, offset, nbytes), lane in zip(rows, active(w), strict=True):
            offset = own_address(w, offset)
            _check_bulk(at, offset, nbytes)
            region = _bytes(memory.find(at, nbytes), at, nbytes, order)

            def write(data: np.ndarray, at: int = at) -> None:
                view = memory.view(at, len(data))
                if function is None:
                    view[:] = data
                else:
                    view[:] = np.ascontiguousarray(function(view.copy().view(dtype), data.view(dtype))).view(
                        np.uint8
                    )

            begin_store(w, [lane], (offset >> 4) + np.arange(nbytes // 16), write, text, region)

    return store


@opcode("cp.async.bulk.prefetch", section="9.7.9.25.4.3", meaning="Prefetch into L2: no effect here")
def bind_bulk_prefetch(binder: Binder, instruction: Instruction) -> Step:
    return lambda w: None


@opcode("cp.async.bulk.commit_group", section="9.7.9.25.4.4", meaning="Closes a bulk group of the thread")
def bind_bulk_commit(binder: Binder, instruction: Instruction) -> Step:
    def commit(w: Warp) -> None:
        for lane in active(w):
            groups = groups_of(w, int(lane))
            groups.closed.append(groups.open)
            groups.open = []

    return commit


@opcode(
    "cp.async.bulk.wait_group",
    section="9.7.9.25.4.5",
    meaning="Waits for all but N bulk groups of the thread",
)
def bind_bulk_wait(binder: Binder, instruction: Instruction) -> Step:
    keep_operand = instruction.operands[0]
    assert isinstance(keep_operand, Immediate)
    keep = int(keep_operand.value)
    only_read = instruction.has("read")

    def older(groups: list[list[BulkOperation]]) -> list[list[BulkOperation]]:
        return groups[: max(len(groups) - keep, 0)]

    def wait(w: Warp) -> Wait | None:
        per_thread = w.pipes.get("bulk")
        if not per_thread:
            return None
        waited = [
            operation
            for lane in active(w)
            if int(lane) in per_thread
            for group in older(per_thread[int(lane)].closed)
            for operation in group
        ]
        left = [o for o in waited if not (o.read if only_read else o.written)]
        if left:
            return Wait(
                lambda: all(o.read if only_read else o.written for o in left),
                lambda: (
                    f"{len(left)} bulk stores of its own that have not "
                    + ("read shared memory yet" if only_read else "written yet")
                ),
            )
        seen = w.clock.seen
        for operation in waited:
            for agent in (operation.reader,) if only_read else (operation.reader, operation.writer):
                seen[agent] = max(int(seen[agent]), operation.epoch)
        for lane in active(w):
            if int(lane) in per_thread and not only_read:
                groups = per_thread[int(lane)]
                del groups.closed[: len(older(groups.closed))]
        return None

    return wait
