"""Gated pairs whose weights a kernel converts: two weights or the halves of one, in every format, and pairs
that are left apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend import explain
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.replacement.unfused import extract
from cute_backend.fx_walk.search import converted_pairs
from cute_backend.planning import Arch
from cute_backend.spec import DType, EpilogueSpec, WeightGroups

BF16 = torch.bfloat16
M, N, K = 24, 40, 256
Linear = Callable[..., Tensor]


def rows(m: int = M) -> Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(m)).to(BF16)


def drawn(seed: int, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def int8(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    """torchao's Int8WeightOnlyConfig."""
    return x @ w.t().to(x.dtype) * scales.to(x.dtype).reshape(-1)


def float8(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    """torchao's Float8WeightOnlyConfig."""
    return x @ (w.t().float() * scales.t()).to(x.dtype)


def groups(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    wide = w.view(len(w), -1, 64).to(x.dtype) - zeros[..., None].to(x.dtype)
    return F.linear(x, (wide * scales[..., None]).view(len(w), -1))


def nibbles(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return groups(x, torch.stack([w & 15, w >> 4], -1).view(len(w), -1), scales, zeros)


def of_columns(seed: int, n: int = N) -> tuple[Tensor, ...]:
    return drawn(seed, 0, 100, n, K).to(torch.int8), drawn(seed, 1, 99, n, 1) / 640


def of_float8(seed: int, n: int = N) -> tuple[Tensor, ...]:
    weight, scales = of_columns(seed, n)
    return weight.view(torch.float8_e4m3fn), scales


def of_groups(seed: int, n: int = N) -> tuple[Tensor, ...]:
    scales, zeros = drawn(seed, 1, 99, n, K // 64) / 640, drawn(seed, -7, 8, n, K // 64)
    return drawn(seed, 0, 256, n, K).to(torch.uint8), scales.to(BF16), zeros.to(torch.int8)


def of_nibbles(seed: int, n: int = N) -> tuple[Tensor, ...]:
    _, *vectors = of_groups(seed, n)
    return drawn(seed, 0, 256, n, K // 2).to(torch.uint8), *vectors


GROUPS = WeightGroups(64, DType.BF16, DType.BF16, DType.I8, DType.BF16)
FORMATS: dict[Linear, tuple[Callable[..., tuple[Tensor, ...]], DType, WeightGroups | None]] = {
    int8: (of_columns, DType.I8, None),
    float8: (of_float8, DType.E4M3, None),
    groups: (of_groups, DType.U8, GROUPS),
    nibbles: (of_nibbles, DType.U4X2, GROUPS),
}
EACH = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.__name__)


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


def products(program: Callable[..., Any], *given: Tensor, arch: str = "sm_90a") -> list[int]:
    """The products of each kernel."""
    return [len(each.spec.accumulators) for each in explain(program, *given, arch=arch).regions]


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
