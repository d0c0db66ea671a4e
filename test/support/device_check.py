"""Compares results of the kernels of `device_rows` with references: to the bit, or within stated errors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_backend.ops import OPS
from cute_backend.spec import DType
from support.device_rows import Conversion, RowCase

MAX_ULP = {
    "div": 0.51,
    "div_floor": 0.51,
    "reciprocal": 0.51,
    "sqrt": 0.51,
    "rsqrt": 2.0,
    "pow": 4.0,
    "exp": 2.0,
    "exp2": 2.5,
    "expm1": 2.0,
    "log": 2.0,
    "log2": 2.0,
    "log10": 2.5,
    "log1p": 2.0,
    "sin": 2.5,
    "cos": 2.5,
    "tanh": 2.0,
    "sigmoid": 4.0,
    "logistic2": 4.0,
    "erf": 2.0,
    "gumbel": 16.0,
}
"""The largest error that each function may have, in ulps of a float64 reference. Other rows match their fp32
reference to the bit."""

_SIGN_OF_ZERO_IS_OPEN = ("maximum", "minimum", "fmax", "fmin", "relu")
_LARGEST = torch.finfo(torch.float32).max


def row_errors(cases: Sequence[RowCase], inputs: dict[str, Tensor], out: Tensor) -> dict[str, float]:
    """The largest error of each case, in ulps if MAX_ULP has its row. The tensors are on one device.

    Asserts that none exceeds its bound.
    """
    errors, complaints = {}, []
    for case, bits in zip(cases, out, strict=True):
        operands = [inputs[name] for name in case.names()]
        if case.name in MAX_ULP:
            error, allowed = _ulps(case, operands, bits.view(torch.float32)), _allowed(case, operands)
            errors[str(case)] = error[allowed < 2.0**23].max().item()
            wrong = ~(error <= allowed)
        else:
            errors[str(case)] = 0.0
            wrong = ~_same(case, operands, bits)
        if wrong.any():
            complaints.append(_complaint(case, operands, bits, wrong))
    assert not complaints, "\n".join(complaints)
    return errors


def _complaint(case: RowCase, operands: list[Tensor], bits: Tensor, wrong: Tensor) -> str:
    """The number of wrong results, the worst of them (without ulps, the first), and the error allowed."""
    got = bits.view(torch.float32) if case.result is DType.F32 else bits
    places = wrong.nonzero()[:, 0]
    said = f"{case}: {len(places)} of {len(wrong)} wrong"
    if case.name in MAX_ULP or (case.name in OPS and {*case.registers, case.result} == {DType.F32}):
        error = _ulps(case, operands, got)[places]
        places = places[error.argsort(descending=True)]
        said = f"{said}, by up to {error.max().item():.2f} ulp"
        operands = [operand.double() for operand in operands]
    worst = places[:4]
    picked = [operand[worst] for operand in operands]
    rule = f"MAX_ULP in test/support/device_check.py allows {MAX_ULP.get(case.name)}"
    if case.name not in MAX_ULP:
        rule = "without a line in MAX_ULP of test/support/device_check.py it must match its reference exactly"
    given, expected = [operand.tolist() for operand in picked], case.reference(*picked).tolist()
    return f"{said}, at {given}: {got[worst].tolist()}, not {expected}; {rule}"


def _same(case: RowCase, operands: list[Tensor], bits: Tensor) -> Tensor:
    expected = case.reference(*operands)
    if case.result is not DType.F32:
        return bits == expected.to(torch.int32)
    got = bits.view(torch.float32)
    equal = got == expected
    if case.name not in _SIGN_OF_ZERO_IS_OPEN:
        equal &= got.signbit() == expected.signbit()
    return equal | (got.isnan() & expected.isnan())


def _ulps(case: RowCase, operands: list[Tensor], got: Tensor) -> Tensor:
    """Errors in ulps of a float64 reference. They are infinite if special results differ."""
    exact = case.reference(*(operand.double() for operand in operands))
    nearest = exact.float()
    exponent = torch.frexp(exact.abs().clamp(2.0**-126, _LARGEST))[1] - 24
    error = (got.double() - exact).abs() / torch.exp2(exponent.double())
    special = nearest.isinf() | nearest.isnan() | (exact == 0)
    same = ((got == nearest) & (got.signbit() == nearest.signbit())) | (got.isnan() & nearest.isnan())
    return torch.where(special, torch.where(same, 0.0, torch.inf), error)


def _allowed(case: RowCase, operands: list[Tensor]) -> Tensor:
    """The error that each result may have, in ulps."""
    name, exact = case.name, case.reference(*(operand.double() for operand in operands))
    allowed = torch.full_like(exact, MAX_ULP[name])
    small = exact.abs() < 2.0**-100
    if name in ("div", "div_floor", "reciprocal", "sqrt"):
        # The remainder that corrects the result loses bits there.
        small |= operands[0].abs() < 2.0**-100
        return torch.where(small, 1.0, allowed)
    if name in ("sin", "cos"):
        # Beyond 2^50 the reduction has no correct bits, and only the bound of the result holds.
        return torch.where(operands[0].abs() < 2.0**50, allowed, torch.inf)
    if name in ("sigmoid", "logistic2"):
        # The sigmoid's product with log2(e) is rounded; below the normal range the reciprocal is flushed.
        if name == "sigmoid":
            allowed = torch.fmax(allowed, -1.5 * operands[0].double())
        return torch.where(exact < 2.0**-126, 2.0**24, allowed)
    if name == "gumbel":
        # Near 0 the logarithm's argument is near 1, and its error is absolute.
        return allowed / exact.abs().clamp(2.0**-24, 1.0)
    return allowed


def assert_converted(cases: Sequence[Conversion], inputs: dict[str, Tensor], out: Tensor) -> None:
    """Asserts that every conversion wrote exactly what `numerics` gives."""
    complaints = []
    for case, bits in zip(cases, out, strict=True):
        got, expected = case.decode(bits).double(), case.expected(inputs).double()
        same = (got == expected) & (got.signbit() == expected.signbit())
        wrong = ~(same | (got.isnan() & expected.isnan()))
        if wrong.any():
            worst = wrong.nonzero()[:4, 0]
            given = {name: tensor[worst].tolist() for name, tensor in inputs.items()}
            count = int(wrong.sum())
            complaints.append(f"{case}: {count} wrong, at {given}: {got[worst]}, not {expected[worst]}")
    assert not complaints, "\n".join(complaints)
