"""Weights of 8 bits that a kernel converts itself, as libraries spell them, and those that a kernel of
Inductor writes in 16 bits first."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor_config

from cute_backend import config, explain
from cute_backend.api import ExplainedRegion
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.fx_walk.replacement.unfused import extract
from cute_backend.planning import MOST_CONVERTED_ROWS
from cute_backend.spec import DType

BF16, F16, I8, U8, E4M3, E5M2 = (
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
M, N, K = 24, 40, 64


def weight(dtype: torch.dtype = I8, n: int = N, k: int = K) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(-100, 100, (n, k), generator=generator).to(dtype)


def rows(m: int = M, dtype: torch.dtype = BF16, k: int = K) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)


SCALES = torch.arange(1, N + 1).div(64)[:, None]
BIAS = torch.arange(N).to(BF16)


def torchao_int8(x: Tensor, w: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    """Int8WeightOnlyConfig by rows, as torch traces it."""
    return F.silu(x @ w.t().to(x.dtype) * scales.to(x.dtype).reshape(-1) + bias)


def torchao_float8(x: Tensor, w: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    """Float8WeightOnlyConfig."""
    return F.silu(x @ (w.t().float() * scales.t()).to(x.dtype) + bias)


def gemma(x: Tensor, w: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    """transformers' gemma_quant.QuantizedLinear with a bias."""
    return F.linear(x, w.to(x.dtype) * scales.to(x.dtype), bias)


def scaled_before_it_is_turned(x: Tensor, w: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, (scales * w.float()).t().to(x.dtype))


def scaled_along_the_last_axis(x: Tensor, w: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    return x @ (w.t().to(x.dtype) * scales.view(-1).to(x.dtype)) + bias


def of_the_whole_weight(x: Tensor, w: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, (w.float() * scales[3]).to(x.dtype)) + bias


def bare(x: Tensor, w: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype))


FORMS = {
    torchao_int8: "acc * rowvec0 + rowvec1",
    torchao_float8: "acc * scale_b + rowvec0",
    gemma: "acc * scale_b + bias",
    scaled_before_it_is_turned: "acc * scale_b + bias",
    scaled_along_the_last_axis: "acc * scale_b + rowvec0",
    of_the_whole_weight: "acc * scale_b + rowvec0",
    bare: "out0 = bf16(acc)",
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


@pytest.mark.sweep(6)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("stored", [I8, U8, E4M3, E5M2], ids=str)
def test_forms(form: Callable[..., Tensor], stored: torch.dtype) -> None:
    given = rows(), weight(stored), SCALES, BIAS
    region = only(form, *given)
    dtypes = {I8: DType.I8, U8: DType.U8, E4M3: DType.E4M3, E5M2: DType.E5M2}
    assert (region.spec.product.a_dtype, region.spec.product.b_dtype) == (DType.BF16, dtypes[stored])
    assert FORMS[form] in region.formula
    assert region.products[0].label.endswith("converted to bf16")
    assert close(form, *given)


def test_fp16_and_leading_axes() -> None:
    def fn(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w.to(F16) * scales.to(F16)))

    given = rows(dtype=F16).reshape(2, 12, K), weight(), SCALES
    assert only(fn, *given).spec.product.b_dtype is DType.I8
    assert close(fn, *given)


def twice(x: Tensor, w: Tensor) -> Tensor:
    wide = w.to(BF16)
    return F.relu(x @ wide.t()) @ wide


def of_k(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    return F.relu(F.linear(x, w.to(BF16) * scales))


def in_groups(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    return F.relu(F.linear(x, (w.reshape(N, -1, 16).to(BF16) * scales).reshape(N, K)))


def in_groups_of_32(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    return F.relu(F.linear(x, (w.reshape(N, -1, 32).to(BF16) * scales).reshape(N, K)))


def scaled_twice(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    return F.relu(F.linear(x, w.to(BF16) * scales.to(BF16) * scales.to(BF16)))


def with_a_zero(x: Tensor, w: Tensor, zeros: Tensor) -> Tensor:
    return F.relu(F.linear(x, w.to(BF16) - zeros.to(BF16)))


def halves(x: Tensor, w: Tensor) -> Tensor:
    gate, up = w.to(BF16).chunk(2)
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def relu(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.linear(x, w.to(BF16)))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("fn", "given"),
    [
        (twice, (rows(), weight())),
        (halves, (rows(), weight(n=2 * N))),
        (of_k, (rows(), weight(), torch.rand(1, K).to(BF16))),
        (of_k, (rows(), weight(n=K), torch.rand(K).to(BF16))),
        (in_groups, (rows(), weight(), torch.rand(N, K // 16, 1).to(BF16))),
        (scaled_twice, (rows(), weight(), SCALES)),
        (with_a_zero, (rows(), weight(), SCALES)),
        (relu, (rows(), weight().t().contiguous().t())),
        (relu, (rows(k=56), weight(k=56))),
        (relu, (rows(MOST_CONVERTED_ROWS + 1), weight())),
    ],
    ids=[
        "two readers of the converted weight",
        "two readers of its halves",
        "a scale along K",
        "a scale of one axis along K, of as many columns",
        "groups of K",
        "two scales",
        "a zero",
        "contiguous along N",
        "rows that are no multiple of 16 bytes",
        "many rows",
    ],
)
def test_the_weight_is_written_in_16_bits_first(fn: Callable[..., Tensor], given: tuple[Any, ...]) -> None:
    region = explain(fn, *given, arch="sm_90a").regions[0]
    assert not is_converted(fn, *given) and close(fn, *given)
    k, n = region.sizes[2], region.sizes[1]
    assert region.products[0].label == f"w, int8 written in bf16 at each call, {2 * n * k:,} bytes"


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fnuz])
def test_a_conversion_that_rounds_is_no_step(dtype: torch.dtype) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return F.relu(F.linear(x, w.to(dtype).to(BF16)))

    def in_groups(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
        wide = w.view(N, -1, 32).to(dtype).to(BF16)
        return F.relu(F.linear(x, (wide * scales[..., None]).view(N, K)))

    for fn, given in ((program, ()), (in_groups, (torch.rand(N, K // 32).to(BF16),))):
        assert not is_converted(fn, rows(), weight(), *given) and close(fn, rows(), weight(), *given)


def less_128(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    centred = w.to(BF16) - 128
    return F.linear(x, centred * scales.to(BF16))


def less_128_in_groups(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    centred = w.reshape(N, -1, 32).to(BF16) - 128
    return F.linear(x, (centred * scales[..., None].to(BF16)).reshape(N, K))


def times_a_number(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    scaled = w.to(BF16) * 0.5
    return F.linear(x, scaled)


def along_k(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    scaled = w.to(BF16) * scales[:, 0]
    return F.relu(F.linear(x, scaled))


def turned_in_groups(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    turned = w.to(BF16).t()
    return x @ (turned.unflatten(0, (-1, 32)) * scales.t()[:, None].to(BF16)).flatten(0, 1)


def viewed_behind(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    wide = w.view(-1).to(BF16)
    return F.linear(x, wide.view(N, K) * scales.to(BF16))


@pytest.mark.parametrize(
    ("fn", "n", "step", "op"),
    [
        (viewed_behind, N, "view_1", "aten.reshape.default of (2560)"),
        (less_128, N, "centred", "aten.sub.Tensor of (40, 64) and 128"),
        (less_128_in_groups, N, "centred", "aten.sub.Tensor of (40, 2, 32) and 128"),
        (turned_in_groups, N, "turned", "aten.permute.default of (40, 64)"),
        (times_a_number, N, "scaled", "aten.mul.Tensor of (40, 64) and 0.5"),
        (along_k, K, "scaled", "aten.mul.Tensor of (64, 64) and (64)"),
        (scaled_twice, N, "mul_tensor_1", "aten.mul.Tensor of (64, 40) and (1, 40)"),
        (with_a_zero, N, "sub", "aten.sub.Tensor of (40, 64) and (40, 1)"),
        (twice, N, "wide", "prims.convert_element_type.default of (40, 64), with 2 readers"),
        (halves, 2 * N, "split", "aten.split.Tensor of (80, 64) and 40, with 2 readers"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_step_that_no_kernel_takes_is_refused(
    fn: Callable[..., Tensor], n: int, step: str, op: str
) -> None:
    scales = torch.rand(n, K // 32 if fn in (less_128_in_groups, turned_in_groups) else 1).to(BF16)
    given = rows(), weight(U8, n), *([scales] if fn not in (twice, halves) else [])
    found = explain(fn, *given, arch="sm_90a")
    (message,) = {each.message for each in found.rejections if each.reason is Reason.WEIGHT_STEPS}
    assert re.match(rf"{step} \(\S+:\d+\) is {re.escape(op)} between w and the product, so another", message)
    assert "takes one tensor of scales" in message and "transpositions before or after these" in message
    assert close(fn, *given)


def test_no_step_is_refused_where_no_kernel_converts() -> None:
    given = weight(U8), SCALES.to(BF16)
    of_many = rows(MOST_CONVERTED_ROWS + 1)
    cases: list[tuple[Tensor, str, dict[str, Any]]] = [
        (rows(), "sm_100a", {}),
        (of_many, "sm_90a", {}),
        (rows(), "sm_90a", {"batch_invariant": True}),
    ]
    for x, arch, settings in cases:
        with config.patch(settings):
            found = explain(less_128, x, *given, arch=arch).rejections
            assert Reason.WEIGHT_STEPS not in [each.reason for each in found]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_120a", "sm_121a"])
@pytest.mark.parametrize("stored", [I8, E4M3, E5M2], ids=str)
def test_architectures_of_mma_sync(stored: torch.dtype, arch: str) -> None:
    """Also those whose MMA does not multiply fp8."""
    for form in (torchao_int8, torchao_float8, bare):
        assert is_converted(form, rows(), weight(stored), SCALES, BIAS, arch=arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_120a", "sm_121a"])
def test_groups_and_unsigned_values_on_mma_sync(arch: str) -> None:
    groups = rows(), weight(), torch.rand(N, K // 32, 1).to(BF16)
    for fn, given in ((in_groups_of_32, groups), (relu, (rows(), weight(torch.uint8)))):
        assert is_converted(fn, *given, arch=arch)


def test_data_center_blackwell_has_no_such_kernel() -> None:
    assert not is_converted(torchao_int8, rows(), weight(), SCALES, BIAS, arch="sm_100a")


def test_an_epilogue_that_cannot_be_transposed_keeps_its_kernel() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w.to(BF16)).argmax(-1)

    assert explain(fn, rows(), weight(), arch="sm_90a").regions
    assert not is_converted(fn, rows(), weight())


def test_columns_that_a_kernel_with_such_a_weight_does_not_divide_are_left_with_the_reason() -> None:
    def alternate(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w.to(BF16))
        return F.silu(y[:, ::2]) * y[:, 1::2]

    def blocks(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w.to(BF16)).view(M, N // 8, 8).float().square().mean(-1)

    for fn, reason in (
        (alternate, "or, unless it converts its weight, into the even and the odd columns"),
        (blocks, "supported block sizes: none beside a weight that the kernel converts"),
    ):
        explained = explain(fn, rows(), weight(), arch="sm_90a")
        assert is_converted(fn, rows(), weight())
        assert any(reason in each.message for each in explained.rejections)


def test_eager_s_roundings_keep_a_scale_in_front_of_the_product() -> None:
    given = rows(), weight(), SCALES, BIAS
    with inductor_config.patch(emulate_precision_casts=True):
        assert not is_converted(gemma, *given)
        assert is_converted(torchao_int8, *given)


def test_rows_of_unknown_number_may_be_few() -> None:
    """A launch of many rows converts the weight in memory."""
    few, many = rows(), rows(MOST_CONVERTED_ROWS + 1)
    for x in (few, many):
        torch._dynamo.mark_dynamic(x, 0)
    given = weight(E4M3), SCALES, BIAS
    (region,) = explain(torchao_float8, few, *given, arch="sm_90a").regions
    assert region.spec.product.is_converted and region.kernel().plan.spec == region.spec
    beyond = f"e4m3 converted to bf16 (beyond {MOST_CONVERTED_ROWS} rows in memory, at each call)"
    assert beyond in str(explain(torchao_float8, few, *given, arch="sm_90a"))
    (region,) = explain(torchao_float8, many, *given, arch="sm_90a").regions
    assert region.spec.product.is_converted and region.kernel().plan.spec == region.spec.widened
    more = rows(MOST_CONVERTED_ROWS + 1)
    torch._dynamo.mark_dynamic(more, 0, min=MOST_CONVERTED_ROWS + 1, max=4096)
    assert not is_converted(torchao_float8, more, *given)


@pytest.mark.parametrize("settings", [{"batch_invariant": True}, {"tile": "128x64_1x1"}], ids=str)
def test_a_setting_that_gives_every_m_one_kernel_keeps_that_of_16_bits(settings: dict[str, Any]) -> None:
    """A scale on the sums leaves out a rounding, so bits of a row would depend on M."""
    with config.patch(settings):
        assert not is_converted(gemma, rows(), weight(), SCALES, BIAS)


def test_inductor_s_time_for_it_includes_the_conversion() -> None:
    (report,) = collect(torchao_float8, (rows(), weight(E4M3), SCALES, BIAS), arch="sm_90a")
    (region,) = report.regions
    alone = extract(region)
    assert [layout.dtype for layout in alone.layouts].count(E4M3) == 1
    names = [node.target for node in alone.module.graph.nodes if node.op == "call_function"]
    assert names.count(torch.ops.aten.mm.default) == 1
    assert names[: names.index(torch.ops.aten.mm.default)]


@pytest.mark.parametrize("form", [torchao_int8, gemma], ids=lambda form: form.__name__)
def test_a_kernel_casts_scales_itself(form: Callable[..., Tensor]) -> None:
    """Inductor would launch a kernel for each vector."""
    region = only(form, rows(), weight(), SCALES, BIAS)
    assert {load.dtype for load in region.loads} == {DType.F32, DType.BF16}
