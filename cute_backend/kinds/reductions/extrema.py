"""The largest and the smallest element, as torch has them, but with an order of zeros.

A NaN wins over all numbers. The larger of two zeros is +0, so the result does not depend on the order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_backend.dtypes import DType
from cute_backend.kinds.reductions.kind import Part, ReductionKind, floats

if TYPE_CHECKING:
    from torch import Tensor

_INFINITY = float("inf")

_NAN = 2**31 - 1
"""The key of NaN: the largest int32."""


def _floats_or_own(value: DType) -> tuple[DType, ...]:
    """Extrema of integers keep their dtype."""
    return floats(value) if value.is_float else (*floats(value), value)


def ordered(value: Tensor) -> Tensor:
    """fp32 as int32 that compare as the numbers do, -0 below +0, with NaN above all of them."""
    import torch  # here, since planning works without it

    bits = value.contiguous().view(torch.int32)
    return torch.where(value.isnan(), _NAN, bits ^ ((bits >> 31) & 0x7FFFFFFF))


def _largest(rows: Tensor) -> Tensor:
    import torch

    key = ordered(rows).amax(-1)
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return torch.where(key == _NAN, torch.nan, bits.contiguous().view(torch.float32))


MAX = ReductionKind(
    name="max",
    parts=(Part("_max", -_INFINITY),),
    combine=lambda math, a, b: (math.maximum(a[0], b[0]),),
    reference=lambda rows, accumulate: _largest(rows),
    stored_as=_floats_or_own,
    is_element=True,
    of_blocks=True,
    words_of={"abs": "amax", "picked": "pick"},
    aten=("aten.amax.default", "aten.max.default", ("aten.max.dim", 0)),
    drawn=("{0}.amax(@)", "({0} > 0).any(@)", "{0}.max(@).values"),
)

MIN = ReductionKind(
    name="min",
    parts=(Part("_min", _INFINITY),),
    combine=lambda math, a, b: (math.minimum(a[0], b[0]),),
    reference=lambda rows, accumulate: -_largest(-rows),
    stored_as=_floats_or_own,
    is_element=True,
    of_blocks=True,
    aten=("aten.amin.default", "aten.min.default", ("aten.min.dim", 0)),
    drawn=("{0}.amin(@)", "{0}.min(@).values"),
)
