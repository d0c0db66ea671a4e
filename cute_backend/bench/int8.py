"""The built-in table of int8: the linears of a Llama 8B, with weights and activations in int8.

The baseline is the same linear in bf16. The scales and the bias are those of torchao's
Int8DynamicActivationInt8Weight, once the activation is quantised.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend.bench.table import Cell, Problem, Rate, Ratio, Runner, Table, Workload

BF16 = torch.bfloat16

LINEARS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""N and K of each linear."""

ROWS = (64, 512, 1024, 4096)


def bf16(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The linear in bf16."""
    return F.linear(x, weight, bias)


def int8(x: Tensor, weight: Tensor, of_rows: Tensor, of_columns: Tensor, bias: Tensor) -> Tensor:
    """The product of int8 with the scales of rows and of columns and the bias, in bf16."""
    y = (torch._int_mm(x, weight.t()) * of_rows).to(BF16)
    return (y * of_columns + bias).to(BF16)


def problem(linear: str, m: int) -> Problem:
    """A linear for a number of rows."""
    n, k = LINEARS[linear]

    def inputs() -> tuple[Tensor, ...]:
        x, weight = (torch.randint(-128, 128, (lines, k), dtype=torch.int8) for lines in (m, n))
        of_rows = (torch.rand(m, 1) + 0.5) / (128 * k**0.5)
        return x, weight, of_rows, (torch.rand(n) + 0.5) / 128, torch.randn(n, dtype=BF16)

    def wide() -> tuple[Tensor, ...]:
        weight = torch.randn(n, k, dtype=BF16).div_(k**0.5)
        return torch.randn(m, k, dtype=BF16), weight, torch.randn(n, dtype=BF16)

    # Tensor cores multiply int8 as fast as fp8, except on Blackwell Ultra.
    runners = (Runner.INDUCTOR, Runner.MAX_AUTOTUNE, Runner.CUTE)
    operations = 2 * m * n * k
    return Problem(
        f"{linear}-{m}-int8",
        (
            Workload("bf16", bf16, wide, Rate.BF16, operations, (Runner.EAGER,)),
            Workload("int8", int8, inputs, Rate.FP8, operations, runners),
        ),
    )


_BF16, _INT8 = Cell("bf16", Runner.EAGER), Cell("int8", Runner.CUTE)

INT8 = Table(
    "int8",
    title="Linears of Llama 8B, by rows. bf16: F.linear; int8: _int_mm with scales of rows and columns, a "
    "bias, and a cast to bf16",
    baseline=_BF16,
    ratios=(
        Ratio(_INT8, _BF16),
        Ratio(_INT8, Cell("int8", Runner.INDUCTOR)),
        Ratio(_INT8, Cell("int8", Runner.MAX_AUTOTUNE)),
    ),
    problems=tuple(problem(linear, rows) for linear in LINEARS for rows in ROWS),
)
