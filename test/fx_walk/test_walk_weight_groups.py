"""Weights of 8 bits in groups of K, as libraries spell them, and those that a kernel of Inductor writes in 16
bits first."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor_config

from cute_backend import explain
from cute_backend.api import ExplainedRegion
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.fx_walk.replacement.unfused import extract
from cute_backend.planning import MOST_ROWS_IN_GROUPS
from cute_backend.spec import DType, WeightGroups

F32, BF16, F16, I8, U8 = DType.F32, DType.BF16, DType.F16, DType.I8, DType.U8
M, N, K = 24, 40, 256


def integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def rows(m: int = M, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(m)).to(dtype)


def weight(dtype: torch.dtype = torch.int8) -> Tensor:
    return integers(-100, 100, N, K).to(dtype) if dtype.is_signed else integers(0, 256, N, K).to(dtype)


def vectors(values: int, *dtypes: torch.dtype) -> tuple[Tensor, ...]:
    """Scales and zeros (N, groups)."""
    groups = K // values
    made = integers(1, 99, N, groups) / 64, integers(-7, 8, N, groups)
    return tuple(each.to(dtype) for each, dtype in zip(made, dtypes, strict=False))


def torchao_int8(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Int8WeightOnlyConfig by groups, as torch traces it."""
    wide = w.reshape(N, -1, 128).to(x.dtype) - zeros.reshape(N, -1, 1).to(x.dtype)
    return F.linear(x, (wide * scales.reshape(N, -1, 1)).reshape(N, K).to(x.dtype))


def torchao_int4(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """IntxWeightOnlyConfig of int4, unpacked."""
    wide = w.reshape(N, -1, 32).to(x.dtype) - zeros.unsqueeze(-1)
    return F.silu(F.linear(x, (wide * scales.unsqueeze(-1)).reshape(N, K)))


def hqq(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """HQQ of 8 bits: (N * groups, 64)."""
    return F.linear(x, ((w.to(x.dtype) - zeros) * scales).reshape(N, K)) + 1


def without_zeros(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    return x @ (scales.unsqueeze(-1).to(x.dtype) * w.to(x.dtype).view(N, 1, 256)).view(N, K).t()


def in_fp32(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    wide = (w.float().view(N, -1, 64) - zeros[..., None]) * scales[..., None]
    return F.relu(x @ wide.view(N, K).t().to(x.dtype))


def groups_first(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Scales that lie (groups, N), and axes that are exchanged in front of the groups."""
    wide = w.t().reshape(4, 64, N).to(x.dtype) - zeros.t()[:, None].to(x.dtype)
    return x @ (wide * scales.t()[:, None]).reshape(K, N)


def by_groups_and_columns(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Scales and zeros that have three axes in memory, (groups, 1, N)."""
    wide = (w.t().unflatten(0, (4, 64)).to(x.dtype) - zeros.to(x.dtype)) * scales
    return x @ wide.flatten(0, 1)


HALF = torch.float16
WIDE = torch.bfloat16
INT8, UINT8 = torch.int8, torch.uint8


def of_rows(scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    return scales.reshape(-1, 1), zeros.reshape(-1, 1)


FORMS = {
    torchao_int8: (
        (rows(), weight(), *vectors(128, torch.float32, INT8)),
        (I8, WeightGroups(128, F32, F32, I8, BF16)),
    ),
    torchao_int4: (
        (rows(), weight(), *vectors(32, WIDE, INT8)),
        (I8, WeightGroups(32, BF16, BF16, I8, BF16)),
    ),
    hqq: (
        (rows(dtype=HALF), weight(UINT8).reshape(-1, 64), *of_rows(*vectors(64, HALF, HALF))),
        (U8, WeightGroups(64, F16, F16, F16, F16)),
    ),
    without_zeros: (
        (rows(), weight(), *vectors(256, torch.float32)),
        (I8, WeightGroups(256, F32, BF16)),
    ),
    in_fp32: (
        (rows(), weight(), *vectors(64, torch.float32, torch.float32)),
        (I8, WeightGroups(64, F32, F32, F32, F32)),
    ),
    groups_first: (
        (rows(), weight(), *vectors(64, WIDE, torch.float32)),
        (I8, WeightGroups(64, BF16, BF16, F32, BF16)),
    ),
    by_groups_and_columns: (
        (rows(), weight(), *(each.t()[:, None].contiguous() for each in vectors(64, WIDE, INT8))),
        (I8, WeightGroups(64, BF16, BF16, I8, BF16)),
    ),
}


def only(fn: Callable[..., Any], *given: Any, **how: Any) -> ExplainedRegion:
    (region,) = explain(fn, *given, arch="sm_90a", **how).regions
    return region


def is_converted(fn: Callable[..., Any], *given: Any, arch: str = "sm_90a", **how: Any) -> bool:
    """Whether a kernel of a program converts its weight."""
    return any(region.spec.product.is_converted for region in explain(fn, *given, arch=arch, **how).regions)


def close(fn: Callable[..., Any], *given: Tensor) -> bool:
    torch._dynamo.reset()
    result, expected = torch.compile(fn, backend="cute")(*given), fn(*given).float()
    return bool((result.float() - expected).norm() < 0.01 * expected.norm())


@pytest.mark.sweep(3)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_forms(form: Callable[..., Tensor]) -> None:
    given, (stored, groups) = FORMS[form]
    region = only(form, *given)
    assert (region.spec.product.b_dtype, region.spec.product.weight_groups) == (stored, groups)
    assert f"{stored.value} in groups of {groups.values} converted to" in region.products[0].label
    assert close(form, *given)


def test_leading_axes_and_eager_s_roundings() -> None:
    """Weights have the bits of the chain, so nothing is left out of it."""
    (x, *given), _ = FORMS[torchao_int4]
    with inductor_config.patch(emulate_precision_casts=True):
        assert is_converted(torchao_int4, x.reshape(2, 12, K), *given)


def with_scale(values: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def fn(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
        wide = w.reshape(N, -1, values).to(x.dtype) * scales.unsqueeze(-1)
        return F.relu(F.linear(x, wide.reshape(N, K)))

    return fn


def zero_of_groups(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    wide = w.reshape(N, -1, 64).to(x.dtype) - zeros
    return F.relu(F.linear(x, (wide * scales.unsqueeze(-1)).reshape(N, K)))


def scaled_twice(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    wide = w.reshape(N, -1, 64).to(x.dtype) * scales.unsqueeze(-1) * scales.unsqueeze(-1)
    return F.relu(F.linear(x, wide.reshape(N, K)))


def zero_last(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    wide = w.reshape(N, -1, 64).to(x.dtype) * scales.unsqueeze(-1) - zeros.unsqueeze(-1)
    return F.relu(F.linear(x, wide.reshape(N, K)))


def in_another_dtype(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    wide = w.reshape(N, -1, 64).to(HALF) * scales.unsqueeze(-1)
    return F.relu(F.linear(x, wide.reshape(N, K).to(x.dtype)))


def rounded_between(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    wide = (w.reshape(N, -1, 64).float() - zeros.unsqueeze(-1)).to(x.dtype) * scales.unsqueeze(-1)
    return F.relu(F.linear(x, wide.reshape(N, K).to(x.dtype)))


def subtracted_in_float64(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    wide = (w.reshape(N, -1, 64).double() - zeros.unsqueeze(-1)).float() * scales.unsqueeze(-1)
    return F.relu(F.linear(x, wide.reshape(N, K).to(x.dtype)))


REFUSED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], str]] = {
    "groups of 16": (
        with_scale(16),
        vectors(16, WIDE),
        r"groups of 16 of K, 256 in all, .* of shape \(40, 16, 1\); .* takes groups of 32, 64, 128, 256",
    ),
    "zeros of groups alone": (
        zero_of_groups,
        (*vectors(64, WIDE), torch.ones(1, 4, 1).to(WIDE)),
        r"of shape \(1, 4, 1\) and \(40, 4, 1\); .* one element for each group and column, \(40, 4, 1\) here",
    ),
    "two scales": (scaled_twice, vectors(64, WIDE), "a scale for each of them, and before it at most"),
    "a zero behind the scale": (zero_last, vectors(64, WIDE, WIDE), "before it at most one zero"),
    "another dtype": (in_another_dtype, vectors(64, HALF), "only if weights are computed in f32 or bf16"),
    "zeros of int16": (
        torchao_int4,
        vectors(32, WIDE, torch.int16),
        "only if scales are f32, bf16, f16, and zeros f32, bf16, f16, i8, u8",
    ),
    "a difference in float64": (
        subtracted_in_float64,
        vectors(64, torch.float32, torch.float32),
        "only if weights are computed in f32 or bf16",
    ),
    "a rounding between": (
        rounded_between,
        vectors(64, torch.float32, torch.float32),
        "no conversion to fewer bits between",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_groups_are_refused_with_their_facts(name: str) -> None:
    fn, given, message = REFUSED[name]
    explained = explain(fn, rows(), weight(), *given, arch="sm_90a")
    (region,) = explained.regions
    (rejection,) = explained.rejections
    assert not region.spec.product.is_converted
    assert rejection.reason is Reason.WEIGHT_GROUPS
    assert re.search(message, rejection.message), rejection.message
    assert close(fn, rows(), weight(), *given)


def test_nothing_is_refused_where_no_kernel_converts() -> None:
    fn, given, _ = REFUSED["groups of 16"]
    assert not explain(fn, rows(), weight(), *given, arch="sm_100a").rejections
    assert not explain(fn, rows(MOST_ROWS_IN_GROUPS + 1), weight(), *given, arch="sm_90a").rejections


def test_two_readers_of_the_weight_and_other_layouts() -> None:
    def twice(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
        wide = (w.reshape(N, -1, 64).to(x.dtype) * scales.unsqueeze(-1)).reshape(N, K)
        return F.relu(x @ wide.t()) @ wide

    given = rows(), weight(), *vectors(64, WIDE)
    assert not is_converted(twice, *given)
    along_n = weight().t().contiguous().t()
    assert not is_converted(with_scale(64), rows(), along_n, *vectors(64, WIDE))
    assert close(with_scale(64), rows(), along_n, *vectors(64, WIDE))


def test_other_architectures_and_many_rows_keep_their_graph() -> None:
    (x, *given), _ = FORMS[torchao_int4]
    assert not is_converted(torchao_int4, x, *given, arch="sm_100a")
    assert not is_converted(torchao_int4, rows(MOST_ROWS_IN_GROUPS + 1), *given)
    assert close(torchao_int4, rows(MOST_ROWS_IN_GROUPS + 1), *given)


def test_rows_of_unknown_number_keep_their_graph() -> None:
    """A launch of many rows could not convert such a weight by one kernel."""
    x = rows()
    torch._dynamo.mark_dynamic(x, 0)
    given = weight(), *vectors(32, torch.bfloat16, torch.int8)
    assert is_converted(torchao_int4, rows(), *given) and not is_converted(torchao_int4, x, *given)


def test_inductor_s_time_for_it_includes_the_conversion() -> None:
    given, _ = FORMS[torchao_int8]
    (report,) = collect(torchao_int8, given, arch="sm_90a")
    (region,) = report.regions
    alone = extract(region)
    assert sorted(str(layout.dtype) for layout in alone.layouts) == [
        "torch.bfloat16",
        "torch.float32",
        "torch.int8",
        "torch.int8",
    ]
    names = [node.target for node in alone.module.graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.sub.Tensor in names and names.count(torch.ops.aten.mm.default) == 1


@pytest.mark.filterwarnings("error:Raw SymInt value")
def test_a_symbolic_k_keeps_a_known_number_of_values() -> None:
    """The program divides K by 64, and the shape of the groups names no 64."""

    def program(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        wide = (w.view(N, -1, 64).to(x.dtype) - zeros[..., None]) * scales[..., None]
        return F.relu(F.linear(x, wide.view(N, w.shape[1])))

    given = rows(), weight(), *vectors(64, WIDE, INT8)
    for tensor in given[:2]:
        torch._dynamo.mark_dynamic(tensor, 1)
    (region,) = explain(program, *given, arch="sm_90a").regions
    assert region.spec.product.weight_groups == WeightGroups(64, BF16, BF16, I8, BF16)
