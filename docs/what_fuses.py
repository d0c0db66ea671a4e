"""The programs of docs/what-fuses.md, each with arguments for `explain`.

`make golden` writes them to the page, each with the formula of its kernel.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import cute_backend


def activation(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, bias)) + residual


def int8(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    y = torch._int_mm(x, w.t()) * x_scale  # (M, 1)
    return y.bfloat16() * w_scale  # (N,)


def weight_only(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, w.to(torch.bfloat16)) * scale  # int8; (N,)


def weight_groups(x: Tensor, w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    groups = w.unflatten(1, (-1, 128)).to(torch.bfloat16)  # int8 or uint8; (N, K / 128, 128)
    return F.linear(x, ((groups - zero[..., None]) * scale[..., None]).flatten(1))


def maximum(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.relu(F.linear(x, w))
    return y, y.abs().amax(-1)


def pooled(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).relu().mean(1)  # (B, S, N) to (B, N)


def last_row(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)[:, -1] / 0.7


def loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), labels)


def head_norm(x: Tensor, w: Tensor, weight: Tensor) -> Tensor:
    y = F.linear(x, w).view(*x.shape[:-1], -1, 128)  # heads of 128 columns
    return F.rms_norm(y, (128,), weight, 1e-6)


def quantised(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.silu(F.linear(x, w)).unflatten(-1, (-1, 128))
    scale = y.abs().amax(-1, keepdim=True).float() / 448
    return (y / scale).to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1)


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(x @ gate) * (x @ up)


def qkv(x: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, q, bias), F.linear(x, k), F.linear(x, v)


def cached(x: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> None:
    heads = (x.shape[0], x.shape[1], -1, 128)
    keys.index_copy_(2, positions, F.linear(x, k).view(heads).transpose(1, 2))
    values.index_copy_(2, positions, F.linear(x, v).view(heads).transpose(1, 2))


def rotated(x: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    heads = (y.view(*x.shape[:-1], -1, 128).transpose(1, 2) for y in (F.linear(x, q), F.linear(x, k)))
    return [y * cos + torch.cat((-y[..., 64:], y[..., :64]), -1) * sin for y in heads]


def experts(x: Tensor, gate: Tensor, up: Tensor, ends: Tensor) -> Tensor:
    return F.silu(F.grouped_mm(x, gate, offs=ends)) * F.grouped_mm(x, up, offs=ends)


def bf16(*sizes: int) -> Tensor:
    return torch.zeros(sizes, dtype=torch.bfloat16)


X = bf16(2, 256, 1024)
HEADS = bf16(1024, 1024)
"""Eight heads of 128 columns."""
CACHE = bf16(2, 8, 4096, 128)
EXPERTS = bf16(8, 1024, 2048)


class Program(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        return self.function.__name__

    def sample(self) -> str:
        """The program and its kernel's formula, as the page shows them. One kernel has all of it."""
        with torch.no_grad():
            (region,) = cute_backend.explain(self.function, *self.args, arch="sm_90a").regions
        program = re.sub(r": Tensor| -> .+(?=:$)", "", inspect.getsource(self.function).rstrip(), flags=re.M)
        return f"```python\n{program}\n```\n\n```text\n{region.formula}\n```"


PROGRAMS = (
    Program(activation, (X, bf16(4096, 1024), bf16(4096), bf16(2, 256, 4096))),
    Program(
        int8,
        (
            torch.zeros(512, 1024, dtype=torch.int8),
            torch.zeros(4096, 1024, dtype=torch.int8),
            torch.zeros(512, 1),
            bf16(4096),
        ),
    ),
    Program(weight_only, (bf16(64, 1024), torch.zeros(4096, 1024, dtype=torch.int8), bf16(4096))),
    Program(
        weight_groups,
        (bf16(64, 1024), torch.zeros(4096, 1024, dtype=torch.uint8), bf16(4096, 8), bf16(4096, 8)),
    ),
    Program(maximum, (bf16(2048, 1024), bf16(14336, 1024))),
    Program(pooled, (X, bf16(4096, 1024))),
    Program(last_row, (X, bf16(32000, 1024))),
    Program(loss, (bf16(512, 1024), bf16(32000, 1024), torch.zeros(512, dtype=torch.int64))),
    Program(head_norm, (X, HEADS, bf16(128))),
    Program(quantised, (X, bf16(4096, 1024))),
    Program(swiglu, (bf16(512, 1024), bf16(1024, 4096), bf16(1024, 4096))),
    Program(qkv, (X, HEADS, bf16(256, 1024), bf16(256, 1024), bf16(1024))),
    Program(cached, (X[:, :1], HEADS, HEADS, CACHE, CACHE.clone(), torch.zeros(1, dtype=torch.int64))),
    Program(rotated, (X, HEADS, bf16(1024, 1024), bf16(1, 1, 256, 128), bf16(1, 1, 256, 128))),
    Program(experts, (bf16(512, 1024), EXPERTS, EXPERTS.clone(), torch.zeros(8, dtype=torch.int32))),
)
