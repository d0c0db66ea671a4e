"""Experts of a mixture, and their quantisation by torchao."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    FqnToConfig,
    PerRow,
    quantize_,
)
from torchao.quantization.quantize_.common import KernelPreference


class Experts(nn.Module):
    """`count` experts of `hidden` and `inner` columns, for rows (M, hidden) that lie in groups by expert,
    with their ends and routing weights (M,)."""

    def __init__(self, count: int, hidden: int, inner: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        gate_up = torch.randn(count, 2 * inner, hidden, generator=generator) / hidden**0.5
        down = torch.randn(count, hidden, inner, generator=generator) / inner**0.5
        self.gate_up, self.down = nn.Parameter(gate_up.bfloat16()), nn.Parameter(down.bfloat16())

    def forward(self, x: Tensor, ends: Tensor, routing: Tensor) -> Tensor:
        gate, up = F.grouped_mm(x, self.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        return y * routing[:, None]


def in_fp8(experts: Experts) -> Experts:
    """Quantises the weights, and rows as they come. torchao wants a GPU for this, which tracing does not."""
    config = Float8DynamicActivationFloat8WeightConfig(
        granularity=PerRow(), kernel_preference=KernelPreference.TORCH
    )
    unchecked = mock.patch("torchao.quantization.quant_api._check_hardware_support")
    with nullcontext() if torch.cuda.is_available() else unchecked:
        quantize_(experts, FqnToConfig({"gate_up": config, "down": config}), filter_fn=None)
    experts.requires_grad_(False)
    return experts
