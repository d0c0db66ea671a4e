"""The MLP block of a Llama with fp8 weights: gate, up and down projections, silu, multiply and the residual.

Weights are quantised once, a scale for each output channel; activations as they come, a scale for each token.

    python -m cute_backend explain examples/llama_mlp.py:mlp
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E4M3_MAX = 448.0


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` in e4m3 with one fp32 scale for each row of its last axis: x is about q * scale."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / E4M3_MAX
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


class Fp8Linear(nn.Module):
    """(..., K) e4m3 with scales (..., 1) to (..., N) bf16."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        weight, scale = quantize(torch.randn(out_features, in_features) / in_features**0.5)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.t())

    def forward(self, x: Tensor, x_scale: Tensor) -> Tensor:
        y = torch._scaled_mm(
            x.flatten(0, -2),
            self.weight.t(),
            x_scale.flatten(0, -2),
            self.scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return y.unflatten(0, x.shape[:-1])


class LlamaMLP(nn.Module):
    """x (batch, tokens, hidden) bf16, normalised, and the residual stream of the same shape."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate = Fp8Linear(hidden, intermediate)
        self.up = Fp8Linear(hidden, intermediate)
        self.down = Fp8Linear(intermediate, hidden)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        q = quantize(x)
        h = F.silu(self.gate(*q)) * self.up(*q)
        return self.down(*quantize(h)) + residual


# The sizes of Llama 3.2 1B.
mlp = LlamaMLP(hidden=2048, intermediate=8192)


def example_inputs() -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 1024, 2048, dtype=torch.bfloat16)
    return x, torch.randn_like(x)
