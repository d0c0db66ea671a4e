"""One fp8 linear with rowwise scales and nothing after it: what fusion must cost nothing beside.

python -m cute_backend bench examples/rowwise_linear.py
"""

import torch
from torch import Tensor


def rowwise_linear(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    return torch._scaled_mm(
        x, weight.t(), x_scale, weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def example_inputs(m: int = 4096, n: int = 4096, k: int = 4096) -> tuple[Tensor, ...]:
    return (
        torch.randn(m, k).to(torch.float8_e4m3fn),
        torch.randn(n, k).to(torch.float8_e4m3fn),
        torch.rand(m, 1) / k**0.5,
        torch.rand(1, n),
    )
