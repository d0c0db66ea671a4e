"""Asynchronous copies of single threads: cp.async and st.async (PTX ISA 9.7.9.12, 9.7.9.25.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cute_backend.simulator.global_shadow import Event, Lanes
from cute_backend.simulator.isa.common import types_of
from cute_backend.simulator.isa.loads_stores import (
    active,
    aligned,
    cells_of,
    per_lane,
    raw_dtype,
    shared_target,
    value_bytes,
    vector_length,
)
from cute_backend.simulator.memory import OFFSET_MASK
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.scopes import Order
from cute_backend.simulator.shadow import IN_FLIGHT, Access
from cute_backend.simulator.syntax import TYPE_BYTES, Immediate, Instruction, elements_of
from cute_backend.simulator.warp import Wait

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.warp import Warp


class CopyGroup:
    """Operations of cp.async that are waited for together: the event of the last one, and the numbers of
    operations that were issued and that are in progress."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.issued = self.under_way = 0


class CopyGroups:
    """A warp's cp.async operations: the group that is open, and those that are closed, oldest first.

    The ISA leaves the order in which the copies of one group finish open, so they finish in any order. Groups
    do too, because only a wait for the older ones could observe their order.
    """

    def __init__(self, w: Warp) -> None:
        self.warp = w
        self.agent = w.cta.cluster.agents.new(f"cp.async of {w.name}", generic=True)
        self.open = CopyGroup(1)
        self.groups: list[CopyGroup] = []
        self.last_due = 0

    def close(self) -> None:
        """Makes a group of the copies that were issued since the last group."""
        self.groups.append(self.open)
        self.open = CopyGroup(self.open.epoch + 1)

    def issue(self, text: str, complete: Callable[[], None]) -> None:
        """Adds a copy to the open group."""
        group, pipe = self.open, self.warp.new_pipe("cp.async")
        group.issued += 1
        group.under_way += 1

        def done() -> None:
            complete()
            group.under_way -= 1

        pipe.issue(text, done)
        self.last_due = max(self.last_due, pipe.last_due)

    def after_all(self, text: str, complete: Callable[[], None]) -> None:
        """Calls `complete` once all copies that were issued so far are done."""
        pipe = self.warp.new_pipe("cp.async")
        pipe.last_due = self.last_due
        pipe.issue(text, complete)


def copies_of(w: Warp) -> CopyGroups:
    return w.own("cp.async", CopyGroups)


@opcode(
    "cp.async", section="9.7.9.25.3", meaning="Copy of 4 to 16 bytes per thread from global to shared memory"
)
def bind_cp_async(binder: Binder, instruction: Instruction) -> Step:
    if not (instruction.has("ca") or instruction.has("cg")):
        raise unsupported(instruction, "this form")
    target, source = (binder.address(o, instruction) for o in instruction.operands[:2])
    size_operand = instruction.operands[2]
    assert isinstance(size_operand, Immediate)
    nbytes = int(size_operand.value)
    rest = list(instruction.operands[3:])
    if instruction.has("L2::cache_hint"):
        rest = rest[:-1]
    source_size = binder.get(rest[0], "u32", instruction) if rest else None
    text, order = instruction.text, Order(nbytes)

    def copy(w: Warp) -> None:
        copies, lanes = copies_of(w), active(w)
        data = np.zeros((len(lanes), nbytes), np.uint8)
        sizes = np.full(len(lanes), nbytes) if source_size is None else per_lane(w, source_size(w), lanes)
        sources = per_lane(w, source(w), lanes)
        epoch = copies.open.epoch
        for size in np.unique(sizes):
            if size:
                here = np.flatnonzero(sizes == size)
                for piece in w.global_memory.pieces(sources[here], int(size)):
                    footprint = Lanes(piece.offsets, int(size))
                    event = Event(
                        w.cta.id, copies.agent, epoch, 0, "generic", False, order, w.name, text, footprint
                    )
                    w.cta.cluster.global_shadow.read(piece.place, event, w.global_clock())
                    data[here[piece.here], :size] = piece.read(int(size))
        addresses = per_lane(w, target(w), lanes)
        aligned(addresses, nbytes)
        ((cta, _, offsets),) = shared_target(w, addresses, "shared::cta", nbytes)
        cells = cells_of(offsets, nbytes)
        cta.shared.shadow.write(cells, Access(copies.agent, epoch, w.clock.copy(), "generic", text))
        w.report.bytes["cp.async"] += data.size
        w.report.shared(lanes, offsets, nbytes)

        def complete() -> None:
            cta.shared.scatter(offsets, data)

        copies.issue(text, complete)

    return copy


@opcode("cp.async.commit_group", section="9.7.9.25.3.2", meaning="Closes a group of cp.async")
def bind_cp_async_commit(binder: Binder, instruction: Instruction) -> Step:
    return lambda w: copies_of(w).close()


@opcode(
    "cp.async.wait_group", "cp.async.wait_all", section="9.7.9.25.3.3", meaning="Waits for cp.async groups"
)
def bind_cp_async_wait(binder: Binder, instruction: Instruction) -> Step:
    every = instruction.has("wait_all")
    left = 0 if every else int(instruction.operands[0].value)  # type: ignore[union-attr]

    def wait(w: Warp) -> Wait | None:
        copies = copies_of(w)
        if every and copies.open.issued:
            copies.close()
        waited_for = copies.groups[: max(len(copies.groups) - left, 0)]
        if any(group.under_way for group in waited_for):
            return Wait(
                lambda: not any(group.under_way for group in waited_for),
                lambda: f"{len(waited_for)} cp.async groups",
            )
        if waited_for:
            w.clock.seen[copies.agent] = waited_for[-1].epoch
            del copies.groups[: len(waited_for)]
        return None

    return wait


@opcode(
    "cp.async.mbarrier.arrive", section="9.7.13.15.17", meaning="Arrival once the thread's cp.async are done"
)
def bind_cp_async_arrive(binder: Binder, instruction: Instruction) -> Step:
    address = binder.address(instruction.operands[0], instruction)
    no_increment = instruction.has("noinc")
    text = instruction.text

    def arrive(w: Warp) -> None:
        copies, lanes = copies_of(w), active(w)
        epoch = copies.open.epoch
        copies.open.epoch += 1
        barriers = [w.cta.mbarrier(int(a) & OFFSET_MASK) for a in per_lane(w, address(w), lanes)]
        if not no_increment:
            for barrier in barriers:
                barrier.pending += 1
        clock = w.release()

        def complete() -> None:
            clock.seen[copies.agent] = epoch
            for barrier in barriers:
                barrier.arrive(1, clock)

        copies.after_all(text, complete)

    return arrive


@opcode("st.async", section="9.7.9.12", meaning="Store to a CTA of the cluster, counted on an mbarrier")
def bind_st_async(binder: Binder, instruction: Instruction) -> Step:
    kind, count = types_of(instruction)[-1], vector_length(instruction)
    address = binder.address(instruction.operands[0], instruction)
    gets = [binder.get(each, kind, instruction) for each in elements_of(instruction.operands[1])]
    barrier_address = binder.address(instruction.operands[2], instruction)
    dtype, nbytes = raw_dtype(kind), TYPE_BYTES[kind] * count
    text = instruction.text

    def store(w: Warp) -> None:
        lanes = active(w)
        data = value_bytes(w, gets, dtype, lanes)
        addresses = per_lane(w, address(w), lanes)
        barriers = per_lane(w, barrier_address(w), lanes)
        aligned(addresses, nbytes)
        for i in range(len(lanes)):
            land_later(w, int(addresses[i]), data[i], int(barriers[i]), text)

    return store


def land_later(w: Warp, address: int, data: np.ndarray, barrier_address: int, text: str) -> None:
    """Writes bytes to shared memory of the cluster later, and counts them on an mbarrier there."""
    cluster = w.cta.cluster
    cta, offset = cluster.locate(address)
    barrier = cluster.mbarrier_at(barrier_address)
    cta.shared.check(offset, offset + len(data))
    cells = np.unique((offset + np.arange(len(data))) >> 2)
    cta.shared.shadow.write(cells, Access(barrier.agent, IN_FLIGHT, w.clock.copy(), "async", text))

    def complete() -> None:
        cta.shared.data[offset : offset + len(data)] = data
        cta.shared.shadow.epoch[cells] = barrier.next_epoch
        barrier.complete_tx(len(data))

    cta.pipes["TMA load"].issue(text, complete)
