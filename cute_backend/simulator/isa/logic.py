"""Bitwise logic, shifts and permutations of bytes (PTX ISA 9.7.8, 9.7.9.7)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cute_backend.simulator.isa.common import compute, straight, the_type
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.syntax import TYPE_BYTES, Immediate, Instruction, Register
from cute_backend.simulator.warp import LANE_IDS

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder


@opcode("and", "or", "xor", section="9.7.8.1-3", meaning="Bitwise logic, predicates included")
def bind_logic(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[instruction.parts[0]]
    return compute(binder, instruction, function, [kind] * 2, kind)


@opcode("not", section="9.7.8.4", meaning="Complement")
def bind_not(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    return compute(binder, instruction, np.invert, [kind], kind)


@opcode("cnot", section="9.7.8.5", meaning="1 where zero, else 0")
def bind_cnot(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    return compute(binder, instruction, lambda a: a == 0, [kind], kind)


@opcode("lop3", section="9.7.8.6", meaning="Any logic of three operands, by its truth table")
def bind_lop3(binder: Binder, instruction: Instruction) -> Step:
    if not isinstance(instruction.operands[0], Register):
        raise unsupported(instruction, "a predicate result")
    table = instruction.operands[4]
    assert isinstance(table, Immediate)
    code = int(table.value)

    def logic(a: Any, b: Any, c: Any) -> Any:
        result = np.zeros(32, np.uint32)
        for row in range(8):
            if (code >> row) & 1:
                x = a if row & 4 else ~a
                y = b if row & 2 else ~b
                z = c if row & 1 else ~c
                result |= x & y & z
        return result

    put = binder.put(instruction.operands[0], "b32", instruction)
    gets = [binder.get(o, "b32", instruction) for o in instruction.operands[1:4]]
    return lambda w: put(w, logic(*(g(w) for g in gets)))


@opcode("shl", "shr", section="9.7.8.8, 9.7.8.9", meaning="Shift; amounts beyond the width are clamped to it")
def bind_shift(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    bits = 8 * TYPE_BYTES[kind]
    left = instruction.parts[0] == "shl"
    amount = instruction.operands[2]
    function = np.left_shift if left else np.right_shift
    signed = kind.startswith("s") and not left
    if isinstance(amount, Immediate) and 0 <= int(amount.value) < bits:
        a = binder.get(instruction.operands[1], kind, instruction)
        constant = binder.constant(amount, kind, instruction)
        return straight(binder, instruction, function, (a, lambda w: constant), kind)

    def shift(a: Any, b: Any) -> Any:
        dtype = np.asarray(a).dtype.type
        if signed:
            return a >> np.minimum(b, bits - 1).astype(dtype)
        return np.where(b < bits, function(a, np.minimum(b, bits - 1).astype(dtype)), dtype(0))

    return compute(binder, instruction, shift, [kind, "u32"], kind)


@opcode("shf", section="9.7.8.7", meaning="Funnel shift of a pair of registers")
def bind_shf(binder: Binder, instruction: Instruction) -> Step:
    left, wrap = instruction.has("l"), instruction.has("wrap")

    def funnel(a: Any, b: Any, c: Any) -> Any:
        pair = (np.asarray(b).astype(np.uint64) << np.uint64(32)) | np.asarray(a).astype(np.uint64)
        amount = (c & np.uint32(31) if wrap else np.minimum(c, 32)).astype(np.uint64)
        shifted = (pair << amount) >> np.uint64(32) if left else pair >> amount
        return shifted.astype(np.uint32)

    return compute(binder, instruction, funnel, ["b32", "b32", "u32"], "b32")


_NIBBLES = np.arange(0, 16, 4, dtype=np.uint32)


@opcode("prmt", section="9.7.9.7", meaning="Bytes picked from a pair of registers")
def bind_prmt(binder: Binder, instruction: Instruction) -> Step:
    modes = {
        "f4e": lambda i, s: s + i,
        "b4e": lambda i, s: (s - i) & 7,
        "rc8": lambda i, s: s,
        "ecl": lambda i, s: max(i, s),
        "ecr": lambda i, s: min(i, s),
        "rc16": lambda i, s: (i & 1) | (s & 2),
    }
    mode = next((m for m in modes if instruction.has(m)), None)
    table = None if mode is None else np.array([[modes[mode](i, c) & 7 for i in range(4)] for c in range(4)])

    def permute(a: Any, b: Any, c: Any) -> Any:
        nibbles = np.asarray(c)[..., None] >> _NIBBLES & np.uint32(15) if table is None else table[c & 3]
        pair = np.empty((32, 2), np.uint32)
        pair[:, 0], pair[:, 1] = a, b
        picked = pair.view(np.uint8)[LANE_IDS[:, None], nibbles & 7]
        signs = nibbles & 8
        if np.count_nonzero(signs):
            picked = np.where(signs, (picked >> 7) * np.uint8(255), picked)
        return np.ascontiguousarray(picked).view(np.uint32).reshape(32)

    return compute(binder, instruction, permute, ["b32", "b32", "b32"], "b32")
