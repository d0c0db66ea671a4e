"""The cast rules against independent definitions, over every input of the small formats and beyond."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_backend import numerics
from cute_backend.spec import VALUE_DTYPES, DType, Overflow
from support.float_formats import FORMATS

SMALL = tuple(FORMATS)
FP8 = (DType.E4M3, DType.E5M2)
TORCH = {dtype: numerics.TORCH_DTYPES[dtype] for dtype in VALUE_DTYPES}


def _codes(dtype: DType) -> Tensor:
    """Every value of a dtype of eight or sixteen bits, in its own torch dtype."""
    if dtype is DType.BOOL:
        return torch.tensor([False, True])
    holder = torch.uint8 if dtype.bits == 8 else torch.int16
    return torch.arange(1 << dtype.bits, dtype=torch.int32).to(holder).view(TORCH[dtype])


def _fp32() -> Tensor:
    """Every 65536th fp32, the boundaries of the small formats, integers, extremes, and neighbours."""
    high = torch.arange(1 << 16, dtype=torch.int32) << 16
    boundaries = []
    for form in FORMATS.values():
        table = torch.from_numpy(form.magnitudes)
        middles = torch.cat([table, (table[1:] + table[:-1]) / 2, (3 * table[-1:] - table[-2:-1]) / 2])
        boundaries.append(middles.to(torch.float32).view(torch.int32))
    integers = torch.arange(-1100, 1100).to(torch.float32) / 4
    limits = torch.tensor([2.0**31, 2.0**31 - 128, -(2.0**31), -(2.0**31) - 256, 2.0**63, 3e38])
    more = torch.cat([*boundaries, integers.view(torch.int32), limits.view(torch.int32)])
    bits = torch.cat([high, more, more ^ (-(2**31))])
    return torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)


def _inputs(register: DType) -> Tensor:
    if register is DType.F32:
        return _fp32()
    if register is DType.BOOL:
        return torch.tensor([False, True])
    edges = [2**power + step for power in range(31) for step in (-1, 0, 1)] + [2**31 - 1]
    values = torch.tensor([*range(-1000, 1000), *edges, *(-edge for edge in edges), -(2**31)])
    return values.to(torch.int32)


def _same(got: Tensor, expected: Tensor) -> Tensor:
    """Elementwise: equal to the sign of a zero, any NaN equal to any NaN."""
    if not got.is_floating_point():
        return got == expected
    equal = (got == expected) & (got.signbit() == expected.signbit())
    return equal | (got.isnan() & expected.isnan())


def _assert_same(got: Tensor, expected: Tensor, inputs: Tensor) -> None:
    assert got.dtype == expected.dtype
    wrong = ~_same(got, expected)
    assert not wrong.any(), (inputs[wrong][:5], got[wrong][:5], expected[wrong][:5])


@pytest.mark.parametrize("dtype", SMALL)
def test_widen_every_code(dtype: DType) -> None:
    codes = _codes(dtype)
    raw = codes.view(torch.uint8 if dtype.bits == 8 else torch.int16).to(torch.int32) & (
        (1 << dtype.bits) - 1
    )
    expected = torch.from_numpy(FORMATS[dtype].decode(raw.numpy())).to(torch.float32)
    _assert_same(numerics.widen(codes, dtype), expected, codes)


@pytest.mark.parametrize("dtype", SMALL)
def test_store_of_every_code_is_that_code(dtype: DType) -> None:
    codes = _codes(dtype)
    values = numerics.widen(codes, dtype)
    stored = numerics.store(values, dtype, Overflow.NONFINITE)
    assert stored.dtype == codes.dtype
    _assert_same(stored.float(), codes.float(), values)


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("overflow", Overflow)
def test_rounding(dtype: DType, overflow: Overflow) -> None:
    values = _fp32()
    rule = overflow if dtype.is_fp8 else None
    expected = torch.from_numpy(FORMATS[dtype].round(values.numpy(), rule))
    _assert_same(numerics.cast(values, dtype, overflow), expected, values)


@pytest.mark.parametrize("source", [DType.BF16, DType.F16])
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("overflow", Overflow)
def test_rounding_of_every_16_bit_value_to_fp8(source: DType, dtype: DType, overflow: Overflow) -> None:
    values = numerics.widen(_codes(source), source)
    expected = torch.from_numpy(FORMATS[dtype].round(values.numpy(), overflow))
    _assert_same(numerics.cast(values, dtype, overflow), expected, values)
    if overflow is Overflow.SATURATE:
        _assert_same(numerics.store(values, dtype).float(), expected, values)


def test_fp8_boundaries() -> None:
    values = torch.tensor(
        [448.0, 464.0, 464.1, 480.0, torch.inf, -torch.inf, torch.nan, 2.0**-10, 2.0**-9 * 1.5]
    )
    saturated = torch.tensor([448.0, 448.0, 448.0, 448.0, 448.0, -448.0, torch.nan, 0.0, 2.0**-8])
    _assert_same(numerics.cast(values, DType.E4M3), saturated, values)
    nan = torch.nan
    open_ended = torch.tensor([448.0, 448.0, nan, nan, nan, nan, nan, 0.0, 2.0**-8])
    _assert_same(numerics.cast(values, DType.E4M3, Overflow.NONFINITE), open_ended, values)
    values = torch.tensor([57344.0, 61439.0, 61440.0, torch.inf, -torch.inf])
    saturated = torch.tensor([57344.0, 57344.0, 57344.0, 57344.0, -57344.0])
    _assert_same(numerics.cast(values, DType.E5M2), saturated, values)
    open_ended = torch.tensor([57344.0, 57344.0, torch.inf, torch.inf, -torch.inf])
    _assert_same(numerics.cast(values, DType.E5M2, Overflow.NONFINITE), open_ended, values)


def test_rounding_to_e8m0() -> None:
    """The nearest power of two by magnitude, of two the larger, as torch rounds; NaN from 1.5 * 2^127 on.
    Subnormals up to 2^-127 give that, and those beyond give 2^-126."""
    values = _fp32()
    codes = numerics.store(values, DType.E8M0).view(torch.uint8)
    assert torch.equal(codes, values.to(torch.float8_e8m0fnu).view(torch.uint8))
    exact = values.abs().double()
    power = torch.exp2(torch.floor(torch.log2(exact.clamp(min=2.0**-126))))
    nearest = torch.where(exact >= 1.5 * power, 2 * power, power)
    nearest = torch.where(exact <= 2.0**-127, 2.0**-127, nearest)
    rounded = numerics.cast(values, DType.E8M0)
    is_nan = ~(exact < 1.5 * 2.0**127)
    assert torch.equal(rounded.isnan(), is_nan) and torch.equal(codes == 255, is_nan)
    assert torch.equal(rounded[~is_nan].double(), nearest[~is_nan])


def test_float_to_integer() -> None:
    values = torch.tensor([2.9, -2.9, -0.0, torch.nan, 2.0**31 - 128, 2.0**31, torch.inf, -(2.0**31), -1e30])
    ends = torch.iinfo(torch.int32)
    expected = torch.tensor(
        [2, -2, 0, 0, 2**31 - 128, ends.max, ends.max, ends.min, ends.min], dtype=torch.int32
    )
    _assert_same(numerics.cast(values, DType.I32), expected, values)


@pytest.mark.parametrize("dtype, low, high", [(DType.I8, -128, 127), (DType.U8, 0, 255)])
def test_integers_wrap(dtype: DType, low: int, high: int) -> None:
    values = _inputs(DType.I32)
    wrapped = torch.from_numpy(values.numpy().astype(np.int8 if low else np.uint8).astype(np.int32))
    _assert_same(numerics.cast(values, dtype), wrapped, values)
    assert wrapped.min() == low and wrapped.max() == high


def test_everything_but_zero_is_true() -> None:
    values = torch.tensor([0.0, -0.0, torch.nan, 1e-45, -3.0])
    expected = torch.tensor([False, False, True, True, True])
    _assert_same(numerics.cast(values, DType.BOOL), expected, values)


def _in_range(values: Tensor, target: DType) -> Tensor:
    """Where torch promises the result of a conversion: float to integer within the integer's range."""
    if target.is_float or target is DType.BOOL or not values.is_floating_point():
        return torch.ones_like(values, dtype=torch.bool)
    limits = torch.iinfo(TORCH[target])
    return (values > limits.min - 1) & (values < limits.max + 1)


@pytest.mark.parametrize("source", VALUE_DTYPES)
@pytest.mark.parametrize("target", VALUE_DTYPES)
def test_every_cast_against_eager(source: DType, target: DType) -> None:
    """From memory to memory, as a program's `.to`: to the bit, wherever torch promises a result."""
    inputs = _inputs(source) if source in (DType.F32, DType.I32) else _codes(source)
    register = numerics.widen(inputs, source)
    promised = _in_range(register, target)
    inputs, register = inputs[promised], register[promised]
    if target.is_fp8:
        # Eager's rule for what is out of range differs from version to version; `test_rounding` has both.
        largest = 448.0 if target is DType.E4M3 else 57344.0
        inside = register.to(torch.float64).abs() <= largest
        inputs, register = inputs[inside], register[inside]
    stored = numerics.store(register, target)
    expected = inputs.to(TORCH[target])
    assert stored.dtype == expected.dtype
    _assert_same(stored.to(torch.float64), expected.to(torch.float64), register)


@pytest.mark.parametrize("target", VALUE_DTYPES)
@pytest.mark.parametrize("register", [DType.F32, DType.I32, DType.BOOL])
@pytest.mark.parametrize("overflow", Overflow)
def test_a_stored_cast_is_the_cast(register: DType, target: DType, overflow: Overflow) -> None:
    """Storing rounds no further than a cast to the same dtype did, whatever its overflow rule."""
    values = _inputs(register)
    rounded = numerics.cast(values, target, overflow)
    assert rounded.dtype == TORCH[target.register]
    stored = numerics.widen(numerics.store(rounded, target, overflow), target)
    _assert_same(stored, rounded, values)
