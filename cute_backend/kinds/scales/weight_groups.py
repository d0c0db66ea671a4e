"""Scales, and zeros, of a weight for each column and group of K."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cute_backend.dtypes import DType
from cute_backend.kinds.axes import Dim, Extent, Stride
from cute_backend.kinds.scales.vectors import Scales, Side, Vector, shown

if TYPE_CHECKING:
    from torch import Tensor

    from cute_backend.kinds.scales.vectors import Round

K_TILE_VALUES = 128
"""Values of K of a k tile of values of 8 bits."""

GROUP_SIZES = (32, 64, 128, 256)
"""The values of K in a group. Groups of fewer than `K_TILE_VALUES` divide a k tile, and others are whole k
tiles."""

_SCALES = (DType.F32, DType.BF16, DType.F16)

_INTEGERS = {DType.I8: (-128, 127), DType.U8: (0, 255)}
"""The least and the largest value of each integer dtype."""

_ZEROS = (*_SCALES, *_INTEGERS)

_ALL_INTEGERS = {DType.F32: 2**24, DType.BF16: 2**8, DType.F16: 2**11}
"""The magnitude up to which a dtype has all integers: two to the number of its significant bits."""


@dataclass(frozen=True)
class WeightGroups(Scales):
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

    @property
    def is_scaled_wide(self) -> bool:
        """Whether the product is one of fp32, which is rounded to the other operand's dtype then."""
        return self.product is DType.F32

    def subtracts_exactly(self, stored: DType) -> bool:
        """Whether no difference of a value of dtype `stored` and a zero is rounded: both are integers, and
        the dtype `difference` has all integers up to the largest difference. That is 255 if both have signs
        or neither has, and 383 otherwise, which bf16 has not."""
        if self.zero not in _INTEGERS or stored not in _INTEGERS or self.difference is None:
            return False
        (low, high), (least, most) = _INTEGERS[stored], _INTEGERS[self.zero]
        return max(high - least, most - low) <= _ALL_INTEGERS[self.difference]

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

    @property
    def words(self) -> str:
        return f"by {self.values}"

    @property
    def place(self) -> str:
        return f"{'registers':<14}  of groups of K, loaded four groups ahead, by element"

    @property
    def names(self) -> tuple[str, ...]:
        return ("DType", "WeightGroups")

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
