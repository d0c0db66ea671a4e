"""Barriers and fences: barrier{.cta}, barrier.cluster, mbarrier, fence (PTX ISA 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_backend.simulator.barriers import Mbarrier, Round
from cute_backend.simulator.isa.common import scalar
from cute_backend.simulator.isa.loads_stores import active, per_lane
from cute_backend.simulator.memory import OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW, WINDOW_MASK
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.scopes import Scope, scope_of
from cute_backend.simulator.simulation_errors import BarrierError, IllegalAccess, RaceError
from cute_backend.simulator.syntax import Immediate, Instruction, Operand, Sink
from cute_backend.simulator.warp import Wait

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.warp import Warp

# --- named barriers -------------------------------------------------------------------------------


@opcode("bar", "barrier", section="9.7.13.1", meaning="Barrier of a CTA: sync, arrive, red")
def bind_bar(binder: Binder, instruction: Instruction) -> Step:
    parts = [p for p in instruction.parts[1:] if p not in ("cta", "aligned")]
    action = parts[0]
    if action not in ("sync", "arrive", "red"):
        raise unsupported(instruction, f".{action}")
    aligned = instruction.parts[0] == "bar" or instruction.has("aligned")
    operands = list(instruction.operands)
    put = None
    if action == "red":
        combine = parts[1]
        put = binder.put(operands.pop(0), "u32" if combine == "popc" else "pred", instruction)
        vote = binder.get(operands.pop(), "pred", instruction)
    number = scalar(binder, operands[0], "u32", instruction)
    count = scalar(binder, operands[1], "u32", instruction) if len(operands) > 1 else None

    def sync(w: Warp) -> Wait | None:
        if aligned and (absent := w.together()) is not None:
            return absent
        which = number(w)
        if not 0 <= which < 16:
            raise BarrierError(f"barrier {which}; 0 to 15 exist")
        barrier = w.cta.named[which]
        expected = 32 * len(w.cta.warps) if count is None else count(w)
        votes = int(np.count_nonzero(np.broadcast_to(vote(w), 32) & w.mask)) if put is not None else 0
        threads = 32 if aligned or w.full else int(w.mask.sum())
        if put is not None:
            barrier.round.voters += int(w.mask.sum())
        now = barrier.arrive(w, threads, expected, votes)
        if action == "arrive":
            return None

        def done() -> None:
            w.acquire(now.clock)
            if put is not None:
                yes = sum(now.votes)
                put(
                    w,
                    {"popc": np.uint32(yes), "and": np.bool_(yes == now.voters), "or": np.bool_(yes > 0)}[
                        combine
                    ],
                )

        if now.complete:
            done()
            return None
        return Wait(lambda: now.complete, barrier.describe, retry=False, then=done)

    return sync


@opcode(
    "barrier.cluster.arrive",
    section="9.7.13.4",
    meaning="Arrival at the barrier of the cluster",
    together=True,
)
def bind_cluster_arrive(binder: Binder, instruction: Instruction) -> Step:
    relaxed = instruction.has("relaxed")

    def arrive(w: Warp) -> None:
        w.cluster_round = w.cta.cluster.barrier.arrive(w, w.fenced if relaxed else w.release())

    return arrive


@opcode(
    "barrier.cluster.wait", section="9.7.13.4", meaning="Wait for the barrier of the cluster", together=True
)
def bind_cluster_wait(binder: Binder, instruction: Instruction) -> Step:
    def wait(w: Warp) -> Wait | None:
        now: Round | None = w.cluster_round
        if now is None:
            raise BarrierError(f"{w.name} waits at the cluster barrier, at which it hasn't arrived")
        if not now.complete:
            return Wait(lambda: now.complete, w.cta.cluster.barrier.describe)
        w.cluster_round = None
        w.acquire(now.clock)
        return None

    return wait


# --- fences ---------------------------------------------------------------------------------------


@opcode(
    "fence.proxy.async", section="9.7.13.6", meaning="Generic-proxy writes become visible to the async proxy"
)
def bind_proxy_fence(binder: Binder, instruction: Instruction) -> Step:
    space = instruction.parts[-1]
    shared, globally = space != "global", not space.startswith("shared")
    return lambda w: w.publish(shared=shared, globally=globally)


@opcode(
    "fence", "membar", section="9.7.13.6", meaning="Orders memory accesses; releases what was done before"
)
def bind_fence(binder: Binder, instruction: Instruction) -> Step:
    words = instruction.parts
    if any(p.startswith("proxy") for p in words):
        return lambda w: None
    acquires, releases = "release" not in words, "acquire" not in words
    of_shared = "mbarrier_init" in words or any(p.startswith("sync_restrict") for p in words)
    scope = Scope.SYS if (found := scope_of(instruction)) is None else found

    def fence(w: Warp) -> None:
        if not of_shared:
            w.fence(scope, acquires=acquires, releases=releases)
        if releases:
            w.fenced = w.release()

    return fence


@opcode("fence.proxy.tensormap::generic", section="9.7.13.6", meaning="Tensor maps written by the kernel")
def bind_tensormap_fence(binder: Binder, instruction: Instruction) -> Step:
    return lambda w: None


# --- mbarrier -------------------------------------------------------------------------------------


def use_mbarrier(w: Warp, address: int) -> Mbarrier:
    """The mbarrier at a shared (cluster) or generic address, if the warp can know that it is initialised."""
    window = address & WINDOW_MASK
    if window and window != SHARED_WINDOW:
        raise IllegalAccess(f"an mbarrier at {address:#x}, which is not shared memory")
    barrier = w.cta.cluster.mbarrier_at(address - window)
    agent, epoch = barrier.made_by
    if w.clock.seen[agent] < epoch:
        raise RaceError(
            f"{w.name} uses the {barrier.name}, which {w.cta.cluster.agents.names[agent]} initialised: "
            "no barrier between the two makes the initialisation visible"
        )
    return barrier


def in_cluster(address: int) -> int:
    """A shared address in the cluster, also if it is given as a generic one."""
    return address - SHARED_WINDOW if address & WINDOW_MASK == SHARED_WINDOW else address


def own_address(w: Warp, address: int) -> int:
    """The offset of a .shared::cta address."""
    address = in_cluster(address)
    if address >> RANK_SHIFT != w.cta.rank:
        raise IllegalAccess(
            f"shared address {address:#x} is not of {w.cta.name}, which has rank {w.cta.rank}"
        )
    return address & OFFSET_MASK


def each_lane(w: Warp, *values: Any) -> list[tuple[int, ...]]:
    """The operands of each active lane, as ints."""
    lanes = active(w)
    return [tuple(int(x) for x in row) for row in zip(*(per_lane(w, v, lanes) for v in values), strict=False)]


@opcode("mbarrier.init", section="9.7.13.15.9", meaning="Makes an mbarrier that expects a count of arrivals")
def bind_init(binder: Binder, instruction: Instruction) -> Step:
    address = binder.address(instruction.operands[0], instruction)
    count = binder.get(instruction.operands[1], "u32", instruction)

    def init(w: Warp) -> None:
        for where, number in each_lane(w, address(w), count(w)):
            offset = own_address(w, where)
            w.cta.shared.check(offset, offset + 8)
            if offset % 8:
                raise IllegalAccess(f"an mbarrier at shared {offset:#x}, which is not a multiple of 8")
            w.cta.init_mbarrier(offset, number).made_by = (w.agent, w.epoch)

    return init


@opcode(
    "mbarrier.inval",
    section="9.7.13.15.10",
    meaning="Ends an mbarrier; its memory can be used for other things",
)
def bind_inval(binder: Binder, instruction: Instruction) -> Step:
    address = binder.address(instruction.operands[0], instruction)

    def inval(w: Warp) -> None:
        for (where,) in each_lane(w, address(w)):
            offset = own_address(w, where)
            w.cta.mbarrier(offset)
            w.cta.retire_mbarrier(offset)

    return inval


@opcode(
    "mbarrier.expect_tx",
    "mbarrier.complete_tx",
    section="9.7.13.15.11-12",
    meaning="More bytes to wait for in the running phase; counts bytes as landed",
)
def bind_bytes(binder: Binder, instruction: Instruction) -> Step:
    address = binder.address(instruction.operands[0], instruction)
    nbytes = binder.get(instruction.operands[1], "u32", instruction)
    count = Mbarrier.expect if instruction.parts[1] == "expect_tx" else Mbarrier.complete_tx

    def add(w: Warp) -> None:
        for where, number in each_lane(w, address(w), nbytes(w)):
            count(use_mbarrier(w, where), number)

    return add


@opcode(
    "mbarrier.arrive",
    "mbarrier.arrive_drop",
    section="9.7.13.15.13-14",
    meaning="Arrival, with .expect_tx also bytes to wait for; with _drop one less is expected from then on",
)
def bind_arrive(binder: Binder, instruction: Instruction) -> Step:
    drop = instruction.parts[1] == "arrive_drop"
    operands = list(instruction.operands)
    target: Operand = Sink()
    if not hasattr(operands[0], "base"):
        target = operands.pop(0)
    address = binder.address(operands[0], instruction)
    expects = instruction.has("expect_tx")
    relaxed = instruction.has("relaxed")
    amount = binder.get(operands[1] if len(operands) > 1 else Immediate(1), "u32", instruction)
    put = binder.put(target, "b64", instruction)
    remote = instruction.has("shared::cluster")

    def arrive(w: Warp) -> None:
        clock = (w.fenced or None) if relaxed else w.release()
        states = np.zeros(32, np.uint64)
        for lane, (where, number) in zip(active(w), each_lane(w, address(w), amount(w)), strict=False):
            barrier = use_mbarrier(w, where)
            if not remote and barrier.cta is not w.cta:
                raise IllegalAccess(f"{instruction.opcode} on the {barrier.name}, which is another CTA's")
            if expects:
                barrier.expect(number)
            states[lane] = barrier.arrive(1 if expects else number, clock, drop=drop)
        put(w, states)

    return arrive


@opcode("mbarrier.pending_count", section="9.7.13.15.18", meaning="Pending count of a state")
def bind_pending(binder: Binder, instruction: Instruction) -> Step:
    raise unsupported(instruction, "reading a count out of an opaque state")


@opcode(
    "mbarrier.try_wait",
    "mbarrier.test_wait",
    section="9.7.13.15.16",
    meaning="Whether a phase is complete; try_wait waits a while for it",
)
def bind_wait(binder: Binder, instruction: Instruction) -> Step:
    blocks = instruction.parts[1] == "try_wait"
    target, source, phase_operand = instruction.operands[:3]
    by_parity = instruction.has("parity")
    relaxed = instruction.has("relaxed")
    address = binder.address(source, instruction)
    phase = binder.get(phase_operand, "u32" if by_parity else "b64", instruction)
    put = binder.put(target, "pred", instruction)

    def passed(barrier: Mbarrier, number: int) -> bool:
        if by_parity:
            if number not in (0, 1):
                raise BarrierError(f"{instruction.opcode} with phase parity {number}; 0 and 1 are parities")
            return barrier.passed(number)
        return barrier.phase > number

    def wait(w: Warp) -> Wait | None:
        rows = each_lane(w, address(w), phase(w))
        if len(set(rows)) == 1:
            where, number = rows[0]
            barrier = use_mbarrier(w, where)
            if barrier.cta is not w.cta:
                raise IllegalAccess(f"{instruction.opcode} on the {barrier.name}, which is another CTA's")
            if passed(barrier, number):
                succeed(w, barrier)
                put(w, np.bool_(True))
            elif blocks and not w.timed_out and not _impatient(w):
                return Wait(
                    lambda: passed(barrier, number), _describe(barrier, number, by_parity), expires=True
                )
            else:
                put(w, np.bool_(False))
            w.timed_out = False
            return None
        found = np.zeros(32, bool)
        for lane, (where, number) in zip(active(w), rows, strict=False):
            barrier = use_mbarrier(w, where)
            found[lane] = passed(barrier, number)
            if found[lane]:
                succeed(w, barrier)
        put(w, found)
        return None

    def succeed(w: Warp, barrier: Mbarrier) -> None:
        if not relaxed:
            w.acquire(barrier.complete)
        if barrier.completed_by_commit:
            w.report.accumulator_ready()

    return wait


def _impatient(w: Warp) -> bool:
    """Whether a try_wait gives up at once, as its time limit allows. With a seed it does now and then."""
    random = w.cta.cluster.engine.random
    return random is not None and random.random() < 0.25


def _describe(barrier: Mbarrier, number: int, by_parity: bool) -> Callable[[], str]:
    what = f"parity {number}" if by_parity else f"phase {number}"
    return lambda: f"{what} of the {barrier.describe()}"
