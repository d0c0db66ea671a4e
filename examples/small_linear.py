"""An fp8 linear with bias, tanh-gelu and a residual, small enough to simulate in seconds.

python -m cute_backend simulate examples/small_linear.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def small_linear(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor, residual: Tensor
) -> Tensor:
    y = torch._scaled_mm(
        x, weight.t(), x_scale, weight_scale, bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return F.gelu(y, approximate="tanh") + residual


def example_inputs(m: int = 512, n: int = 256, k: int = 512) -> tuple[Tensor, ...]:
    return (
        torch.randn(m, k).to(torch.float8_e4m3fn),
        torch.randn(n, k).to(torch.float8_e4m3fn),
        torch.rand(m, 1) / k**0.5,
        torch.rand(1, n),
        torch.randn(n, dtype=torch.bfloat16),
        torch.randn(m, n, dtype=torch.bfloat16),
    )
