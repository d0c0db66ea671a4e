"""Exchange between the lanes of a warp (PTX ISA 9.7.9.6, 9.7.13.5-14)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cute_backend.simulator.isa.common import of_all, the_type
from cute_backend.simulator.lane_accesses import ALL_LANES, bits
from cute_backend.simulator.opcodes import Step, after, opcode, unsupported
from cute_backend.simulator.simulation_errors import SimulationError
from cute_backend.simulator.syntax import Immediate, Instruction, Operand, Pair
from cute_backend.simulator.warp import LANE_IDS

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.warp import Warp

BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


class Members:
    """The membermask of a .sync instruction. `absent` waits until all of its lanes have come."""

    def __init__(self, binder: Binder, operand: Operand, instruction: Instruction) -> None:
        self.get = binder.get(operand, "b32", instruction)
        self.opcode = instruction.opcode

    def lanes(self, w: Warp) -> np.ndarray:
        return (np.uint32(of_all(w, self.get(w))) & BITS) != 0

    def absent(self, w: Warp) -> Any:
        """A wait for the lanes of the membermask, or None if all have come. Raises `SimulationError` if a
        lane executes the instruction that is not in the membermask."""
        if w.full and of_all(w, self.get(w)) == ALL_LANES:
            return None
        members = self.lanes(w)
        outside = w.mask & ~members
        if outside.any():
            raise SimulationError(
                f"{self.opcode} in lanes {np.flatnonzero(outside).tolist()} of {w.name}, which its "
                f"membermask {bits(members):#x} leaves out"
            )
        return None if w.full else w.together(members)


def _sources(mode: str, second: Any, control: Any) -> tuple[np.ndarray, np.ndarray]:
    """The lane that each lane reads, and whether that lane is in bounds. If it is not, the lane reads
    itself."""
    offset, control = second.astype(np.int64) & 31, control.astype(np.int64)
    bound, segment = control & 31, (control >> 8) & 31
    most = (LANE_IDS & segment) | (bound & ~segment & 31)
    least = LANE_IDS & segment
    if mode == "up":
        lane = LANE_IDS - offset
        valid = lane >= most
    else:
        indexed = least | (offset & ~segment & 31)
        lane = {"down": LANE_IDS + offset, "bfly": LANE_IDS ^ offset, "idx": indexed}[mode]
        valid = lane <= most
    return np.where(valid, lane, LANE_IDS), valid


@opcode("shfl.sync", section="9.7.9.6", meaning="Value of another lane: up, down, bfly or idx")
def bind_shfl(binder: Binder, instruction: Instruction) -> Step:
    mode = instruction.parts[2]
    target, source, second, clamp, mask = instruction.operands
    members = Members(binder, mask, instruction)
    put = binder.put(target.first if isinstance(target, Pair) else target, "b32", instruction)
    put_valid = binder.put(target.second, "pred", instruction) if isinstance(target, Pair) else None
    a, b, c = (binder.get(o, "b32", instruction) for o in (source, second, clamp))
    fixed = None
    if isinstance(second, Immediate) and isinstance(clamp, Immediate):
        fixed = _sources(mode, np.int64(second.value), np.int64(clamp.value))

    def shuffle(w: Warp) -> None:
        value = a(w)
        if not np.ndim(value):
            value = np.broadcast_to(value, 32)
        lane, valid = fixed or _sources(mode, np.asarray(b(w)), np.asarray(c(w)))
        put(w, value[lane])
        if put_valid is not None:
            put_valid(w, valid)

    return after(members.absent, shuffle)


@opcode("elect.sync", section="9.7.13.14", meaning="One lane of the membermask: the lowest")
def bind_elect(binder: Binder, instruction: Instruction) -> Step:
    target, mask = instruction.operands
    members = Members(binder, mask, instruction)
    assert isinstance(target, Pair)
    put_lane = binder.put(target.first, "b32", instruction)
    put_elected = binder.put(target.second, "pred", instruction)
    first = LANE_IDS == 0

    def elect(w: Warp) -> None:
        if w.full:
            put_lane(w, np.uint32(0))
            put_elected(w, first)
            return
        leader = int((w.mask & members.lanes(w)).argmax())
        put_lane(w, np.uint32(leader))
        put_elected(w, leader == LANE_IDS)

    return after(members.absent, elect)


@opcode("vote.sync", section="9.7.13.10", meaning="all, any, uni or ballot of a predicate")
def bind_vote(binder: Binder, instruction: Instruction) -> Step:
    mode = instruction.parts[2]
    target, source, mask = instruction.operands
    members = Members(binder, mask, instruction)
    put = binder.put(target, "b32" if mode == "ballot" else "pred", instruction)
    get = binder.get(source, "pred", instruction)

    def vote(w: Warp) -> None:
        value = np.broadcast_to(get(w), 32)
        among = members.lanes(w) & w.mask
        if mode == "ballot":
            put(w, np.uint32(bits(value & among)))
        elif mode == "all":
            put(w, value[among].all())
        elif mode == "any":
            put(w, value[among].any())
        else:
            put(w, value[among].all() or not value[among].any())

    return after(members.absent, vote)


@opcode("activemask", section="9.7.13.12", meaning="The lanes that execute this")
def bind_activemask(binder: Binder, instruction: Instruction) -> Step:
    put = binder.put(instruction.operands[0], "b32", instruction)
    return lambda w: put(w, np.uint32(bits(w.mask)))


@opcode("match.any.sync", "match.all.sync", section="9.7.13.11", meaning="Lanes with the same value")
def bind_match(binder: Binder, instruction: Instruction) -> Step:
    every = instruction.has("all")
    kind = the_type(instruction)
    target, source, mask = instruction.operands
    members = Members(binder, mask, instruction)
    put = binder.put(target.first if isinstance(target, Pair) else target, "b32", instruction)
    put_all = binder.put(target.second, "pred", instruction) if isinstance(target, Pair) else None
    get = binder.get(source, kind, instruction)

    def match(w: Warp) -> None:
        among = members.lanes(w) & w.mask
        value = np.broadcast_to(get(w), 32)
        equal = (value[:, None] == value[None, :]) & among[None, :]
        if every:
            same = bool((value[among] == value[among][0]).all())
            put(w, np.uint32(bits(among) if same else 0))
            if put_all is not None:
                put_all(w, np.bool_(same))
        else:
            put(w, np.array([bits(row) for row in equal], np.uint32))

    return after(members.absent, match)


@opcode("redux.sync", section="9.7.13.13", meaning="Reduction over the lanes")
def bind_redux(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    name = next(p for p in instruction.parts if p in ("add", "min", "max", "and", "or", "xor"))
    target, source, mask = instruction.operands
    members = Members(binder, mask, instruction)
    magnitude, propagate = instruction.has("abs"), instruction.has("NaN")
    if kind not in ("u32", "s32", "b32", "f32"):
        raise unsupported(instruction, kind)
    put, get = binder.put(target, kind, instruction), binder.get(source, kind, instruction)
    function = {
        "add": np.add, "min": np.fmin, "max": np.fmax, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[name]  # fmt: skip

    def reduce(w: Warp) -> None:
        value = np.broadcast_to(get(w), 32)[members.lanes(w) & w.mask]
        if magnitude:
            value = np.abs(value)
        result = function.reduce(value)
        if propagate and np.isnan(value).any():
            result = np.float32(np.nan)
        put(w, result)

    return after(members.absent, reduce)


@opcode("bar.warp.sync", section="9.7.13.2", meaning="Waits until the lanes of the membermask have come")
def bind_warp_sync(binder: Binder, instruction: Instruction) -> Step:
    members = Members(binder, instruction.operands[0], instruction)

    return after(members.absent, lambda w: w.acquire(w.release()))
