"""Floating-point arithmetic: f64, f32, f16, bf16 and the packed forms, with every rounding PTX states.

Results are rounded once. Approximations (.approx, tanh, ex2, ...) are computed in double precision and
rounded to the type. So they are more accurate than the hardware, whose error PTX ISA 9.7.3 bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_backend.simulator.formats import (
    BF16,
    F16,
    F32,
    Format,
    decode,
    encode,
    flush,
    round_to,
    sum_to_odd,
    to_odd,
)
from cute_backend.simulator.isa import integer
from cute_backend.simulator.isa.common import compute, types_of
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.syntax import Instruction

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder

FLOATS = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64")
FORMATS: dict[str, Format] = {"f16": F16, "bf16": BF16, "f32": F32}
MODES = ("rn", "rz", "rm", "rp")
Function = Callable[..., Any]


def element(kind: str) -> str:
    """The type of one element: f16 for f16x2."""
    return kind.removesuffix("x2")


def _lanes(raw: Any, dtype: Any) -> Any:
    """Packed registers (32,) as (32, 2) elements."""
    whole = raw if np.ndim(raw) else np.broadcast_to(raw, 32)
    return np.ascontiguousarray(whole).view(dtype).reshape(32, 2)


def values(kind: str) -> Function:
    """Converts the result of a register getter to float32 or float64 values, (32, 2) for packed types."""
    return {
        "f32": lambda raw: raw,
        "f64": lambda raw: raw,
        "f16": lambda raw: np.asarray(raw).astype(np.float32),
        "bf16": lambda raw: decode(raw, "bf16"),
        "f16x2": lambda raw: _lanes(raw, np.float16).astype(np.float32),
        "bf16x2": lambda raw: decode(_lanes(raw, np.uint16), "bf16"),
        "f32x2": lambda raw: _lanes(raw, np.float32),
    }[kind]


def float_values(kind: str) -> Function | None:
    """`values` for comparisons; None if the getter's vector can be compared without conversion."""
    return None if kind not in ("bf16", "f16x2", "bf16x2") else values(kind)


def pack(kind: str) -> Function:
    """Converts rounded values of the element type to the argument of a register putter."""
    if kind in ("f32", "f64"):
        return lambda x: x
    if kind == "f16":
        return lambda x: np.asarray(x, np.float16)
    if kind == "bf16":
        return lambda x: encode(np.asarray(x), "bf16")
    if kind == "f32x2":
        return lambda x: np.ascontiguousarray(x, np.float32).view(np.uint64).reshape(-1)
    name = element(kind)
    return lambda x: np.ascontiguousarray(encode(np.asarray(x), name)).view(np.uint32).reshape(-1)


def mode_of(instruction: Instruction) -> str:
    return next((p for p in instruction.parts if p in MODES), "rn")


def flush_inputs(instruction: Instruction) -> Function | None:
    """The function by which .ftz flushes f32 operands; None without .ftz."""
    return flush if instruction.has("ftz") and types_of(instruction)[-1] in ("f32", "f32x2") else None


def rounding(instruction: Instruction, kind: str) -> Function:
    """Rounds a float64 result (rounded to odd if inexact) to the element type, with .ftz, .sat and .relu."""
    name, mode = element(kind), mode_of(instruction)
    ftz, sat, relu = (instruction.has(m) for m in ("ftz", "sat", "relu"))
    if name == "f64" and mode != "rn":
        raise unsupported(instruction, f".{mode} on f64")
    if kind in ("bf16", "f16x2", "bf16x2") and mode == "rn" and not (sat or relu):
        return np.asarray  # as `pack` rounds

    def rounded(x: Any) -> Any:
        if name == "f32" and mode == "rn":
            x = np.asarray(x).astype(np.float32)
        elif name != "f64":
            x = round_to(x, FORMATS[name], mode).astype(np.float32)
        if ftz and name == "f32":
            x = flush(x)
        if sat:
            x = np.where(np.isnan(x), x.dtype.type(0), np.clip(x, 0, 1))
        if relu:
            x = np.where(x > 0, x, np.where(np.isnan(x), x, x.dtype.type(0)))
        return x

    return rounded


def elementwise(
    binder: Binder,
    instruction: Instruction,
    function: Function,
    kinds: list[str],
    result: str,
    round_result: Function,
) -> Step:
    """A step around `function` on values: unpack, flush, compute, round, pack."""
    unpacks = [values(k) for k in kinds]
    packed = pack(result)
    ftz = flush_inputs(instruction)

    def whole(*raw: Any) -> Any:
        operands = [u(r) for u, r in zip(unpacks, raw, strict=False)]
        if ftz is not None:
            operands = [ftz(x) for x in operands]
        return packed(round_result(function(*operands)))

    registers = [{"f16x2": "b32", "bf16x2": "b32", "f32x2": "b64"}.get(k, k) for k in kinds]
    target = {"f16x2": "b32", "bf16x2": "b32", "f32x2": "b64"}.get(result, result)
    return compute(binder, instruction, whole, registers, target)


def _wide(x: Any) -> Any:
    return np.asarray(x, np.float64)


def exact_sum(a: Any, b: Any) -> Any:
    return sum_to_odd(_wide(a), _wide(b))


def exact_difference(a: Any, b: Any) -> Any:
    return sum_to_odd(_wide(a), -_wide(b))


def exact_product(a: Any, b: Any) -> Any:
    return _wide(a) * _wide(b)


def exact_fma(a: Any, b: Any, c: Any) -> Any:
    return sum_to_odd(_wide(a) * _wide(b), _wide(c))


def fma_f64(a: Any, b: Any, c: Any) -> Any:
    """a * b + c in double precision, rounded once: by exact splitting (Dekker), and a sum in long double that
    is rounded to odd."""
    wide = np.longdouble
    product = _wide(a) * _wide(b)
    split = 134217729.0
    ah = split * a - (split * a - a)
    bh = split * b - (split * b - b)
    al, bl = a - ah, b - bh
    error = ((ah * bh - product) + ah * bl + al * bh) + al * bl
    total = product + _wide(c)
    part = total - product
    rest = ((product - (total - part)) + (_wide(c) - part)).astype(wide) + error.astype(wide)
    # Adding a zero would lose the sign of another zero; the splitting would turn infinities into NaN.
    settled = (rest == 0) | ~np.isfinite(total)
    return np.where(settled, total, np.asarray(total.astype(wide) + rest, np.float64))


def native(function: Function, instruction: Instruction, kind: str) -> bool:
    """Whether numpy's own operation on the getter's vector is the PTX operation."""
    return (
        kind in ("f32", "f64")
        and mode_of(instruction) == "rn"
        and not any(instruction.has(m) for m in ("ftz", "sat", "relu"))
    )


ARITHMETIC: dict[str, tuple[Function, Function]] = {
    "add": (np.add, exact_sum),
    "sub": (np.subtract, exact_difference),
    "mul": (np.multiply, exact_product),
}


def bind_float_arithmetic(binder: Binder, instruction: Instruction) -> Step:
    """add, sub, mul, mad and fma of floats."""
    name, found = instruction.parts[0], types_of(instruction)
    kind = found[0]
    if len(found) == 2:
        # Mixed precision: the first operands are f16 or bf16, the last one and the result f32.
        count = len(instruction.operands) - 2
        kinds = [found[1]] * count + ["f32"]
    else:
        kinds = [kind] * (len(instruction.operands) - 1)
    if name in ("fma", "mad"):
        if kind == "f64":
            return compute(binder, instruction, fma_f64, ["f64"] * 3, "f64")
        return elementwise(binder, instruction, exact_fma, kinds, kind, rounding(instruction, kind))
    quick, exact = ARITHMETIC[name]
    if len(found) == 1 and native(quick, instruction, kind):
        return compute(binder, instruction, quick, kinds, kind)
    if kind == "f64" or (kind in ("f32", "f32x2") and mode_of(instruction) == "rn" and len(found) == 1):
        exact = quick
    return elementwise(binder, instruction, exact, kinds, kind, rounding(instruction, kind))


@opcode("add", section="9.7.1.1, 9.7.3.3, 9.7.4.1", meaning="Sum")
def bind_add(binder: Binder, instruction: Instruction) -> Step:
    if _float(instruction):
        return bind_float_arithmetic(binder, instruction)
    return integer.bind_sum(binder, instruction, 1)


@opcode("sub", section="9.7.1.2, 9.7.3.4, 9.7.4.2", meaning="Difference")
def bind_sub(binder: Binder, instruction: Instruction) -> Step:
    if _float(instruction):
        return bind_float_arithmetic(binder, instruction)
    return integer.bind_sum(binder, instruction, -1)


@opcode("mul", "mad", section="9.7.1.3, 9.7.1.4", meaning="Product (and sum): low half, high half or both")
def bind_mul(binder: Binder, instruction: Instruction) -> Step:
    if types_of(instruction)[-1] in FLOATS:
        return bind_float_arithmetic(binder, instruction)
    return integer.bind_product(binder, instruction)


@opcode("fma", section="9.7.3.6, 9.7.4.4", meaning="a * b + c, rounded once")
def bind_fma(binder: Binder, instruction: Instruction) -> Step:
    return bind_float_arithmetic(binder, instruction)


def _float(instruction: Instruction) -> bool:
    return any(p in FLOATS for p in instruction.parts[1:])


@opcode("div", section="9.7.1.8, 9.7.3.8", meaning="Quotient")
def bind_div(binder: Binder, instruction: Instruction) -> Step:
    kind = types_of(instruction)[-1]
    if not _float(instruction):
        return compute(binder, instruction, integer.divide, [kind] * 2, kind)
    return elementwise(
        binder, instruction, lambda a, b: _wide(a) / _wide(b), [kind] * 2, kind, rounding(instruction, kind)
    )


def extremum(a: Any, b: Any, low: bool) -> Any:
    """The smaller or larger operand, or the number if the other is NaN; -0 is less than +0."""
    tie = np.where(np.signbit(a) == low, a, b)
    return np.where(np.equal(a, b), tie, np.fmin(a, b) if low else np.fmax(a, b))


@opcode("min", "max", section="9.7.1.12-13, 9.7.3.11-12, 9.7.4.9-10", meaning="The lesser or greater operand")
def bind_extreme(binder: Binder, instruction: Instruction) -> Step:
    low = instruction.parts[0] == "min"
    if not _float(instruction):
        return _integer_extreme(binder, instruction, low)
    kind = types_of(instruction)[-1]
    propagate, xorsign, magnitude = (instruction.has(m) for m in ("NaN", "xorsign", "abs"))

    def extreme(*operands: Any) -> Any:
        signs = operands
        if magnitude:
            operands = tuple(np.abs(x) for x in operands)
        result = operands[0]
        for other in operands[1:]:
            result = extremum(result, other, low)
        if propagate:
            for x in operands:
                result = np.where(np.isnan(x), x, result)
        if xorsign:
            sign = np.signbit(signs[0])
            for x in signs[1:]:
                sign = sign ^ np.signbit(x)
            result = np.copysign(result, np.where(sign, -1.0, 1.0).astype(np.float32))
        return result

    kinds = [kind] * (len(instruction.operands) - 1)
    return elementwise(binder, instruction, extreme, kinds, kind, rounding(instruction, kind))


def _integer_extreme(binder: Binder, instruction: Instruction, low: bool) -> Step:
    function = np.minimum if low else np.maximum
    kind = integer.the_integer_type(instruction)

    def not_negative(a: Any, b: Any) -> Any:
        return np.maximum(function(a, b), 0)

    extreme = not_negative if instruction.has("relu") else function
    if kind in ("u16x2", "s16x2"):
        dtype = np.uint16 if kind == "u16x2" else np.int16
        return compute(binder, instruction, integer.halves(extreme, dtype), ["b32", "b32"], "b32")
    return compute(binder, instruction, extreme, [kind] * 2, kind)


@opcode("abs", "neg", section="9.7.1.10-11, 9.7.3.9-10, 9.7.4.6-7", meaning="Magnitude; negation")
def bind_sign(binder: Binder, instruction: Instruction) -> Step:
    negate = instruction.parts[0] == "neg"
    kind = types_of(instruction)[-1]
    if not _float(instruction):
        return compute(binder, instruction, np.negative if negate else np.abs, [kind], kind)
    # Only the sign bit changes, also that of a NaN.
    if kind in ("f32", "f64", "f16") and not instruction.has("ftz"):
        return compute(binder, instruction, np.negative if negate else np.abs, [kind], kind)
    if kind in ("f32", "f32x2"):
        function = np.negative if negate else np.abs
        return elementwise(binder, instruction, function, [kind], kind, rounding(instruction, kind))
    width = {"bf16": "b16", "bf16x2": "b32", "f16x2": "b32", "f16": "b16"}[kind]
    mask = {"b16": np.uint16(0x8000), "b32": np.uint32(0x80008000)}[width]
    if negate:
        return compute(binder, instruction, lambda a: a ^ mask, [width], width)
    return compute(binder, instruction, lambda a: a & ~mask, [width], width)


def unary(function: Function) -> Function:
    return lambda x: function(_wide(x))


UNARY: dict[str, Function] = {
    "rcp": unary(lambda x: 1.0 / x),
    "sqrt": unary(np.sqrt),
    "rsqrt": unary(lambda x: 1.0 / np.sqrt(x)),
    "sin": unary(np.sin),
    "cos": unary(np.cos),
    "lg2": unary(np.log2),
    "ex2": unary(np.exp2),
    "tanh": unary(np.tanh),
}


@opcode(
    *UNARY, section="9.7.3.13-22, 9.7.4.11-12", meaning="Reciprocal, roots, sine, cosine, log2, exp2, tanh"
)
def bind_unary(binder: Binder, instruction: Instruction) -> Step:
    kind = types_of(instruction)[-1]
    function = UNARY[instruction.parts[0]]
    return elementwise(binder, instruction, function, [kind], kind, rounding(instruction, kind))


@opcode("copysign", section="9.7.3.2", meaning="b with the sign of a")
def bind_copysign(binder: Binder, instruction: Instruction) -> Step:
    kind = types_of(instruction)[-1]
    return compute(binder, instruction, lambda a, b: np.copysign(b, a), [kind] * 2, kind)


@opcode("testp", section="9.7.3.1", meaning="Property of a float")
def bind_testp(binder: Binder, instruction: Instruction) -> Step:
    kind = types_of(instruction)[-1]
    smallest = np.finfo(np.float32 if kind == "f32" else np.float64).tiny
    tests: dict[str, Function] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= smallest),
        "subnormal": lambda x: (x != 0) & (np.abs(x) < smallest),
    }
    return compute(binder, instruction, tests[instruction.parts[1]], [kind], "pred")


__all__ = ["FLOATS", "bind_float_arithmetic", "float_values", "flush_inputs", "to_odd"]
