"""A bound program: each instruction of an entry as a Python closure with its operands bound."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import cute_backend.simulator.isa  # noqa: F401  (fills the opcode table)
from cute_backend.simulator.binder import Binder
from cute_backend.simulator.isa.tcgen05 import complete_before_use, follow_copy
from cute_backend.simulator.isa.wgmma import guard_registers
from cute_backend.simulator.opcodes import Step, lookup
from cute_backend.simulator.roles import Roles
from cute_backend.simulator.simulation_errors import ResourceError
from cute_backend.simulator.syntax import Entry, Immediate, Instruction, Vector, registers_of
from cute_backend.simulator.warp import ALL, MOVED, NONE, Warp

SM_REGISTERS = 65536


class Program:
    """An entry ready to run."""

    def __init__(
        self, entry: Entry, symbols: dict[str, tuple[str, int]], parameters: np.ndarray, local: int
    ) -> None:
        self.entry = entry
        self.local_bytes = local
        self.launch_registers = _launch_registers(entry)
        binder = Binder(entry, symbols, parameters)
        _check_cta_groups(entry)
        self.multiplied = _used_by_wgmma(entry)
        self.loaded = _with_copies(entry, _written_by(entry, "tcgen05.ld"))
        self.steps: list[Step] = [self._bind(binder, i) for i in entry.instructions]
        self.steps.append(lambda w: w.exit(w.mask))
        self.roles = Roles(self)

    def _bind(self, binder: Binder, instruction: Instruction) -> Step:
        step = lookup(instruction).bind(binder, instruction)
        family = instruction.parts[0]
        if self.multiplied and family != "wgmma":
            touched = self.multiplied & registers_of(instruction.operands)
            if touched:
                step = guard_registers(step, frozenset(slot for _, slot in touched), copies=family == "mov")
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


def _launch_registers(entry: Entry) -> int | None:
    """The registers of a thread at the start of a kernel with setmaxnreg; None if they need not be counted.

    ptxas allocates no more than the directives allow (PTX ISA 11.4: .maxnreg, or .reqntid and .minnctapersm,
    which divide the registers of a multiprocessor), and no more than the kernel ever requests. Without these
    directives it ignores setmaxnreg.
    """
    counts = [i.operands[0] for i in entry.instructions if i.parts[0] == "setmaxnreg"]
    asked = [int(count.value) for count in counts if isinstance(count, Immediate)]
    if not asked:
        return None
    if entry.most_registers is not None:
        return min(entry.most_registers[0], max(asked))
    if entry.required_threads is None:
        return None
    ctas = entry.resident_ctas[0] if entry.resident_ctas else 1
    shared_out = SM_REGISTERS // (math.prod(entry.required_threads) * ctas) // 8 * 8
    return min(shared_out, max(asked))


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


def _used_by_wgmma(entry: Entry) -> frozenset[tuple[str, int]]:
    """The registers that hold D, or A, of some wgmma."""
    found: frozenset[tuple[str, int]] = frozenset()
    for instruction in entry.instructions:
        if instruction.opcode.startswith("wgmma.mma_async"):
            found |= registers_of(o for o in instruction.operands[:2] if isinstance(o, Vector))
    return found


def _written_by(entry: Entry, opcode: str) -> frozenset[tuple[str, int]]:
    """The registers that some instruction of this opcode writes."""
    found: frozenset[tuple[str, int]] = frozenset()
    for instruction in entry.instructions:
        if instruction.opcode.startswith(opcode):
            found |= registers_of(instruction.operands[:1])
    return found


def _with_copies(entry: Entry, registers: frozenset[tuple[str, int]]) -> frozenset[tuple[str, int]]:
    """These registers, and those that a chain of movs may have copied them to."""
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
