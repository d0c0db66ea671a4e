"""Ops on int8 and uint8 tensors: as in eager, numbers and 0-d tensors wrap where they are out of range."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters

from support.fx_walk.synthetic import BF16, Graph, aten, called, prims, rewritten, run

I8, U8, I32 = torch.int8, torch.uint8, torch.int32
M, N, K = 16, 16, 16
OP = "cute_backend.gemm_epilogue.default"
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
EVERY_BYTE = torch.arange(256, dtype=U8).reshape(M, N)

Step = Callable[..., fx.Node]
"""Adds an op to a graph: on a value of it and on numbers or 0-d tensors."""


def assert_as_eager(
    dtype: torch.dtype,
    step: Step,
    *numbers: Any,
    scalars: tuple[Tensor, ...] = (),
    fused: bool = True,
    plane: Tensor | None = None,
) -> None:
    """`step` gives the same of every byte, or of a `plane`, after the pass, which takes it in if `fused`."""
    made = Graph()
    zeros = made.call(prims.convert_element_type.default, made.mm(M, N, K), dtype)
    value = made.call(aten.add.Tensor, zeros, made.input("plane", (M, N), dtype))
    loads = [made.input(f"scalar{index}", (), scalar.dtype) for index, scalar in enumerate(scalars)]
    graph = made.output(step(made, value, *numbers, *loads))
    zero = torch.zeros(M, K, dtype=BF16)
    inputs = [zero, zero.t(), EVERY_BYTE.view(dtype) if plane is None else plane, *scalars]
    (wanted,) = run(copy.deepcopy(graph), *inputs)
    after = rewritten(graph)
    assert (called(after) == [OP]) is fused
    (result,) = run(after, *inputs)
    assert result.dtype is wanted.dtype
    assert torch.equal(result, wanted)


def op(target: Any, **arguments: Any) -> Step:
    return lambda made, *operands: made.call(target, *operands, **arguments)


def choice(made: Graph, value: fx.Node, other: fx.Node) -> fx.Node:
    return made.call(aten.where.self, made.call(aten.gt.Scalar, value, 7), value, other)


OUT_OF_RANGE = [(I8, 200), (I8, -129), (I8, 256), (U8, -2), (U8, 256), (U8, 300)]
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@pytest.mark.parametrize(("dtype", "number"), OUT_OF_RANGE)
@pytest.mark.parametrize("name", COMPARISONS)
def test_a_number_that_is_compared_with_wraps(name: str, dtype: torch.dtype, number: int) -> None:
    assert_as_eager(dtype, op(getattr(aten, name).Scalar), number)


@pytest.mark.parametrize(("dtype", "number"), OUT_OF_RANGE)
@pytest.mark.parametrize(
    ("step", "fused"),
    [
        (op(aten.add.Tensor), True),
        (op(aten.sub.Tensor), True),
        (op(aten.mul.Tensor), True),
        (op(aten.bitwise_and.Scalar), True),
        (op(aten.bitwise_or.Scalar), True),
        (op(aten.bitwise_xor.Scalar), True),
        (op(aten.div.Tensor_mode, rounding_mode="floor"), False),
        (op(aten.div.Tensor_mode, rounding_mode="trunc"), False),
    ],
    ids=["add", "sub", "mul", "and", "or", "xor", "div_floor", "div_trunc"],
)
def test_a_number_that_is_computed_with_wraps(
    step: Step, fused: bool, dtype: torch.dtype, number: int
) -> None:
    if fused or number != 256:  # 256 would divide by zero
        assert_as_eager(dtype, step, number, fused=fused)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 31, 32, -1])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("name", ["bitwise_left_shift", "bitwise_right_shift"])
def test_bytes_are_shifted_as_in_eager(name: str, dtype: torch.dtype, count: int) -> None:
    assert_as_eager(dtype, op(getattr(aten, name).Tensor_Scalar), count)


@pytest.mark.parametrize("count", [0, 2, 8, 31, 32, -1])
@pytest.mark.parametrize("dtype", [I8, U8, I32])
@pytest.mark.parametrize("target", [aten.__lshift__, aten.__rshift__])
def test_an_operator_shifts_as_in_eager(target: Any, dtype: torch.dtype, count: int) -> None:
    """`x << 2` and `x >> 2` are not the ops `bitwise_left_shift` and `bitwise_right_shift`."""
    bits = EVERY_BYTE.to(I32) * 77_000_011 - (1 << 31) if dtype is I32 else EVERY_BYTE.view(dtype)
    for step, scalars in (
        (lambda made, value: made.call(target.Scalar, value, count), ()),
        (lambda made, value, by: made.call(target.Tensor, value, by), (torch.tensor(count, dtype=I32),)),
    ):
        assert_as_eager(dtype, step, scalars=scalars, plane=bits)


@pytest.mark.parametrize("program", [lambda y: y << 2, lambda y: y >> 1, lambda y: shifted_in_place(y)])
def test_operators_of_shifts_are_fused(program: Callable[[Tensor], Tensor], fresh_compiler: None) -> None:
    def shifting(x: Tensor, w: Tensor) -> Tensor:
        return program((x @ w).to(I32))

    arguments = [torch.arange(256.0).reshape(M, N).bfloat16() % 7 - 3 for _ in range(2)]
    result = torch.compile(shifting, backend="cute")(*arguments)
    assert dict(counters["cute_backend"]) == {"anchors": 1, "regions": 1}
    assert torch.equal(result, shifting(*arguments))


def shifted_in_place(y: Tensor) -> Tensor:
    y <<= 3
    y >>= 1
    return y


@pytest.mark.parametrize("target", [aten.remainder.Scalar, aten.fmod.Scalar])
def test_a_remainder_by_a_number_that_wraps(target: Any) -> None:
    assert_as_eager(I8, op(target), 300, fused=False)


def test_a_bound_below_every_value() -> None:
    """Up to torch 2.14 eager reads -2 as 254, from 2.15 on as a bound that no value is below."""
    wraps = TORCH < (2, 15)
    lowest = torch.tensor([0, 253, 255], dtype=U8).clamp_min(-2)
    assert lowest.tolist() == ([254, 254, 255] if wraps else [0, 253, 255])
    assert_as_eager(U8, op(aten.clamp_min.default), -2)
    assert_as_eager(U8, op(aten.clamp.default), -2, 3)


@pytest.mark.parametrize(("dtype", "name", "number"), [(U8, "clamp_max", 300), (I8, "clamp_min", -200)])
def test_a_bound_beyond_every_value(dtype: torch.dtype, name: str, number: int) -> None:
    """Up to torch 2.14 eager refuses these bounds, from 2.15 on no value is beyond them."""
    clamp = op(getattr(aten, name).default)
    if TORCH < (2, 15):
        with pytest.raises(RuntimeError, match="without overflow"):
            assert_as_eager(dtype, clamp, number)
    else:
        assert_as_eager(dtype, clamp, number)


@pytest.mark.parametrize("dtype", [I8, U8])
@pytest.mark.parametrize("number", [-2.5, 300.0, True])
def test_floats_and_truth_values_do_not_wrap(dtype: torch.dtype, number: float | bool) -> None:
    assert_as_eager(dtype, op(aten.gt.Scalar), number)
    assert_as_eager(dtype, op(aten.mul.Tensor), number)


def test_a_number_beside_truth_values_does_not_wrap() -> None:
    def step(made: Graph, value: fx.Node) -> fx.Node:
        return made.call(aten.gt.Scalar, made.call(aten.gt.Scalar, value, 3), -256)

    assert_as_eager(I8, step)


@pytest.mark.parametrize(
    "step",
    [
        *(op(getattr(aten, name).Tensor) for name in COMPARISONS),
        op(aten.maximum.default),
        op(aten.minimum.default),
        op(aten.logical_and.default),
        choice,
    ],
    ids=[*COMPARISONS, "maximum", "minimum", "logical_and", "where"],
)
@pytest.mark.parametrize(
    ("dtype", "scalar"),
    [
        (U8, torch.tensor(-2, dtype=I32)),
        (U8, torch.tensor(256, dtype=I32)),
        (U8, torch.tensor(-3, dtype=I8)),
        (I8, torch.tensor(200, dtype=U8)),
        (I8, torch.tensor(-7000, dtype=I32)),
    ],
    ids=str,
)
def test_a_tensor_without_axes_wraps(step: Step, dtype: torch.dtype, scalar: Tensor) -> None:
    """It takes no part in the promotion: the op computes in the dtype of the other."""
    assert_as_eager(dtype, step, scalars=(scalar,))


@pytest.mark.parametrize("number", [-2, 300])
def test_a_vector_does_not_wrap(number: int) -> None:
    """It does take part: uint8 and int32 are compared in int32."""

    def step(made: Graph, value: fx.Node, scalar: fx.Node) -> fx.Node:
        return made.call(aten.gt.Tensor, value, made.call(aten.reshape.default, scalar, [1]))

    assert_as_eager(U8, step, scalars=(torch.tensor(number, dtype=I32),))


def test_a_number_that_fills_a_tensor_wraps() -> None:
    def step(made: Graph, value: fx.Node) -> fx.Node:
        filled = made.call(aten.full.default, [M, N], -2, dtype=U8)
        return made.call(aten.gt.Tensor, made.call(prims.convert_element_type.default, value, I32), filled)

    assert_as_eager(U8, step)
