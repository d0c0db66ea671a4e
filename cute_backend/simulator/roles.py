"""The role of each warp of a kernel, derived from the control flow before it runs.

A role is named after the instructions that its warps can reach, so its name may differ from the template's
name for the same warps; `other` are warps that reach none of those instructions. If the warp's number decides
a branch, one side is followed; at all other branches, both are. So a warp has the same role from its first
instruction to its last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from cute_backend.simulator.syntax import (
    Entry,
    Immediate,
    Instruction,
    Label,
    Operand,
    Register,
    Special,
    Symbol,
    registers_of,
)
from cute_backend.simulator.warp import Registers

if TYPE_CHECKING:
    from cute_backend.simulator.bound_program import Program
    from cute_backend.simulator.warp import Warp

UNNAMED = "other"
"""The role of a warp that reaches none of the opcodes below."""

MAIN_ROLES = {
    "tma": r"cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global",
    "mma": r"tcgen05\.mma|mma\.sync",
    "wgmma": r"wgmma\.mma_async",
    "epilogue": r"tcgen05\.ld",
}
"""Roles and the opcodes that identify them. A warp that can reach opcodes of several has all of their
names."""

HELPER_ROLES = {
    "store": (r"cp\.(reduce\.)?async\.bulk\.tensor\.\dd\.global",),
    "staging": (r"ld\.(\w+\.)*global", r"st\.(\w+\.)*shared"),
}
"""Roles of warps without a main role: the first of these all of whose opcodes the warp can reach."""

PURE = frozenset((
    "mov", "add", "sub", "mul", "mad", "shl", "shr", "shf", "and", "or", "xor", "not", "setp", "selp", "set",
    "min", "max", "abs", "neg", "cvt", "bfe", "bfi", "lop3", "prmt",
))  # fmt: skip
"""Opcodes whose results depend on their registers alone."""

OF_THE_WARP = re.compile(
    r"%(tid|ntid|laneid|warpid|nwarpid|cluster_ctaid|cluster_nctaid|cluster_n?ctarank)\b"
)
"""Special registers that are the same for this warp in every cluster and launch of a grid."""


class Roles:
    """The roles of the warps of a program, found on first use."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: set[tuple[str, int]] = set()
        self._decided = list(self._decide(program.entry))
        self._found: dict[tuple[int, int], str] = {}

    def of(self, warp: Warp) -> str:
        """The warp's role, such as "mma", or "tma+mma" if one warp can reach both."""
        key = warp.index, warp.cta.rank
        if key not in self._found:
            self._found[key] = _role(self._opcodes(warp))
        return self._found[key]

    def _decide(self, entry: Entry) -> Iterator[Instruction]:
        """The instructions whose results the warp's number decides, in an order in which they can run.

        No other instruction writes their registers, so these have the same value wherever they are read.
        """
        writers = [_results(instruction) for instruction in entry.instructions]
        times: dict[tuple[str, int], int] = {}
        for written in writers:
            for register in written:
                times[register] = times.get(register, 0) + 1
        left = [
            (instruction, written)
            for instruction, written in zip(entry.instructions, writers, strict=True)
            if _is_pure(instruction) and all(times[register] == 1 for register in written)
        ]
        while True:
            before = len(left)
            undecided = []
            for instruction, written in left:
                if all(self._is_known(operand) for operand in instruction.operands[1:]):
                    self._known |= written
                    yield instruction
                else:
                    undecided.append((instruction, written))
            left = undecided
            if len(left) == before:
                return

    def _is_known(self, operand: Operand) -> bool:
        if isinstance(operand, Special):
            return OF_THE_WARP.match(operand.name) is not None
        return registers_of([operand]) <= self._known

    def _opcodes(self, warp: Warp) -> set[str]:
        """The opcodes of all instructions that the warp can reach."""
        lanes = Lanes(warp)
        with np.errstate(all="ignore"):
            for instruction in self._decided:
                self._program.steps[instruction.index](lanes)  # type: ignore[arg-type]
        instructions = self._program.entry.instructions
        queue, seen, found = [0], {0}, set()
        while queue:
            index = queue.pop()
            if index == len(instructions):
                continue
            instruction = instructions[index]
            runs, skips = self._guard(instruction, lanes, warp.threads)
            if runs:
                found.add(instruction.opcode)
            for successor in self._successors(instruction, runs, skips, lanes, warp.threads):
                if successor not in seen:
                    seen.add(successor)
                    queue.append(successor)
        return found

    def _guard(self, instruction: Instruction, lanes: Lanes, alive: np.ndarray) -> tuple[bool, bool]:
        """Whether some lanes may execute an instruction, and whether some may skip it."""
        if instruction.guard is None:
            return True, False
        register, negated = instruction.guard
        if (register.file, register.slot) not in self._known:
            return True, True
        chosen = (lanes.pred[register.slot] ^ negated)[alive]
        return bool(chosen.any()), not chosen.all()

    def _successors(
        self, instruction: Instruction, runs: bool, skips: bool, lanes: Lanes, alive: np.ndarray
    ) -> list[int]:
        """The instructions that may follow an instruction."""
        following = [instruction.index + 1]
        name = instruction.parts[0]
        if not runs or name not in ("bra", "brx", "ret", "exit", "trap"):
            return following
        jumps: list[int] = []
        if name == "bra":
            jumps = [operand.index for operand in instruction.operands if isinstance(operand, Label)]
        elif name == "brx":
            index, table = instruction.operands
            assert isinstance(table, (Label, Symbol))
            targets = self._program.entry.branch_targets[table.name]
            jumps = list(targets)
            if isinstance(index, Register) and (index.file, index.slot) in self._known:
                jumps = [targets[min(int(i), len(targets) - 1)] for i in lanes.u32[index.slot][alive]]
        return jumps + (following if skips else [])


class Lanes(Registers):
    """Registers of a warp, with as much of its interface as PURE opcodes need."""

    def __init__(self, warp: Warp) -> None:
        super().__init__(warp.program.entry.register_counts, np.zeros)
        self.cta = warp.cta
        self.special = warp.special
        self.mask = np.ones_like(warp.mask)
        self.full = True
        self.pipes: dict[str, object] = {}


def _is_pure(instruction: Instruction) -> bool:
    """Whether the results of an instruction depend on its operands alone."""
    if instruction.guard is not None or "cc" in instruction.parts:
        return False
    if instruction.parts[0] == "shfl":  # of all lanes: otherwise the result depends on which lanes take part
        members = instruction.operands[-1]
        return isinstance(members, Immediate) and int(members.value) & 0xFFFFFFFF == 0xFFFFFFFF
    return instruction.parts[0] in PURE


def _results(instruction: Instruction) -> frozenset[tuple[str, int]]:
    """The registers of an instruction's first operand. An instruction writes no others, and some only read
    these."""
    if instruction.parts[0] in ("brx", "bar", "barrier") and "red" not in instruction.parts:
        return frozenset()
    return registers_of(instruction.operands[:1])


def _role(opcodes: set[str]) -> str:
    def comes_to(pattern: str) -> bool:
        return any(re.match(pattern, opcode) for opcode in opcodes)

    main = [role for role, pattern in MAIN_ROLES.items() if comes_to(pattern)]
    helper = [role for role, patterns in HELPER_ROLES.items() if all(map(comes_to, patterns))]
    return "+".join(main) or next(iter(helper), UNNAMED)
