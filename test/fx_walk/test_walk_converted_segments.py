"""Products of one input by several stored weights, whose results are never combined: one launch, or the
reason why they take several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_backend import explain
from cute_backend.fx_walk.search import predictions, shared_launch
from cute_backend.planning import Arch, Sizes, choose
from cute_backend.planning.cost import cost
from cute_backend.spec import BColumns, EpilogueSpec
from support.fx_walk.stored_formats import (
    BF16,
    EACH,
    FORMATS,
    K,
    Linear,
    float8,
    groups,
    int8,
    of_columns,
    of_float8,
    of_groups,
    products,
    rows,
)

M = 24
WIDTHS = (96, 40, 24)


def projected(*forms: Linear) -> Callable[..., Any]:
    """A program that multiplies one input by several weights, each with as many vectors as the others."""

    def program(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        each = len(given) // len(forms)
        return tuple(form(x, *given[i * each : (i + 1) * each]) for i, form in enumerate(forms))

    return program


def weights(form: Linear, widths: tuple[int, ...] = WIDTHS) -> tuple[Tensor, ...]:
    made, *_ = FORMATS[form]
    return tuple(each for seed, n in enumerate(widths) for each in made(seed, n))


def agrees(program: Callable[..., Any], *given: Tensor) -> None:
    torch._dynamo.reset()
    results = torch.compile(program, backend="cute", dynamic=False)(*given)
    for result, expected in zip(results, program(*given), strict=True):
        assert (result.float() - expected.float()).norm() < 0.01 * expected.float().norm()


@EACH
def test_three_weights_are_one_launch(form: Linear) -> None:
    _, stored, of_k = FORMATS[form]
    given = rows(), *weights(form)
    (region,) = explain(projected(form, form, form), *given, arch="sm_90a").regions
    accumulators = region.spec.accumulators
    assert [(each.b_dtype, each.weight_groups, each.width) for each in accumulators] == [
        (stored, of_k, width) for width in WIDTHS
    ]
    assert region.spec.b_columns is BColumns.SEGMENTS
    assert all("converted to bf16, its " in line for line in str(region).splitlines() if "acc0 of" in line)
    agrees(projected(form, form, form), *given)


def test_each_has_what_follows_it() -> None:
    """Scales of columns, a bias, heads and a plane, each of one product, and a scale of rows of two."""

    def program(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        wq, sq, wk, wv, bias, of_rows, plane = given
        q, k, v = int8(x, wq, sq), x @ wk.t().to(x.dtype), x @ wv.t().to(x.dtype)
        return (q * of_rows).view(M, 12, 8).transpose(0, 1), (k + bias) * of_rows, (v - plane).relu()

    (wq, sq), (wk, _), (wv, _) = (of_columns(seed, n) for seed, n in enumerate(WIDTHS))
    _, n, columns = WIDTHS
    given = rows(), wq, sq, wk, wv, torch.randn(n).to(BF16), torch.rand(M, 1).to(BF16), rows(M)[:, :columns]
    assert products(program, *given) == [3]
    agrees(program, *given)


@pytest.mark.parametrize("arch", ["sm_80", "sm_120a", "sm_100a"])
def test_other_gpus_have_a_launch_for_each(arch: str) -> None:
    """mma.sync has no segments; tcgen05 converts no weights, and shares a launch of weights in 16 bits."""
    given = rows(), *weights(int8)
    regions = explain(projected(int8, int8, int8), *given, arch=arch).regions
    assert all(each.spec.product.is_converted is (arch != "sm_100a") for each in regions)
    assert [len(each.spec.accumulators) for each in regions] == ([3] if arch == "sm_100a" else [1, 1, 1])


def of_wider_groups(seed: int, n: int) -> tuple[Tensor, ...]:
    return of_groups(seed, n, 128)


@pytest.mark.parametrize(
    ("other", "made", "facts"),
    [
        (float8, of_float8, "i8 beside e4m3"),
        (groups, of_groups, "i8 beside u8 in groups of 64"),
    ],
)
def test_other_formats_take_a_launch_each(other: Linear, made: Callable[..., Any], facts: str) -> None:
    first, second = of_columns(1, 96), made(2, 40)

    def program(x: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        return int8(x, *given[:2]), other(x, *given[2:])

    found = explain(program, rows(), *first, *second, arch="sm_90a")
    why = f"one kernel takes weights of one format, not {facts}"
    assert [len(each.spec.accumulators) for each in found.regions] == [1, 1]
    assert all(each.unshared.endswith(why) for each in found.regions)
    assert why in " ".join(str(found).split())


def test_other_groups_take_a_launch_each() -> None:
    given = rows(), *of_groups(1, 96), *of_wider_groups(2, 40)
    found = explain(projected(groups, groups), *given, arch="sm_90a")
    why = "one kernel takes weights of one format, not u8 in groups of 64 beside u8 in groups of 128"
    assert [len(each.spec.accumulators) for each in found.regions] == [1, 1]
    assert why in found.regions[0].unshared


def test_rows_that_vary_are_one_launch() -> None:
    x, given, program = rows(), weights(int8), projected(int8, int8, int8)
    torch._dynamo.mark_dynamic(x, 0)
    assert products(program, x, *given) == [3]
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="cute", dynamic=True)
    for m in (3, 1500):
        for result, expected in zip(compiled(rows(m), *given), program(rows(m), *given), strict=True):
            assert (result.float() - expected.float()).norm() < 0.01 * expected.float().norm()


def test_rows_that_vary_pay_for_decoding_and_for_what_kernels_still_convert(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In 16 bits the second number of rows is 2,048, for which no kernel converts a weight."""
    asked: set[int] = set()

    def recorded(arch: Arch, spec: EpilogueSpec, m: int, n: int, k: int) -> float:
        asked.add(m)
        return predictions.predicted(arch, spec, m, n, k)

    monkeypatch.setattr(shared_launch, "predicted", recorded)
    x = rows()
    torch._dynamo.mark_dynamic(x, 0)
    assert products(projected(int8, int8), x, *weights(int8, (96, 40))) == [2]
    assert asked == {16, 256}


def test_the_predicted_time_counts_whole_tiles_of_each_segment() -> None:
    """Rows of the transposed product: 96, 40 and 24 are two tiles of 64, one and one."""
    (region,) = explain(projected(int8, int8, int8), rows(), *weights(int8), arch="sm_90a").regions
    tile = choose(Arch.SM90A, region.spec, Sizes(M, sum(WIDTHS), K), 132)
    assert tile.transposed and tile.tile_m == 64
    alone, *_ = region.spec.segments
    together = cost(tile, region.spec, Sizes(M, sum(WIDTHS), K), 1)
    assert together == cost(tile, alone, Sizes(M, 4 * 64, K), 1)


def slow(arch: Arch, spec: EpilogueSpec, m: int, n: int, k: int) -> float:
    return 300.0 if len(spec.accumulators) > 1 else 90.0


def test_a_launch_of_which_the_model_expects_no_gain_is_one_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    given = rows(), *weights(groups)
    monkeypatch.setattr(shared_launch, "predicted", slow)
    found = explain(projected(groups, groups, groups), *given, arch="sm_90a")
    assert [len(each.spec.accumulators) for each in found.regions] == [1, 1, 1]
    assert "by the cost model it would take 1.100 times as long" in found.regions[0].unshared
    agrees(projected(groups, groups, groups), *given)
