"""Number formats of PTX as numpy arrays: decoding to floats, rounding and encoding, every mode.

Formats and rounding: PTX ISA 5.2.3 "Alternate floating-point data formats", 9.7.9.21 "cvt". e4m3 has no
infinity and its NaN is 0x7f (OCP 8-bit floating point specification 1.0).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Format:
    """A binary float of `bits` bits: `precision` counts the hidden bit; `low` and `high` bound the
    exponent.
    """

    name: str
    bits: int
    precision: int
    low: int
    high: int
    largest: float
    infinite: bool
    nan: int


F16 = Format("f16", 16, 11, -14, 15, 65504.0, True, 0x7FFF)
BF16 = Format("bf16", 16, 8, -126, 127, float.fromhex("0x1.fep127"), True, 0x7FFF)
E4M3 = Format("e4m3", 8, 4, -6, 8, 448.0, False, 0x7F)
E5M2 = Format("e5m2", 8, 3, -14, 15, 57344.0, True, 0x7F)
TF32 = Format("tf32", 32, 11, -126, 127, float.fromhex("0x1.ffcp127"), True, 0x7FFFFFFF)
F32 = Format("f32", 32, 24, -126, 127, float(np.finfo(np.float32).max), True, 0x7FFFFFFF)
E2M1 = Format("e2m1", 4, 2, 0, 2, 6.0, False, 0x7)
E2M3 = Format("e2m3", 6, 4, 0, 2, 7.5, False, 0x1F)
E3M2 = Format("e3m2", 6, 3, -2, 4, 28.0, False, 0x1F)
FORMATS = {f.name: f for f in (F16, BF16, E4M3, E5M2, TF32, F32, E2M1, E2M3, E3M2)}


def _small_table(fmt: Format) -> np.ndarray:
    """Values of all 256 codes of a format of at most 8 bits."""
    values = np.empty(256, np.float32)
    mantissa_bits = fmt.precision - 1
    exponent_bits = fmt.bits - 1 - mantissa_bits
    for code in range(256):
        mantissa = code & ((1 << mantissa_bits) - 1)
        exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
        sign = -1.0 if (code >> (fmt.bits - 1)) & 1 else 1.0
        if fmt is E5M2 and exponent == 31:
            value = np.inf if mantissa == 0 else np.nan
        elif fmt is E4M3 and exponent == 15 and mantissa == 7:
            value = np.nan
        elif exponent == 0:
            value = mantissa * 2.0 ** (fmt.low - mantissa_bits)
        else:
            value = (1 + mantissa * 2.0**-mantissa_bits) * 2.0 ** (exponent - 1 + fmt.low)
        values[code] = sign * value
    return values


TABLES = {f.name: _small_table(f) for f in (E4M3, E5M2, E2M1, E2M3, E3M2)}


def decode(bits: np.ndarray, name: str) -> np.ndarray:
    """Raw bits (unsigned integers) to float32 (exact for each format here)."""
    if name in TABLES:
        return TABLES[name][bits]
    if name == "bf16":
        return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name == "f16":
        return np.asarray(bits, np.uint16).view(np.float16).astype(np.float32)
    if name == "tf32":
        return (np.asarray(bits, np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    if name == "f32":
        return np.asarray(bits, np.uint32).view(np.float32)
    raise KeyError(name)


def round_to(x: np.ndarray, fmt: Format, mode: str = "rn", saturate: bool = False) -> np.ndarray:
    """Rounds float64 values to `fmt`, kept as float64. NaN stays NaN.

    `saturate` is PTX's .satfinite: values beyond the largest finite value become that value. Otherwise they
    become infinity in a format that has one (or the largest value, if the rounding is towards zero).
    """
    x = np.asarray(x, np.float64)
    magnitude = np.abs(x)
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 1.0))
    step = np.maximum(exponent - 1, fmt.low) - (fmt.precision - 1)
    scaled = np.ldexp(x, -step)
    if mode == "rn":
        q = np.rint(scaled)
    elif mode == "rz":
        q = np.trunc(scaled)
    elif mode == "rm":
        q = np.floor(scaled)
    elif mode == "rp":
        q = np.ceil(scaled)
    elif mode == "rna":
        q = np.copysign(np.floor(np.abs(scaled) + 0.5), x)
    else:
        raise KeyError(mode)
    result = np.copysign(np.ldexp(q, step), x)
    over = np.abs(result) > fmt.largest
    if over.any() or np.isinf(x).any():
        if saturate or not fmt.infinite:
            limit = np.full_like(result, fmt.largest)
        else:
            limit = np.full_like(result, np.inf)
            finite = np.isfinite(x)
            if mode == "rz":
                limit[finite] = fmt.largest
            elif mode == "rm":
                limit[finite & (x > 0)] = fmt.largest
            elif mode == "rp":
                limit[finite & (x < 0)] = fmt.largest
        result = np.where(over | np.isinf(x), np.copysign(limit, x), result)
    return np.where(np.isnan(magnitude), np.nan, result)


def encode(x: np.ndarray, name: str, mode: str = "rn", saturate: bool = False) -> np.ndarray:
    """Floats (float32 or float64) to the raw bits of `name`, rounded; NaN gives the format's canonical
    NaN.
    """
    fmt = FORMATS[name]
    if mode == "rn" and not saturate and name in _NEAREST and (near := _NEAREST[name](x)) is not None:
        nan = np.isnan(x)
        return np.where(nan, np.uint16(fmt.nan), near) if np.count_nonzero(nan) else near
    rounded = round_to(x, fmt, mode, saturate)
    nan = np.isnan(rounded)
    if name == "f16":
        bits = rounded.astype(np.float16).view(np.uint16)
    elif name == "bf16":
        bits = (rounded.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    elif name in ("tf32", "f32"):
        bits = rounded.astype(np.float32).view(np.uint32)
    else:
        bits = _encode_small(np.where(nan, 0.0, rounded), fmt)
    return np.where(nan, bits.dtype.type(fmt.nan), bits)


def _nearest_f16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16)


def _nearest_bf16(x: np.ndarray) -> np.ndarray | None:
    """The bits of numbers that are rounded to float32 first; None if some would be rounded twice: those that
    the first rounding puts halfway between two numbers."""
    single = np.ascontiguousarray(x, np.float32)
    raw = single.view(np.uint32)
    if x.dtype != np.float32:
        halfway = (raw & np.uint32(0xFFFF)) == np.uint32(0x8000)
        if np.count_nonzero(halfway) and np.count_nonzero(halfway & (single != x)):
            return None
    even = (raw + (np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return even.astype(np.uint16)


_NEAREST = {"f16": _nearest_f16, "bf16": _nearest_bf16}


def _encode_small(rounded: np.ndarray, fmt: Format) -> np.ndarray:
    """Bits of values that the format (at most 8 bits) holds exactly."""
    mantissa_bits = fmt.precision - 1
    sign = np.signbit(rounded).astype(np.int64) << (fmt.bits - 1)
    magnitude = np.abs(rounded)
    infinite = np.isinf(magnitude)
    magnitude = np.where(infinite, 0.0, magnitude)
    _, exponent = np.frexp(magnitude)
    exponent = np.where(magnitude > 0, np.maximum(exponent - 1, fmt.low), fmt.low)
    units = np.ldexp(magnitude, mantissa_bits - exponent).astype(np.int64)
    # A subnormal has units below 2**mantissa_bits and so leaves the exponent field 0.
    code = ((exponent - fmt.low).astype(np.int64) << mantissa_bits) + units
    if fmt is E5M2:
        code = np.where(infinite, 0x7C, code)
    return (sign | code).astype(np.uint8)


def flush(x: np.ndarray) -> np.ndarray:
    """.ftz: subnormal float32 to a zero of the same sign."""
    small = np.abs(x) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), x), x)


def to_odd(rounded: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Turns a float64 sum and its exact error into the sum rounded to odd.

    Rounding once more to at most 51 bits then equals rounding the exact value once (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums", 2008).
    """
    if not np.count_nonzero(error):
        return rounded
    bits = rounded.view(np.int64)
    inexact = (error != 0) & np.isfinite(rounded) & np.isfinite(error) & ((bits & 1) == 0)
    if not inexact.any():
        return rounded
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where(inexact, np.nextafter(rounded, towards), rounded)


def sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b of float64 arrays, rounded to odd."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    return to_odd(total, error)
