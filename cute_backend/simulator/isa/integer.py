"""Integer arithmetic and bit fields (PTX ISA 9.7.1, 9.7.2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from cute_backend.simulator.isa.common import compute, lane_by_lane, the_type, types_of
from cute_backend.simulator.opcodes import Step, opcode
from cute_backend.simulator.syntax import TYPE_BYTES, Instruction

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.warp import Warp

WIDE = {
    "u16": (np.uint32, "u32"),
    "s16": (np.int32, "s32"),
    "u32": (np.uint64, "u64"),
    "s32": (np.int64, "s64"),
}


def high_product(a: Any, b: Any, kind: str) -> Any:
    """The upper half of the product."""
    if kind in WIDE:
        wide = WIDE[kind][0]
        shift = 16 if kind.endswith("16") else 32
        return ((np.asarray(a).astype(wide) * np.asarray(b).astype(wide)) >> wide(shift)).astype(
            np.asarray(a).dtype
        )
    dtype = np.uint64 if kind == "u64" else np.int64
    product = np.asarray(a).astype(object) * np.asarray(b).astype(object)
    return (product >> 64).astype(dtype)


def wide_product(a: Any, b: Any, kind: str) -> Any:
    wide = WIDE[kind][0]
    return np.asarray(a).astype(wide) * np.asarray(b).astype(wide)


def saturated_sum(a: Any, b: Any, sign: int) -> Any:
    total = np.asarray(a).astype(np.int64) + sign * np.asarray(b).astype(np.int64)
    return np.clip(total, -(1 << 31), (1 << 31) - 1).astype(np.int32)


def halves(function: Callable[[Any, Any], Any], dtype: Any) -> Callable[..., Any]:
    """Applies a function to both 16-bit halves of 32-bit values."""

    def packed(*operands: Any) -> Any:
        parts = [np.ascontiguousarray(np.broadcast_to(o, 32)).view(dtype).reshape(32, 2) for o in operands]
        return np.ascontiguousarray(function(*parts)).astype(dtype, copy=False).view(np.uint32).reshape(32)

    return packed


def bind_sum(binder: Binder, instruction: Instruction, sign: int) -> Step:
    """add and sub of integers."""
    kind, function = the_integer_type(instruction), np.add if sign > 0 else np.subtract
    if kind in ("u16x2", "s16x2"):
        return compute(binder, instruction, halves(function, np.uint16), ["b32", "b32"], "b32")
    if instruction.has("sat"):
        return compute(binder, instruction, lambda a, b: saturated_sum(a, b, sign), ["s32", "s32"], "s32")
    if instruction.has("cc"):
        return _carry(binder, instruction, kind, sign, carry_in=False, carry_out=True)
    return compute(binder, instruction, function, [kind, kind], kind)


def the_integer_type(instruction: Instruction) -> str:
    """The type modifier, which may also be a packed integer type, although registers never have these."""
    for packed in ("u16x2", "s16x2"):
        if packed in instruction.parts:
            return packed
    return the_type(instruction)


@opcode("addc", "subc", section="9.7.2", meaning="Sum or difference with the carry flag")
def bind_addc(binder: Binder, instruction: Instruction) -> Step:
    sign = 1 if instruction.parts[0] == "addc" else -1
    return _carry(
        binder, instruction, the_type(instruction), sign, carry_in=True, carry_out=instruction.has("cc")
    )


def _carry(
    binder: Binder, instruction: Instruction, kind: str, sign: int, carry_in: bool, carry_out: bool
) -> Step:
    raw = "u64" if kind.endswith("64") else "u32"
    dtype = np.uint64 if raw == "u64" else np.uint32
    put = binder.put(instruction.operands[0], raw, instruction)
    a, b = (binder.get(o, raw, instruction) for o in instruction.operands[1:])

    def step(w: Warp) -> None:
        x, y = np.broadcast_to(a(w), 32), np.broadcast_to(b(w), 32)
        carried = w.carry.astype(dtype) if carry_in else dtype(0)
        if sign > 0:
            part = x + y
            total = part + carried
            out = (part < x) | (total < part)
        else:
            part = x - y
            total = part - carried
            out = (x < y) | (part < carried)
        put(w, total)
        if carry_out:
            np.copyto(w.carry, out.astype(np.uint8), where=w.mask)

    return step


def bind_product(binder: Binder, instruction: Instruction) -> Step:
    """`mul` and `mad` of integers."""
    kind = types_of(instruction)[-1]
    if instruction.has("cc"):
        return _mad_carry(binder, instruction, kind, carry_in=False)
    result, function = kind, cast(Callable[..., Any], np.multiply)
    if instruction.has("wide"):
        result, function = WIDE[kind][1], partial(wide_product, kind=kind)
    elif instruction.has("hi"):
        function = partial(high_product, kind=kind)
    if instruction.parts[0] == "mul":
        return compute(binder, instruction, function, [kind] * 2, result)
    add = partial(saturated_sum, sign=1) if instruction.has("sat") else np.add
    return compute(binder, instruction, lambda a, b, c: add(function(a, b), c), [kind, kind, result], result)


@opcode("madc", section="9.7.2.6", meaning="Product and sum with the carry flag")
def bind_madc(binder: Binder, instruction: Instruction) -> Step:
    return _mad_carry(binder, instruction, the_type(instruction), carry_in=True)


def _mad_carry(binder: Binder, instruction: Instruction, kind: str, carry_in: bool) -> Step:
    bits = 8 * TYPE_BYTES[kind]
    raw, dtype = f"u{bits}", np.dtype(f"u{bits // 8}").type
    put = binder.put(instruction.operands[0], raw, instruction)
    a, b = (binder.get(o, kind, instruction) for o in instruction.operands[1:3])
    c = binder.get(instruction.operands[3], raw, instruction)
    high, carry_out = instruction.has("hi"), instruction.has("cc")

    def step(w: Warp) -> None:
        x, y = np.broadcast_to(a(w), 32), np.broadcast_to(b(w), 32)
        product = (high_product(x, y, kind) if high else x * y).astype(dtype)
        part = product + c(w)
        total = part + (w.carry.astype(dtype) if carry_in else dtype(0))
        out = (part < product) | (total < part)
        put(w, total)
        if carry_out:
            np.copyto(w.carry, out.astype(np.uint8), where=w.mask)

    return step


@opcode("mul24", "mad24", section="9.7.1.5", meaning="Product of the low 24 bits, low or high 32 bits of it")
def bind_mul24(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    shift = 16 if instruction.has("hi") else 0

    def cut(a: Any) -> Any:
        wide = np.asarray(a).astype(np.int64) & 0xFFFFFF
        return np.where(wide >> 23, wide - (1 << 24), wide) if kind == "s32" else wide

    def product(a: Any, b: Any) -> Any:
        return (
            ((cut(a) * cut(b)) >> shift)
            .astype(np.uint64)
            .astype(np.uint32)
            .view(np.dtype(kind[0].replace("s", "i") + "4"))
        )

    if instruction.parts[0] == "mad24":
        return compute(binder, instruction, lambda a, b, c: product(a, b) + c, [kind] * 3, kind)
    return compute(binder, instruction, product, [kind] * 2, kind)


@opcode("sad", section="9.7.1.7", meaning="c + |a - b|")
def bind_sad(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    return compute(binder, instruction, lambda a, b, c: c + np.where(a < b, b - a, a - b), [kind] * 3, kind)


def divide(a: Any, b: Any) -> Any:
    """The quotient, rounded towards zero. Division by zero gives all ones, as on the hardware (PTX leaves it
    open)."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        remainder = a - quotient * safe
        quotient = quotient + ((remainder != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(b == 0, ~a.dtype.type(0), quotient)


def remainder(a: Any, b: Any) -> Any:
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, b.dtype.type(1), b)
    return np.where(b == 0, a, a - divide(a, safe) * safe)


@opcode("rem", section="9.7.1.9", meaning="Remainder with the sign of the dividend")
def bind_rem(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    return compute(binder, instruction, remainder, [kind] * 2, kind)


@opcode("popc", section="9.7.1.14", meaning="Number of ones")
def bind_popc(binder: Binder, instruction: Instruction) -> Step:
    return compute(
        binder, instruction, lambda a: np.bitwise_count(a).astype(np.uint32), [the_type(instruction)], "u32"
    )


def leading_zeros(a: Any, bits: int) -> Any:
    values = np.atleast_1d(a)
    return np.array([bits - int(v).bit_length() for v in values], np.uint32)


@opcode("clz", section="9.7.1.15", meaning="Number of leading zeros")
def bind_clz(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    return compute(binder, instruction, lambda a: leading_zeros(a, 8 * TYPE_BYTES[kind]), [kind], "u32")


@opcode("bfind", section="9.7.1.16", meaning="Position of the leading bit that isn't the sign; -1 for none")
def bind_bfind(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    bits = 8 * TYPE_BYTES[kind]
    shift_amount = instruction.has("shiftamt")

    def find(a: Any) -> Any:
        values = np.atleast_1d(a)
        found = [(~int(v) if int(v) < 0 else int(v)).bit_length() - 1 for v in values]
        if shift_amount:
            found = [bits - 1 - f if f >= 0 else -1 for f in found]
        return np.array(found, np.int32).view(np.uint32)

    return compute(binder, instruction, find, [kind], "u32")


@opcode("brev", section="9.7.1.18", meaning="Bits in reverse order")
def bind_brev(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    bits = 8 * TYPE_BYTES[kind]

    def reverse(a: Any) -> Any:
        values = np.atleast_1d(a)
        return np.array([int(format(int(v), f"0{bits}b")[::-1], 2) for v in values], values.dtype)

    return compute(binder, instruction, reverse, [kind], kind)


@opcode("bfe", section="9.7.1.19", meaning="Bit field extracted, sign-extended for signed types")
def bind_bfe(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    bits = 8 * TYPE_BYTES[kind]

    def extract(a: int, start: int, length: int) -> int:
        start, length = start & 0xFF, length & 0xFF
        raw = a & ((1 << bits) - 1)
        if length == 0:
            return 0
        negative = kind.startswith("s") and (raw >> min(start + length - 1, bits - 1)) & 1
        field = (raw >> start) & ((1 << length) - 1) if start < bits else 0
        taken = min(length, max(bits - start, 0))
        return (field | (-1 << taken)) & ((1 << bits) - 1) if negative else field

    return compute(binder, instruction, lane_by_lane(extract, bits), [kind, "u32", "u32"], f"b{bits}")


@opcode("bfi", section="9.7.1.20", meaning="Bit field inserted")
def bind_bfi(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    bits = 8 * TYPE_BYTES[kind]

    def insert(a: int, b: int, start: int, length: int) -> int:
        start, length = start & 0xFF, length & 0xFF
        field = (((1 << length) - 1) << start) & ((1 << bits) - 1)
        return (b & ~field) | ((a << start) & field)

    return compute(binder, instruction, lane_by_lane(insert, bits), [kind, kind, "u32", "u32"], kind)


@opcode("bmsk", section="9.7.1.22", meaning="Mask of b ones from bit a")
def bind_bmsk(binder: Binder, instruction: Instruction) -> Step:
    wrap = instruction.has("wrap")

    def mask(a: int, b: int) -> int:
        start, length = (a & 31, b & 31) if wrap else (min(a, 32), min(b, 32))
        return (((1 << length) - 1) << start) & 0xFFFFFFFF

    return compute(binder, instruction, lane_by_lane(mask, 32), ["u32", "u32"], "b32")


@opcode("szext", section="9.7.1.21", meaning="Sign or zero extension of the low b bits")
def bind_szext(binder: Binder, instruction: Instruction) -> Step:
    signed, wrap = the_type(instruction) == "s32", instruction.has("wrap")

    def extend(a: int, n: int) -> int:
        n = n & 31 if wrap else min(n, 32)
        field = a & ((1 << n) - 1)
        if signed and n and (field >> (n - 1)) & 1:
            field |= -1 << n
        return field & 0xFFFFFFFF

    return compute(binder, instruction, lane_by_lane(extend, 32), ["b32", "u32"], "b32")


@opcode("dp4a", "dp2a", section="9.7.1.23, 9.7.1.24", meaning="Dot product of bytes, added to c")
def bind_dp(binder: Binder, instruction: Instruction) -> Step:
    first, second = [p for p in instruction.parts[1:] if p in ("u32", "s32")]
    four = instruction.parts[0] == "dp4a"
    high = instruction.has("hi")

    def pieces(a: Any, signed: bool, width: int) -> Any:
        dtype = f"{'i' if signed else 'u'}{width}"
        return np.ascontiguousarray(np.broadcast_to(a, 32)).view(dtype).reshape(32, -1).astype(np.int64)

    def dot(a: Any, b: Any, c: Any) -> Any:
        x = pieces(a, first == "s32", 1 if four else 2)
        y = pieces(b, second == "s32", 1)
        if not four:
            y = y[:, 2:] if high else y[:, :2]
        total = (x * y).sum(1) + np.asarray(c).astype(np.int64)
        return (total & 0xFFFFFFFF).astype(np.uint32)

    return compute(binder, instruction, dot, ["b32", "b32", "b32"], "b32")
