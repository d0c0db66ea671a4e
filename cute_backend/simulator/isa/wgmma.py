"""The tensor core of sm_90: wgmma with its fence and groups (PTX ISA 9.7.15).

Each warp of a warpgroup computes its own 16 rows of D. Accumulators change when the operation completes;
touching them, or the registers of A, before the wgmma.wait_group that waits for it is an error.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_backend.simulator.isa.common import scalar
from cute_backend.simulator.layouts import decode_descriptor
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.shadow import Access
from cute_backend.simulator.simulation_errors import RaceError
from cute_backend.simulator.syntax import Immediate, Instruction, Vector, registers_of
from cute_backend.simulator.tensor_cores import WIDTHS, accumulate, collect, plan, values
from cute_backend.simulator.warp import LANE_IDS, Wait

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.warp import Warp

ROWS = 64
_ROW, _PAIR = LANE_IDS // 4, LANE_IDS % 4


class WgmmaState:
    """A warp's wgmma operations: groups, what has finished, and the registers that are in flight."""

    def __init__(self, w: Warp) -> None:
        self.agent = w.cta.cluster.agents.new(f"wgmma of {w.name}")
        self.epoch = 1
        self.issued = 0
        self.finished = 0
        self.groups: list[tuple[int, int]] = []
        self.fenced = False
        self.touched: set[int] = set()
        self.in_flight: dict[int, int] = {}
        self.pipe = w.new_pipe("wgmma")


def state_of(w: Warp) -> WgmmaState:
    return w.own("wgmma", WgmmaState)


@opcode("wgmma.fence", section="9.7.15.7.1", meaning="Orders register accesses before wgmma", together=True)
def bind_fence(binder: Binder, instruction: Instruction) -> Step:
    def fence(w: Warp) -> None:
        state = state_of(w)
        state.fenced = True
        state.touched.clear()

    return fence


@opcode("wgmma.commit_group", section="9.7.15.7.2", meaning="Closes a group of wgmma")
def bind_commit(binder: Binder, instruction: Instruction) -> Step:
    def commit(w: Warp) -> None:
        state = state_of(w)
        state.groups.append((state.issued, state.epoch))
        state.epoch += 1

    return commit


@opcode("wgmma.wait_group", section="9.7.15.7.3", meaning="Waits for all but N groups of wgmma")
def bind_wait(binder: Binder, instruction: Instruction) -> Step:
    operand = instruction.operands[0]
    assert isinstance(operand, Immediate)
    keep = int(operand.value)

    def wait(w: Warp) -> Wait | None:
        state = state_of(w)
        wanted = len(state.groups) - keep
        if wanted <= 0:
            return None
        count, epoch = state.groups[wanted - 1]
        if state.finished < count:
            return Wait(
                lambda: state.finished >= count,
                lambda: f"wgmma groups: {count - state.finished} operations are not done",
            )
        state.groups = state.groups[wanted:]
        w.clock.seen[state.agent] = epoch
        state.in_flight = {slot: order for slot, order in state.in_flight.items() if order > count}
        if keep == 0:
            w.report.accumulator_ready()
        return None

    return wait


def result_rows(w: Warp, slots: list[int], kind: str) -> np.ndarray:
    """D of a warp (16, N), raw, from its registers (PTX ISA 9.7.15.5.1.1.1, figure of the D fragment)."""
    raw = w.u32.array[slots]
    if kind == "f16":
        raw = raw.view(np.uint16).reshape(len(slots), 32, 2).transpose(0, 2, 1).astype(np.uint32)
    pieces = raw.reshape(-1, 2, 2, 32)
    out = np.empty((16, 8 * len(pieces)), np.uint32)
    out[_places(len(pieces))] = pieces
    return out


@lru_cache(maxsize=64)
def _places(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The row and the column of D of each element of (columns / 8, upper or lower half, left or right,
    lane)."""
    eighth, half, side, _ = np.ogrid[:count, :2, :2, :32]
    return _ROW + 8 * half, 8 * eighth + 2 * _PAIR + side


def put_result(w: Warp, slots: list[int], kind: str, d: np.ndarray) -> None:
    """The reverse of `result_rows`."""
    pieces = d[_places(d.shape[1] // 8)]
    if kind == "f16":
        w.u32.array[slots] = (pieces[:, :, 0] | (pieces[:, :, 1] << np.uint32(16))).reshape(-1, 32)
    else:
        w.u32.array[slots] = pieces.reshape(-1, 32)


def _a_places() -> np.ndarray:
    """The place, among four registers by 32 lanes, of each word of A (16, 8)."""
    places = np.empty((16, 8), np.int64)
    for index in range(4):
        places[_ROW + 8 * (index % 2), _PAIR + 4 * (index // 2)] = 32 * index + LANE_IDS
    return places


_A_PLACES = _a_places()


def a_from_registers(w: Warp, gets: list[Any], kind: str) -> np.ndarray:
    """A of a warp (16, K) as float64 from four registers per lane (figure of the A fragment)."""
    raw = np.empty((4, 32), np.uint32)
    for index, get in enumerate(gets):
        raw[index] = get(w)
    return values(raw.take(_A_PLACES).view(np.uint8), kind)


@opcode(
    "wgmma.mma_async", section="9.7.15.5.2", meaning="D = A * B + D in registers, asynchronous", together=True
)
def bind_mma(binder: Binder, instruction: Instruction) -> Step:
    if instruction.has("sp"):
        raise unsupported(instruction, "sparsity")
    parts = instruction.parts
    shape = next(re.fullmatch(r"m64n(\d+)k(\d+)", p) for p in parts if p.startswith("m64n"))
    assert shape is not None
    n, k = int(shape.group(1)), int(shape.group(2))
    at = next(i for i, p in enumerate(parts) if p.startswith("m64n"))
    d_kind, a_kind, b_kind = (p for p in parts[at + 1 :] if p != "satfinite")
    if a_kind not in WIDTHS or b_kind not in WIDTHS or d_kind not in ("f32", "f16", "s32"):
        raise unsupported(instruction, f"types {d_kind}.{a_kind}.{b_kind}")
    operands = instruction.operands
    d_operand = operands[0]
    assert isinstance(d_operand, Vector)
    slots = [e.slot for e in d_operand.elements]  # type: ignore[union-attr]
    from_registers = isinstance(operands[1], Vector)
    registers = frozenset(slot for _, slot in registers_of(o for o in operands[:2] if isinstance(o, Vector)))
    a_gets = [binder.get(e, "b32", instruction) for e in operands[1].elements] if from_registers else []  # type: ignore[union-attr]
    a_descriptor = None if from_registers else scalar(binder, operands[1], "b64", instruction)
    b_descriptor = scalar(binder, operands[2], "b64", instruction)
    adds = scalar(binder, operands[3], "pred", instruction)
    constants = [int(o.value) for o in operands[4:] if isinstance(o, Immediate)]
    sign_a, sign_b = ([*constants, 1, 1])[:2] if constants else (1, 1)
    transposes = constants[2:] if len(constants) > 2 else []
    a_mn = bool(transposes[0]) if len(transposes) == 2 else False
    b_mn = bool(transposes[-1]) if transposes else False
    width, saturate, text = (
        WIDTHS[a_kind],
        instruction.has("satfinite"),
        instruction.text.split("{")[0].strip(),
    )

    def mma(w: Warp) -> None:
        state = state_of(w)
        if not state.fenced:
            raise RaceError(f"{w.name} issues its first wgmma.mma_async with no wgmma.fence before it")
        if not state.touched.isdisjoint(registers):
            raise RaceError(
                f"{w.name} issues a wgmma.mma_async on registers that it has touched since its last "
                "wgmma.fence"
            )
        quarter = 16 * (w.index % 4)
        shared = w.cta.shared
        access = Access(state.agent, state.epoch, w.clock, "async", f"{text} of {w.name}")
        b_plan = plan(decode_descriptor(b_descriptor(w), False), n, k, width, b_mn)
        plans = [b_plan]
        a_now = a_from_registers(w, a_gets, a_kind) if from_registers else None
        a_plan = None
        if a_descriptor is not None:
            a_plan = plan(decode_descriptor(a_descriptor(w), False), ROWS, k, width, a_mn)
            plans.append(a_plan)
        for part in plans:
            shared.check(part.low, part.high)
            shared.shadow.read(part.cells, access)
        shared.shadow.note(state.agent, state.epoch, text)
        accumulates = bool(adds(w))
        state.issued += 1
        for slot in registers:
            state.in_flight[slot] = state.issued

        def complete() -> None:
            b = collect(shared, b_plan, b_kind) * sign_b
            a = a_now if a_plan is None else collect(shared, a_plan, a_kind)[quarter : quarter + 16]
            assert a is not None
            old = result_rows(w, slots, d_kind) if accumulates else None
            put_result(w, slots, d_kind, accumulate(old, a * sign_a, b, d_kind, saturate))
            state.finished += 1

        w.report.bytes["MMA operands"] += (16 + n) * k * width
        state.pipe.issue(text, complete)

    return mma


def guard_registers(step: Step, slots: frozenset[int], *, copies: bool) -> Step:
    """Wraps a step that touches registers which some wgmma of the program uses: they must not be in flight,
    and the next wgmma that uses them needs a fence before it (PTX ISA 9.7.15.7.1).

    A step that `copies` needs no fence: compilers put the initial zeros of sums after the fence, and ptxas
    renames registers instead of copying them.
    """

    def guarded(w: Warp) -> Any:
        state = w.pipes.get("wgmma")
        if state is not None:
            if state.in_flight and not slots.isdisjoint(state.in_flight):
                raise RaceError(
                    f"{w.name} touches registers of a wgmma.mma_async that it has not waited for "
                    "(wgmma.wait_group)"
                )
            if not copies:
                state.touched |= slots
        return step(w)

    return guarded
