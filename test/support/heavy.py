"""Epilogues with more planes than any shared one has, of mixed dtypes, and their inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def fp32_residual(a, b, f32, i8, bf16, f16):
    return (F.gelu((a @ b).float()) + f32).to(BF16)


def four_read(a, b, f32, i8, bf16, f16):
    return F.gelu((a @ b).float() * f32 + f32[:1]) * bf16 + i8 * f16


def two_results_and_a_maximum(a, b, f32, i8, bf16, f16):
    first = F.gelu((a @ b).float()) * f32 + bf16.float()
    second = first * f16 + i8
    return first.to(BF16), second, second.amax(-1)


def four_results(a, b, f32, i8, bf16, f16):
    first = (a @ b).float() + f32
    second = F.gelu(first) * i8
    third = second + f16
    return first, second, third, third * bf16


def promoted(a, b, f32, i8, bf16, f16):
    one = torch.ones((), device=a.device)
    y = torch._scaled_mm(a.to(E4M3), b.t().to(E4M3).t(), one, one, out_dtype=BF16)
    first = F.gelu(y.float()) * f32 + bf16
    second = torch.where(i8 > 2, first, f16)
    return first.to(BF16), (second * 2).to(E4M3), second.sum(-1)


def neighbours(a, b, f32, i8, bf16, f16):
    half = b.shape[1] // 2
    y = a @ b[:, : 2 * half]
    gate, up = y[:, ::2].float(), y[:, 1::2].float()
    return _gated(gate, up, *(plane[:, :half] for plane in (f32, i8, bf16, f16)))


def neighbours_saved(a, b, f32, i8, bf16, f16):
    half = b.shape[1] // 2
    both = a @ b[:, : 2 * half] + bf16[:1, :1]
    gate, up = both[:, ::2], both[:, 1::2]
    return F.silu(gate) * up + bf16[:, :half], both


def gradients_of_neighbours(a, b, f32, i8, bf16, f16):
    hidden = a @ b
    gate, up = bf16.repeat(1, 2)[:, ::2], bf16.repeat(1, 2)[:, 1::2]
    return torch.stack((hidden * up * torch.sigmoid(gate), hidden * gate), -1).flatten(-2), hidden * f16


def halves(a, b, f32, i8, bf16, f16):
    half = b.shape[1] // 2
    gate, up = (a @ b[:, : 2 * half]).float().chunk(2, -1)
    return _gated(gate, up, *(plane[:, :half] for plane in (f32, i8, bf16, f16)))


def _gated(gate, up, f32, i8, bf16, f16):
    first = F.silu(gate + bf16) * (up + f16)
    second = F.gelu(first, approximate="tanh") + f32 * i8
    return second.to(BF16), first.to(BF16), gate.to(BF16)


HEAVY: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    fn.__name__: fn
    for fn in (
        fp32_residual,
        four_read,
        two_results_and_a_maximum,
        four_results,
        promoted,
        neighbours,
        neighbours_saved,
        gradients_of_neighbours,
        halves,
    )
}


def heavy_inputs(m: int, n: int, k: int) -> tuple[Tensor, ...]:
    """A (m, k), B (k, n) and four planes of different dtypes."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    i8 = torch.randint(0, 5, (m, n), generator=generator).to(torch.int8)
    a, b = normal(m, k).to(BF16), (normal(n, k) / k**0.5).to(BF16).t()
    return a, b, normal(m, n), i8, normal(m, n).to(BF16), normal(m, n).to(F16)
