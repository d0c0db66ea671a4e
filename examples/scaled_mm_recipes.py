"""`torch.nn.functional.scaled_mm`, whose scales follow a recipe, with a bias, silu and a residual after it.

python -m cute_backend explain examples/scaled_mm_recipes.py:rowwise
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType


def rowwise(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, residual: Tensor) -> Tensor:
    """A scale for each row of x and each row of weight, (N, K)."""
    y = _scaled_mm(x, weight, x_scale, weight_scale, ScalingType.RowWise)
    return F.silu(y) + residual


def tensorwise(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, residual: Tensor) -> Tensor:
    """One scale for all of x and one for all of weight: the first of those given."""
    y = _scaled_mm(x, weight, x_scale[0], weight_scale[:, 0], ScalingType.TensorWise)
    return F.silu(y) + residual


def _scaled_mm(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, recipe: ScalingType
) -> Tensor:
    return F.scaled_mm(
        x, weight.t(), x_scale, recipe, weight_scale, recipe, output_dtype=torch.bfloat16, use_fast_accum=True
    )


def example_inputs(m: int = 256, n: int = 512, k: int = 256) -> tuple[Tensor, ...]:
    return (
        torch.randn(m, k).to(torch.float8_e4m3fn),
        torch.randn(n, k).to(torch.float8_e4m3fn),
        torch.rand(m, 1) / k**0.5,
        torch.rand(1, n),
        torch.randn(m, n, dtype=torch.bfloat16),
    )
