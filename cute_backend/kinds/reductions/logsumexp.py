"""log(sum(exp(x))), shifted by the largest x so that nothing overflows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

from cute_backend.kinds.reductions.kind import Part, ReductionKind, Values


def _shift(math: Any, top: Any) -> Any:
    """The value that is subtracted from exponents: the largest one, or 0 if that is infinite."""
    return math.where(math.isinf(top), 0.0, top)


def _exp(math: Any, value: Any) -> Any:
    """exp of a value that is not positive, or not finite, as a term of a sum.

    It takes one approximate instruction, within 2 ulp or |value| ulp.
    """
    return math.exp2(value * 1.4426950408889634, fastmath=True)


def _exponentials(math: Any, values: Sequence[Any]) -> Values:
    top = functools.reduce(math.maximum, values)
    shift = _shift(math, top)
    return top, functools.reduce(operator.add, [_exp(math, value - shift) for value in values])


def _sum_of_exponentials(math: Any, a: Values, b: Values) -> Values:
    top = math.maximum(a[0], b[0])
    shift = _shift(math, top)

    def shifted(part: Values) -> Any:
        # An infinite top was not subtracted from the exponents; its total is 0 or infinite, and stays so.
        return part[1] * _exp(math, math.fmin(_shift(math, part[0]) - shift, 0.0))

    return top, shifted(a) + shifted(b)


LOGSUMEXP = ReductionKind(
    name="logsumexp",
    parts=(Part("_top", -float("inf")), Part("_total", 0.0)),
    element=lambda math, value, place: _exponentials(math, [value]),
    combine=_sum_of_exponentials,
    result=lambda math, whole, count: math.log(whole[1]) + _shift(math, whole[0]),
    several=_exponentials,
    reference=lambda rows, accumulate: rows.to(accumulate).logsumexp(-1).float(),
    aten=("aten.logsumexp.default",),
    drawn=("{0}.logsumexp(@)",),
)
