"""Gated pairs whose weights a kernel converts: two weights or the halves of one, in every format, and pairs
that are left apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend import explain
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.replacement.unfused import extract
from cute_backend.fx_walk.search import converted_pairs
from cute_backend.planning import Arch
from cute_backend.spec import EpilogueSpec
from support.fx_walk.stored_formats import (
    BF16,
    EACH,
    FORMATS,
    Linear,
    float8,
    groups,
    int8,
    nibbles,
    of_columns,
    of_float8,
    of_groups,
    products,
    rows,
)

M, N = 24, 40


def gated(gate: Linear, up: Linear | None = None) -> Callable[..., Tensor]:
    """A program that multiplies by two weights, each with as many vectors as the other."""

    def program(x: Tensor, *given: Tensor) -> Tensor:
        half = len(given) // 2
        return F.silu(gate(x, *given[:half])) * (up or gate)(x, *given[half:])

    return program


def packed(form: Linear) -> Callable[..., Tensor]:
    """The same of one weight, the first half of whose columns is the first product's."""

    def program(x: Tensor, *given: Tensor) -> Tensor:
        gate, up = form(x, *given).chunk(2, -1)
        return F.silu(gate) * up

    return program


def agrees(program: Callable[..., Tensor], *given: Tensor) -> None:
    torch._dynamo.reset()
    result, expected = torch.compile(program, backend="cute", dynamic=False)(*given), program(*given).float()
    assert (result.float() - expected).norm() < 0.01 * expected.norm()


@EACH
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80", "sm_120a"])
def test_two_weights_are_one_kernel(form: Linear, arch: str) -> None:
    made, stored, of_k = FORMATS[form]
    given = rows(), *made(1), *made(2)
    (region,) = explain(gated(form), *given, arch=arch).regions
    accumulators = region.spec.accumulators
    assert [(each.b_dtype, each.weight_groups) for each in accumulators] == [(stored, of_k)] * 2
    assert all(each.label.endswith("converted to bf16") for each in region.products)
    if arch == "sm_90a":
        agrees(gated(form), *given)


@EACH
def test_halves_of_one_weight_are_one_kernel(form: Linear) -> None:
    made, stored, of_k = FORMATS[form]
    given = rows(), *made(3, 2 * N)
    (region,) = explain(packed(form), *given, arch="sm_90a").regions
    accumulators = region.spec.accumulators
    assert [(each.b_dtype, each.weight_groups) for each in accumulators] == [(stored, of_k)] * 2
    agrees(packed(form), *given)


def test_even_and_odd_columns_of_a_weight_are_one_product() -> None:
    def program(x: Tensor, *given: Tensor) -> Tensor:
        gate, up = int8(x, *given).unflatten(-1, (-1, 2)).unbind(-1)
        return F.silu(gate) * up

    given = rows(), *of_columns(3, 2 * N)
    assert products(program, *given) == [1]
    agrees(program, *given)


def test_weights_of_other_formats_are_two_kernels() -> None:
    for up, made in ((float8, of_float8), (groups, of_groups)):
        given = rows(), *of_columns(1), *made(2)

        def program(x: Tensor, *given: Tensor, up: Linear = up) -> Tensor:
            return F.silu(int8(x, *given[:2])) * up(x, *given[2:])

        assert products(program, *given) == [1, 1]
        agrees(program, *given)


def test_rows_that_vary_are_one_kernel() -> None:
    x, given = rows(), (*of_columns(1), *of_columns(2))
    torch._dynamo.mark_dynamic(x, 0)
    assert products(gated(int8), x, *given) == [2]
    torch._dynamo.reset()
    compiled = torch.compile(gated(int8), backend="cute", dynamic=True)
    for m in (3, 1500):
        result, expected = compiled(rows(m), *given), gated(int8)(rows(m), *given).float()
        assert (result.float() - expected).norm() < 0.01 * expected.norm()


def slow_pair(arch: Arch, spec: EpilogueSpec, m: int, n: int, k: int) -> float:
    return 300.0 if len(spec.accumulators) > 1 else 100.0


def no_pair(arch: Arch, spec: EpilogueSpec, m: int, n: int, k: int) -> float:
    if len(spec.accumulators) > 1:
        raise ValueError("no tile serves it")
    return 100.0


@pytest.mark.parametrize("predicted", [slow_pair, no_pair])
def test_pairs_of_which_the_model_expects_no_gain_are_two_kernels(
    predicted: Callable[..., float], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = rows(), *of_groups(1), *of_groups(2)
    monkeypatch.setattr(converted_pairs, "predicted", predicted)
    assert products(gated(groups), *given) == [1, 1]
    agrees(gated(groups), *given)


def test_tiles_of_many_rows_leave_a_pair_no_registers() -> None:
    """Each of more tiles would convert the weights again."""

    def made(m: int) -> tuple[Tensor, ...]:
        k, n = 2048, 5504
        scales, zeros = torch.ones(n, k // 64, dtype=BF16), torch.zeros(n, k // 64, dtype=BF16)
        weight = torch.zeros(n, k // 2, dtype=torch.uint8), scales, zeros
        return torch.zeros(m, k, dtype=BF16), *weight, *weight

    assert products(gated(nibbles), *made(16)) == [2]
    for many in (64, 128):
        assert products(gated(nibbles), *made(many)) == [1, 1]


@EACH
def test_a_pair_alone_has_the_steps_of_both_weights(form: Linear) -> None:
    made, *_ = FORMATS[form]
    given = rows(), *made(1), *made(2)
    (report,) = collect(gated(form), given, arch="sm_90a")
    alone = extract(report.regions[0])
    assert sorted(str(each.dtype) for each in alone.layouts) == sorted(str(each.dtype) for each in given)
