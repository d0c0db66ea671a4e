"""A training loop as it is usually written: gradient accumulation, clipped gradients, AdamW.

    python examples/training_loop.py

The model is compiled in place. `loss.backward()` runs the compiled backward graph, in which products take
in the derivatives of activations. Runs on a GPU if there is one, else on the CPU, where fused regions are
computed with aten.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

STEPS, ACCUMULATED, TOKENS, HIDDEN, CLASSES = 3, 2, 64, 128, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x), approximate="tanh"))


def train(model: nn.Module, device: str) -> list[float]:
    """The loss of each step; every run draws the same data."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ACCUMULATED, TOKENS, HIDDEN, generator=generator).to(device, torch.bfloat16)
    target = torch.randint(CLASSES, (ACCUMULATED, TOKENS), generator=generator).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        total = 0.0
        for part in range(ACCUMULATED):
            loss = F.cross_entropy(model(x[part]).float(), target[part]) / ACCUMULATED
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def make_model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Linear(HIDDEN, CLASSES)).to(device, torch.bfloat16)


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    expected = train(make_model(device), device)
    model = make_model(device)
    model.compile(backend="cute")
    losses = train(model, device)
    regions = counters["cute_backend"]["regions"]
    apart = max(abs(loss - other) for loss, other in zip(losses, expected, strict=True))
    print(f"losses {losses}\neager  {expected}\n{regions} fused regions, forward and backward")
    return 0 if apart < 0.02 and losses[-1] < losses[0] and regions else 1


if __name__ == "__main__":
    raise SystemExit(main())
