"""torchao's inference linears whose blocks have scales: each fuses as it is, with what follows it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cute_backend
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.spec import Order, Scaling
from support.torchao_mx import plane_of_largest, same_fp8, to_mx_behind_products

pytest.importorskip("torchao.prototype.mx_formats")

BF16 = torch.bfloat16
M, N, K = 64, 256, 512


def explained(weight: Tensor, bias: Tensor | None) -> cute_backend.Explanation:
    """A linear of torchao, silu and a residual, for data center Blackwell."""

    def program(x: Tensor, residual: Tensor) -> Tensor:
        return F.silu(F.linear(x, weight, bias)) + residual

    inputs = torch.randn(M, K, dtype=BF16), torch.randn(M, N, dtype=BF16)
    return cute_backend.explain(program, *inputs, arch="sm_100a")


@pytest.mark.parametrize("biased", [False, True])
def test_mxfp8(biased: bool) -> None:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs
    from torchao.quantization.quantize_.common import KernelPreference

    how = {"kernel_preference": KernelPreference.AUTO, "is_swizzled_scales": True}
    activations = QuantizeTensorToMXKwargs(elem_dtype=torch.float8_e4m3fn, block_size=32, **how)
    wide, bias = torch.randn(N, K, dtype=BF16), torch.randn(N, dtype=BF16) if biased else None
    weight = MXTensor.to_mx(wide, torch.float8_e4m3fn, 32, act_quant_kwargs=activations, **how)
    (region,) = explained(weight, bias).regions
    assert region.spec.product.a_scaling is region.spec.product.b_scaling is Scaling.MX
    assert [load.kind.value for load in region.spec.loads] == ["rowvec"] * biased + ["exact"]


@pytest.mark.parametrize("of_all", [False, True], ids=["blocks", "blocks and a scale of all"])
def test_nvfp4(of_all: bool) -> None:
    """torchao applies both scales of whole operands behind the product: a scalar of the epilogue."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, QuantizeTensorToNVFP4Kwargs

    activations = QuantizeTensorToNVFP4Kwargs(is_swizzled_scales=True)
    scale = torch.tensor(0.01) if of_all else None
    wide = torch.randn(N, K, dtype=BF16)
    weight = NVFP4Tensor.to_nvfp4(
        wide, per_tensor_scale=scale, is_swizzled_scales=True, act_quant_kwargs=activations
    )
    (region,) = explained(weight, None).regions
    assert region.spec.product.a_scaling is region.spec.product.b_scaling is Scaling.NV
    assert [load.kind.value for load in region.spec.loads] == ["scalar"] * of_all + ["exact"]


def modes(*often: str) -> pytest.MarkDecorator:
    """torchao's modes of scaling, of which `make test` runs those named."""
    rest = (mode for mode in ("FLOOR", "RCEIL", "CEIL", "EVEN") if mode not in often)
    seldom = (pytest.param(mode, marks=pytest.mark.exhaustive) for mode in rest)
    return pytest.mark.parametrize("mode", [*often, *seldom])


@modes("FLOOR", "RCEIL")
def test_an_mlp_in_mxfp8_is_two_kernels(mode: str) -> None:
    """Each of three linears quantises its input; that of the third is the first kernel's results."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs
    from torchao.quantization.quantize_.common import KernelPreference

    how = {"kernel_preference": KernelPreference.AUTO, "is_swizzled_scales": True}
    scaling = ScaleCalculationMode[mode]
    activations = QuantizeTensorToMXKwargs(torch.float8_e4m3fn, 32, scaling, **how)
    gate, up, down = (
        MXTensor.to_mx(torch.randn(rows, k, dtype=BF16), torch.float8_e4m3fn, 32, scaling, **how)
        for rows, k in ((N, K), (N, K), (K, N))
    )
    for weight in (gate, up, down):
        weight.act_quant_kwargs = activations

    def mlp(x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) + x

    found = cute_backend.explain(mlp, torch.randn(M, K, dtype=BF16), arch="sm_100a")
    found.assert_fused(regions=2)
    assert not found.rejections
    first, second = (region.spec for region in found.regions)
    assert len(first.accumulators) == 2
    assert [store.form.order for store in first.stores] == [Order.ROW, Order.TILED]
    assert [load.kind.value for load in second.loads] == ["exact"]


@modes("FLOOR", "EVEN")
def test_quantised_values_are_those_of_eager_to_the_bit(mode: str, fresh_compiler: None) -> None:
    """Every exponent, mantissas around those that round up, zeros, infinities and NaN, in blocks of 32."""
    program, inputs = to_mx_behind_products(mode), plane_of_largest(96, 1024)
    cute_backend.explain(program, *inputs, arch="sm_100a").assert_fused(regions=1, no=list(Reason))
    scales, values = torch.compile(program, backend="cute", fullgraph=True)(*inputs)
    of_eager, wanted = program(*inputs)
    assert torch.equal(scales.view(torch.uint8), of_eager.view(torch.uint8))
    assert scales.view(torch.uint8).unique().numel() > 240, "nearly every code of E8M0"
    assert same_fp8(values, wanted)
