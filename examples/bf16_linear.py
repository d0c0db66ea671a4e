"""A bf16 linear with relu and a learned scale for each channel.

python -m cute_backend build examples/bf16_linear.py --arch sm_100a
"""

import torch
from torch import Tensor


def linear_relu_scale(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias).relu() * scale


def example_inputs() -> tuple[Tensor, ...]:
    bf16 = torch.bfloat16
    return (
        torch.randn(4, 512, 4096, dtype=bf16),
        torch.randn(4096, 4096, dtype=bf16),
        torch.randn(4096, dtype=bf16),
        torch.rand(4096, dtype=bf16),
    )
