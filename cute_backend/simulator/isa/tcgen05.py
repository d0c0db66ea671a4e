"""Tensor memory: allocation, loads and stores (PTX ISA 9.7.16.7, 9.7.16.8).

tcgen05.ld and .st take effect at once. The registers may be used without a tcgen05.wait::ld, since ptxas
waits before their first use; a mov does not count as a use. Barriers by which the warp releases the columns
are not ordered by that wait: until a tcgen05.wait::ld, or a use, the load counts as still reading the
columns, even if the warp has arrived at a barrier since. Likewise a store counts as still writing until a
tcgen05.wait::st.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_backend.simulator.cta import TMEM_LANES
from cute_backend.simulator.isa.barrier import own_address
from cute_backend.simulator.isa.common import scalar, scalar_address
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.shadow import Access
from cute_backend.simulator.simulation_errors import IllegalAccess, ResourceError, SimulationError
from cute_backend.simulator.syntax import Instruction, Register, elements_of
from cute_backend.simulator.warp import LANE_IDS, Wait

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.cta import Cta
    from cute_backend.simulator.warp import Warp


@opcode(
    "tcgen05.alloc",
    section="9.7.16.7.1",
    meaning="Allocates columns, writes their address to shared memory",
    together=True,
)
def bind_alloc(binder: Binder, instruction: Instruction) -> Step:
    address = scalar_address(binder, instruction.operands[0], instruction)
    columns = scalar(binder, instruction.operands[1], "u32", instruction)
    paired = instruction.has("cta_group::2")

    def alloc(w: Warp) -> Wait | None:
        count = columns(w)
        tmem = w.cta.tmem
        if paired:
            peer = _peer(w.cta, instruction).tmem
            start = tmem.allocate_with(peer, count)
            if start is None:
                return Wait(
                    lambda: tmem.granted is not None or tmem.may_allocate_with(peer),
                    lambda: (
                        f"{count} columns to be allocated in {peer.cta.name} too; allocated here are "
                        f"{tmem.allocated}"
                    ),
                )
        else:
            start = tmem.allocate(count)
            if start is None:
                return Wait(
                    lambda: tmem.room(count) is not None,
                    lambda: f"{count} free columns of tensor memory; allocated are {tmem.allocated}",
                )
        offset = own_address(w, address(w))
        shared = w.cta.shared
        shared.check(offset, offset + 4)
        shared.shadow.write(slice(offset // 4, offset // 4 + 1), w.access(w.name))
        shared.words[offset // 4] = start
        return None

    return alloc


def _peer(cta: Cta, instruction: Instruction) -> Cta:
    """The other CTA of a pair: they differ in the last bit of their rank."""
    ctas = cta.cluster.ctas
    if cta.rank ^ 1 >= len(ctas):
        raise ResourceError(f"{instruction.opcode} in a cluster of {len(ctas)}; it needs a pair of CTAs")
    return ctas[cta.rank ^ 1]


@opcode("tcgen05.dealloc", section="9.7.16.7.1", meaning="Frees columns", together=True)
def bind_dealloc(binder: Binder, instruction: Instruction) -> Step:
    address = scalar(binder, instruction.operands[0], "u32", instruction)
    columns = scalar(binder, instruction.operands[1], "u32", instruction)

    def dealloc(w: Warp) -> None:
        start, count = address(w) & 0xFFFF, columns(w)
        block = (slice(0, TMEM_LANES), slice(start, start + count))
        w.cta.tmem.shadow.write(block, w.access(f"tcgen05.dealloc of {w.name}"))
        w.cta.tmem.free(start, count)

    return dealloc


@opcode("tcgen05.relinquish_alloc_permit", section="9.7.16.7.1", meaning="The CTA allocates no more")
def bind_relinquish(binder: Binder, instruction: Instruction) -> Step:
    def relinquish(w: Warp) -> None:
        w.cta.tmem.may_allocate = False

    return relinquish


@dataclass(frozen=True)
class Shape:
    """The places of the registers of one repetition: lane and column of register r of thread t, and columns
    per repetition.
    """

    rows: int
    columns: int
    lanes: tuple[np.ndarray, ...]
    offsets: tuple[np.ndarray, ...]


_T = LANE_IDS
SHAPES = {
    "32x32b": Shape(32, 1, (_T,), (_T * 0,)),
    "16x64b": Shape(16, 2, (_T // 4 + 8 * (_T // 2 % 2),), (_T % 2,)),
    "16x128b": Shape(16, 4, (_T // 4, _T // 4 + 8), (_T % 4, _T % 4)),
    "16x256b": Shape(
        16,
        8,
        (_T // 4, _T // 4, _T // 4 + 8, _T // 4 + 8),
        (2 * (_T % 4), 2 * (_T % 4) + 1, 2 * (_T % 4), 2 * (_T % 4) + 1),
    ),
}


class Fragment:
    """The cells that the registers of a tcgen05.ld or .st name: lanes and columns (32, registers) from an
    address.
    """

    def __init__(self, instruction: Instruction, split: int | None) -> None:
        name = next((p for p in instruction.parts if "x" in p and p.endswith("b")), "")
        repeat = next(int(p[1:]) for p in instruction.parts if p[0] == "x" and p[1:].isdigit())
        if instruction.has("pack::16b") or instruction.has("unpack::16b") or instruction.has("red"):
            raise unsupported(instruction, "packing and reduction")
        if name not in SHAPES and "16x32bx2" not in instruction.parts:
            raise unsupported(instruction, "this shape")
        if "16x32bx2" in instruction.parts:
            assert split is not None
            self.rows, self.width = 16, max(repeat, split + repeat)
            self.lanes = np.repeat((_T % 16)[:, None], repeat, axis=1)
            self.columns = (_T // 16 * split)[:, None] + np.arange(repeat)
            return
        shape = SHAPES[name]
        self.rows, self.width = shape.rows, shape.columns * repeat
        self.lanes = np.stack([lane for _ in range(repeat) for lane in shape.lanes], axis=1)
        self.columns = np.stack(
            [offset + r * shape.columns for r in range(repeat) for offset in shape.offsets], axis=1
        )

    def place(self, w: Warp, address: int) -> tuple[slice, slice, int, int]:
        """The block of cells. Raises unless it is allocated, and in the quarter of the lanes that this warp
        may access."""
        lane, column = address >> 16, address & 0xFFFF
        quarter = 32 * (w.index % 4)
        if lane < quarter or lane + self.rows > quarter + 32 or lane % 16:
            raise IllegalAccess(
                f"tensor memory lanes {lane} to {lane + self.rows - 1}: {w.name} may touch lanes "
                f"{quarter} to {quarter + 31} (warp number modulo 4)"
            )
        w.cta.tmem.check(column, self.width)
        return slice(lane, lane + self.rows), slice(column, column + self.width), lane, column


def _fragment_and_registers(
    instruction: Instruction, register_operand: Any, rest: Any
) -> tuple[Fragment, tuple]:
    split = int(rest[0].value) if rest else None
    fragment = Fragment(instruction, split)
    registers = elements_of(register_operand)
    if len(registers) != fragment.lanes.shape[1]:
        raise SimulationError(f"{instruction.opcode} with {len(registers)} registers")
    return fragment, registers


@dataclass
class Loads:
    """The tcgen05.ld of a warp. They are reads by `agent`, as event `epoch`, until a wait or until a register
    of `loading` (by file and slot) is used."""

    agent: int
    loading: set[tuple[str, int]]
    epoch: int = 1

    def wait(self, w: Warp) -> None:
        """Completes all loads so far."""
        w.clock.seen[self.agent] = self.epoch
        self.epoch += 1
        self.loading.clear()


def loads_of(w: Warp) -> Loads:
    """The loads of a warp, made on first use."""
    new = w.cta.cluster.agents.new
    return w.own("tcgen05.ld", lambda w: Loads(new(f"a tcgen05.ld of {w.name}", generic=True), set()))


@opcode("tcgen05.ld", section="9.7.16.8.1", meaning="Tensor memory to registers", together=True)
def bind_ld(binder: Binder, instruction: Instruction) -> Step:
    fragment, registers = _fragment_and_registers(
        instruction, instruction.operands[0], instruction.operands[2:]
    )
    puts = [binder.put(r, "b32", instruction) for r in registers]
    address = scalar_address(binder, instruction.operands[1], instruction)
    straight = instruction.has("32x32b")
    loaded = [(r.file, r.slot) for r in registers if isinstance(r, Register)]

    def load(w: Warp) -> None:
        lanes, columns, lane, column = fragment.place(w, address(w))
        tmem = w.cta.tmem
        loads = loads_of(w)
        access = Access(loads.agent, loads.epoch, w.clock, "generic", w.name)
        tmem.shadow.read((lanes, columns), access)
        loads.loading.update(loaded)
        if straight:
            data = tmem.cells[lanes, columns].T
        else:
            data = tmem.cells[lane + fragment.lanes, column + fragment.columns].T
        for put, value in zip(puts, data, strict=False):
            put(w, value)
        w.report.bytes["tcgen05.ld"] += data.size * 4

    return load


@dataclass
class Stores:
    """The tcgen05.st of a warp. They are writes by `agent`, as event `epoch`, which a tcgen05.wait::st makes
    known."""

    agent: int
    epoch: int = 1

    def access(self, w: Warp) -> Access:
        clock = w.clock.copy()
        clock.seen[self.agent] = self.epoch  # the stores of one warp keep their order
        return Access(self.agent, self.epoch, clock, "generic", w.name)

    def wait(self, w: Warp) -> None:
        w.clock.seen[self.agent] = self.epoch
        self.epoch += 1


def stores_of(w: Warp) -> Stores:
    """The stores of a warp, made on first use."""
    return w.own("tcgen05.st", lambda w: Stores(w.cta.cluster.agents.new(f"a tcgen05.st of {w.name}")))


@opcode("tcgen05.st", section="9.7.16.8.2", meaning="Registers to tensor memory", together=True)
def bind_st(binder: Binder, instruction: Instruction) -> Step:
    fragment, registers = _fragment_and_registers(
        instruction, instruction.operands[-1], instruction.operands[1:-1]
    )
    gets = [binder.get(r, "b32", instruction) for r in registers]
    address = scalar_address(binder, instruction.operands[0], instruction)

    def store(w: Warp) -> None:
        lanes, columns, lane, column = fragment.place(w, address(w))
        tmem = w.cta.tmem
        tmem.shadow.write((lanes, columns), stores_of(w).access(w))
        data = np.stack([np.broadcast_to(g(w), 32) for g in gets], axis=1)
        tmem.cells[lane + fragment.lanes, column + fragment.columns] = data
        w.report.bytes["tcgen05.st"] += data.size * 4

    return store


@opcode("tcgen05.wait::ld", section="9.7.16.8.3", meaning="Waits until this warp's tcgen05.ld are complete")
def bind_wait_ld(binder: Binder, instruction: Instruction) -> Step:
    return lambda w: loads_of(w).wait(w)


def complete_before_use(step: Step, touched: frozenset[tuple[str, int]]) -> Step:
    """Wraps a step that uses registers that may be loading, so that it completes the loads first, as ptxas
    waits before such a use."""

    def complete(w: Warp) -> Any:
        loads = w.pipes.get("tcgen05.ld")
        if loads is not None and not loads.loading.isdisjoint(touched):
            loads.wait(w)
        return step(w)

    return complete


def follow_copy(step: Step, sources: frozenset[tuple[str, int]], targets: frozenset[tuple[str, int]]) -> Step:
    """Wraps a mov of registers that may be loading. It does not count as a use, as ptxas only renames
    registers."""

    def follow(w: Warp) -> Any:
        loads = w.pipes.get("tcgen05.ld")
        if loads is not None and not loads.loading.isdisjoint(sources):
            loads.loading.update(targets)
        return step(w)

    return follow


@opcode("tcgen05.wait::st", section="9.7.16.8.3", meaning="Waits until this warp's tcgen05.st are complete")
def bind_wait_st(binder: Binder, instruction: Instruction) -> Step:
    return lambda w: stores_of(w).wait(w)


@opcode(
    "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync",
    section="9.7.16.11", meaning="Order around barriers, which here pass on all that was done",
)  # fmt: skip
def bind_fence(binder: Binder, instruction: Instruction) -> Step:
    return lambda w: None
