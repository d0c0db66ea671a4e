"""Operands of small integers, whose products and sums are exact."""

from __future__ import annotations

import torch
from torch import Tensor

from support.fx_walk.synthetic import BF16

K = 16


def product_inputs(m: int, n: int) -> tuple[Tensor, Tensor]:
    """A (m, K) and B (K, n), K contiguous, whose products are small integers."""
    generator = torch.Generator().manual_seed(m * 1000 + n)
    a = torch.randint(-1, 2, (m, K), generator=generator).to(BF16)
    return a, torch.randint(-1, 2, (n, K), generator=generator).to(BF16).t()


def integers(*shape: int) -> Tensor:
    """Small integers, different from place to place."""
    return (torch.arange(torch.Size(shape).numel()) % 61 - 30).reshape(shape).to(BF16)
