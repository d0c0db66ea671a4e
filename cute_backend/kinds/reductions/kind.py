"""The face of a kind of reduction: how it combines elements, its reference, and where it may be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cute_backend.dtypes import VALUE_DTYPES, DType
from cute_backend.kinds.kind import Kind

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Values = tuple[Any, ...]
"""A partial: a number for each of its parts."""


@dataclass(frozen=True)
class Part:
    """One number of a partial."""

    name: str
    """The end of the name of its tensor in the workspace."""
    identity: float
    """Its value in the partial of no elements."""
    dtype: DType = DType.F32
    """F32, or I32, which is I64 if the whole plane is reduced."""


def floats(value: DType) -> tuple[DType, ...]:
    """The dtypes that a number in fp32 is stored as, whatever the dtype of the elements."""
    return tuple(dtype for dtype in VALUE_DTYPES if dtype.is_float)


@dataclass(frozen=True, eq=False, repr=False)
class ReductionKind(Kind):
    """How a reduction combines elements, which are fp32; a bool is 1.0 or 0.0.

    `element`, `combine`, `result`, `several` and `follow` are the arithmetic of a kernel. Their first
    argument, `math`, has the functions of `memory_ops/device_math.py`, and numbers have Python's operators.
    Elements beyond the plane are left out. `test/test_kinds.py` runs the same arithmetic on torch's tensors,
    in random orders, beside `reference`; a function that its `MATH` lacks is added there.
    """

    name: str
    """Its name in the JSON form of a spec, in formulas and in the names of kernels. Generated modules have it
    in capitals."""
    parts: tuple[Part, ...]
    combine: Callable[[Any, Values, Values], Values]
    """The partial of the elements of two partials."""
    reference: Callable[[Tensor, torch.dtype], Tensor]
    """The reduction of each row of an fp32 tensor (rows, elements), by aten: (rows,), fp32 or int64. Sums are
    computed in the dtype that is given."""
    element: Callable[[Any, Any, Any], Values] = lambda math, value, place: (value,)
    """The partial of one element: its value and its place."""
    result: Callable[[Any, Values, Any], Any] = lambda math, whole, count: whole[0]
    """The result of the partial of all elements, whose number is `count`, an int64."""
    several: Callable[[Any, Sequence[Any]], Values] | None = None
    """The partial of several values, if that is cheaper than to combine theirs one by one. Elements beyond
    the plane have the value of the first part's identity."""
    follow: Callable[[Any, Values, Values, Any], Values] | None = None
    """Combines a partial with that of an element of a higher place, which is ignored if it is not inside the
    plane; a kind has it if it is cheaper than `combine`."""
    stored_as: Callable[[DType], tuple[DType, ...]] = floats
    """The dtypes that a store of it may have, from the dtype of the elements; none if it has no such
    elements. Whole numbers are stored as int64 alone, as torch's are."""
    is_place: bool = False
    """Whether the result is the place of an element."""
    is_element: bool = False
    """Whether the result is one of the elements, so that one that is stored as it was rounded stays as it
    is."""
    of_blocks: bool = False
    """Whether ops may reduce the columns of a block by it, as the value of each of these."""
    words_of: Mapping[str, str | None] = field(default_factory=dict)
    """Its words in the names of kernels for the results of some ops, for a value that was `picked` from a row
    by its column, and for one with `noise`, in place of its name. None if the name of the op says it."""
    aten: tuple[str | tuple[str, int], ...] = ()
    """The calls that compute it, whose arguments are `self`, the axes and, for some, `dtype`: targets, or a
    target with the number of its result. Kinds that share a call differ in the dtypes of `stored_as`; a
    refusal names the first of them in `REDUCTIONS`."""
    drawn: tuple[str, ...] = ()
    """How random programs spell it: texts with `@` for the axes."""
    drawn_element: str = ""
    """The reduction that gives the element whose place this one gives, spelled in the same way."""
