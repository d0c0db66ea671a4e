"""The arithmetic of generated epilogues: functions of register scalars, and conversions of fragments.

Generated modules import this as `math`. The scalars are Float32, Int32 and Boolean; a Python number may
replace one. Nothing here branches or touches memory, because an epilogue hides latency by interleaving many
elements. If CUDA's own function has a slow path (division, square root, sine), this module has a branch-free
one; otherwise it uses the DSL's, which is one instruction or a call of CUDA's libdevice.

Errors are bounds in units in the last place (ulp) of normal fp32 results. The test helper
`test/support/device_check.py` checks them against float64. libdevice's functions are within 2.5 ulp (exp2 and
log10 just above 2, the others near 1), pow within 4. Casts follow the rules in `cute_backend.numerics`.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any, Union

import cutlass
import cutlass.cute as cute
from cutlass import (
    BFloat16,
    Boolean,
    Float8E4M3FN,
    Float8E5M2,
    Float16,
    Float32,
    Float64,
    Int8,
    Int32,
    Int64,
    Uint8,
    Uint16,
)
from cutlass._mlir.dialects import arith, llvm
from cutlass._mlir.extras import types as T
from cutlass.cute.arch import fmax, fmin, rcp_approx
from cutlass.cute.math import (
    abs,
    ceil,
    copysign,
    erf,
    exp,
    exp2,
    expm1,
    floor,
    fma,
    log,
    log1p,
    log2,
    log10,
    pow,
    rsqrt,
    tanh,
    trunc,
)
from cutlass.cute.math import absi as abs_int
from cutlass.cute.math import max as maximum_int
from cutlass.cute.math import min as minimum_int
from cutlass.cute.math import roundeven as round

__all__ = [
    "abs",
    "abs_int",
    "bits",
    "ceil",
    "constant",
    "copysign",
    "cos",
    "div",
    "div_floor",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "fmax",
    "fmin",
    "isfinite",
    "isinf",
    "isnan",
    "log",
    "log1p",
    "log2",
    "log10",
    "logical_not",
    "logistic2",
    "maximum",
    "maximum_int",
    "minimum",
    "minimum_int",
    "narrow",
    "negative_zero",
    "of_bits",
    "of_e8m0",
    "pack",
    "pair_bf16",
    "pair_f16",
    "polynomial",
    "pow",
    "reciprocal",
    "round",
    "round_to_bf16",
    "round_to_e4m3",
    "round_to_e5m2",
    "round_to_f16",
    "rsqrt",
    "shift_left",
    "shift_right",
    "sigmoid",
    "sign",
    "sign_int",
    "signbit",
    "sin",
    "sqrt",
    "tanh",
    "to_bool",
    "to_f32",
    "to_i32",
    "trunc",
    "where",
    "widen",
    "wrap_to_i8",
    "wrap_to_u8",
]

Float = Union[Float32, float]
Register = Union[Float32, Int32, Boolean]

_INFINITY = float("inf")


def constant(value: Any, kind: type[Register]) -> Any:
    """Returns a number as a register scalar, for ops whose operands are all numbers. A DSL scalar that is
    made from a Python number keeps that number through conversions: converting to bf16 and back did not round
    it (4.8.1)."""
    return kind(kind(value).ir_value())


def negative_zero() -> Float32:
    """Returns -0.0. A literal -0.0 becomes 0.0 if a 0.0 came before it, because the DSL caches constants by
    value (4.8.1)."""
    return Int32(-(2**31)).bitcast(Float32)


def where(condition: Boolean, chosen: Any, other: Any) -> Any:
    """Returns `chosen` if the condition holds, else `other`. At least one of them must be a register
    scalar."""
    kind = type(chosen) if isinstance(chosen, cutlass.Numeric) else type(other)
    values = [kind(value).ir_value() for value in (chosen, other)]
    return kind(arith.select(Boolean(condition).ir_value(), *values))


def maximum(a: Float, b: Float) -> Float32:
    """The larger of a and b; NaN if either is NaN; +0 for -0 and +0 (PTX max.NaN.f32)."""
    return fmax(a, b, nan=True)


def minimum(a: Float, b: Float) -> Float32:
    """The smaller of a and b; NaN if either is NaN; -0 for -0 and +0 (PTX min.NaN.f32)."""
    return fmin(a, b, nan=True)


def sign(x: Float32) -> Float32:
    """1, -1 or 0; 0 for NaN, as in torch."""
    return where(x > 0.0, 1.0, where(x < 0.0, -1.0, Float32(0.0)))


def sign_int(x: Int32) -> Int32:
    return where(x > 0, 1, where(x < 0, -1, Int32(0)))


def isnan(x: Float32) -> Boolean:
    return x != x


def isinf(x: Float32) -> Boolean:
    return abs(x) == _INFINITY


def isfinite(x: Float32) -> Boolean:
    return abs(x) < _INFINITY


def signbit(x: Float32) -> Boolean:
    """Whether the sign bit is set, also for zeros and NaNs."""
    return x.bitcast(Int32) < 0


def bits(x: Float) -> Int32:
    """The bits of x."""
    return Float32(x).bitcast(Int32)


def of_bits(x: Union[Int32, int]) -> Float32:
    """The fp32 value that the bits of x stand for."""
    return Int32(x).bitcast(Float32)


def shift_left(x: Union[Int32, int], count: Union[Int32, int]) -> Int32:
    """x shifted to the left by `count` bits; 0 if `count` is negative or more than 31."""
    return where(_is_shift(count), Int32(x) << (count & 31), Int32(0))


def shift_right(x: Union[Int32, int], count: Union[Int32, int]) -> Int32:
    """x shifted to the right by `count` bits, with copies of its sign; only these are left if `count` is
    negative or more than 31."""
    return Int32(x) >> where(_is_shift(count), Int32(count), Int32(31))


def _is_shift(count: Union[Int32, int]) -> Boolean:
    """Whether `count` of an int32's bits can be shifted: from 0 to 31."""
    return (count & -32) == 0


def logical_not(x: Boolean) -> Boolean:
    return x == Boolean(False)


def div(a: Float, b: Float) -> Float32:
    """a / b, within 0.51 ulp; 1 ulp where a or the quotient is below 2^-100.

    It takes the hardware's approximate reciprocal, then corrects the quotient once by the remainder, which
    fma computes exactly. Divisors that the reciprocal would flush are scaled first, as in PTX div.full.f32.
    """
    a, b = Float32(a), Float32(b)
    huge, tiny = abs(b) > 2.0**126, abs(b) < 2.0**-126
    scale = where(huge, 0.25, where(tiny, 2.0**24, Float32(1.0)))
    a, b = a * scale, b * scale
    inverse = rcp_approx(b)
    quotient = a * inverse
    excess = fma(b, quotient, -a)
    corrected = fma(excess, -inverse, quotient)
    # The correction would turn zeros, infinities and NaNs into NaN, or lose the sign of a zero.
    return where(abs(corrected) > 0.0, corrected, quotient)


def div_floor(a: Float, b: Float) -> Float32:
    """Returns the floor of the exact quotient. It subtracts one if a / b was rounded up to an integer or to
    zero.

    As in torch, an infinite `a` gives NaN unless `b` is zero.
    """
    a, b = Float32(a), Float32(b)
    quotient = floor(div(a, b))
    excess = where(quotient == 0.0, -a, fma(quotient, b, -a))
    beyond = where(b < 0.0, excess < 0.0, excess > 0.0)
    lowered = where(beyond, quotient - 1.0, quotient)
    return where((abs(a) == _INFINITY) & (b != 0.0), float("nan"), lowered)


def reciprocal(x: Float) -> Float32:
    """1 / x, computed as `div` computes it."""
    return div(1.0, x)


def sqrt(x: Float) -> Float32:
    """The root of x, within 0.51 ulp, or 1 ulp where x is below 2^-100. It takes the approximate root and
    corrects it by the remainder."""
    x = Float32(x)
    inverse = rsqrt(x)
    root = x * inverse
    excess = fma(root, root, -x)
    corrected = fma(excess, inverse * -0.5, root)
    return where((x == 0.0) | (x == _INFINITY), x, corrected)


def sigmoid(x: Float) -> Float32:
    """1 / (1 + exp(-x)), by two approximate instructions: within 4 ulp for x > -2, 1.5 |x| below; 0 where
    that is below fp32's normal range."""
    return logistic2(Float32(x) * _LOG2_E)


def logistic2(x: Float) -> Float32:
    """1 / (1 + 2^-x), the sigmoid of x * log(2), by two approximate instructions: within 4 ulp; 0 where that
    is below fp32's normal range."""
    return rcp_approx(exp2(-Float32(x), fastmath=True) + 1.0)


_LOG2_E = 1.4426950408889634
_HALF_PI = (1.5707963267948966, 6.123233995736766e-17)
_TWO_OVER_PI = 0.6366197723675814
_ROUND_F64 = 1.5 * 2.0**52
"""Adding this to a float64 below 2^51 leaves the nearest integer in the low bits of the mantissa."""


def sin(x: Float) -> Float32:
    """sin(x), within 2.5 ulp for |x| < 2^50; beyond, float64 does not resolve where in the period x is."""
    return _sine(x, 0)


def cos(x: Float) -> Float32:
    """cos(x), within 2.5 ulp for |x| < 2^50; beyond, float64 does not resolve where in the period x is."""
    return _sine(x, 1)


def _sine(x: Float, quarter_turns: int) -> Float32:
    """sin(x + quarter_turns * pi / 2), by reduction to [-pi/4, pi/4] in float64 and a polynomial in fp32."""
    wide = Float32(x).to(Float64)
    shifted = fma(wide, Float64(_TWO_OVER_PI), Float64(_ROUND_F64))
    turns = shifted - Float64(_ROUND_F64)
    quadrant = shifted.bitcast(Int64).to(Int32) + quarter_turns
    for part in _HALF_PI:
        wide = fma(-turns, Float64(part), wide)
    r = wide.to(Float32)
    z = r * r
    sine = r * polynomial(z, 1.0, -0.16666655, 0.008332178, -0.00019517234)
    cosine = polynomial(z, 1.0, -0.5, 0.041666646, -0.0013887367, 2.4438378e-05)
    value = where((quadrant & 1) != 0, cosine, sine)
    return where((quadrant & 2) != 0, -value, value)


def polynomial(z: Float32, *coefficients: float) -> Float32:
    """Horner's rule; the constant term first."""
    value = Float32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = fma(value, z, Float32(coefficient))
    return value


def to_f32(x: Union[Int32, Boolean]) -> Float32:
    """Converts to the nearest fp32, ties to even; truth values give 1 and 0."""
    return where(x, 1.0, Float32(0.0)) if isinstance(x, Boolean) else x.to(Float32)


def to_i32(x: Union[Float32, Boolean]) -> Int32:
    """Rounds towards zero. NaN gives 0, and values beyond int32's range saturate (PTX cvt.rzi.s32.f32)."""
    if isinstance(x, Boolean):
        return where(x, 1, Int32(0))
    # The DSL's own conversion is LLVM's fptosi, whose result is undefined out of range.
    return Int32(llvm.call_intrinsic(T.i32(), "llvm.nvvm.f2i.rz", [Float32(x).ir_value()], [], []))


def to_bool(x: Union[Float32, Int32]) -> Boolean:
    """Whether x differs from zero; true for NaN."""
    return x != 0


def round_to_bf16(x: Float32) -> Float32:
    return x.to(BFloat16).to(Float32)


def round_to_f16(x: Float32) -> Float32:
    return x.to(Float16).to(Float32)


def pair_bf16(x: Float32, y: Float32) -> Int32:
    """Rounds two values to bf16, side by side, the first in the low bits."""
    return _pair(x, y, BFloat16)


def pair_f16(x: Float32, y: Float32) -> Int32:
    """Rounds two values to fp16, side by side, the first in the low bits."""
    return _pair(x, y, Float16)


def _pair(x: Float32, y: Float32, dtype: type[cutlass.Numeric]) -> Int32:
    fragment = cute.make_rmem_tensor(2, Float32)
    fragment[0] = x
    fragment[1] = y
    return cute.recast_tensor(narrow(fragment, dtype), Int32)[0]


def round_to_e4m3(x: Float32, saturate: bool = True) -> Float32:
    return _round_to(x, Float8E4M3FN, saturate)


def round_to_e5m2(x: Float32, saturate: bool = True) -> Float32:
    return _round_to(x, Float8E5M2, saturate)


def round_to_e8m0(x: Float32) -> Float32:
    return of_e8m0(_e8m0_code(x))


def of_e8m0(code: Int32) -> Float32:
    """The power of two that the low eight bits of `code` stand for in E8M0; 255 is NaN."""
    code = code & 255
    power = where(code == 0, Int32(1 << 22), code << 23).bitcast(Float32)
    return where(code == 255, Float32(float("nan")), power)


def _e8m0_code(x: Float32) -> Int32:
    """The exponent of the nearest power of two, biased by 127; 255 stands for NaN. It follows
    `numerics._e8m0_code`."""
    bits = x.bitcast(Int32) & 0x7FFFFFFF
    bits = where(bits > 0x7F800000, Int32(0x7F800000), bits)
    return (bits + where(bits == 1 << 22, Int32((1 << 22) - 1), Int32(1 << 22))) >> 23


def e8m0_codes(fragment: cute.Tensor) -> cute.Tensor:
    """Rounds fp32 register values to E8M0, packed as bytes."""
    return _vector(_each(fragment, Int32, _e8m0_code), Uint8)


def wrap_to_i8(x: Int32) -> Int32:
    return x.to(Int8).to(Int32)


def wrap_to_u8(x: Int32) -> Int32:
    return x & 255


def _round_to(x: Float32, dtype: type[cutlass.Numeric], saturate: bool) -> Float32:
    """Converts to fp8 and back."""
    fragment = cute.make_rmem_tensor(2, Float32)
    fragment[0] = x
    fragment[1] = Float32(0.0)
    rounded = widen(narrow(fragment, dtype, saturate), Float32)
    return rounded[0]


def widen(fragment: cute.Tensor, register: type[Register]) -> cute.Tensor:
    """A loaded fragment, converted to the register type of its dtype: a new fragment of the same layout.

    A bool is loaded as a byte (Uint8), which is true if it is not zero.
    """
    if fragment.element_type is register:
        return fragment
    if register is Boolean:
        return _each(fragment, Boolean, to_bool)
    if fragment.element_type is BFloat16 and cute.size(fragment) % 2 == 0:
        return _widened_pairs(fragment)
    return _vector(fragment, register)


def _widened_pairs(fragment: cute.Tensor) -> cute.Tensor:
    """Converts bf16 to fp32 with one instruction per element, since bf16 is the upper half of fp32."""
    wide = cute.make_rmem_tensor(fragment.shape, Float32)
    pairs = cute.recast_tensor(fragment, Int32)
    for i in builtins.range(cute.size(pairs)):
        wide[2 * i] = (pairs[i] << 16).bitcast(Float32)
        wide[2 * i + 1] = (pairs[i] & -65536).bitcast(Float32)
    return wide


def pack(fragment: cute.Tensor) -> cute.Tensor:
    """Packs an even number of 16-bit elements, two to a register, into a new fragment of the same layout.

    Elements that were read one at a time take a 32-bit register each. A byte permutation combines two of
    them, and no compiler separates them again before they are used.
    """
    packed = cute.make_rmem_tensor_like(fragment)
    halves, words = cute.recast_tensor(fragment, Uint16), cute.recast_tensor(packed, Int32)
    for i in builtins.range(cute.size(words)):
        words[i] = Int32(cute.arch.prmt(Int32(halves[2 * i]), Int32(halves[2 * i + 1]), 0x5410))
    return packed


def narrow(fragment: cute.Tensor, dtype: type[cutlass.Numeric], saturate: bool = True) -> cute.Tensor:
    """Rounds register values to `dtype`, packed as in memory, in a new fragment of the same layout.

    For fp8, `saturate` picks the rule for values out of range; `Boolean` gives bytes (Uint8) of 0 and 1.
    Elements are converted in pairs, as in PTX (cvt.rn.satfinite.e4m3x2.f32, cvt.rn.bf16x2.f32).
    """
    if dtype is Boolean:
        return _vector(_to_register(fragment, Boolean), Uint8)
    fragment = _to_register(fragment, _register_of(dtype))
    if fragment.element_type is dtype:
        return fragment
    if dtype in (Float8E4M3FN, Float8E5M2) and not saturate:
        return _narrow_nonfinite(fragment, dtype)
    return _vector(fragment, dtype)


def _narrow_nonfinite(fragment: cute.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Converts to fp8 by the rule NONFINITE, since the hardware's conversions only saturate."""
    if dtype is Float8E4M3FN:
        # 464 is halfway between 448 and 480, the next value if there were one, and rounds to even: to 448.
        return _vector(_each(fragment, Float32, lambda x: where(abs(x) > 464.0, float("nan"), x)), dtype)
    codes = cute.recast_tensor(_vector(fragment, dtype), Uint8)
    for i in builtins.range(cute.size(fragment)):
        # Select infinities: on sm_100a, libNVVM fails on arithmetic on the bytes of a conversion.
        x = fragment[i]
        codes[i] = where(x >= 61440.0, Uint8(0x7C), where(x <= -61440.0, Uint8(0xFC), codes[i]))
    return cute.recast_tensor(codes, dtype)


_CONVERSIONS = {Float32: to_f32, Int32: to_i32, Boolean: to_bool}


def _register_of(dtype: type[cutlass.Numeric]) -> type[Register]:
    return Float32 if issubclass(dtype, cutlass.Float) else Int32


def _to_register(fragment: cute.Tensor, register: type[Register]) -> cute.Tensor:
    if fragment.element_type is register:
        return fragment
    return _each(fragment, register, _CONVERSIONS[register])


def _each(fragment: cute.Tensor, dtype: type[cutlass.Numeric], function: Callable[[Any], Any]) -> cute.Tensor:
    result = cute.make_rmem_tensor_like(fragment, dtype)
    for i in builtins.range(cute.size(fragment)):
        result[i] = function(fragment[i])
    return result


def _vector(fragment: cute.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """The DSL's own conversion of a whole vector."""
    result = cute.make_rmem_tensor_like(fragment, dtype)
    result.store(fragment.load().to(dtype))
    return result
