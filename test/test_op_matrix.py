"""The ops, operands and dtypes that users of epilogue fusion know, each through `torch.compile` on CPU.

With `emulate_precision_casts` a fused program gives eager's bits, as long as its sums are exact, which those
of small integers are, and its ops have one right result. What has none is within a unit of its dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from cute_backend.fx_walk.collect import collect

M, N, K = 16, 32, 16
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, I8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
OPERANDS = {"bf16": BF16, "fp16": F16, "fp8": E4M3}

Program = Callable[..., list[Tensor]]


def integers(*shape: int, seed: int = 0, dtype: torch.dtype = BF16, low: int = -3, high: int = 4) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(name: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    dtype = OPERANDS[name]
    return integers(M, K, dtype=dtype, seed=seed), integers(N, K, seed=seed + 99, dtype=dtype).t()


def product(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product of bf16 or fp16 operands, or a scaled one of fp8, which gives bf16."""
    if a.dtype is not E4M3:
        return a @ b
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b, one, one * 0.25, out_dtype=BF16)


def compiled(program: Program, *inputs: Any, regions: int, eager: bool = True) -> list[Tensor]:
    """The results of a program through the backend, under eager's rounding or the fused one.

    Asserts that `regions` regions were fused, of as many products.
    """
    torch._dynamo.reset()
    counters.clear()
    with inductor_config.patch(emulate_precision_casts=eager, force_disable_caches=True):
        results = torch.compile(program, backend="cute", dynamic=False)(*inputs)
    counted = counters["cute_backend"]
    assert counted["regions"] == regions, dict(counted)
    return results


def assert_bits(actual: list[Tensor], expected: list[Tensor], names: list[str]) -> None:
    for got, right, name in zip(actual, expected, names, strict=True):
        assert got.dtype is right.dtype, name
        torch.testing.assert_close(
            got.float(),
            right.float(),
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda told, name=name: f"{name}: {told}",
        )


# Ops of one operand

EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "relu": F.relu,
    "square": torch.square,
    "clamp both": lambda x: x.clamp(-2, 3),
    "clamp below": lambda x: x.clamp(min=-2),
    "clamp above": lambda x: x.clamp(max=3),
    "clamp by tensors": lambda x: torch.clamp(x, -torch.ones_like(x), torch.ones_like(x) * 2),
    "number minus": lambda x: 1.5 - x,
    "minus number": lambda x: x - 1.5,
    "number over": lambda x: 2 / (x.abs() + 1),
    "over number": lambda x: x / 4,
    "times number": lambda x: x * 0.3,
    "plus number": lambda x: x + 7,
    "squared": lambda x: x**2,
    "cubed": lambda x: (x / 8) ** 3,
    "one over": lambda x: (x.abs() + 1) ** -1,
}
SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu erf": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "erf": torch.erf,
    "exp": lambda x: torch.exp(-x.abs()),
    "log": lambda x: torch.log(x.abs() + 1),
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "pow": lambda x: (x.abs() + 1) ** 1.7,
    "number to the": lambda x: torch.pow(2, -x.abs()),
    "to a tensor": lambda x: torch.pow(x.abs() + 1, x.clamp(-2, 2)),
}


@pytest.mark.parametrize("dtype", OPERANDS)
def test_ops_with_one_right_result_give_eagers_bits(dtype: str, fresh_compiler: None) -> None:
    def program(*inputs: Tensor) -> list[Tensor]:
        return [
            op(product(*inputs[i : i + 2])) for i, op in zip(range(0, 99, 2), EXACT.values(), strict=False)
        ]

    inputs = [each for seed in range(len(EXACT)) for each in operands(dtype, seed)]
    assert_bits(compiled(program, *inputs, regions=len(EXACT)), program(*inputs), [*EXACT])


@pytest.mark.sweep
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "fused"])
@pytest.mark.parametrize("dtype", OPERANDS)
def test_smooth_ops_are_within_a_unit(dtype: str, eager: bool, fresh_compiler: None) -> None:
    """Of eager's result; of a few where eager rounds on the way and the fused program does not."""

    def program(*inputs: Tensor) -> list[Tensor]:
        return [
            op(product(*inputs[i : i + 2])) for i, op in zip(range(0, 99, 2), SMOOTH.values(), strict=False)
        ]

    inputs = [each for seed in range(len(SMOOTH)) for each in operands(dtype, seed)]
    results = compiled(program, *inputs, regions=len(SMOOTH), eager=eager)
    for got, right, name in zip(results, program(*inputs), SMOOTH, strict=True):
        unit = torch.finfo(got.dtype).eps
        torch.testing.assert_close(
            got,
            right,
            rtol=(1 if eager else 4) * unit,
            atol=unit / 8,
            msg=lambda told, name=name: f"{name}: {told}",
        )


# Ops of two operands, of each class, on either side

BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}
CLASSES = {"scalar": (), "rowvec": (N,), "colvec": (M, 1), "exact": (M, N)}


@pytest.mark.sweep
@pytest.mark.parametrize("load", [BF16, F32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", BINARY)
def test_operands_of_each_class_on_either_side(name: str, load: torch.dtype, fresh_compiler: None) -> None:
    op = BINARY[name]

    def program(values: list[Tensor], *inputs: Tensor) -> list[Tensor]:
        results = []
        for index, value in enumerate(values):
            y = product(*inputs[4 * index : 4 * index + 2]).to(load)
            z = product(*inputs[4 * index + 2 : 4 * index + 4]).to(load)
            results += [op(y, value), op(value, z)]
        return results

    # Nothing divides by zero, whose sign a product of integers may lose.
    values = [integers(*shape, dtype=load, low=1) for shape in CLASSES.values()]
    inputs = [each for seed in range(2 * len(values)) for each in operands("bf16", seed)]
    if name == "div":
        inputs = [each.abs() + 1 for each in inputs]
    names = [f"{kind} on the {side}" for kind in CLASSES for side in ("right", "left")]
    assert_bits(compiled(program, values, *inputs, regions=len(names)), program(values, *inputs), names)
    kinds = [
        load.kind.value
        for report in collect(program, (values, *inputs))
        for region in report.regions
        for load in region.spec.loads
    ]
    assert kinds == [kind for kind in CLASSES for _ in range(2)]


# Dtypes of results

RESULTS = {"bf16": BF16, "fp16": F16, "fp32": F32, "e4m3": E4M3, "e5m2": E5M2, "int8": I8}
ROUTES: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "direct": lambda y, dtype: (y + 1).to(dtype),
    "through fp32": lambda y, dtype: (y.float() + 1).to(dtype),
    "across precisions": lambda y, dtype: (y.to(F16 if y.dtype is BF16 else BF16) + 1).to(dtype),
    "in the middle": lambda y, dtype: (y.float() * 0.5).to(dtype).float() * 3,
}


@pytest.mark.sweep
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", OPERANDS)
def test_results_of_each_dtype(dtype: str, route: str, fresh_compiler: None) -> None:
    """To the bit, also where fp8 and int8 round in the middle of a chain."""

    def program(*inputs: Tensor) -> list[Tensor]:
        return [
            ROUTES[route](product(*inputs[i : i + 2]), result)
            for i, result in zip(range(0, 99, 2), RESULTS.values(), strict=False)
        ]

    inputs = [each for seed in range(len(RESULTS)) for each in operands(dtype, seed)]
    expected = program(*inputs)
    assert_bits(compiled(program, *inputs, regions=len(RESULTS)), expected, [*RESULTS])
    for got, right, name in zip(
        compiled(program, *inputs, regions=len(RESULTS), eager=False), expected, RESULTS, strict=True
    ):
        unit = 1 / 8 if name in ("e4m3", "e5m2") else torch.finfo(BF16).eps
        if name != "int8":
            torch.testing.assert_close(got.float(), right.float(), rtol=2 * unit, atol=unit)


# Refusals, each of which is right through the unfused path

Case = tuple[Callable[..., Tensor], Callable[[], list[Tensor]]]


def dense(dtype: torch.dtype, k: int = K) -> list[Tensor]:
    return [integers(M, k, dtype=dtype), integers(N, k, seed=1, dtype=dtype).t()]


def relu_of_product(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b).relu()


REFUSED: dict[str, tuple[str, Case]] = {
    "bare product": ("nothing_to_fuse", (torch.matmul, lambda: dense(BF16))),
    "fp32": ("operand_dtype", (relu_of_product, lambda: dense(F32))),
    "fp64": ("operand_dtype", (relu_of_product, lambda: dense(torch.float64))),
    "odd K": ("operand_alignment", (relu_of_product, lambda: dense(BF16, 15))),
    "odd N": (
        "operand_alignment",
        (relu_of_product, lambda: [integers(M, K), integers(K, 31, seed=1)]),
    ),
    "every other column": (
        "operand_layout",
        (relu_of_product, lambda: [integers(M, 2 * K)[:, ::2], dense(BF16)[1]]),
    ),
    "overlapping rows": (
        "operand_alignment",
        (relu_of_product, lambda: [integers(M + K).as_strided((M, K), (1, 1)), dense(BF16)[1]]),
    ),
    "one row for all": (
        "operand_layout",
        (relu_of_product, lambda: [integers(1, K).expand(M, K), dense(BF16)[1]]),
    ),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_right(name: str, fresh_compiler: None) -> None:
    reason, (program, make) = REFUSED[name]
    inputs, again = make(), make()
    with inductor_config.patch(emulate_precision_casts=True):
        result = torch.compile(program, backend="cute", dynamic=False)(*inputs)
    assert counters["cute_backend"][reason] == 1, dict(counters["cute_backend"])
    assert torch.equal(result, program(*again))
    assert all(map(torch.equal, inputs, again))


LOADS: dict[str, Callable[[], Tensor]] = {
    "overlapping": lambda: integers(M + N, seed=2).as_strided((M, N), (1, 1)),
    "windows": lambda: integers(2 * M + N, seed=2).unfold(0, N, 2)[:M],
    "negated": lambda: torch._neg_view(integers(M, N, seed=2)),
    "not at an alignment": lambda: integers(M * N + 1, seed=2)[1:].view(M, N),
}


@pytest.mark.parametrize("name", LOADS)
def test_loads_of_odd_layouts_are_right(name: str, fresh_compiler: None) -> None:
    """Reading needs no element of its own for each place; what is negated is so in its bit alone."""
    inputs = [*dense(BF16), LOADS[name]()]

    def program(a: Tensor, b: Tensor, load: Tensor) -> list[Tensor]:
        return [(a @ b).relu() + load]

    assert_bits(compiled(program, *inputs, regions=1), program(*inputs), [name])


def written(a: Tensor, b: Tensor, kept: Tensor) -> Tensor:
    """An intermediate that is kept in place, and a sum that reads what was kept before and after."""
    hidden = (a @ b).relu()
    before = kept.clone()
    kept.copy_(hidden)
    return hidden * 2 + before + kept


def test_an_intermediate_that_is_kept_in_place_is_a_further_result(fresh_compiler: None) -> None:
    inputs, again = ([*dense(BF16), integers(M, N, seed=2)] for _ in range(2))
    with inductor_config.patch(emulate_precision_casts=True):
        result = torch.compile(written, backend="cute", dynamic=False)(*inputs)
    assert counters["cute_backend"]["regions"] == 1
    assert torch.equal(result, written(*again))
    assert torch.equal(inputs[2], again[2])
