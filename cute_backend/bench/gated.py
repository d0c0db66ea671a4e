"""The table of gated pairs: products whose two halves, or even and odd columns, are multiplied.

The baseline is the bare product with as many operations. It writes all N columns, and a pair writes N / 2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend.bench.scaled_mm import bare, operands
from cute_backend.bench.table import Cell, Problem, Rate, Ratio, Runner, Table, Workload

BF16 = torch.bfloat16


def two(x: Tensor, gate: Tensor, up: Tensor, x_scale: Tensor, gate_scale: Tensor, up_scale: Tensor) -> Tensor:
    """SwiGLU of two fp8 rowwise products of one input."""
    return F.silu(bare(x, gate, x_scale, gate_scale)) * bare(x, up, x_scale, up_scale)


def chunk(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """SwiGLU of the halves of one fp8 rowwise product."""
    gate, up = bare(x, weight, x_scale, weight_scale).chunk(2, -1)
    return F.silu(gate) * up


def swiglu7(x: Tensor, weight: Tensor) -> Tensor:
    """Clamped SwiGLU of the even and the odd columns of one bf16 product."""
    y = x @ weight
    gate, linear = y[:, ::2].clamp(max=7), y[:, 1::2].clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (linear + 1)


def fp8_problem(m: int, n: int, k: int, pair: Callable[..., Tensor]) -> Problem:
    """SwiGLU of N / 2 columns, spelled as `two` or as `chunk`, and the bare product of N columns."""

    def halved() -> tuple[Tensor, ...]:
        x, weight, x_scale, weight_scale = operands(m, n, k)
        gate, up = (half.contiguous() for half in weight.chunk(2))
        return x, gate, up, x_scale, *weight_scale.chunk(2, -1)

    wide = partial(operands, m, n, k)
    return Problem(
        f"{m}x{n}x{k}-{pair.__name__}",
        _workloads(bare, wide, pair, halved if pair is two else wide, Rate.FP8, 2 * m * n * k),
    )


def bf16_problem(m: int, n: int, k: int, row_major: bool) -> Problem:
    """swiglu7 of a weight (N, K), as a linear holds it, or (K, N) if `row_major`, as experts hold theirs."""

    def inputs() -> tuple[Tensor, Tensor]:
        x, weight = torch.randn(m, k, dtype=BF16), torch.randn(n, k, dtype=BF16) / k**0.5
        return x, weight.t().contiguous() if row_major else weight.t()

    name = f"{m}x{n}x{k}-swiglu7" + ("-kn" if row_major else "")
    return Problem(name, _workloads(torch.mm, inputs, swiglu7, inputs, Rate.BF16, 2 * m * n * k))


def _workloads(
    product: Callable[..., Tensor],
    product_inputs: Callable[[], tuple[Any, ...]],
    pair: Callable[..., Tensor],
    pair_inputs: Callable[[], tuple[Any, ...]],
    rate: Rate,
    operations: int,
) -> tuple[Workload, Workload]:
    runners = (Runner.EAGER, Runner.INDUCTOR, Runner.CUTE)
    return (
        Workload("wide", product, product_inputs, rate, operations, (Runner.EAGER,)),
        Workload("gated", pair, pair_inputs, rate, operations, runners),
    )


_WIDE, _GATED = Cell("wide", Runner.EAGER), Cell("gated", Runner.CUTE)

GATED = Table(
    "gated",
    title="Gated pairs. wide: the bare product of N columns; gated: N / 2 columns of swiglu7, gpt-oss's "
    "gated activation (bf16, even and odd columns), or of SwiGLU (fp8 rowwise). -kn: a weight (K, "
    "N); -two: two products; -chunk: halves of one",
    baseline=_WIDE,
    ratios=(Ratio(_GATED, _WIDE), Ratio(_GATED, Cell("gated", Runner.INDUCTOR))),
    problems=(
        bf16_problem(7697, 27304, 5120, row_major=False),
        bf16_problem(7697, 27304, 5120, row_major=True),
        fp8_problem(4096, 2 * 14336, 4096, two),
        fp8_problem(4096, 2 * 14336, 4096, chunk),
    ),
)
