"""A bf16 linear with relu and a residual, so deep that the MMA of each tile outlasts the epilogue before it.

CUTE_BACKEND_TILE=128x64_1x1_unrolled \\
    python -m cute_backend simulate examples/overlap.py --async-seed 1 --timeline timeline.png

Without the tile's name, the planner chooses split-K, and each CTA computes a part of one tile.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def relu_residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.linear(x, weight, bias).relu() + residual


def example_inputs(m: int = 256, n: int = 256, k: int = 1024) -> tuple[Tensor, ...]:
    return (
        torch.randn(m, k, dtype=torch.bfloat16),
        torch.randn(n, k, dtype=torch.bfloat16) / k**0.5,
        torch.randn(n, dtype=torch.bfloat16),
        torch.randn(m, n, dtype=torch.bfloat16),
    )
