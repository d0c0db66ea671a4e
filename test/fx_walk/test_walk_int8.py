"""Products of int8, whose sums are int32: `_int_mm` and what libraries compute from its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config

from cute_backend import explain
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.spec import DType

BF16, F16, I8 = torch.bfloat16, torch.float16, torch.int8
M, N, K = 24, 40, 2048


def operands(m: int = M, n: int = N, k: int = K) -> tuple[Tensor, Tensor]:
    """Values whose sums leave 24 bits if K is long, with the largest sum in a corner."""
    generator = torch.Generator().manual_seed(m + k)
    a, weight = (torch.randint(-128, -64, (lines, k), dtype=I8, generator=generator) for lines in (m, n))
    a[0], weight[0] = -128, -128
    return a, weight


def sums(a: Tensor, weight: Tensor) -> np.ndarray[Any, Any]:
    return a.numpy().astype(np.int64) @ weight.numpy().astype(np.int64).T


def vectors(m: int = M, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.arange(1, m + 1, dtype=torch.float32)[:, None] / (64 * m)
    columns = torch.arange(n, 0, -1, dtype=torch.float32)[:, None] / (3 * n)
    return rows, columns, torch.arange(n, dtype=torch.float32).to(BF16)


def compiled(fn: Callable[..., Any], *given: Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, backend="cute")(*given)


def dynamic_activation(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """torchao's Int8DynamicActivationInt8Weight, as it reaches the pass, with the activation in int8 and its
    scales."""
    low, high = x.amin(1, True).clamp(max=0), x.amax(1, True).clamp(min=0)
    scale = (torch.maximum(-low, high) / 127.5).float().clamp_min(1e-5).to(BF16).float()
    quantised = (x.float() * scale.reciprocal()).round().clamp(-128, 127).to(I8)
    y = torch._int_mm(quantised, weight.t()) * scale.expand(x.shape[0], weight.shape[0])
    y = y.to(BF16) * scales.reshape(-1) + bias
    return y.to(BF16), quantised, scale


def test_torchao_s_dynamic_activations() -> None:
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(0)).to(BF16)
    _, weight = operands()
    _, scales, bias = vectors()
    (region,) = explain(dynamic_activation, x, weight, scales, bias).regions
    assert region.formula == "out0 = bf16(acc * colvec0 * rowvec0 + rowvec1)"
    result, quantised, scale = compiled(dynamic_activation, x, weight, scales, bias)
    exact = sums(quantised, weight).astype(np.float32) * scale.numpy() * scales.numpy().T
    exact += bias.float().numpy()
    assert torch.equal(result, torch.from_numpy(exact).to(BF16))


@pytest.mark.parametrize("m", [1, 5, 17])
def test_any_number_of_rows(m: int) -> None:
    """Eager wants more than 16 on a GPU."""
    a, weight = operands(m)
    rows, columns, _ = vectors(m)
    result = compiled(lambda a, w, r, c: torch._int_mm(a, w.t()) * r * c.t(), a, weight, rows, columns)
    exact = sums(a, weight).astype(np.float32) * rows.numpy() * columns.numpy().T
    assert np.array_equal(result.numpy(), exact)


def with_zero_points(a: Tensor, weight: Tensor, rows: Tensor, columns: Tensor, zeros: Tensor) -> Tensor:
    """An asymmetric activation: each row's zero point times the sum of each of the weight's rows."""
    y = torch._int_mm(a, weight.t()) * rows
    return (y - rows * zeros * weight.sum(-1).float()) * columns.reshape(-1)


def test_zero_points() -> None:
    a, weight = operands()
    rows, columns, _ = vectors()
    zeros = torch.arange(M, dtype=torch.float32)[:, None] - 7
    given = a, weight, rows, columns, zeros
    (region,) = explain(with_zero_points, *given).regions
    assert {load.kind for load in region.loads} == {"colvec", "rowvec"}
    exact = (sums(a, weight) - zeros.numpy() * weight.sum(-1).numpy()) * rows.numpy() * columns.numpy().T
    assert np.allclose(compiled(with_zero_points, *given).numpy(), exact, rtol=1e-5, atol=1e-2)


def test_integers_stay_exact() -> None:
    """Sums of more than 24 bits don't pass through fp32."""

    def program(a: Tensor, weight: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        y = torch._int_mm(a, weight.t())
        return y + shift, torch.clamp(y - 3, -100, 2**25 - 7)

    a, weight = operands()
    shift = torch.arange(N, dtype=torch.int32)
    exact = sums(a, weight)
    assert (exact.astype(np.float32).astype(np.int64) != exact).any()
    (region,) = explain(program, a, weight, shift).regions
    assert [store.dtype for store in region.stores] == ["i32", "i32"]
    shifted, clamped = compiled(program, a, weight, shift)
    assert shifted.dtype is clamped.dtype is torch.int32
    assert np.array_equal(shifted.numpy(), exact + shift.numpy())
    assert np.array_equal(clamped.numpy(), np.clip(exact - 3, -100, 2**25 - 7))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_conversion_of_the_sums_rounds_as_the_setting_says(dtype: torch.dtype) -> None:
    def program(a: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
        return torch._int_mm(a, weight.t()).to(dtype) * rows

    a, weight = (each // 16 for each in operands(k=128))
    rows, _, _ = vectors()
    exact = torch.from_numpy(sums(a, weight)).float()
    rounded = exact.to(dtype).float()
    assert not torch.equal(exact, rounded)
    assert torch.equal(compiled(program, a, weight, rows), exact * rows)
    with inductor_config.patch(emulate_precision_casts=True):
        assert torch.equal(compiled(program, a, weight, rows), rounded * rows)


def test_a_bare_product_is_left_to_inductor() -> None:
    (refusal,) = explain(lambda a, w: torch._int_mm(a, w.t()), *operands()).rejections
    assert refusal.reason is Reason.NOTHING_TO_FUSE


@pytest.mark.parametrize(
    ("strides", "shape", "reason", "said"),
    [
        ((N, 1), (K, N), Reason.OPERAND_LAYOUT, "int8, fp8 and fp4 want K contiguous, as in weight.t()"),
        ((1, 40), (40, N), Reason.OPERAND_ALIGNMENT, "stride of 40 bytes"),
    ],
)
def test_weights_as_no_kernel_reads_them(
    strides: tuple[int, int], shape: tuple[int, int], reason: Reason, said: str
) -> None:
    a, b = torch.zeros(M, shape[0], dtype=I8), torch.empty_strided(shape, strides, dtype=I8)
    (refusal,) = explain(lambda a, b: torch._int_mm(a, b) * 0.5, a, b).rejections
    assert refusal.reason is reason
    assert said in refusal.message


def test_a_gpu_that_is_slow_in_int8_gets_no_kernel() -> None:
    explained = explain(lambda a, w: torch._int_mm(a, w.t()) * 0.5, *operands(), arch="sm_103a")
    (refusal,) = explained.rejections
    assert refusal.message.startswith("kernels for sm_103a do not multiply torch.int8 by torch.int8")


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_torchao_has_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each linear is one kernel with the work behind it, and under eager's roundings gives eager's bits."""
    torchao = pytest.importorskip("torchao.quantization")
    # On a processor with VNNI alone, torchao's products are of uint8, unlike those of GPUs.
    monkeypatch.setattr("torchao.kernel.intmm._cpu_is_vnni_supported", lambda: False)
    torch.manual_seed(0)
    first, second = torch.nn.Linear(64, 48, dtype=BF16), torch.nn.Linear(48, 32, dtype=BF16)
    model = torch.nn.Sequential(first, torch.nn.ReLU(), second).requires_grad_(False)
    torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig())
    x = torch.randn(24, 64).to(BF16)
    explained = explain(model, x, arch="sm_90a")
    assert [region.formula.count("acc") for region in explained.regions] == [1, 1]
    assert all(region.spec.product.dtype is DType.I32 for region in explained.regions)
    with inductor_config.patch(emulate_precision_casts=True):
        assert torch.equal(compiled(model, x), model(x))
