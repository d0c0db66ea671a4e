"""Kinds by their own arithmetic: that of a kernel, on torch's tensors, beside each kind's reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cute_backend.dtypes import VALUE_DTYPES, DType
from cute_backend.errors import SpecError
from cute_backend.kinds import reductions
from cute_backend.kinds.reductions import REDUCTIONS, ReductionKind, Values
from cute_backend.spec import EpilogueSpec
from support.small_specs import row_maximum, spec_of

INF, NAN = float("inf"), float("nan")
VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 88.0, -3e4, 1e-30, INF, -INF, NAN])


def _where(condition: Tensor, chosen: Any, other: Any) -> Tensor:
    kind = chosen if isinstance(chosen, Tensor) else other
    return torch.where(
        condition, torch.as_tensor(chosen).to(kind.dtype), torch.as_tensor(other).to(kind.dtype)
    )


def _extremum(a: Any, b: Any, sign: int, ignores_nan: bool = False) -> Tensor:
    """torch's extremum, with +0 above -0."""
    a, b = torch.as_tensor(a, dtype=torch.float32), torch.as_tensor(b, dtype=torch.float32)
    if ignores_nan:
        return torch.fmin(a, b)
    larger = torch.maximum(sign * a, sign * b)
    zeros = torch.maximum(torch.copysign(torch.ones(()), sign * a), torch.copysign(torch.ones(()), sign * b))
    return sign * torch.where(larger == 0, torch.copysign(larger, zeros), larger)


MATH = SimpleNamespace(
    where=_where,
    maximum=lambda a, b: _extremum(a, b, 1),
    minimum=lambda a, b: _extremum(a, b, -1),
    fmin=lambda a, b: _extremum(a, b, -1, ignores_nan=True),
    isinf=torch.isinf,
    exp2=lambda x, fastmath: torch.exp2(x),
    log=torch.log,
    div=torch.div,
    logical_not=torch.logical_not,
    to_f32=lambda x: x.float(),
    to_i32=lambda x: x.int(),
)
"""The functions of `device_math` that kinds of reductions use, on tensors."""


def identity(kind: ReductionKind) -> Values:
    dtypes = {DType.F32: torch.float32, DType.I32: torch.int32}
    return tuple(torch.tensor(part.identity, dtype=dtypes[part.dtype]) for part in kind.parts)


def combined(kind: ReductionKind, row: list[float], order: list[int]) -> Tensor:
    """The reduction of a row whose elements are combined in a random tree."""
    partials = [
        kind.element(MATH, torch.tensor(row[place]), torch.tensor(place, dtype=torch.int32))
        for place in order
    ]
    partials = [identity(kind), *partials]
    while len(partials) > 1:
        at = (7 * len(partials) + order[0]) % (len(partials) - 1)
        partials[at : at + 2] = [kind.combine(MATH, partials[at], partials[at + 1])]
    return kind.result(MATH, partials[0], torch.tensor(len(row)))


@pytest.mark.parametrize("kind", REDUCTIONS)
@given(row=st.lists(VALUES, min_size=1, max_size=9), draw=st.randoms(use_true_random=False))
def test_the_arithmetic_of_a_kernel_is_the_reference(
    kind: ReductionKind, row: list[float], draw: Any
) -> None:
    if kind is reductions.PROD:
        row = [max(min(value, 2.0), -2.0) if value == value else value for value in row]
    order = draw.sample(range(len(row)), len(row))
    expected = kind.reference(torch.tensor([row]), torch.float32)[0]
    got = combined(kind, row, order).to(expected.dtype)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("kind", [kind for kind in REDUCTIONS if kind.several or kind.follow])
@given(row=st.lists(VALUES, min_size=1, max_size=9))
def test_shorter_ways_agree(kind: ReductionKind, row: list[float]) -> None:
    """Several values at once, and elements in the order of their places."""
    values, inside = [torch.tensor(value) for value in row], torch.tensor(True)
    if kind.several is not None:
        whole = kind.combine(MATH, identity(kind), kind.several(MATH, values))
    else:
        assert kind.follow is not None
        whole = identity(kind)
        for place, value in enumerate(values):
            element = kind.element(MATH, value, torch.tensor(place, dtype=torch.int32))
            whole = kind.follow(MATH, whole, element, inside)
            beyond = kind.follow(MATH, whole, (torch.tensor(NAN), element[1]), ~inside)
            assert all(torch.equal(a, b) or a.isnan() for a, b in zip(beyond, whole, strict=True))
    expected = kind.reference(torch.tensor([row]), torch.float32)[0]
    got = kind.result(MATH, whole, torch.tensor(len(row))).to(expected.dtype)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_names_and_calls_belong_to_one_kind() -> None:
    assert len({kind.name for kind in REDUCTIONS}) == len(REDUCTIONS)
    uses = [
        (call, dtype, of)
        for kind in REDUCTIONS
        for call in kind.aten
        for of in VALUE_DTYPES
        for dtype in kind.stored_as(of)
    ]
    assert len(set(uses)) == len(uses)


def test_a_spec_has_the_name_alone() -> None:
    spec = spec_of(dtype=DType.BF16)
    spec = EpilogueSpec(spec.accumulators, spec.loads, spec.ops, (*spec.stores, row_maximum()))
    text = spec.to_json()
    assert '"kind":"max"' in text.replace(" ", "") and EpilogueSpec.from_json(text) == spec
    with pytest.raises(SpecError, match="no reduction is called 'largest'; there are sum, mean"):
        EpilogueSpec.from_json(text.replace('"max"', '"largest"'))
