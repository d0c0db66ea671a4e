"""One fp8 linear with rowwise scales, bias, tanh-gelu and a residual.

python -m cute_backend source examples/gelu_residual.py --arch sm_90a
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_gelu_residual(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor, residual: Tensor
) -> Tensor:
    y = torch._scaled_mm(
        x, weight.t(), x_scale, weight_scale, bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return F.gelu(y, approximate="tanh") + residual


def example_inputs(m: int = 4096, n: int = 4096, k: int = 4096) -> tuple[Tensor, ...]:
    return (
        torch.randn(m, k).to(torch.float8_e4m3fn),
        torch.randn(n, k).to(torch.float8_e4m3fn),
        torch.rand(m, 1) / k**0.5,
        torch.rand(1, n),
        torch.randn(n, dtype=torch.bfloat16),
        torch.randn(m, n, dtype=torch.bfloat16),
    )
