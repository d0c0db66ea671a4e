"""The rules of casts, independent of torch's version. The device code follows the same rules.

A value is held in its dtype's register dtype (fp32, int32 or bool). `cast` rounds or wraps it and keeps it
there; `store` also packs it into memory's dtype.

- to bf16 and fp16: to the nearest, halves to even; beyond the range infinity.
- to fp8: to the nearest, halves to even; NaN stays NaN. SATURATE replaces values beyond the largest finite
  value, infinities included, by that value (PTX `cvt.rn.satfinite`). NONFINITE rounds as if the range had no
  end. A result beyond the range is then NaN in e4m3 (which has no infinity) and infinity in e5m2.
- to E8M0: to the nearest power of two by magnitude; 1.5 times a power of two is rounded up. Infinities, and
  magnitudes that would round to 2^128, give NaN, as in torch. Magnitudes up to 2^-127 give 2^-127, other
  subnormal ones 2^-126.
- float to integer: towards zero; NaN gives 0; a value beyond int32's range gives the nearest end of the
  range. int8 and uint8 then keep the low eight bits. For values beyond the range torch promises nothing: its
  CPU and CUDA results differ.
- to bool: true if the value differs from zero, so NaN is true.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_backend.spec import DType, Overflow

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.F32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.E4M3: torch.float8_e4m3fn,
    DType.E5M2: torch.float8_e5m2,
    DType.I8: torch.int8,
    DType.U4X2: torch.uint8,
    DType.I4X2: torch.uint8,
    DType.U8: torch.uint8,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
    DType.BOOL: torch.bool,
    DType.E2M1X2: torch.float4_e2m1fn_x2,
    DType.E8M0: torch.float8_e8m0fnu,
}
"""The dtypes of tensors. A tensor of pairs of values has that of their `DType.part`."""


def widen(value: Tensor, dtype: DType) -> Tensor:
    """Converts a tensor of `dtype` to its register dtype, exactly. Of i64, numbers that int32 does not hold
    become its smallest or largest one."""
    if dtype is DType.I64:
        limits = torch.iinfo(torch.int32)
        value = value.clamp(limits.min, limits.max)
    return value.to(TORCH_DTYPES[dtype.register])


def convert(value: Tensor, target: DType) -> Tensor:
    """Converts a register value to another register dtype."""
    if target is DType.BOOL:
        return value != 0
    if target is DType.I32 and value.is_floating_point():
        return _truncate(value)
    return value.to(TORCH_DTYPES[target])


def cast(value: Tensor, target: DType, overflow: Overflow = Overflow.SATURATE) -> Tensor:
    """Rounds or wraps a register value to `target`, and keeps it in `target`'s register dtype."""
    value = convert(value, target.register)
    if target.is_fp8:
        return _round_fp8(value, _FLOAT8[target], overflow)
    if target is DType.E8M0:
        return _round_e8m0(value)
    if target in (DType.BF16, DType.F16):
        # IEEE rounding in every torch, on every device.
        return value.to(TORCH_DTYPES[target]).to(torch.float32)
    if target is DType.I8:
        return ((value + 128) & 255) - 128
    if target is DType.U8:
        return value & 255
    return value


def store(value: Tensor, target: DType, overflow: Overflow = Overflow.SATURATE) -> Tensor:
    """Casts a register value to `target` and packs it into a tensor of `target`'s own dtype. Pairs of values
    become two columns."""
    if target.part is not target:
        return value.contiguous().view(TORCH_DTYPES[target.part])
    value = cast(value, target, overflow)
    if target.is_fp8:
        return _encode_fp8(value, _FLOAT8[target]).view(TORCH_DTYPES[target])
    if target is DType.E8M0:
        return _e8m0_code(value).to(torch.uint8).view(TORCH_DTYPES[target])
    return value.to(TORCH_DTYPES[target])


def _e8m0_code(value: Tensor) -> Tensor:
    """The exponent of the nearest power of two, biased by 127; 255 stands for NaN."""
    bits = (value.view(torch.int32) & 0x7FFFFFFF).clamp(max=0x7F800000)
    # 2^-127 is half of the least normal number, and its code is 0.
    return (bits + (1 << 22) - (bits == 1 << 22).to(torch.int32)) >> 23


def _round_e8m0(value: Tensor) -> Tensor:
    return e8m0_value(_e8m0_code(value.contiguous()))


def e8m0_value(code: Tensor) -> Tensor:
    """The power of two that the low eight bits of an int32 stand for in E8M0, in fp32; 255 is NaN."""
    code = code & 255
    power = torch.where(code == 0, 1 << 22, code << 23).view(torch.float32)
    return torch.where(code == 255, float("nan"), power)


def _truncate(value: Tensor) -> Tensor:
    """Converts fp32 to int32 like PTX `cvt.rzi.s32.f32`."""
    inside = torch.where(value.abs() < 2.0**31, value, 0.0).to(torch.int32)
    ends = torch.iinfo(torch.int32)
    return torch.where(value >= 2.0**31, ends.max, torch.where(value <= -(2.0**31), ends.min, inside))


@dataclass(frozen=True)
class _Float8:
    """An fp8 format. `overflow_code` is the encoding of an overflow under NONFINITE."""

    mantissa_bits: int
    min_exponent: int
    largest: float
    overflow_value: float
    overflow_code: int

    @property
    def bias(self) -> int:
        return 1 - self.min_exponent


_FLOAT8 = {
    DType.E4M3: _Float8(3, -6, 448.0, overflow_value=float("nan"), overflow_code=0x7F),
    DType.E5M2: _Float8(2, -14, 57344.0, overflow_value=float("inf"), overflow_code=0x7C),
}
_FP8_NAN = 0x7F


def largest_finite(dtype: DType) -> float:
    """The largest number of an fp8 format."""
    return _FLOAT8[dtype].largest


def _round_fp8(value: Tensor, form: _Float8, overflow: Overflow) -> Tensor:
    """Rounds fp32 to an fp8 format, in fp32.

    It adds 2^23 times the spacing of the format's numbers around `value`, and subtracts it again. The fp32
    addition rounds the sum to that spacing, to nearest even.
    """
    saturate = overflow is Overflow.SATURATE
    magnitude = value.abs().clamp(max=form.largest if saturate else 2 * form.largest)
    exponent = (magnitude.view(torch.int32) >> 23) - 127
    spacing = exponent.clamp(min=form.min_exponent) - form.mantissa_bits
    shifter = ((spacing + 23 + 127) << 23).view(torch.float32)
    rounded = torch.where(magnitude.isnan(), magnitude, (magnitude + shifter) - shifter)
    if not saturate:
        rounded = torch.where(rounded > form.largest, form.overflow_value, rounded)
    return rounded.copysign(value)


def _encode_fp8(value: Tensor, form: _Float8) -> Tensor:
    """The bytes (uint8) of fp32 values that the format represents exactly."""
    magnitude = value.abs()
    normal = (magnitude.view(torch.int32) >> (23 - form.mantissa_bits)) - (
        (127 - form.bias) << form.mantissa_bits
    )
    subnormal = (magnitude * 2.0 ** (form.mantissa_bits - form.min_exponent)).to(torch.int32)
    code = torch.where(magnitude < 2.0**form.min_exponent, subnormal, normal)
    code = torch.where(magnitude.isinf(), form.overflow_code, code)
    code = torch.where(magnitude.isnan(), _FP8_NAN, code)
    return torch.where(value.signbit(), code | 0x80, code).to(torch.uint8)
