"""Integer arithmetic, logic, shifts, comparison, selection and data movement between registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_backend.simulator.isa.common import compute, the_type, types_of
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.parser import (
    TYPE_BYTES,
    Immediate,
    Instruction,
    Label,
    Pair,
    Register,
    Symbol,
    Vector,
)

if TYPE_CHECKING:
    from cute_backend.simulator.program import Binder
    from cute_backend.simulator.warp import Warp

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64", "b16", "b32", "b64")
UNSIGNED = {"s8": np.uint8, "s16": np.uint16, "s32": np.uint32, "s64": np.uint64}
WIDE = {
    "u16": (np.uint32, "u32"),
    "s16": (np.int32, "s32"),
    "u32": (np.uint64, "u64"),
    "s32": (np.int64, "s64"),
}


def is_integer(kind: str) -> bool:
    return kind in INTEGERS


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


def low_product(a: Any, b: Any) -> Any:
    return a * b


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
    kind = the_integer_type(instruction)
    if kind in ("u16x2", "s16x2"):
        function = halves((lambda a, b: a + b) if sign > 0 else (lambda a, b: a - b), np.uint16)
        return compute(binder, instruction, function, ["b32", "b32"], "b32")
    if instruction.has("sat"):
        return compute(binder, instruction, lambda a, b: saturated_sum(a, b, sign), ["s32", "s32"], "s32")
    if instruction.has("cc"):
        return _carry(binder, instruction, kind, sign, carry_in=False, carry_out=True)
    if sign > 0:
        return compute(binder, instruction, lambda a, b: a + b, [kind, kind], kind)
    return compute(binder, instruction, lambda a, b: a - b, [kind, kind], kind)


def the_integer_type(instruction: Instruction) -> str:
    """The type modifier, the packed integer types included, which no register is declared with."""
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


@opcode("mul", "mad", section="9.7.1.3, 9.7.1.4", meaning="Product (and sum): low half, high half or both")
def bind_mul(binder: Binder, instruction: Instruction) -> Step:
    from cute_backend.simulator.isa.floating import FLOATS, bind_float_arithmetic

    kind = types_of(instruction)[-1]
    if kind in FLOATS:
        return bind_float_arithmetic(binder, instruction)
    multiply_add = instruction.parts[0] == "mad"
    if instruction.has("wide"):
        result = WIDE[kind][1]
        if multiply_add:
            return compute(
                binder,
                instruction,
                lambda a, b, c: wide_product(a, b, kind) + c,
                [kind, kind, result],
                result,
            )
        return compute(binder, instruction, lambda a, b: wide_product(a, b, kind), [kind, kind], result)
    if instruction.has("cc"):
        return _mad_carry(binder, instruction, kind, carry_in=False)
    if instruction.has("hi"):
        if multiply_add and instruction.has("sat"):
            return compute(
                binder,
                instruction,
                lambda a, b, c: saturated_sum(high_product(a, b, kind), c, 1),
                [kind] * 3,
                kind,
            )
        if multiply_add:
            return compute(
                binder, instruction, lambda a, b, c: high_product(a, b, kind) + c, [kind] * 3, kind
            )
        return compute(binder, instruction, lambda a, b: high_product(a, b, kind), [kind] * 2, kind)
    if multiply_add:
        return compute(binder, instruction, lambda a, b, c: a * b + c, [kind] * 3, kind)
    return compute(binder, instruction, low_product, [kind] * 2, kind)


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
    """Towards zero. Division by zero gives all ones, as the hardware does (PTX: machine-specific)."""
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

    return compute(binder, instruction, _each(extract, bits), [kind, "u32", "u32"], f"b{bits}")


def _each(function: Callable[..., int], bits: int) -> Callable[..., Any]:
    """Applies a function of Python ints lane by lane: for rare instructions."""

    def lanes(*operands: Any) -> Any:
        columns = [np.broadcast_to(o, 32).tolist() for o in operands]
        return np.array([function(*row) for row in zip(*columns)], f"u{bits // 8}")

    return lanes


@opcode("bfi", section="9.7.1.20", meaning="Bit field inserted")
def bind_bfi(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    bits = 8 * TYPE_BYTES[kind]

    def insert(a: int, b: int, start: int, length: int) -> int:
        start, length = start & 0xFF, length & 0xFF
        field = (((1 << length) - 1) << start) & ((1 << bits) - 1)
        return (b & ~field) | ((a << start) & field)

    return compute(binder, instruction, _each(insert, bits), [kind, kind, "u32", "u32"], kind)


@opcode("bmsk", section="9.7.1.22", meaning="Mask of b ones from bit a")
def bind_bmsk(binder: Binder, instruction: Instruction) -> Step:
    wrap = instruction.has("wrap")

    def mask(a: int, b: int) -> int:
        start, length = (a & 31, b & 31) if wrap else (min(a, 32), min(b, 32))
        return (((1 << length) - 1) << start) & 0xFFFFFFFF

    return compute(binder, instruction, _each(mask, 32), ["u32", "u32"], "b32")


@opcode("szext", section="9.7.1.21", meaning="Sign or zero extension of the low b bits")
def bind_szext(binder: Binder, instruction: Instruction) -> Step:
    signed, wrap = the_type(instruction) == "s32", instruction.has("wrap")

    def extend(a: int, n: int) -> int:
        n = n & 31 if wrap else min(n, 32)
        field = a & ((1 << n) - 1)
        if signed and n and (field >> (n - 1)) & 1:
            field |= -1 << n
        return field & 0xFFFFFFFF

    return compute(binder, instruction, _each(extend, 32), ["b32", "u32"], "b32")


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


# --- logic and shifts --------------------------------------------------------------------------------------


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
        put = binder.put(instruction.operands[0], kind, instruction)
        a = binder.get(instruction.operands[1], kind, instruction)
        constant = binder.constant(amount, kind, instruction)
        return lambda w: put(w, function(a(w), constant))

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

    def permute(a: int, b: int, c: int) -> int:
        source = (b << 32) | a
        result = 0
        for i in range(4):
            if mode is None:
                selector = (c >> (4 * i)) & 0xF
            else:
                selector = modes[mode](i, c & 3) & 7
            byte = (source >> (8 * (selector & 7))) & 0xFF
            if selector & 8:
                byte = 0xFF if byte & 0x80 else 0
            result |= byte << (8 * i)
        return result

    return compute(binder, instruction, _each(permute, 32), ["b32", "b32", "b32"], "b32")


# --- comparison and selection -------------------------------------------------------------------------------


def comparison(name: str, kind: str) -> Callable[[Any, Any], Any]:
    """The function of a comparison operator (PTX ISA 9.3.1): unordered forms are true if an operand is NaN."""
    plain: dict[str, Callable[[Any, Any], Any]] = {
        "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
        "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    }  # fmt: skip
    floating = kind in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2")
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if floating and name == "ne":
        return lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b))
    if name in plain:
        return plain[name]
    base = plain[name[:-1]] if name.endswith("u") else None
    if base is None:
        raise KeyError(name)
    return lambda a, b: base(a, b) | np.isnan(a) | np.isnan(b)


COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu", "leu", "gtu", "geu",
               "num", "nan")  # fmt: skip


@opcode("setp", "set", section="9.7.6.1, 9.7.6.2", meaning="Comparison, optionally combined with a predicate")
def bind_setp(binder: Binder, instruction: Instruction) -> Step:
    from cute_backend.simulator.isa.floating import float_values, flush_inputs

    parts = instruction.parts
    operator = next(p for p in parts[1:] if p in COMPARISONS)
    combine = next((p for p in parts[1:] if p in ("and", "or", "xor")), None)
    kinds = types_of(instruction)
    kind = kinds[-1]
    compare = comparison(operator, kind)
    decode = float_values(kind)
    ftz = flush_inputs(instruction)
    a, b = (binder.get(o, kind, instruction) for o in instruction.operands[1:3])
    third = binder.get(instruction.operands[3], "pred", instruction) if combine else None
    merge = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, None: None}[combine]

    def both(w: Warp) -> tuple[Any, Any]:
        x, y = a(w), b(w)
        if decode is not None:
            x, y = decode(x), decode(y)
        if ftz is not None:
            x, y = ftz(x), ftz(y)
        found = np.asarray(compare(x, y))
        if merge is None:
            return found, None
        assert third is not None
        c = third(w)
        c = c[:, None] if found.ndim == 2 else c
        return merge(found, c), merge(~found, c)

    target = instruction.operands[0]
    if parts[0] == "set":
        result = kinds[0]
        put = binder.put(target, "b32" if result in ("f16x2", "bf16x2") else result, instruction)
        yes: Any = {"f32": np.float32(1), "f16": np.float16(1), "bf16": np.uint16(0x3F80)}.get(result)
        if kind.endswith("x2"):
            one = {"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(result, 0xFFFF)
            return lambda w: put(
                w,
                np.where(both(w)[0], np.uint16(one), np.uint16(0))
                .astype(np.uint16)
                .view(np.uint32)
                .reshape(-1),
            )
        if yes is None:
            width = TYPE_BYTES[result]
            yes = np.array((1 << (8 * width)) - 1, f"u{width}")[()]
        return lambda w: put(w, np.where(both(w)[0], yes, yes.dtype.type(0)))
    if isinstance(target, Pair):
        first, second = (binder.put(o, "pred", instruction) for o in (target.first, target.second))
        if kind.endswith("x2"):

            def step_packed(w: Warp) -> None:
                found = np.broadcast_to(both(w)[0], (32, 2))
                first(w, found[:, 0])
                second(w, found[:, 1])

            return step_packed

        def step_pair(w: Warp) -> None:
            found, opposite = both(w)
            first(w, found)
            second(w, ~found if opposite is None else opposite)

        return step_pair
    put = binder.put(target, "pred", instruction)
    if decode is None and ftz is None and merge is None:
        return lambda w: put(w, compare(a(w), b(w)))
    return lambda w: put(w, both(w)[0])


@opcode("selp", section="9.7.6.3", meaning="a where the predicate is true, else b")
def bind_selp(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    return compute(binder, instruction, lambda a, b, p: np.where(p, a, b), [kind, kind, "pred"], kind)


@opcode("slct", section="9.7.6.4", meaning="a where c is not negative, else b")
def bind_slct(binder: Binder, instruction: Instruction) -> Step:
    kinds = types_of(instruction)
    return compute(
        binder, instruction, lambda a, b, c: np.where(c >= 0, a, b), [kinds[0], kinds[0], kinds[1]], kinds[0]
    )


# --- mov ------------------------------------------------------------------------------------------------------


@opcode("mov", section="9.7.9.2, 9.7.9.3", meaning="Copy; packs and unpacks vectors; takes addresses")
def bind_mov(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    target, source = instruction.operands
    if isinstance(source, Vector):
        return _pack(binder, instruction, kind, source)
    if isinstance(source, Label):
        raise unsupported(instruction, "the address of a label")
    put = binder.put(target, kind, instruction)
    if kind == "b128":
        if not isinstance(source, Register):
            raise unsupported(instruction, f"the source {source!r}")
        slot = source.slot
        return lambda w: put(w, w.u128[slot])
    if isinstance(source, Symbol) and kind not in ("u32", "u64", "b32", "b64"):
        raise unsupported(instruction, f"the address of a variable as {kind}")
    get = binder.get(source, kind, instruction)
    return lambda w: put(w, get(w))


def _pack(binder: Binder, instruction: Instruction, kind: str, source: Vector) -> Step:
    width = TYPE_BYTES[kind] // len(source.elements)
    gets = [binder.get(e, f"b{8 * width}", instruction) for e in source.elements]
    put = binder.put(instruction.operands[0], kind, instruction)
    if kind == "b128":

        def step_wide(w: Warp) -> None:
            raw = np.stack([np.broadcast_to(g(w), 32) for g in gets], axis=1).astype(f"u{width}")
            put(w, np.ascontiguousarray(raw).view(np.uint64).reshape(32, 2))

        return step_wide
    if width == 4 and len(gets) == 2:
        low, high = gets
        shift = np.uint64(32)

        def step_two(w: Warp) -> None:
            put(w, low(w).astype(np.uint64) | (high(w).astype(np.uint64) << shift))

        return step_two
    dtype = np.dtype(f"u{TYPE_BYTES[kind]}").type

    def step(w: Warp) -> None:
        total = dtype(0)
        for i, get in enumerate(gets):
            total = total | (get(w).astype(dtype) << dtype(8 * width * i))
        put(w, total)

    return step
