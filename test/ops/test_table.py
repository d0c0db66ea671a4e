"""The table's rows against torch's own ops, on special values and under every type promotion."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_backend import numerics
from cute_backend.kinds.blocks import BLOCK_OPS
from cute_backend.ops import (
    OPS,
    SPECIAL,
    OperandError,
    OperandRule,
    PointwiseOp,
    by_aten,
    cast_expression,
    check,
    conversion_expression,
    effective_dtype,
    promote,
    result_dtype,
)
from cute_backend.spec import (
    Accumulator,
    Const,
    DType,
    EpilogueSpec,
    Op,
    Overflow,
    Precision,
    SpecError,
    Store,
)
from support.op_samples import operands

ROWS = [row for row in OPS.values() if row not in SPECIAL]
TARGETS = [(row, target) for row in ROWS for target in row.aten]
DTYPES = (DType.F32, DType.BF16, DType.F16, DType.I8, DType.U8, DType.I32, DType.BOOL)
FROM_TORCH = {torch_dtype: dtype for dtype, torch_dtype in numerics.TORCH_DTYPES.items()}
NUMBERS = (2.5, -0.0, float("nan"), float("inf"), 3, -2, True)

_LOOSE = {
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos"), 1e-38),
    **dict.fromkeys(("tanh", "sigmoid", "logistic2", "pow", "rsqrt", "sqrt"), 1e-38),
    "erf": 4e-7,
}
"""Rows on whose last bits torch's own vectorised and scalar loops disagree, with an absolute tolerance."""


def aten(target: str) -> Callable[..., Tensor]:
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def placeholders(text: str) -> set[str]:
    return {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}


@pytest.mark.parametrize("row", OPS.values(), ids=OPS)
def test_a_row_is_consistent(row: PointwiseOp) -> None:
    fields = {str(index) for index in range(row.arity)}
    words = BLOCK_OPS[row.name].words(32) if row.name in BLOCK_OPS else row.formula
    assert placeholders(words) == fields
    expressions = [text for text in (row.cute, row.cute_int, row.cute_bool) if text is not None]
    assert all(placeholders(text) == fields for text in expressions)
    assert bool(expressions) != (row in SPECIAL)
    for target in row.aten:
        assert by_aten(target) is row
        required = [arg for arg in aten(target)._schema.arguments if not arg.kwarg_only]
        assert len(required) >= row.arity
        assert all(arg.has_default_value() for arg in required[row.arity :])


def test_no_target_has_two_rows() -> None:
    targets = [target for _, target in TARGETS]
    assert len(set(targets)) == len(targets)
    assert by_aten("aten.mm.default") is None


@dataclass(frozen=True)
class Call:
    """An eager call: dtypes or numbers as operands."""

    row: PointwiseOp
    target: str
    operands: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.target}({', '.join(getattr(item, 'value', str(item)) for item in self.operands)})"


def _choices(schema_argument: Any) -> tuple[Any, ...]:
    return NUMBERS if str(schema_argument.type) in ("number", "Optional[number]") else DTYPES


def _calls() -> list[Call]:
    calls = []
    for row, target in TARGETS:
        arguments = aten(target)._schema.arguments[: row.arity]
        for picked in product(*(_choices(argument) for argument in arguments)):
            if sum(isinstance(item, DType) for item in picked) == 0:
                continue
            if row.arity == 3 and len(set(picked[1:])) > 1 and picked[0] is not DType.BOOL:
                continue
            if target.startswith("prims.") and len(set(picked[-2:])) > 1:
                continue
            if DType.I32 in picked and not {DType.BF16, DType.F16}.isdisjoint(picked):
                continue  # torch rounds the integers to the 16-bit float first: a cast, which is the walker's
            if DType.U8 in picked and -2 in picked:
                continue  # torch wraps a number to the tensor's dtype first: likewise
            calls.append(Call(row, target, picked))
    return calls


def _eager(call: Call) -> tuple[Tensor, list[Tensor | Any]] | None:
    """Eager's result and the operands in registers, or None if torch refuses the operands."""
    registers = tuple(item.register for item in call.operands if isinstance(item, DType))
    samples = iter(operands(registers, count=64))
    given: list[Any] = []
    held: list[Any] = []
    for item in call.operands:
        if isinstance(item, DType):
            stored = numerics.store(next(samples), item)
            given.append(stored)
            held.append(numerics.widen(stored, item))
        else:
            given.append(item)
            held.append(item)
    try:
        return aten(call.target)(*given), held
    except (RuntimeError, ValueError, TypeError):
        return None


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_rows_against_eager(row: PointwiseOp) -> None:
    """The row's reference, on operands brought together as `promote` says, is what eager computes."""
    compared = 0
    for call in (call for call in _calls() if call.row is row):
        outcome = _eager(call)
        if outcome is None or outcome[0].dtype not in FROM_TORCH:
            continue
        expected, held = outcome
        dtypes = [item if isinstance(item, DType) else Const(item).dtype for item in call.operands]
        try:
            registers = promote(row, dtypes)
        except OperandError:
            continue
        brought = [
            numerics.convert(value, register)
            if isinstance(value, Tensor)
            else torch.tensor(value, dtype=numerics.TORCH_DTYPES[register])
            for value, register in zip(held, registers, strict=True)
        ]
        target_dtype = FROM_TORCH[expected.dtype]
        assert result_dtype(row, dtypes) is target_dtype.register, str(call)
        result = row.reference(*brought)
        assert result.dtype == numerics.TORCH_DTYPES[target_dtype.register], str(call)
        rounded = numerics.store(result, target_dtype).expand_as(expected)
        relative = 2 * torch.finfo(expected.dtype).eps if row.name in _LOOSE else 0.0
        absolute = _LOOSE.get(row.name, 0.0)
        try:
            torch.testing.assert_close(rounded, expected, rtol=relative, atol=absolute, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(f"{call}: {error}") from error
        if expected.is_floating_point() and row.name not in ("maximum", "minimum", "fmax", "fmin"):
            signs = rounded.signbit() == expected.signbit()
            assert bool((signs | expected.isnan()).all()), f"{call}: signs of zeros differ"
        compared += 1
    assert compared > 0 or not row.aten


@pytest.mark.parametrize("mode", ["trunc", "floor"])
def test_divisions_with_a_rounding_mode(mode: str) -> None:
    a, b = operands((DType.F32, DType.F32))
    expected = torch.div(a, b, rounding_mode=mode)
    torch.testing.assert_close(OPS[f"div_{mode}"].reference(a, b), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "name, dtypes, registers, result",
    [
        ("add", (DType.BF16, DType.I8), (DType.F32, DType.F32), DType.F32),
        ("add", (DType.U8, DType.BOOL), (DType.I32, DType.I32), DType.I32),
        ("add", (DType.BOOL, DType.BOOL), (DType.BOOL, DType.BOOL), DType.BOOL),
        ("div", (DType.I32, DType.I8), (DType.F32, DType.F32), DType.F32),
        ("lt", (DType.BOOL, DType.BOOL), (DType.I32, DType.I32), DType.BOOL),
        ("logical_or", (DType.F32, DType.I32), (DType.BOOL, DType.BOOL), DType.BOOL),
        ("where", (DType.F32, DType.I8, DType.BOOL), (DType.BOOL, DType.I32, DType.I32), DType.I32),
        ("where", (DType.BOOL, DType.E4M3, DType.I32), (DType.BOOL, DType.F32, DType.F32), DType.F32),
        ("isnan", (DType.I32,), (DType.F32,), DType.BOOL),
        ("bitwise_and", (DType.BOOL, DType.I32), (DType.I32, DType.I32), DType.I32),
    ],
)
def test_promotion(name: str, dtypes: tuple[DType, ...], registers: tuple[DType, ...], result: DType) -> None:
    assert promote(OPS[name], dtypes) == registers
    assert result_dtype(OPS[name], dtypes) is result


@pytest.mark.parametrize(
    "name, dtypes, message",
    [
        ("pow", (DType.I32, DType.I32), r"pow is not defined on \(i32, i32\)"),
        ("bitwise_xor", (DType.F32, DType.BOOL), r"bitwise_xor is not defined on \(f32, bool\)"),
        ("sub", (DType.BOOL, DType.BOOL), r"sub is not defined on \(bool, bool\)"),
        ("neg", (DType.BOOL,), r"neg is not defined on \(bool\)"),
        ("add", (DType.F32,), "add takes 2 operands, not 1"),
    ],
)
def test_operands_that_a_row_does_not_take(name: str, dtypes: tuple[DType, ...], message: str) -> None:
    with pytest.raises(OperandError, match=message):
        result_dtype(OPS[name], dtypes)


@pytest.mark.parametrize(
    "source, target, overflow, expression",
    [
        (DType.F32, DType.BF16, Overflow.SATURATE, "math.round_to_bf16(x)"),
        (DType.I32, DType.E4M3, Overflow.SATURATE, "math.round_to_e4m3(math.to_f32(x))"),
        (DType.F32, DType.E5M2, Overflow.NONFINITE, "math.round_to_e5m2(x, saturate=False)"),
        (DType.F32, DType.U8, Overflow.SATURATE, "math.wrap_to_u8(math.to_i32(x))"),
        (DType.BOOL, DType.F32, Overflow.SATURATE, "math.to_f32(x)"),
        (DType.BF16, DType.BOOL, Overflow.SATURATE, "math.to_bool(x)"),
        (DType.E4M3, DType.F32, Overflow.SATURATE, "x"),
    ],
)
def test_cast_expressions(source: DType, target: DType, overflow: Overflow, expression: str) -> None:
    assert cast_expression("x", source, target, overflow) == expression


def test_conversions_between_registers() -> None:
    assert conversion_expression("x", DType.I32, DType.I32) == "x"
    assert conversion_expression("x", DType.I32, DType.BOOL) == "math.to_bool(x)"


@pytest.mark.parametrize("dtype", DType)
def test_what_a_cast_rounds_to(dtype: DType) -> None:
    op = Op("t0", "cast", ("acc",), dtype)
    assert effective_dtype(op, Precision.EAGER) is dtype
    fused = DType.F32 if dtype in (DType.BF16, DType.F16) else dtype
    assert effective_dtype(op, Precision.FUSED) is fused


@pytest.mark.parametrize(
    "op, message",
    [
        (
            Op("t0", "softmax", ("acc",), DType.F32),
            "t0 = softmax: there is no such op; the table has add, sub",
        ),
        (Op("t0", "add", ("acc",), DType.F32), "t0: add takes 2 operands, not 1"),
        (Op("t0", "lt", ("acc", Const(0)), DType.F32), "t0 = lt gives bool, but the spec says f32"),
        (Op("t0", "bitwise_not", ("acc",), DType.F32), r"t0: bitwise_not is not defined on \(f32\)"),
    ],
)
def test_a_spec_that_contradicts_the_table(op: Op, message: str) -> None:
    accumulator = Accumulator("acc", DType.BF16, DType.BF16)
    spec = EpilogueSpec((accumulator,), (), (op,), (Store("out0", "t0", DType.BF16),))
    with pytest.raises(SpecError, match=message):
        check(spec)


def test_every_device_function_is_named_by_the_table_alone() -> None:
    """Expressions call functions of `math` and of `noise` that exist, and no other name."""
    libraries = {
        name: pytest.importorskip(f"cute_backend.memory_ops.device_{name}").__all__
        for name in ("math", "noise")
    }
    texts = [text for row in ROWS for text in (row.cute, row.cute_int, row.cute_bool) if text]
    called = {name for text in texts for name in re.findall(r"([\w.]+)\(", text)}
    assert called <= {f"{library}.{name}" for library, names in libraries.items() for name in names}
    rules = {row.operands for row in ROWS}
    assert rules == set(OperandRule)
