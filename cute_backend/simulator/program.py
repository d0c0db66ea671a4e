"""A bound program: each instruction of an entry as a Python closure with its operands bound."""

from __future__ import annotations

from typing import Any

import numpy as np

import cute_backend.simulator.isa  # noqa: F401  (fills the opcode table)
from cute_backend.simulator.binder import Binder
from cute_backend.simulator.errors import ResourceError
from cute_backend.simulator.isa.tcgen05 import complete_before_use, follow_copy
from cute_backend.simulator.isa.wgmma import guard_accumulators
from cute_backend.simulator.memory import PARAM_WINDOW
from cute_backend.simulator.opcodes import Step, lookup
from cute_backend.simulator.roles import Roles
from cute_backend.simulator.syntax import Entry, Instruction, registers_of
from cute_backend.simulator.warp import ALL, MOVED, NONE, Warp


class Program:
    """An entry ready to run."""

    def __init__(
        self, entry: Entry, symbols: dict[str, tuple[str, int]], parameters: np.ndarray, local: int
    ) -> None:
        self.entry = entry
        self.local_bytes = local
        binder = Binder(entry, symbols, parameters)
        _check_cta_groups(entry)
        self.accumulators = _written_by(entry, "wgmma.mma_async")
        self.loaded = _with_copies(entry, _written_by(entry, "tcgen05.ld"))
        self.steps: list[Step] = [self._bind(binder, i) for i in entry.instructions]
        self.steps.append(lambda w: w.exit(w.mask))
        self.roles = Roles(self)

    def _bind(self, binder: Binder, instruction: Instruction) -> Step:
        step = lookup(instruction).bind(binder, instruction)
        family = instruction.parts[0]
        if self.accumulators and family != "wgmma":
            touched = self.accumulators & registers_of(instruction.operands)
            if touched:
                step = guard_accumulators(step, frozenset(slot for _, slot in touched))
        if self.loaded and family != "tcgen05":
            touched = self.loaded & registers_of(instruction.operands)
            if touched and family == "mov":
                target, *sources = instruction.operands
                step = follow_copy(step, registers_of(sources), registers_of([target]))
            elif touched:
                step = complete_before_use(step, touched)
        if instruction.guard is None or instruction.parts[0] == "bra":
            return step
        register, negated = instruction.guard
        return _guarded(step, register.slot, negated)


def _check_cta_groups(entry: Entry) -> None:
    """PTX ISA 9.7.16.5: all tcgen05 instructions of a kernel have the same .cta_group."""
    lines: dict[str, int] = {}
    for instruction in entry.instructions:
        if instruction.parts[0] == "tcgen05":
            for part in instruction.parts:
                if part.startswith("cta_group::"):
                    lines.setdefault(part, instruction.line)
    if len(lines) > 1:
        found = " and ".join(f".{group} (PTX line {line})" for group, line in sorted(lines.items()))
        raise ResourceError(f"tcgen05 instructions of {found} in one kernel; all must have the same")


def _written_by(entry: Entry, opcode: str) -> frozenset[tuple[str, int]]:
    """The registers that some instruction of this opcode writes."""
    found: frozenset[tuple[str, int]] = frozenset()
    for instruction in entry.instructions:
        if instruction.opcode.startswith(opcode):
            found |= registers_of(instruction.operands[:1])
    return found


def _with_copies(entry: Entry, registers: frozenset[tuple[str, int]]) -> frozenset[tuple[str, int]]:
    """These registers and those that a mov may have copied them to, at any remove."""
    while True:
        found = registers
        for instruction in entry.instructions:
            if instruction.parts[0] == "mov" and registers & registers_of(instruction.operands[1:]):
                found |= registers_of(instruction.operands[:1])
        if found == registers:
            return found
        registers = found


def _guarded(step: Step, slot: int, negated: bool) -> Step:
    on, off = (NONE, ALL) if negated else (ALL, NONE)

    def guarded(w: Warp) -> Any:
        guard = w.pred[slot]
        mask, full = w.mask, w.full
        if full:
            raw = guard.tobytes()
            if raw == on:
                return step(w)
            if raw == off:
                return None
        chosen = mask & ~guard if negated else mask & guard
        if not chosen.any():
            return None
        w.mask, w.full = chosen, bool(chosen.all())
        outcome = step(w)
        if outcome is not MOVED:
            w.mask, w.full = mask, full
        return outcome

    return guarded


def parameter_symbols(entry: Entry) -> dict[str, tuple[str, int]]:
    """Addresses of the entry's parameters, in the window of the parameter space."""
    return {p.name: ("param", PARAM_WINDOW + p.offset) for p in entry.parameters}
