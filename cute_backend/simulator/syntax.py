"""The syntax tree of PTX: instructions, operands, variables, entries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Union

TYPE_BYTES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8,
    "f32x2": 8, "b128": 16,
}  # fmt: skip
FILE_BYTES = {"p": 1, "h": 2, "w": 4, "d": 8, "q": 16}
"""The bytes of a register, by its file."""


@dataclass(frozen=True)
class Register:
    """One register: `file` is the register file ("p", "h", "w", "d", "q" for 1, 16, 32, 64, 128 bits)."""

    name: str
    file: str
    slot: int


@dataclass(frozen=True)
class Special:
    """A read-only special register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A literal. `value` is an int, or a float for decimal and for the 0f and 0d bit forms."""

    value: int | float


@dataclass(frozen=True)
class FloatBits(Immediate):
    """A 0f or 0d literal: its value and its exact bits."""

    bits: int = 0
    nbytes: int = 4


@dataclass(frozen=True)
class Symbol:
    """The address of a variable, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """`[base + offset]`, or `[base, {coordinates}]` of a tensor instruction."""

    base: Union[Register, Symbol, Immediate]
    offset: int = 0
    rest: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """`a|b`: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Not:
    """`!p`."""

    register: Register


@dataclass(frozen=True)
class Sink:
    """`_`."""


@dataclass(frozen=True)
class Label:
    """A branch target: the index of an instruction."""

    name: str
    index: int


Operand = Union[Register, Special, Immediate, Symbol, Address, Vector, Pair, Not, Sink, Label]


def elements_of(operand: Operand) -> tuple[Operand, ...]:
    """The elements of a vector, or the operand itself as the only one."""
    return operand.elements if isinstance(operand, Vector) else (operand,)


def registers_of(operands: Iterable[Operand]) -> frozenset[tuple[str, int]]:
    """The registers among operands, by file and slot."""
    found: set[tuple[str, int]] = set()
    for operand in operands:
        if isinstance(operand, Register):
            found.add((operand.file, operand.slot))
        elif isinstance(operand, Not):
            found |= registers_of((operand.register,))
        elif isinstance(operand, Vector):
            found |= registers_of(operand.elements)
        elif isinstance(operand, Pair):
            found |= registers_of((operand.first, operand.second))
        elif isinstance(operand, Address):
            found |= registers_of((operand.base, *operand.rest))
    return frozenset(found)


@dataclass
class Instruction:
    """One instruction: `opcode` is the whole dotted name, `parts` its pieces, `guard` the @p or @!p."""

    index: int
    line: int
    text: str
    opcode: str
    parts: tuple[str, ...]
    guard: tuple[Register, bool] | None
    operands: tuple[Operand, ...]
    source: str | None = None

    def has(self, modifier: str) -> bool:
        return modifier in self.parts


@dataclass(frozen=True)
class Parameter:
    name: str
    offset: int
    nbytes: int


@dataclass
class Variable:
    """A .shared, .global, .const or .local variable; `data` holds the initial bytes where there are any."""

    name: str
    space: str
    nbytes: int
    align: int
    external: bool = False
    data: bytes | None = None


@dataclass
class Entry:
    """One .entry with its instructions, parameters, variables and the sizes of its register files."""

    name: str
    parameters: list[Parameter] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    branch_targets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    register_counts: dict[str, int] = field(default_factory=dict)
    required_threads: tuple[int, int, int] | None = None
    cluster: tuple[int, int, int] | None = None
    most_registers: tuple[int, int, int] | None = None
    resident_ctas: tuple[int, int, int] | None = None


@dataclass
class Module:
    target: str
    version: str
    entries: dict[str, Entry]
    variables: dict[str, Variable]
