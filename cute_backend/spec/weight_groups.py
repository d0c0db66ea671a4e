"""Scales, and zeros, of a weight for each column and group of K."""

from __future__ import annotations

from dataclasses import dataclass

from cute_backend.dtypes import DType

K_TILE_VALUES = 128
"""Values of K of a k tile of values of 8 bits."""

GROUP_SIZES = (32, 64, 128, 256)
"""The values of K in a group. Groups of fewer than `K_TILE_VALUES` divide a k tile, and others are whole k
tiles."""

_SCALES = (DType.F32, DType.BF16, DType.F16)
_ZEROS = (*_SCALES, DType.I8, DType.U8)


@dataclass(frozen=True)
class WeightGroups:
    """The groups of K of a weight of 8 bits: `values` neighbours along K of one column share a `scale`, and a
    `zero` unless that is None. Both are dtypes in memory.

    A weight is (stored - zero) * scale. The difference is rounded to the dtype `difference`, and the product
    to `product`, which are fp32 or the dtype of the other operand, to which the weight is rounded then. In
    this way programs round, so that weights have their bits. `difference` is None if there is no zero.
    """

    values: int
    scale: DType
    product: DType
    zero: DType | None = None
    difference: DType | None = None

    @property
    def of_k_tile(self) -> int:
        """Groups of a k tile, of which there is at least one."""
        return max(K_TILE_VALUES // self.values, 1)

    @property
    def vectors(self) -> tuple[DType, ...]:
        """The dtypes of the scales and, if there are any, of the zeros."""
        return (self.scale,) if self.zero is None else (self.scale, self.zero)

    def contradiction(self, other: DType) -> str:
        """The rule that these groups break beside an operand of dtype `other`; empty if they break none."""
        if self.values not in GROUP_SIZES:
            return f"groups have {', '.join(map(str, GROUP_SIZES))} values"
        if self.scale not in _SCALES or self.zero not in (None, *_ZEROS):
            scales, zeros = (", ".join(dtype.value for dtype in each) for each in (_SCALES, _ZEROS))
            return f"scales are {scales}, and zeros {zeros}"
        if (self.zero is None) is not (self.difference is None):
            return "zeros and the dtype of their difference come together"
        if not {self.product, self.difference} <= {None, DType.F32, other}:
            return f"weights are computed in f32 or {other.value}"
        return ""
