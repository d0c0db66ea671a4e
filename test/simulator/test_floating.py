"""Floating-point arithmetic against exact rational arithmetic, numpy and torch."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from support.simulator.formats import NAN, bits_of, values_of
from support.simulator.ptx_entries import elementwise, one

SPECIALS = np.float32(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.0**-126, 2.0**-149, -(2.0**-130), 3.4e38]
)


def floats(seed: int, spread: int = 30, count: int = 3000) -> np.ndarray:
    random = np.random.default_rng(seed)
    x = (random.normal(size=count) * 2.0 ** random.integers(-spread, spread, count)).astype(np.float32)
    return random.permutation(np.concatenate([x, np.tile(SPECIALS, 11)]))


def halves(seed: int, name: str) -> np.ndarray:
    """All 16-bit values in a random order, NaN left out."""
    bits = np.random.default_rng(seed).permutation(1 << 16).astype(np.uint16)
    return np.where(np.isnan(values_of(bits, name)), np.uint16(0x3C00), bits)


def nearest(value: Fraction, name: str) -> float:
    """Round to nearest even by exact arithmetic; overflow to infinity."""
    bits, low, largest = {
        "f32": (23, -126, float(np.finfo(np.float32).max)),
        "f16": (10, -14, 65504.0),
        "bf16": (7, -126, float(torch.finfo(torch.bfloat16).max)),
    }[name]
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > magnitude
    exponent = max(exponent, low)
    units = round(magnitude / Fraction(2) ** (exponent - bits))  # Python rounds halves to even.
    result = float(units * Fraction(2) ** (exponent - bits)) if units else 0.0
    result = math.inf if result > largest else result
    return result if value > 0 else -result


def finite_rows(*columns: np.ndarray) -> np.ndarray:
    return np.all([np.isfinite(c) for c in columns], axis=0)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_f32_arithmetic_is_ieee(name: str) -> None:
    a, b = floats(1), floats(2)
    with np.errstate(all="ignore"):
        wanted = {"add": a + b, "sub": a - b, "mul": a * b, "div": a / b}[name]
    got = one(f"{name}.rn.f32 {{x}}, {{a}}, {{b}};", [a, b], np.float32)
    np.testing.assert_array_equal(got, wanted)
    assert np.array_equal(np.signbit(got[wanted == 0]), np.signbit(wanted[wanted == 0]))


def test_f32_fma_rounds_once() -> None:
    a, b = floats(3, 12), floats(4, 12)
    random = np.random.default_rng(5)
    with np.errstate(all="ignore"):
        close = np.nextafter(-(a * b), np.float32(0)) * random.choice(
            [1, 1 + 2.0**-20, 2.0**-10, 2.0**20], len(a)
        )
        c = np.where(random.random(len(a)) < 0.5, close.astype(np.float32), floats(6, 12))
    got = one("fma.rn.f32 {x}, {a}, {b}, {c};", [a, b, c], np.float32)
    rows = finite_rows(a, b, c)
    wanted = [
        nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), "f32")
        for x, y, z in zip(a[rows], b[rows], c[rows], strict=True)
    ]
    assert got[rows].tolist() == wanted
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(a.astype(float) * b + c))


def test_fma_of_a_known_double_rounding_trap() -> None:
    # 1 + 2**-24 + 2**-60: rounding to 53 bits first would make the tie look exact, and round it down to even.
    a = np.float32([1 + 2.0**-12])
    b = np.float32([1 - 2.0**-12 + 2.0**-24])
    c = np.float32([2.0**-60])
    exact = Fraction(float(a[0])) * Fraction(float(b[0])) + Fraction(float(c[0]))
    got = one("fma.rn.f32 {x}, {a}, {b}, {c};", [a, b, c], np.float32)
    assert float(got[0]) == nearest(exact, "f32")


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["add", "mul", "fma"])
def test_f32_directed_rounding(name: str, mode: str) -> None:
    a, b, c = (floats(seed, 8, 800) for seed in (7, 8, 9))
    rows = finite_rows(a, b, c) & (np.abs(a) < 1e15) & (np.abs(b) < 1e15) & (np.abs(c) < 1e15)
    rows &= np.all([np.abs(v) > 1e-15 for v in (a, b, c)], axis=0)
    code = f"{name}.{mode}.f32 {{x}}, {{a}}, {{b}}" + (", {c};" if name == "fma" else ";")
    got = one(code, [a, b, c], np.float32)[rows]
    exact = {"add": lambda x, y, z: x + y, "mul": lambda x, y, z: x * y, "fma": lambda x, y, z: x * y + z}[
        name
    ]
    for g, x, y, z in zip(got, a[rows], b[rows], c[rows], strict=True):
        value = exact(*(Fraction(float(v)) for v in (x, y, z)))
        up, down = float(np.nextafter(g, np.float32(np.inf))), float(np.nextafter(g, np.float32(-np.inf)))
        g = Fraction(float(g))
        towards_zero = mode == "rz"
        if mode == "rm" or (towards_zero and value > 0):
            assert g <= value < Fraction(up)
        else:
            assert Fraction(down) < value <= g


def test_ftz_and_sat() -> None:
    a, b = floats(10, 75), floats(11, 75)
    got = one("mul.ftz.f32 {x}, {a}, {b};", [a, b], np.float32)
    tiny = np.float32(2.0**-126)
    zero = lambda v: np.where(np.abs(v) < tiny, np.copysign(np.float32(0), v), v)  # noqa: E731
    with np.errstate(all="ignore"):
        wanted = zero(zero(a) * zero(b))
    np.testing.assert_array_equal(got, wanted)
    assert np.array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(wanted[~np.isnan(wanted)]))
    got = one("add.sat.f32 {x}, {a}, {b};", [a, b], np.float32)
    with np.errstate(all="ignore"):
        total = a + b
    np.testing.assert_array_equal(got, np.where(np.isnan(total), 0, np.clip(total, 0, 1)))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_16_bit_arithmetic_rounds_once(name: str, kind: str) -> None:
    a, b, c = (halves(seed, kind)[:4000] for seed in range(3))
    x, y, z = (values_of(v, kind) for v in (a, b, c))
    rows = finite_rows(x, y, z)
    code = f"{name}.rn.{kind} {{x}}, {{a}}, {{b}}" + (", {c};" if name == "fma" else ";")
    got = values_of(one(code, [a, b, c], np.uint16), kind)
    exact = {
        "add": lambda p, q, r: p + q,
        "sub": lambda p, q, r: p - q,
        "mul": lambda p, q, r: p * q,
        "fma": lambda p, q, r: p * q + r,
    }[name]
    wanted = [
        nearest(exact(*(Fraction(float(v)) for v in row)), kind)
        for row in zip(x[rows], y[rows], z[rows], strict=True)
    ]
    assert got[rows].tolist() == wanted
    # The packed form is the scalar form twice.
    pair = lambda v: v.astype(np.uint32) | (np.roll(v, 1).astype(np.uint32) << np.uint32(16))  # noqa: E731
    code = code.replace(kind, kind + "x2")
    packed = one(code, [pair(a), pair(b), pair(c)], np.uint32)
    low, high = (
        values_of((packed >> np.uint32(s) & np.uint32(0xFFFF)).astype(np.uint16), kind) for s in (0, 16)
    )
    np.testing.assert_array_equal(low, got)
    np.testing.assert_array_equal(high, np.roll(got, 1))


@pytest.mark.parametrize("name", ["add", "mul", "fma"])
def test_packed_f32x2(name: str) -> None:
    pairs = [np.stack([floats(s), floats(s + 1)], 1).copy().view(np.uint64).reshape(-1) for s in (1, 3, 5)]
    code = f"{name}.rn.f32x2 {{x}}, {{a}}, {{b}}" + (", {c};" if name == "fma" else ";")
    got = one(code, pairs, np.uint64).view(np.float32).reshape(-1, 2)
    columns = [p.view(np.float32).reshape(-1, 2) for p in pairs]
    scalar = code.replace("f32x2", "f32")
    for side in range(2):
        alone = one(scalar, [np.ascontiguousarray(c[:, side]) for c in columns], np.float32)
        np.testing.assert_array_equal(got[:, side], alone)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_mixed_precision_fma(kind: str) -> None:
    a, b = (halves(seed, kind)[:3000] for seed in (5, 6))
    c = floats(7, 10)[:3000]
    got = one(f"fma.rn.f32.{kind} {{x}}, {{a}}, {{b}}, {{c}};", [a, b, c], np.float32)
    x, y = values_of(a, kind), values_of(b, kind)
    rows = finite_rows(x, y, c)
    wanted = [
        nearest(Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r)), "f32")
        for p, q, r in zip(x[rows], y[rows], c[rows], strict=True)
    ]
    assert got[rows].tolist() == wanted


def test_f64_arithmetic() -> None:
    random = np.random.default_rng(1)
    a, b, c = (random.normal(size=1000) * 2.0 ** random.integers(-40, 40, 1000) for _ in range(3))
    np.testing.assert_array_equal(one("add.rn.f64 {x}, {a}, {b};", [a, b], np.float64), a + b)
    np.testing.assert_array_equal(one("mul.rn.f64 {x}, {a}, {b};", [a, b], np.float64), a * b)
    np.testing.assert_array_equal(one("div.rn.f64 {x}, {a}, {b};", [a, b], np.float64), a / b)
    c[:500] = -(a * b)[:500]
    got = one("fma.rn.f64 {x}, {a}, {b}, {c};", [a, b, c], np.float64)
    wanted = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c, strict=True)]
    assert got.tolist() == wanted


# --- NaN, zeros, signs ------------------------------------------------------------


def less(a: float, b: float) -> float:
    """PTX's min: the number beside a NaN; -0 below +0."""
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    if a == b == 0:
        return -0.0 if math.copysign(1, a) < 0 or math.copysign(1, b) < 0 else 0.0
    return min(a, b)


def text(values: np.ndarray) -> list[str]:
    """Bits as they matter: sign of zero yes, payload of NaN no."""
    return ["nan" if math.isnan(v) else repr(float(v)) for v in values.tolist()]


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_min_and_max_with_nan_and_zeros(kind: str) -> None:
    specials = np.concatenate([SPECIALS, np.float32([2.0, -2.0, 0.5])])
    x, y = (g.reshape(-1) for g in np.meshgrid(specials, specials))
    raw = (lambda v: v) if kind == "f32" else (lambda v: bits_of(v, kind))
    back = (lambda v: v) if kind == "f32" else (lambda v: values_of(v, kind))
    a, b = raw(np.ascontiguousarray(x)), raw(np.ascontiguousarray(y))
    x, y = back(a), back(b)
    dtype = np.float32 if kind == "f32" else np.uint16
    low = back(one(f"min.{kind} {{x}}, {{a}}, {{b}};", [a, b], dtype))
    assert text(low) == text(np.array([less(p, q) for p, q in zip(x.tolist(), y.tolist(), strict=True)]))
    high = back(one(f"max.{kind} {{x}}, {{a}}, {{b}};", [a, b], dtype))
    assert text(high) == text(np.array([-less(-p, -q) for p, q in zip(x.tolist(), y.tolist(), strict=True)]))
    nan = back(one(f"max.NaN.{kind} {{x}}, {{a}}, {{b}};", [a, b], dtype))
    assert np.array_equal(np.isnan(nan), np.isnan(x) | np.isnan(y))
    assert text(nan[~np.isnan(nan)]) == text(high[~np.isnan(nan)])


def test_three_operands_and_xorsign() -> None:
    a, b, c = (floats(s, 3) for s in (1, 2, 3))
    got = one("max.f32 {x}, {a}, {b}, {c};", [a, b, c], np.float32)
    np.testing.assert_array_equal(got, np.fmax(np.fmax(a, b), c))
    got = one("min.xorsign.abs.f32 {x}, {a}, {b};", [a, b], np.float32)
    sign = np.where(np.signbit(a) ^ np.signbit(b), -1, 1)
    wanted = np.fmin(np.abs(a), np.abs(b)) * sign
    rows = ~np.isnan(wanted)
    np.testing.assert_array_equal(got[rows], wanted[rows])


COMPARISONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "equ": lambda a, b: ~(a != b) | np.isnan(a) | np.isnan(b),
    "neu": lambda a, b: a != b,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_float_comparisons(name: str, kind: str) -> None:
    specials = np.concatenate([SPECIALS, np.float32([2.0, -2.0])])
    x, y = (np.ascontiguousarray(g.reshape(-1)) for g in np.meshgrid(specials, specials))
    a, b = {"f32": (x, y), "f64": (x.astype(float), y.astype(float))}.get(kind) or (
        bits_of(x, kind),
        bits_of(y, kind),
    )
    if kind in ("f16", "bf16"):
        x, y = values_of(a, kind), values_of(b, kind)
    got = one(f"setp.{name}.{kind} %p0, {{a}}, {{b}}; selp.u32 {{x}}, 1, 0, %p0;", [a, b], np.uint32)
    assert np.array_equal(got.astype(bool), COMPARISONS[name](x, y))


def test_packed_comparison_gives_two_predicates() -> None:
    bits = halves(3, "f16")
    other = halves(4, "f16")
    pair = lambda v: v.astype(np.uint32) | (np.roll(v, 1).astype(np.uint32) << np.uint32(16))  # noqa: E731
    code = "setp.gt.f16x2 %p0|%p1, {a}, {b}; selp.u32 {x}, 1, 0, %p0; selp.u32 {y}, 1, 0, %p1;"
    low, high = elementwise(code, [pair(bits), pair(other)], [np.uint32] * 2)
    wanted = values_of(bits, "f16") > values_of(other, "f16")
    assert np.array_equal(low.astype(bool), wanted)
    assert np.array_equal(high.astype(bool), np.roll(wanted, 1))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_abs_and_neg_touch_only_the_sign(kind: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    assert np.array_equal(one(f"abs.{kind} {{x}}, {{a}};", [bits], np.uint16), bits & np.uint16(0x7FFF))
    assert np.array_equal(one(f"neg.{kind} {{x}}, {{a}};", [bits], np.uint16), bits ^ np.uint16(0x8000))


def test_testp_and_copysign() -> None:
    a, b = floats(1, 75), floats(2, 75)
    np.testing.assert_array_equal(one("copysign.f32 {x}, {a}, {b};", [a, b], np.float32), np.copysign(b, a))
    got = one("testp.subnormal.f32 %p0, {a}; selp.u32 {x}, 1, 0, %p0;", [a], np.uint32)
    assert np.array_equal(got.astype(bool), (a != 0) & (np.abs(a) < np.float32(2.0**-126)))


# --- approximations ------------------------------------------------------------

APPROXIMATIONS = {
    "rcp.approx": lambda x: 1 / x,
    "sqrt.approx": np.sqrt,
    "rsqrt.approx": lambda x: 1 / np.sqrt(x),
    "ex2.approx": np.exp2,
    "lg2.approx": np.log2,
    "tanh.approx": np.tanh,
    "sin.approx": np.sin,
    "cos.approx": np.cos,
    "rcp.rn": lambda x: 1 / x,
    "sqrt.rn": np.sqrt,
}


@pytest.mark.parametrize("name", APPROXIMATIONS)
def test_approximations_are_the_rounded_function(name: str) -> None:
    x = floats(1, 6)
    with np.errstate(all="ignore"):
        wanted = APPROXIMATIONS[name](x.astype(np.float64)).astype(np.float32)
    got = one(f"{name}.f32 {{x}}, {{a}};", [x], np.float32)
    np.testing.assert_array_equal(got, wanted)


def test_tanh_of_16_bits() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = values_of(bits, "bf16")
    got = one("tanh.approx.bf16 {x}, {a};", [bits], np.uint16)
    wanted = bits_of(np.tanh(np.nan_to_num(x).astype(np.float64)).astype(np.float32), "bf16")
    assert np.array_equal(got, np.where(np.isnan(x), NAN["bf16"], wanted))
