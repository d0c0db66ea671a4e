"""Weights in each stored format, and programs that multiply by them as libraries write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend import explain
from cute_backend.spec import DType, WeightGroups

BF16 = torch.bfloat16
K = 256
Linear = Callable[..., Tensor]


def rows(m: int = 24) -> Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(m)).to(BF16)


def drawn(seed: int, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def int8(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    """torchao's Int8WeightOnlyConfig."""
    return x @ w.t().to(x.dtype) * scales.to(x.dtype).reshape(-1)


def float8(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    """torchao's Float8WeightOnlyConfig."""
    return x @ (w.t().float() * scales.t()).to(x.dtype)


def groups(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    wide = w.view(len(w), scales.shape[1], -1).to(x.dtype) - zeros[..., None].to(x.dtype)
    return F.linear(x, (wide * scales[..., None]).view(len(w), -1))


def nibbles(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return groups(x, torch.stack([w & 15, w >> 4], -1).view(len(w), -1), scales, zeros)


def of_columns(seed: int, n: int = 40) -> tuple[Tensor, ...]:
    return drawn(seed, 0, 100, n, K).to(torch.int8), drawn(seed, 1, 99, n, 1) / 640


def of_float8(seed: int, n: int = 40) -> tuple[Tensor, ...]:
    weight, scales = of_columns(seed, n)
    return weight.view(torch.float8_e4m3fn), scales


def of_groups(seed: int, n: int = 40, values: int = 64) -> tuple[Tensor, ...]:
    scales, zeros = drawn(seed, 1, 99, n, K // values) / 640, drawn(seed, -7, 8, n, K // values)
    return drawn(seed, 0, 256, n, K).to(torch.uint8), scales.to(BF16), zeros.to(torch.int8)


def of_nibbles(seed: int, n: int = 40) -> tuple[Tensor, ...]:
    _, *vectors = of_groups(seed, n)
    return drawn(seed, 0, 256, n, K // 2).to(torch.uint8), *vectors


GROUPS = WeightGroups(64, DType.BF16, DType.BF16, DType.I8, DType.BF16)
FORMATS: dict[Linear, tuple[Callable[..., tuple[Tensor, ...]], DType, WeightGroups | None]] = {
    int8: (of_columns, DType.I8, None),
    float8: (of_float8, DType.E4M3, None),
    groups: (of_groups, DType.U8, GROUPS),
    nibbles: (of_nibbles, DType.U4X2, GROUPS),
}
EACH = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.__name__)


def products(program: Callable[..., Any], *given: Tensor, arch: str = "sm_90a") -> list[int]:
    """The products of each kernel."""
    return [len(each.spec.accumulators) for each in explain(program, *given, arch=arch).regions]
