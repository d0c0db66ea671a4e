"""Control flow and hints to the machine (PTX ISA 9.7.12, 9.7.19)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cute_backend.simulator.isa.common import scalar
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.simulation_errors import ResourceError, Trap
from cute_backend.simulator.syntax import Instruction, Label, Symbol
from cute_backend.simulator.warp import ALL, LANES, NONE, Wait

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.warp import Warp


@opcode("bra", section="9.7.12.3", meaning="Branch, of each lane on its own")
def bind_bra(binder: Binder, instruction: Instruction) -> Step:
    label = instruction.operands[0]
    if not isinstance(label, Label):
        raise unsupported(instruction, f"the target {label!r}")
    target = label.index
    if instruction.guard is None:
        return lambda w: target
    slot, negated = instruction.guard[0].slot, instruction.guard[1]
    on, off = (NONE, ALL) if negated else (ALL, NONE)

    def branch(w: Warp) -> Any:
        guard = w.pred[slot]
        if w.full:
            raw = guard.tobytes()
            if raw == on:
                return target
            if raw == off:
                return None
        taken = w.mask & ~guard if negated else w.mask & guard
        if not taken.any():
            return None
        rest = w.mask & ~taken
        if not rest.any():
            return target
        return w.split(target, taken, rest)

    return branch


@opcode("brx.idx", section="9.7.12.4", meaning="Branch through a list of targets")
def bind_brx(binder: Binder, instruction: Instruction) -> Step:
    table = instruction.operands[1]
    name = table.name if isinstance(table, (Label, Symbol)) else ""
    targets = np.array(binder.entry.branch_targets[name])
    index = binder.get(instruction.operands[0], "u32", instruction)

    def branch(w: Warp) -> Any:
        return w.spread(targets[np.minimum(np.broadcast_to(index(w), 32), len(targets) - 1)])

    return branch


@opcode(
    "ret", "exit", section="9.7.12.6, 9.7.12.7", meaning="End of these lanes (of an entry, ret is the same)"
)
def bind_exit(binder: Binder, instruction: Instruction) -> Step:
    return lambda w: w.exit(w.mask)


@opcode("trap", section="9.7.19.4", meaning="Abort")
def bind_trap(binder: Binder, instruction: Instruction) -> Step:
    def trap(w: Warp) -> None:
        raise Trap("the kernel executed trap")

    return trap


@opcode(
    "nanosleep", "brkpt", "pmevent", "griddepcontrol.launch_dependents", "membar.proxy", "fence.proxy.alias",
    section="9.7.13.6, 9.7.19", meaning="No effect on the values of a single functional launch",
)  # fmt: skip
def bind_nothing(binder: Binder, instruction: Instruction) -> Step:
    return lambda w: None


@opcode(
    "griddepcontrol.wait",
    section="9.7.13.13",
    meaning="Until the kernels ahead in the stream have ended",
    together=True,
)
def bind_grid_wait(binder: Binder, instruction: Instruction) -> Step:
    def wait(w: Warp) -> None:
        w.clock.seen[w.cta.cluster.ahead] = 1

    return wait


@opcode(
    "setmaxnreg.inc", "setmaxnreg.dec", section="9.7.19.5",
    meaning="Registers per thread, taken from or returned to the CTA's pool; inc waits until it has them",
    together=True,
)  # fmt: skip
def bind_setmaxnreg(binder: Binder, instruction: Instruction) -> Step:
    count = scalar(binder, instruction.operands[0], "u32", instruction)
    more = instruction.has("inc")

    def change(w: Warp) -> Wait | None:
        wanted, cta = count(w), w.cta
        if w.register_limit is None:
            return None  # ptxas ignores the instruction too
        if wanted % 8 or not 24 <= wanted <= 256:
            raise ResourceError(f"{instruction.opcode} {wanted}: multiples of 8 from 24 to 256 are allowed")
        if (wanted < w.register_limit) if more else (wanted > w.register_limit):
            raise ResourceError(
                f"{instruction.opcode} {wanted}, but a thread of {w.name} has {w.register_limit}"
            )
        needed = LANES * (wanted - w.register_limit)
        if needed > cta.free_registers:
            return Wait(
                lambda: needed <= cta.free_registers,
                lambda: (
                    f"{wanted} registers per thread, {needed} more for the warp; the pool of {cta.name} has "
                    f"{cta.free_registers}"
                ),
            )
        cta.free_registers -= needed
        w.register_limit = wanted
        cta.cluster.activity += 1
        return None

    return change
