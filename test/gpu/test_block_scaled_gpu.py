"""DeepSeek's MLP in fp8 on a real GPU: two kernels, of which the first quantises its result by the blocks of
the second."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.reference import relative_error

pytestmark = pytest.mark.gpu

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def mlp(x: Tensor, of_x: Tensor, wide: Tensor, of_wide: Tensor, down: Tensor, of_down: Tensor) -> Tensor:
    """Gate and up of one weight, silu * up, quantised by blocks of 1 x 128, and down."""
    gate, up = torch._scaled_mm(x, wide.t(), of_x, of_wide.t(), out_dtype=BF16).chunk(2, -1)
    blocks = (F.silu(gate) * up).float().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    h, of_h = (blocks / scale).flatten(-2).to(E4M3), scale.squeeze(-1).t().contiguous().t()
    return torch._scaled_mm(h, down.t(), of_h, of_down.t(), out_dtype=BF16).relu()


def spread(values: Tensor, scales: Tensor) -> Tensor:
    """Values (rows, K) by the scales of their blocks, in float64."""
    lines = 1 if scales.shape[0] == values.shape[0] else 128
    return values.double() * scales.double().repeat_interleave(lines, 0).repeat_interleave(128, 1)


@pytest.mark.parametrize("m", [4, 132, 1028])
def test_an_mlp_of_deepseek_is_right(m: int, fresh_compiler: None) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("blocks of 128 columns are quantised in the kernel on Hopper alone")
    d, inner, generator = 896, 512, torch.Generator("cuda").manual_seed(m)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device="cuda")

    def weight(rows: int, k: int) -> tuple[Tensor, Tensor]:
        values = torch.randn(rows, k, generator=generator, device="cuda").to(E4M3)
        return values, random(rows // 128, k // 128) / 8 + 0.02

    x = torch.randn(m, d, generator=generator, device="cuda").to(E4M3)
    inputs = (x, (random(d // 128, m) + 0.1).t(), *weight(2 * inner, d), *weight(d, inner))
    result = torch.compile(mlp, backend="cute", dynamic=False)(*inputs)
    gate, up = (spread(*inputs[:2]) @ spread(*inputs[2:4]).t()).chunk(2, -1)
    h = (F.silu(gate) * up).unflatten(-1, (-1, 128))
    scale = h.abs().amax(-1, keepdim=True) / 448
    h = ((h / scale).float().to(E4M3).double() * scale).flatten(-2)
    assert relative_error(result, (h @ spread(*inputs[4:]).t()).relu()) < 1e-2
    counters = torch._dynamo.utils.counters["cute_backend"]
    assert counters["regions"] == 2, dict(counters)
    assert not counters["replayed"] and not counters["builds_failed"]
