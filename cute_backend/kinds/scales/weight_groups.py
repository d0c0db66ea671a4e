"""Scales, and zeros, of a weight for each column and group of K."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cute_backend.dtypes import DType
from cute_backend.kinds.axes import Dim, Extent, Stride
from cute_backend.kinds.scales.vectors import Scales, Side, Vector, shown
from cute_backend.kinds.stored import STORED

if TYPE_CHECKING:
    from torch import Tensor

    from cute_backend.kinds.scales.vectors import Round

SPAN = 128
"""Values of K whose groups a thread goes on to at once: those of a k tile of values of 8 bits, and of half of
one of values of 4 bits."""

GROUP_SIZES = (32, 64, 128, 256)
"""The values of K in a group. Groups of fewer than `SPAN` divide a span, and others are whole spans."""

_SCALES = (DType.F32, DType.BF16, DType.F16)

_ZEROS = (*_SCALES, DType.I8, DType.U8)

VECTOR_DTYPES = "scales are {}, and zeros {}".format(
    *(", ".join(dtype.value for dtype in each) for each in (_SCALES, _ZEROS))
)
"""The rule for the dtypes of scales and zeros."""

_SIGNIFICANT = {DType.F32: 24, DType.BF16: 8, DType.F16: 11}
"""The significant bits of dtypes."""


def has_integers(dtype: DType, most: int) -> bool:
    """Whether a dtype has all integers of magnitudes up to `most`."""
    return most <= 1 << _SIGNIFICANT[dtype]


def computed_in(other: DType) -> str:
    """The rule for the dtypes of a difference and a product, beside an operand of dtype `other`."""
    return f"weights are computed in f32 or {other.value}"


@dataclass(frozen=True)
class WeightGroups(Scales):
    """The groups of K of a weight that is stored in few bits: `values` neighbours along K of one column share
    a `scale`, and a `zero` unless that is None. Both are dtypes in memory.

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
    def vectors(self) -> tuple[DType, ...]:
        """The dtypes of the scales and, if there are any, of the zeros."""
        return (self.scale,) if self.zero is None else (self.scale, self.zero)

    @property
    def is_scaled_wide(self) -> bool:
        """Whether the product is one of fp32, which is rounded to the other operand's dtype then."""
        return self.product is DType.F32

    def subtracts_exactly(self, stored: DType) -> bool:
        """Whether no difference of a value of dtype `stored` and a zero is rounded: both are integers, and
        the dtype `difference` has all integers up to the largest difference. Of bytes that is 255 if both
        have signs or neither has, and 383 otherwise, which bf16 has not."""
        zero, values = STORED.get(self.zero or DType.F32), STORED[stored].integers
        if zero is None or zero.integers is None or values is None or self.difference is None:
            return False
        (low, high), (least, most) = values, zero.integers
        return has_integers(self.difference, max(high - least, most - low))

    def contradiction(self, other: DType) -> str:
        """The rule that these groups break beside an operand of dtype `other`; empty if they break none."""
        if self.values not in GROUP_SIZES:
            return f"groups have {', '.join(map(str, GROUP_SIZES))} values"
        if self.scale not in _SCALES or self.zero not in (None, *_ZEROS):
            return VECTOR_DTYPES
        if (self.zero is None) is not (self.difference is None):
            return "zeros and the dtype of their difference come together"
        if not {self.product, self.difference} <= {None, DType.F32, other}:
            return computed_in(other)
        return ""

    def fault(self, product: Any) -> str:
        what = f"has a weight in groups of {self.values} of K, by scales of {self.scale.value}"
        what += "" if self.zero is None else f" and zeros of {self.zero.value}"
        if not product.is_converted:
            return f"{what}, and converts no operand; only weights that are converted have groups"
        rule = self.contradiction(product.multiplied)
        return f"{what}; {rule}" if rule else ""

    @property
    def words(self) -> str:
        return f"by {self.values}"

    @property
    def place(self) -> str:
        return f"{'registers':<14}  of groups of K, loaded four groups ahead, by element"

    @property
    def of_values(self) -> str:
        return f" in groups of {self.values}"

    @property
    def parts(self) -> str:
        return "groups"

    def taken(self, expected: Sequence[Any]) -> str:
        return f"of groups of {self.values} of K they have {shown(expected)}"

    def beside(self, side: Side) -> tuple[Vector, ...]:
        dims = side.along(Dim(side.lines, Stride.OTHER), Dim(Extent.K_BLOCKS, Stride.OTHER))
        return tuple(
            Vector(name, f"{name} of the groups", dtype, dims, inner=side.k_axis)
            for name, dtype in zip(("scales", "zeros"), self.vectors, strict=False)
        )

    def sizes(self, side: Side, lines: Any, k: Any) -> dict[Extent, Any]:
        return {side.lines: lines, Extent.K_BLOCKS: k // self.values}

    def misfit(
        self, side: Side, shape: Sequence[Any], k: Any, groups: Any, given: Sequence[Sequence[Any]]
    ) -> str:
        if k % self.values != 0:
            return f"{side.name} is {shown(shape)}, and {k} is no multiple of its groups of {self.values}"
        return super().misfit(side, shape, k, groups, given)

    def applied(self, operand: Tensor, vectors: Sequence[Tensor], to: DType, rounded: Round) -> Tensor:
        def computed(values: Tensor, dtype: DType | None) -> Tensor:
            return values if dtype is None else rounded(values, dtype)

        scales, *zeros = (
            computed(each.float(), dtype).repeat_interleave(self.values, 0)
            for each, dtype in zip(vectors, (self.product, self.difference), strict=False)
        )
        values = operand.float()
        for zero in zeros:
            values = computed(values - zero, self.difference)
        return rounded(rounded(rounded(values, self.product) * scales, self.product), to)
