"""A Llama's MLP and attention, quantised by torchao: fp8 weights, and activations as they come.

    pip install torchao
    python -m cute_backend explain examples/torchao_fp8.py:mlp_per_row

The scales that torchao divides by come from row maxima (PerRow) or from one maximum (PerTensor). The maxima
of the down projection's input are found by the kernel that writes it.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    FqnToConfig,
    PerRow,
    PerTensor,
    quantize_,
)
from torchao.quantization.quantize_.common import KernelPreference

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 512, 1024, 8, 4


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)) + x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.size = HIDDEN // HEADS
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * self.size, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * self.size, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(heads.transpose(1, 2).flatten(-2)) + x


def quantized(module: nn.Module, granularity: Any, *parameters: str) -> nn.Module:
    """The module in bf16, its linears in fp8, and so the parameters of other modules that are named, as `re:`
    patterns. torchao wants a GPU for this, which explaining does not."""
    config = Float8DynamicActivationFloat8WeightConfig(
        granularity=granularity, kernel_preference=KernelPreference.TORCH
    )
    unchecked = mock.patch("torchao.quantization.quant_api._check_hardware_support")
    with nullcontext() if torch.cuda.is_available() else unchecked:
        quantize_(module.to(torch.bfloat16), config)
        if parameters:
            quantize_(module, FqnToConfig(dict.fromkeys(parameters, config)), filter_fn=None)
    return module.requires_grad_(False)


torch.manual_seed(0)
mlp_per_row = quantized(MLP(), PerRow())
mlp_per_tensor = quantized(MLP(), PerTensor())
attention_per_row = quantized(Attention(), PerRow())
attention_per_tensor = quantized(Attention(), PerTensor())


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(2, 64, HIDDEN, dtype=torch.bfloat16),)
