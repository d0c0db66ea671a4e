"""cvt over all inputs of types with 16 bits or fewer, and samples of wider ones, against torch and exact
arithmetic.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from support.simulator.formats import NAN, bits_of, values_of
from support.simulator.ptx_entries import elementwise, one
from support.sweeps import in_parts

ALL_16 = np.arange(1 << 16, dtype=np.uint16)
IN_PARTS = in_parts(16)
"""A test of all numbers of 16 bits has every sixteenth in each case, of which `make test` has some."""

ALL_8 = np.arange(1 << 8, dtype=np.uint16)
LARGEST = {"f16": 65504.0, "e4m3": 448.0, "e5m2": 57344.0, "bf16": float(torch.finfo(torch.bfloat16).max)}
SMALLEST_STEP = {"f16": (10, -14), "bf16": (7, -126), "e4m3": (3, -6), "e5m2": (2, -14), "f32": (23, -126)}


def float_samples(seed: int = 0, count: int = 20000, part: slice = slice(None, None, 16)) -> np.ndarray:
    """Float32 of all magnitudes, the midpoints between neighbours of 16-bit and 8-bit types, and specials. Of
    midpoints between 16-bit numbers, a part."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    near = random.normal(size=count).astype(np.float32) * np.float32(2.0) ** random.integers(-20, 20, count)
    ties = (np.arange(1 << 16, dtype=np.uint32)[part] << np.uint32(16)) | np.uint32(0x8000)
    small = values_of(ALL_8.astype(np.uint8), "e4m3")
    small = small[np.isfinite(small)]
    middles = (np.sort(small)[:-1] + np.sort(small)[1:]) / 2
    edges = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        448,
        464,
        464.01,
        480,
        57344,
        61439,
        61440,
        65504,
        65519.99,
        65520,
        -464,
        -61440,
        -65520,
        1e38,
        2.0**-24,
        2.0**-25,
        2.0**-26,
        3e38,
    ]
    return np.concatenate([raw, near.astype(np.float32), ties.view(np.float32), middles, np.float32(edges)])


def saturated(x: np.ndarray, name: str) -> np.ndarray:
    """.satfinite in plain words: clamp what would round beyond the largest value, keep NaN."""
    return np.where(np.isnan(x), x, np.clip(x, -LARGEST[name], LARGEST[name])).astype(np.float32)


def same_bits(got: np.ndarray, wanted: np.ndarray, x: np.ndarray, name: str) -> None:
    wanted = np.where(np.isnan(x), NAN[name], wanted)
    different = np.flatnonzero(got != wanted)
    assert different.size == 0, [(x[i], hex(got[i]), hex(wanted[i])) for i in different[:5]]


# --- to narrower floats ------------------------------------------------------------


@pytest.mark.sweep(2)
@IN_PARTS
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_f32_to_16_bits(name: str, part: slice) -> None:
    x = float_samples(part.start, 2000, part)
    got = one(f"cvt.rn.{name}.f32 {{x}}, {{a}};", [x], np.uint16)
    same_bits(got, bits_of(x, name), x, name)
    y = np.roll(x, 1)
    packed = one(f"cvt.rn.{name}x2.f32 {{x}}, {{a}}, {{b}};", [x, y], np.uint32)
    same_bits((packed >> np.uint32(16)).astype(np.uint16), bits_of(x, name), x, name)
    same_bits((packed & np.uint32(0xFFFF)).astype(np.uint16), bits_of(y, name), y, name)
    got = one(f"cvt.rn.satfinite.{name}.f32 {{x}}, {{a}};", [x], np.uint16)
    same_bits(got, bits_of(saturated(x, name), name), x, name)
    got = one(f"cvt.rn.relu.{name}.f32 {{x}}, {{a}};", [x], np.uint16)
    same_bits(got, bits_of(np.where(x < 0, np.float32(0), x), name) & np.uint16(0x7FFF), x, name)


@pytest.mark.sweep(2)
@IN_PARTS
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_f32_to_8_bits_saturates(name: str, part: slice) -> None:
    x = float_samples(part.start + 1, 2000, part)
    y = np.roll(x, 7)
    got = one(f"cvt.rn.satfinite.{name}x2.f32 {{x}}, {{a}}, {{b}};", [x, y], np.uint16)
    same_bits(got >> np.uint16(8), bits_of(saturated(x, name), name), x, name)
    same_bits(got & np.uint16(0xFF), bits_of(saturated(y, name), name), y, name)
    got = one(f"cvt.rn.satfinite.relu.{name}x2.f32 {{x}}, {{a}}, {{b}};", [x, x], np.uint16)
    relu = saturated(np.where(x < 0, np.float32(0), x), name)
    same_bits(got & np.uint16(0x7F), bits_of(relu, name) & 0x7F, x, name)


@pytest.mark.sweep(2)
@IN_PARTS
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("source", ["f16", "bf16"])
def test_all_16_bit_values_to_8_bits(name: str, source: str, part: slice) -> None:
    raw = ALL_16[part]
    x = values_of(raw, source)
    packed = raw.astype(np.uint32) | (np.roll(raw, 1).astype(np.uint32) << np.uint32(16))
    got = one(f"cvt.rn.satfinite.{name}x2.{source}x2 {{x}}, {{a}};", [packed], np.uint16)
    wanted = bits_of(saturated(x, name), name)
    same_bits(got & np.uint16(0xFF), wanted, x, name)
    same_bits(got >> np.uint16(8), np.roll(wanted, 1), np.roll(x, 1), name)


@pytest.mark.sweep(2)
@IN_PARTS
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_all_8_bit_pairs_to_f16(name: str, part: slice) -> None:
    raw = ALL_16.reshape(256, 256).T.reshape(-1)[part]  # in `make test` not only even first numbers
    got = one(f"cvt.rn.f16x2.{name}x2 {{x}}, {{a}};", [raw], np.uint32)
    for codes, half in (
        (raw & np.uint16(0xFF), got & np.uint32(0xFFFF)),
        (raw >> np.uint16(8), got >> np.uint32(16)),
    ):
        x = values_of(codes.astype(np.uint8), name)
        same_bits(half.astype(np.uint16), bits_of(x, "f16"), x, "f16")


def test_f32_to_tf32_keeps_ten_bits() -> None:
    x = float_samples(2)
    x = x[np.isfinite(x) & (np.abs(x) < 1e38)]
    got = one("cvt.rna.tf32.f32 {x}, {a};", [x], np.uint32)
    raw = x.view(np.uint32).astype(np.uint64)
    assert np.array_equal(got, ((raw + 0x1000) & 0xFFFFE000).astype(np.uint32))


# --- directed rounding ------------------------------------------------------------


def exactly_rounded(x: float, name: str, mode: str) -> Fraction:
    """Rounds by exact rational arithmetic."""
    bits, low = SMALLEST_STEP[name]
    value = Fraction(x)
    if value == 0:
        return value
    exponent = max(math.frexp(x)[1] - 1, low)
    units = value / Fraction(2) ** (exponent - bits)
    floor = units.numerator // units.denominator
    whole = {
        "rz": floor if value > 0 else -((-units.numerator) // units.denominator),
        "rm": floor,
        "rp": -((-units.numerator) // units.denominator),
    }[mode]
    return whole * Fraction(2) ** (exponent - bits)


@pytest.mark.parametrize(("name", "mode"), [("f16", "rz"), ("f16", "rm"), ("f16", "rp"), ("bf16", "rz")])
def test_directed_rounding_to_16_bits(name: str, mode: str) -> None:
    x = float_samples(3, 2000)
    x = x[np.isfinite(x) & (np.abs(x) < 6e4)]
    got = values_of(one(f"cvt.{mode}.{name}.f32 {{x}}, {{a}};", [x], np.uint16), name)
    assert [Fraction(float(g)) for g in got] == [exactly_rounded(float(v), name, mode) for v in x]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_f64_to_f32(mode: str) -> None:
    random = np.random.default_rng(4)
    x = random.normal(size=3000) * 2.0 ** random.integers(-150, 100, 3000)
    got = one(f"cvt.{mode}.f32.f64 {{x}}, {{a}};", [x], np.float32)
    if mode == "rn":
        assert np.array_equal(got, x.astype(np.float32))
    else:
        assert [Fraction(float(g)) for g in got] == [exactly_rounded(float(v), "f32", mode) for v in x]


# --- to wider floats ------------------------------------------------------------


@pytest.mark.sweep(2)
@IN_PARTS
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_all_16_bit_values_to_f32_and_f64(name: str, part: slice) -> None:
    raw = ALL_16[part]
    got = one(f"cvt.f32.{name} {{x}}, {{a}};", [raw], np.float32)
    np.testing.assert_array_equal(got, values_of(raw, name))
    if name == "f16":
        np.testing.assert_array_equal(one("cvt.f64.f16 {x}, {a};", [raw], np.float64), values_of(raw, name))


# --- integers ------------------------------------------------------------

RANGES = {
    "u8": (0, 255),
    "s8": (-128, 127),
    "u16": (0, 65535),
    "s16": (-32768, 32767),
    "u32": (0, 2**32 - 1),
    "s32": (-(2**31), 2**31 - 1),
    "u64": (0, 2**64 - 1),
    "s64": (-(2**63), 2**63 - 1),
}
HOLDERS = {
    "u8": np.uint16,
    "s8": np.int16,
    "u16": np.uint16,
    "s16": np.int16,
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
}
ROUNDED = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ROUNDED)
@pytest.mark.parametrize("target", RANGES)
def test_floats_to_integers_clamp(target: str, mode: str) -> None:
    low, high = RANGES[target]
    x = float_samples(5, 3000)
    x = x[~np.isnan(x)]
    got = one(f"cvt.{mode}.{target}.f32 {{x}}, {{a}};", [x], HOLDERS[target])
    with np.errstate(invalid="ignore"):
        rounded = ROUNDED[mode](x.astype(np.float64))
    wanted = [low if v == -np.inf else high if v == np.inf else max(low, min(high, int(v))) for v in rounded]
    assert got.tolist() == wanted


@pytest.mark.sweep(4)
@IN_PARTS
@pytest.mark.parametrize("target", ["u8", "s8", "u16", "s16", "u32", "s32"])
@pytest.mark.parametrize("source", ["f16", "bf16"])
def test_all_16_bit_floats_to_integers(source: str, target: str, part: slice) -> None:
    low, high = RANGES[target]
    got = one(f"cvt.rzi.{target}.{source} {{x}}, {{a}};", [ALL_16[part]], HOLDERS[target])
    wanted = [
        0
        if math.isnan(v)
        else low
        if v == -math.inf
        else high
        if v == math.inf
        else max(low, min(high, int(v)))
        for v in values_of(ALL_16[part], source).tolist()
    ]
    assert got.tolist() == wanted


@pytest.mark.sweep(7)
@IN_PARTS
@pytest.mark.parametrize("source", ["u8", "s8", "u16", "s16"])
@pytest.mark.parametrize("target", ["f16", "bf16", "f32"])
def test_all_small_integers_to_floats(source: str, target: str, part: slice) -> None:
    raw = ALL_8 if source.endswith("8") else ALL_16[part]
    low, _ = RANGES[source]
    numbers = (
        raw.astype(np.int64)
        if low == 0
        else raw.astype(np.uint8 if source == "s8" else np.uint16)
        .view(np.int8 if source == "s8" else np.int16)
        .astype(np.int64)
    )
    got = one(f"cvt.rn.{target}.{source} {{x}}, {{a}};", [raw], np.float32 if target == "f32" else np.uint16)
    if target == "f32":
        assert np.array_equal(got, numbers.astype(np.float32))
    else:
        x = numbers.astype(np.float32)
        same_bits(got, bits_of(x, target), x, target)


@pytest.mark.parametrize("source", ["u32", "s32", "u64", "s64"])
def test_wide_integers_to_floats_round_once(source: str) -> None:
    random = np.random.default_rng(6)
    raw = random.integers(0, 1 << 63, 3000, dtype=np.uint64) >> random.integers(0, 63, 3000).astype(np.uint64)
    halfway = np.array(
        [(1 << 24) + 1, (1 << 62) + (1 << 38) + 1, (1 << 62) + (1 << 38), (1 << 53) + 1], np.uint64
    )
    numbers = np.concatenate([raw, halfway]).astype(HOLDERS[source])
    f32, f64 = elementwise(
        f"cvt.rn.f32.{source} {{x}}, {{a}}; cvt.rn.f64.{source} {{y}}, {{a}};",
        [numbers],
        [np.float32, np.float64],
    )
    assert np.array_equal(f32, numbers.astype(np.float32))
    assert np.array_equal(f64, numbers.astype(np.float64))
    down = one(f"cvt.rz.f32.{source} {{x}}, {{a}};", [numbers], np.float32)
    assert [int(v) for v in down] == [int(exactly_rounded_integer(int(n))) for n in numbers]


def exactly_rounded_integer(n: int) -> int:
    shift = max(abs(n).bit_length() - 24, 0)
    return (abs(n) >> shift << shift) * (1 if n >= 0 else -1)


@pytest.mark.sweep(5)
@in_parts(4)
@pytest.mark.parametrize("source", RANGES)
@pytest.mark.parametrize("target", RANGES)
def test_integers_to_integers(source: str, target: str, part: slice) -> None:
    width = int(source[1:])
    random = np.random.default_rng(7)
    raw = random.integers(0, 1 << 63, 2000, dtype=np.uint64) >> random.integers(0, 63, 2000).astype(np.uint64)
    if width <= 16:
        raw = np.arange(1 << width, dtype=np.uint64)[part if width == 16 else slice(None)]
    exact = raw.astype(f"u{width // 8}")
    exact = exact.view(f"i{width // 8}") if source[0] == "s" else exact
    holder = exact.astype(HOLDERS[source])
    got = one(f"cvt.{target}.{source} {{x}}, {{a}};", [holder], HOLDERS[target])
    kind = f"{'i' if target[0] == 's' else 'u'}{int(target[1:]) // 8}"
    assert np.array_equal(got, exact.astype(kind))
    low, high = RANGES[target]
    got = one(f"cvt.sat.{target}.{source} {{x}}, {{a}};", [holder], HOLDERS[target])
    assert got.tolist() == [max(low, min(high, v)) for v in exact.tolist()]


def test_pack_saturates_two_integers() -> None:
    random = np.random.default_rng(8)
    a, b = (
        random.integers(-(1 << 31), 1 << 31, 500).astype(np.int32) >> random.integers(0, 31, 500)
        for _ in "ab"
    )
    c = random.integers(0, 1 << 32, 500, dtype=np.uint32)
    got = one("cvt.pack.sat.s16.s32 {x}, {a}, {b};", [a, b], np.uint32)
    clip = lambda v, low, high: np.clip(v, low, high).astype(np.int64)  # noqa: E731
    wanted = (clip(a, -32768, 32767) & 0xFFFF) << 16 | (clip(b, -32768, 32767) & 0xFFFF)
    assert np.array_equal(got, wanted.astype(np.uint32))
    got = one("cvt.pack.sat.u8.s32.b32 {x}, {a}, {b}, {c};", [a, b, c], np.uint32)
    wanted = clip(a, 0, 255) << 8 | clip(b, 0, 255) | (c.astype(np.int64) << 16 & 0xFFFFFFFF)
    assert np.array_equal(got, wanted.astype(np.uint32))
