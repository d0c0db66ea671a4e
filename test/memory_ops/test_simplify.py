"""Rewrites keep the values and drop what they promise to drop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cute_backend.memory_ops.simplify import simplify
from cute_backend.replay import replay
from cute_backend.runtime.arguments.operands import parse_spec
from cute_backend.simulator.simulate import run_with
from cute_backend.spec import (
    Accumulator,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Op,
    Overflow,
    Precision,
    Store,
    Stride,
)
from support.epilogues import EPILOGUES, Problem

ACC = (Accumulator("acc", DType.BF16, DType.BF16),)


def spec_of(*ops: tuple, value: str, precision: Precision = Precision.FUSED) -> EpilogueSpec:
    rows = tuple(Op(name, op, tuple(operands), DType.F32) for name, op, *operands in ops)
    return EpilogueSpec(ACC, (), rows, (Store("out0", value, DType.F32),), precision)


def evaluate(spec: EpilogueSpec, x: torch.Tensor) -> torch.Tensor:
    """The chain on given accumulators: A is a column of ones and B a row."""
    ones = torch.ones(1, 1, dtype=torch.bfloat16)
    return replay(spec, [ones], [x[None].bfloat16()], [])[0][0]


INF, NAN = float("inf"), float("nan")
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 20.0, -20.0, 200.0, -200.0, INF, -INF, NAN])

SILU = [("n", "neg", "acc"), ("e", "exp", "n"), ("d", "add", "e", Const(1)), ("y", "div", "acc", "d")]
SIGMOID = [*SILU[:3], ("y", "div", Const(1.0), "d")]
RECIPROCAL = [*SILU[:2], ("d", "add", Const(1.0), "e"), ("y", "reciprocal", "d")]
TANH = [("t", "tanh", "acc"), ("y", "add", "t", Const(1.0))]
GELU = [
    ("half", "mul", "acc", Const(0.5)),
    ("square", "mul", "acc", "acc"),
    ("cube", "mul", "square", "acc"),
    ("small", "mul", "cube", Const(0.044715)),
    ("sum", "add", "acc", "small"),
    ("u", "mul", "sum", Const(0.7978845608028654)),
    ("t", "tanh", "u"),
    ("one", "add", "t", Const(1)),
    ("y", "mul", "half", "one"),
]


@pytest.mark.parametrize(
    ("ops", "left"),
    [
        (SILU, ["mul", "logistic2", "mul"]),
        (SIGMOID, ["mul", "logistic2"]),
        (RECIPROCAL, ["mul", "logistic2"]),
        (TANH, ["mul", "logistic2", "mul"]),
        (GELU, ["mul", "mul", "add", "mul", "logistic2", "mul"]),
    ],
)
def test_pattern_becomes_a_sigmoid_of_equal_values(ops: list, left: list[str]) -> None:
    spec = spec_of(*ops, value="y")
    simple = simplify(spec)
    assert [op.op for op in simple.ops] == left
    x = torch.cat([SPECIAL, torch.randn(1000)])
    torch.testing.assert_close(evaluate(simple, x), evaluate(spec, x), rtol=2e-6, atol=2e-7, equal_nan=True)


def test_one_plus_tanh_keeps_the_digits_that_the_sum_cancels() -> None:
    spec = spec_of(*TANH, value="y")
    x = torch.linspace(-8, -2, 25).bfloat16().double()
    exact = 1 + torch.tanh(x)
    error = ((evaluate(simplify(spec), x).double() - exact) / exact).abs().max()
    assert error < 1e-6 < ((evaluate(spec, x).double() - exact) / exact).abs().max()


@pytest.mark.parametrize(
    "ops",
    [
        [("e", "exp", "acc"), ("d", "add", "e", Const(1)), ("y", "div", "acc", "d")],
        [*SILU[:2], ("d", "add", "e", Const(2)), ("y", "div", "acc", "d")],
        [*SILU[:2], ("d", "sub", "e", Const(1)), ("y", "div", "acc", "d")],
        [("t", "tanh", "acc"), ("y", "add", "t", Const(2.0))],
    ],
)
def test_a_near_miss_is_left_alone(ops: list) -> None:
    spec = spec_of(*ops, value="y")
    assert simplify(spec) == spec


def test_a_negation_that_wraps_is_left_alone() -> None:
    """-(-2^31) is -2^31 in int32, whose exponential is 0 and not infinity."""
    whole = Load("exact0", LoadKind.EXACT, DType.I32, Stride.OTHER, Stride.ONE)
    rows = [("n", "neg", "exact0", DType.I32), ("e", "exp", "n", DType.F32), ("d", "add", "e", DType.F32)]
    ops = [Op(name, op, (x, Const(1.0)) if op == "add" else (x,), dtype) for name, op, x, dtype in rows]
    ops.append(Op("y", "div", ("acc", "d"), DType.F32))
    spec = EpilogueSpec(ACC, (whole,), tuple(ops), (Store("out0", "y", DType.F32),))
    one, lowest = torch.ones(1, 1).bfloat16(), torch.full((1, 1), -(2**31), dtype=torch.int32)
    assert replay(simplify(spec), [one], [one], [lowest])[0].item() == 1


def test_an_op_that_something_else_reads_stays() -> None:
    spec = spec_of(*SILU, ("z", "mul", "y", "e"), value="z")
    assert [op.op for op in simplify(spec).ops] == ["neg", "exp", "mul", "logistic2", "mul", "mul"]


def test_casts_go_only_where_they_round_nothing() -> None:
    ops = (
        Op("h", "cast", ("acc",), DType.BF16),
        Op("q", "cast", ("h",), DType.E4M3),
        Op("y", "neg", ("q",), DType.F32),
    )
    for precision, left in ((Precision.FUSED, ["q", "y"]), (Precision.EAGER, ["h", "q", "y"])):
        spec = EpilogueSpec(ACC, (), ops, (Store("out0", "y", DType.F32),), precision)
        assert [op.name for op in simplify(spec).ops] == left


@pytest.mark.parametrize("name", EPILOGUES)
def test_shared_epilogues_keep_their_values(name: str) -> None:
    epilogue = EPILOGUES[name]

    def execute(a: list[Tensor], b: list[Tensor], loads: list[Tensor], text: str) -> list[Tensor]:
        spec = parse_spec(text)
        simple = simplify(spec)
        assert simple.loads == spec.loads
        kept = [(store.name, store.dtype) for store in simple.stores]
        assert kept == [(store.name, store.dtype) for store in spec.stores]
        before = replay(spec, a, b, loads)
        for right, after in zip(before, replay(simple, a, b, loads), strict=True):
            torch.testing.assert_close(after.float(), right.float(), rtol=1e-2, atol=1e-2)
        return before

    run_with(epilogue.fn, epilogue.inputs(Problem(32, 32, 32)), execute)


HALF, QUARTER, THIRD = Const(0.5), Const(0.25), Const(1 / 3)


@pytest.mark.parametrize(
    ("ops", "left"),
    [
        ([("a", "mul", "acc", THIRD), ("y", "mul", "a", HALF)], [("mul", "acc", Const(1 / 6))]),
        ([("a", "mul", "acc", HALF), ("y", "mul", "a", THIRD)], [("mul", "acc", Const(1 / 6))]),
        (
            [
                ("r", "relu", "acc"),
                ("a", "mul", "acc", HALF),
                ("b", "mul", "r", Const(2.0)),
                ("y", "mul", "a", "b"),
            ],
            [("relu", "acc"), ("mul", "acc", "r")],
        ),
        (
            [
                ("r", "relu", "acc"),
                ("a", "mul", "acc", HALF),
                ("b", "mul", "r", HALF),
                ("y", "mul", "a", "b"),
            ],
            [("relu", "acc"), ("mul", "acc", "r"), ("mul", "y_product", QUARTER)],
        ),
        (
            [("a", "mul", "acc", THIRD), ("y", "sigmoid", "a")],
            [("mul", "acc", Const(math.log2(math.e) / 3)), ("logistic2", "y_argument")],
        ),
    ],
)
def test_numbers_are_gathered(ops: list, left: list) -> None:
    spec = spec_of(*ops, value="y")
    simple = simplify(spec)
    assert [(op.op, *op.operands) for op in simple.ops] == left
    x = torch.cat([SPECIAL, torch.randn(1000)])
    torch.testing.assert_close(evaluate(simple, x), evaluate(spec, x), rtol=4e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "ops",
    [
        [("a", "mul", "acc", THIRD), ("y", "mul", "a", THIRD)],
        [("a", "mul", "acc", Const(2.0**100)), ("y", "mul", "a", Const(2.0**100))],
        [("r", "relu", "acc"), ("a", "mul", "acc", THIRD), ("b", "mul", "r", HALF), ("y", "mul", "a", "b")],
        [("a", "mul", "acc", HALF), ("b", "add", "a", HALF), ("y", "mul", "b", THIRD)],
    ],
)
def test_numbers_that_would_round_otherwise_stay(ops: list) -> None:
    spec = spec_of(*ops, value="y")
    assert simplify(spec) == spec


def test_the_expression_of_a_folded_number_is_its_value() -> None:
    folded: dict[float, str] = {}
    ops = [("a", "mul", "acc", Const(0.7978846)), ("t", "tanh", "a"), ("y", "add", "t", Const(1.0))]
    simple = simplify(spec_of(*ops, value="y"), folded)
    (number,) = (float(op.operands[1].value) for op in simple.ops if op.name.endswith("argument"))
    assert folded[number] == "0.7978846 * 2 * log2(e)"
    for value, text in folded.items():
        assert eval(text, {"log2": math.log2, "e": math.e}) == pytest.approx(value)


def test_no_factor_is_taken_out_where_infinities_would_differ() -> None:
    product = [("r", "relu", "acc"), ("p", "mul", "r", "acc"), ("s", "mul", "p", HALF)]
    spec = spec_of(*product, ("t", "add", "acc", "s"), ("y", "sigmoid", "t"), value="y")
    assert [op.op for op in simplify(spec).ops] == ["relu", "mul", "mul", "add", "mul", "logistic2"]


def quantised(low: float, high: float, overflow: Overflow = Overflow.SATURATE) -> EpilogueSpec:
    ops = (
        Op("low", "maximum", ("acc", Const(low)), DType.F32),
        Op("high", "minimum", ("low", Const(high)), DType.F32),
        Op("q", "cast", ("high",), DType.E4M3, overflow),
    )
    return EpilogueSpec(ACC, (), ops, (Store("out0", "q", DType.E4M3),))


def test_a_clamp_that_the_cast_does_as_well_is_dropped() -> None:
    spec = quantised(-448.0, 500.0)
    simple = simplify(spec)
    assert [op.name for op in simple.ops] == ["q"]
    x = torch.cat([SPECIAL, torch.randn(1000) * 300])
    before, after = (evaluate(each, x).view(torch.uint8) for each in (spec, simple))
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    "spec", [quantised(-440.0, 440.0), quantised(448.0, 500.0), quantised(-448.0, 448.0, Overflow.NONFINITE)]
)
def test_a_clamp_that_the_cast_does_not_do_stays(spec: EpilogueSpec) -> None:
    assert "maximum" in [op.op for op in simplify(spec).ops]
