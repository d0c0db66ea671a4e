"""The place of the largest or the smallest element: the lowest of equal ones, or the first NaN's.

A place is the column in a row, the row in a column, and row * N + column in the plane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cute_backend.dtypes import DType
from cute_backend.kinds.reductions.extrema import ordered
from cute_backend.kinds.reductions.kind import Part, ReductionKind, Values

if TYPE_CHECKING:
    from torch import Tensor

_PARTS = (Part("_key", -float("inf")), Part("_index", 0, DType.I32))
"""A key and its place. The partial of no elements has place 0, which is also the result if no key is above
-inf."""


def _above(math: Any, a: Any, b: Any) -> Any:
    """Whether a counts as the larger: NaN is above all numbers, zeros are equal."""
    return math.logical_not(a <= b) & (b == b)


def _largest(math: Any, a: Values, b: Values) -> Values:
    """The partial with the larger key or, if the keys are equal, the one with the lower place."""
    equal = math.logical_not(_above(math, a[0], b[0]))
    later = _above(math, b[0], a[0]) | (equal & (b[1] < a[1]))
    return math.where(later, b[0], a[0]), math.where(later, b[1], a[1])


def _first_largest(math: Any, a: Values, b: Values, inside: Any) -> Values:
    """`_largest` of a and b, where b has the higher place, or a if b is not inside."""
    later = inside & _above(math, b[0], a[0])
    return math.where(later, b[0], a[0]), math.where(later, b[1], a[1])


def _first_of_largest(rows: Tensor) -> Tensor:
    import torch  # here, since planning works without it

    keys = ordered(rows + 0.0)  # -0 becomes +0: they are equal, and of equals the first counts
    columns = torch.arange(rows.shape[-1], device=rows.device)
    return torch.where(keys == keys.amax(-1, keepdim=True), columns, rows.shape[-1]).amin(-1)


ARGMAX = ReductionKind(
    name="argmax",
    parts=_PARTS,
    element=lambda math, value, place: (value, place),
    combine=_largest,
    result=lambda math, whole, count: whole[1],
    follow=_first_largest,
    reference=lambda rows, accumulate: _first_of_largest(rows),
    stored_as=lambda value: (DType.I64,),
    is_place=True,
    words_of={"noise": None},
    aten=("aten.argmax.default", ("aten.max.dim", 1)),
    drawn=("{0}.argmax(@)", "{0}.max(@).indices"),
    drawn_element="{0}.amax(@, keepdim=True)",
)

ARGMIN = ReductionKind(
    name="argmin",
    parts=_PARTS,
    element=lambda math, value, place: (-value, place),
    combine=_largest,
    result=lambda math, whole, count: whole[1],
    follow=_first_largest,
    reference=lambda rows, accumulate: _first_of_largest(-rows),
    stored_as=lambda value: (DType.I64,),
    is_place=True,
    aten=("aten.argmin.default", ("aten.min.dim", 1)),
    drawn=("{0}.argmin(@)",),
    drawn_element="{0}.amin(@, keepdim=True)",
)
