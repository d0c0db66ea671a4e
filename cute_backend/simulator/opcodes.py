"""The table of opcodes: name, section of the PTX ISA (9.0), meaning, and the function that binds it.

A binder is called once per instruction of the program, before the run. It decodes the modifiers and operands,
and returns a step: a function of a `Warp` that executes the instruction for the warp's active lanes. A step
returns None to continue, the index of the next instruction, `MOVED` when it has set the program counter, or a
`Wait`.

To add an opcode, write a binder in the module of its family in `isa/` and decorate it with `@opcode`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from cute_backend.simulator.simulation_errors import UnknownOpcode

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.syntax import Instruction
    from cute_backend.simulator.warp import Warp

Step = Callable[["Warp"], Any]
Bind = Callable[["Binder", "Instruction"], Step]


@dataclass(frozen=True)
class Opcode:
    """One row of the table."""

    name: str
    section: str
    meaning: str
    bind: Bind


TABLE: dict[str, Opcode] = {}


def opcode(*names: str, section: str, meaning: str, together: bool = False) -> Callable[[Bind], Bind]:
    """Adds a binder to the table under each of `names` (a dotted prefix of the whole opcode). A step of an
    opcode that the lanes of a warp execute `together` waits until all that live have come."""

    def add(bind: Bind) -> Bind:
        @wraps(bind)
        def bind_together(binder: Binder, instruction: Instruction) -> Step:
            return after(lambda w: w.together(), bind(binder, instruction))

        for name in names:
            TABLE[name] = Opcode(name, section, meaning, bind_together if together else bind)
        return bind

    return add


def after(absent: Step, step: Step) -> Step:
    """A step that is executed once `absent` returns no more waits."""
    return lambda w: step(w) if (wait := absent(w)) is None else wait


def lookup(instruction: Instruction) -> Opcode:
    """The row with the longest name that begins this instruction's opcode. Raises `UnknownOpcode`."""
    parts = instruction.parts
    for length in range(len(parts), 0, -1):
        row = TABLE.get(".".join(parts[:length]))
        if row is not None:
            return row
    raise UnknownOpcode(
        f"the opcode {instruction.opcode} is not in the table "
        f"(PTX line {instruction.line}: {instruction.text[:100]}); "
        "add a binder for it in the module of its family under cute_backend/simulator/isa"
    )


def unsupported(instruction: Instruction, what: str) -> UnknownOpcode:
    """The error for a form of a known opcode that its binder doesn't have."""
    row = lookup(instruction)
    return UnknownOpcode(
        f"{instruction.opcode}: {what} is not supported (PTX line {instruction.line}); "
        f"its binder is {row.bind.__module__}.{row.bind.__name__}"
    )
