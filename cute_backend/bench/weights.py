"""The built-in table of weights of 8 and 4 bits: the linears of a Llama 8B at few rows, as in decoding.

The baseline is the same linear in bf16. The scales are those of torchao's Int8WeightOnly, which stand behind
the product, or have zeros beside them for each group of 128 of K, and of its Float8WeightOnly, which stand in
front of the product. Of 4 bits, a byte has two values, in the same groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend.bench.int8 import LINEARS
from cute_backend.bench.table import Cell, Problem, Rate, Ratio, Runner, Table, Workload

BF16 = torch.bfloat16

ROWS = (2, 8, 16, 64, 128)

GROUP = 128
"""Values of K that share a scale and a zero."""


def bf16(x: Tensor, weight: Tensor) -> Tensor:
    """The linear in bf16."""
    return F.linear(x, weight)


def int8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The linear with a weight of int8, and a scale of each column behind it."""
    return F.linear(x, weight.to(BF16)) * scales.to(BF16).reshape(-1)


def int8_groups(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The linear with a weight of int8, and a scale and a zero of each column and group of K."""
    wide = weight.reshape(len(weight), -1, GROUP).to(BF16) - zeros[..., None].to(BF16)
    return F.linear(x, (wide * scales[..., None]).to(BF16).reshape(weight.shape))


def nibble_groups(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The linear with a weight of which a byte has two values, and a scale and a zero of each column and
    group of K in the input's dtype and in int8."""
    values = torch.stack([weight & 15, weight >> 4], -1).view(len(weight), -1, GROUP).to(BF16)
    return F.linear(x, ((values - zeros[..., None].to(BF16)) * scales[..., None]).view(len(weight), -1))


def e4m3(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The linear with a weight of e4m3, scaled in fp32 in front of it."""
    return F.linear(x, (weight.float() * scales).to(BF16))


def problem(linear: str, m: int) -> Problem:
    """A linear for a number of rows."""
    n, k = LINEARS[linear]

    def wide() -> tuple[Tensor, ...]:
        return torch.randn(m, k, dtype=BF16), torch.randn(n, k, dtype=BF16).div_(k**0.5)

    def narrow(dtype: torch.dtype) -> tuple[Tensor, ...]:
        weight = torch.randint(-128, 128, (n, k), dtype=torch.int8).to(dtype)
        return torch.randn(m, k, dtype=BF16), weight, (torch.rand(n, 1) + 0.5) / (128 * k**0.5)

    def in_groups() -> tuple[Tensor, ...]:
        x, weight, _ = narrow(torch.int8)
        scales = (torch.rand(n, k // GROUP) + 0.5) / (128 * k**0.5)
        return x, weight, scales, torch.randint(-8, 8, scales.shape, dtype=torch.int8)

    def in_nibbles() -> tuple[Tensor, ...]:
        weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
        scales = ((torch.rand(n, k // GROUP) + 0.5) / (8 * k**0.5)).to(BF16)
        return (
            torch.randn(m, k, dtype=BF16),
            weight,
            scales,
            torch.randint(0, 16, scales.shape, dtype=torch.int8),
        )

    runners = (Runner.INDUCTOR, Runner.MAX_AUTOTUNE, Runner.CUTE)
    operations = 2 * m * n * k
    return Problem(
        f"{linear}-{m}-weights",
        (
            Workload("bf16", bf16, wide, Rate.BF16, operations, (Runner.EAGER,)),
            Workload("int8", int8, lambda: narrow(torch.int8), Rate.BF16, operations, runners),
            Workload("int8 groups", int8_groups, in_groups, Rate.BF16, operations, runners),
            Workload("int4 groups", nibble_groups, in_nibbles, Rate.BF16, operations, runners),
            Workload("e4m3", e4m3, lambda: narrow(torch.float8_e4m3fn), Rate.BF16, operations, runners),
        ),
    )


_BF16 = Cell("bf16", Runner.EAGER)

WEIGHTS = Table(
    "weights",
    title="Linears of Llama 8B with quantised weights, scaled by columns or groups, by rows. bf16: F.linear",
    baseline=_BF16,
    ratios=tuple(
        Ratio(Cell(name, Runner.CUTE), other)
        for name in ("int8", "int8 groups", "int4 groups", "e4m3")
        for other in (_BF16, Cell(name, Runner.INDUCTOR), Cell(name, Runner.MAX_AUTOTUNE))
    ),
    problems=tuple(problem(linear, rows) for linear in LINEARS for rows in ROWS),
)
