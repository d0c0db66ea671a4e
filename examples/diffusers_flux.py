"""A block of a diffusion transformer, Flux's from diffusers, with random weights at a small size.

    pip install diffusers
    python examples/diffusers_flux.py
    python -m cute_backend explain examples/diffusers_flux.py:block

Runs on a GPU if there is one, else on the CPU, where fused regions are computed with aten.
"""

from __future__ import annotations

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformerBlock
from torch import Tensor
from torch._dynamo.utils import counters

WIDTH, HEADS, IMAGE, TEXT = 256, 4, 96, 32

torch.manual_seed(0)
block = FluxTransformerBlock(WIDTH, HEADS, WIDTH // HEADS).to(torch.bfloat16).eval().requires_grad_(False)


def example_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """The image's tokens, the text's, and the embedding of the time step."""
    generator = torch.Generator().manual_seed(1)
    shapes = (1, IMAGE, WIDTH), (1, TEXT, WIDTH), (1, WIDTH)
    image, text, time = (torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes)
    return image, text, time


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = tuple(tensor.to(device) for tensor in example_inputs())
    eager = block.to(device)
    expected = eager(*inputs)
    results = torch.compile(eager, backend="cute")(*inputs)
    regions = counters["cute_backend"]["regions"]
    errors = [
        ((result.double() - right.double()).norm() / right.double().norm()).item()
        for result, right in zip(results, expected, strict=True)
    ]
    print(f"differs from eager by {max(errors):.2%} in norm; {regions} fused regions")
    return 0 if max(errors) < 0.02 and regions else 1


if __name__ == "__main__":
    raise SystemExit(main())
