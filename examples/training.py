"""MLPs as they are trained: what the backward pass needs is stored beside the result, and the backward
pass's own products take in the derivative of the activation.

    python -m cute_backend explain examples/training.py:swiglu
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

HIDDEN, INTERMEDIATE = 256, 512


class GeluMLP(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INTERMEDIATE)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x), approximate="tanh")
        return self.down(F.dropout(h, self.dropout) if self.dropout else h) + x


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x)) + x


class Checkpointed(nn.Module):
    """A block of which the backward pass computes the inside again."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


torch.manual_seed(0)
gelu = GeluMLP().to(torch.bfloat16)
swiglu = SwiGLU().to(torch.bfloat16)
dropout = GeluMLP(dropout=0.1).to(torch.bfloat16)
checkpointed_gelu = Checkpointed(GeluMLP()).to(torch.bfloat16)
checkpointed_swiglu = Checkpointed(SwiGLU()).to(torch.bfloat16)


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(4, 64, HIDDEN, dtype=torch.bfloat16, requires_grad=True),)
