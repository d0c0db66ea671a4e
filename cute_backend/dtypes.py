"""Element types, and the type in which a register holds a value of each."""

from __future__ import annotations

from enum import Enum


class DType(str, Enum):
    """Element types of operands, loads, stores and cast results."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    I8 = "i8"
    U8 = "u8"
    I32 = "i32"
    I64 = "i64"
    """Indices, as torch stores them, and positions in a cache, as torch has them; held in int32."""
    BOOL = "bool"
    E2M1X2 = "e2m1x2"
    """Two values of E2M1 in a byte, the first in its low bits (torch.float4_e2m1fn_x2). Only operands of
    products have it."""
    U4X2 = "u4x2"
    """Two integers from 0 to 15 in a byte, the first in its low bits. Only stored weights have it."""
    I4X2 = "i4x2"
    """Two integers from -8 to 7 in a byte, each with 8 added, the first in its low bits. Only stored weights
    have it."""
    E8M0 = "e8m0"
    """A power of two from 2^-127 to 2^127, or NaN. Only scales of blocks have it."""
    BF16X2 = "bf16x2"
    """Two values of bf16 in 32 bits, the first in the low bits. Only stores have it: their results have 2 N
    columns, of which each element holds two neighbours."""
    F16X2 = "f16x2"
    """The same as BF16X2, with values of fp16."""

    @property
    def is_float(self) -> bool:
        return self in (DType.F32, DType.BF16, DType.F16, DType.E4M3, DType.E5M2)

    @property
    def is_fp8(self) -> bool:
        return self in (DType.E4M3, DType.E5M2)

    @property
    def bits(self) -> int:
        """Bits of one element in memory; a bool takes a byte, as in torch."""
        return _BITS.get(self, 8)

    @property
    def values(self) -> int:
        """Values in one element."""
        return 2 if self in _TWO_IN_A_BYTE or self.part is not self else 1

    @property
    def part(self) -> DType:
        """The dtype of a tensor whose elements are stored in pairs; the dtype itself for any other."""
        return next((part for part, pair in PAIRED_DTYPES.items() if pair is self), self)

    @property
    def sums(self) -> DType:
        """The dtype in which tensor cores add up products of operands of this dtype."""
        return DType.I32 if self is DType.I8 else DType.F32

    @property
    def register(self) -> DType:
        """The dtype in which a value of this dtype is held inside the epilogue."""
        if self.is_float or self is DType.E8M0:
            return DType.F32
        return DType.BOOL if self is DType.BOOL else DType.I32


_BITS = {DType.I64: 64, DType.BF16: 16, DType.F16: 16}
_BITS |= dict.fromkeys((DType.F32, DType.I32, DType.BF16X2, DType.F16X2), 32)
_TWO_IN_A_BYTE = (DType.E2M1X2, DType.U4X2, DType.I4X2)

PRODUCT_DTYPES = (*_TWO_IN_A_BYTE, DType.E8M0)
"""The dtypes that only the operands of products and the scales of blocks have."""

PAIRED_DTYPES = {DType.BF16: DType.BF16X2, DType.F16: DType.F16X2}
"""The dtypes of two values side by side, by the dtype of each."""

VALUE_DTYPES = tuple(
    dtype for dtype in DType if dtype not in (DType.I64, *PRODUCT_DTYPES, *PAIRED_DTYPES.values())
)
"""The dtypes of loads, casts and stored planes: all except that of indices, those that only products have and
those of two values."""
