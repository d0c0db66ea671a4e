"""Gated pairs whose weights a kernel converts: two weights or the halves of one, in every format, and pairs
that are left apart."""

from __future__ import annotations

import re
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
    K,
    Linear,
    drawn,
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


def of_wider_groups(seed: int) -> tuple[Tensor, ...]:
    return of_groups(seed, values=128)


def scaled_wide(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """`groups`, which multiplies in fp32."""
    wide = w.view(len(w), scales.shape[1], -1).to(x.dtype) - zeros[..., None].to(x.dtype)
    return F.linear(x, (wide.float() * scales.float()[..., None]).to(x.dtype).view(len(w), -1))


def of_bf16(seed: int) -> tuple[Tensor, ...]:
    return (drawn(seed, -9, 10, N, K).to(BF16),)


def bf16(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def apart(program: Callable[..., Tensor], *given: Tensor, arch: str = "sm_90a") -> str:
    """The one reason why the products of a pair have a kernel each, without the name of the other."""
    found = explain(program, *given, arch=arch)
    (why,) = {each.unshared.partition(", because ")[2] for each in found.regions}
    assert [each.unshared.partition(", because ")[0] for each in found.regions] == [
        "shares no launch with mm_1",
        "shares no launch with mm",
    ]
    assert why in " ".join(str(found).split())
    return why


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    ("forms", "first", "second", "facts"),
    [
        ((int8, float8), of_columns, of_float8, "i8 beside e4m3"),
        ((int8, groups), of_columns, of_groups, "i8 beside u8 in groups of 64"),
        ((groups, groups), of_groups, of_wider_groups, "u8 in groups of 64 beside u8 in groups of 128"),
        ((groups, scaled_wide), of_groups, of_groups, "scales of bf16 in bf16 beside scales of bf16 in f32"),
        ((bf16, int8), of_bf16, of_columns, "bf16 beside i8"),
    ],
)
def test_weights_of_other_formats_are_two_kernels(
    forms: tuple[Linear, Linear],
    first: Callable[[int], tuple[Tensor, ...]],
    second: Callable[[int], tuple[Tensor, ...]],
    facts: str,
    arch: str,
) -> None:
    gate, up = first(1), second(2)

    def program(x: Tensor, *given: Tensor) -> Tensor:
        return F.silu(forms[0](x, *given[: len(gate)])) * forms[1](x, *given[len(gate) :])

    assert products(program, rows(), *gate, *up, arch=arch) == [1, 1]
    why = f"one kernel takes weights of one format, not {facts}"
    assert apart(program, rows(), *gate, *up, arch=arch) == why
    if arch == "sm_90a":
        agrees(program, rows(), *gate, *up)


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


@pytest.mark.parametrize(
    ("predicted", "why"),
    [
        # 300 us, and twice 100 with the time of 5 MiB and of the plane between them.
        (slow_pair, "by the cost model, one kernel of both would take 1.490 times as long as one of each"),
        (no_pair, "no tile serves it"),
    ],
)
def test_pairs_of_which_the_model_expects_no_gain_are_two_kernels(
    predicted: Callable[..., float], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = rows(), *of_groups(1), *of_groups(2)
    monkeypatch.setattr(converted_pairs, "predicted", predicted)
    assert products(gated(groups), *given) == [1, 1]
    assert apart(gated(groups), *given) == why
    agrees(gated(groups), *given)


def test_halves_of_which_the_model_expects_no_gain_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    given = rows(), *of_groups(3, 2 * N)
    monkeypatch.setattr(converted_pairs, "predicted", no_pair)
    (region,) = explain(packed(groups), *given, arch="sm_90a").regions
    assert len(region.spec.accumulators) == 1
    assert region.unshared == "makes no pair of its halves, because no tile serves it"


def test_columns_that_vary_are_two_kernels() -> None:
    first, second = of_columns(1), of_columns(2)
    for each in (*first, *second):
        torch._dynamo.mark_dynamic(each, 0)
    why = apart(gated(int8), rows(), *first, *second)
    assert re.fullmatch(
        "one kernel of both takes an N and a K that are numbers, and they are s.* and 256", why
    )


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
    assert apart(gated(nibbles), *made(64), arch="sm_80") == (
        "for 64 rows, one kernel of both has tiles 64x32x2_1x1_transposed, which leave a thread too few "
        "registers; for fewer rows, tiles may be smaller"
    )


@EACH
def test_a_pair_alone_has_the_steps_of_both_weights(form: Linear) -> None:
    made, *_ = FORMATS[form]
    given = rows(), *made(1), *made(2)
    (report,) = collect(gated(form), given, arch="sm_90a")
    alone = extract(report.regions[0])
    assert sorted(str(each.dtype) for each in alone.layouts) == sorted(str(each.dtype) for each in given)
