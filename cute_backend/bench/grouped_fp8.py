"""The table of experts in fp8: rows in groups, with a scale for each row and each column of every weight.

The baseline is torch's bare `_scaled_grouped_mm`. It writes gate and up, and the gated product writes one
plane; its second product has no routing weights.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend.bench.grouped import MODELS, TOKENS, Experts, Split
from cute_backend.bench.table import Cell, Problem, Rate, Ratio, Runner, Table, Workload


def product(x: Tensor, weight: Tensor, of_rows: Tensor, of_columns: Tensor, ends: Tensor) -> Tensor:
    """The bare product with the weights (G, columns, K) of one matrix, or of both halves: bf16."""
    return torch._scaled_grouped_mm(
        x, weight.mT, of_rows, of_columns, ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def gated(x: Tensor, weight: Tensor, of_rows: Tensor, of_columns: Tensor, ends: Tensor) -> Tensor:
    """silu(gate) * up: (rows, inner)."""
    gate, up = product(x, weight, of_rows, of_columns, ends).chunk(2, -1)
    return F.silu(gate) * up


def routed(
    x: Tensor, weight: Tensor, of_rows: Tensor, of_columns: Tensor, ends: Tensor, routing: Tensor
) -> Tensor:
    """The second product, times routing weights: (rows, hidden)."""
    return product(x, weight, of_rows, of_columns, ends) * routing[:, None]


def problem(experts: Experts, tokens: int, split: Split) -> Problem:
    """Both products for `tokens` tokens."""
    counts = experts.rows(tokens, split)
    rows, idle = sum(counts), counts.count(0)

    def workload(name: str, fn: Any, runner: Runner, second: bool) -> Workload:
        sizes = (experts.hidden, experts.inner) if second else (2 * experts.inner, experts.hidden)
        columns, k = sizes

        def inputs() -> tuple[Tensor, ...]:
            x = torch.randn(rows, k).to(torch.float8_e4m3fn)
            weight = torch.randn(experts.count, columns, k, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
            scales = torch.rand(rows) + 0.5, (torch.rand(experts.count, columns) + 0.5) / k**0.5
            ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
            return (x, weight, *scales, ends, *([torch.rand(rows, dtype=torch.bfloat16)] * (fn is routed)))

        return Workload(
            name,
            fn,
            inputs,
            Rate.FP8,
            operations=2 * rows * columns * k,
            runners=(runner,),
            unread=idle * columns * k,
        )

    suffix = "-skewed" if split is Split.SKEWED else ""
    return Problem(
        f"{experts.name}-{tokens}-fp8{suffix}",
        (
            workload("gate_up", product, Runner.EAGER, second=False),
            workload("gated", gated, Runner.CUTE, second=False),
            workload("down", product, Runner.EAGER, second=True),
            workload("routed", routed, Runner.CUTE, second=True),
        ),
    )


_GATE_UP, _DOWN = Cell("gate_up", Runner.EAGER), Cell("down", Runner.EAGER)

GROUPED_FP8 = Table(
    "grouped_fp8",
    title="Experts, fp8 with scales of rows and columns, by model and tokens. gate_up, down: torch's "
    "_scaled_grouped_mm; gated: silu(gate) * up; routed: down, routing weights. -skewed: half of the rows in "
    "one expert",
    baseline=_GATE_UP,
    ratios=(Ratio(Cell("gated", Runner.CUTE), _GATE_UP), Ratio(Cell("routed", Runner.CUTE), _DOWN)),
    problems=tuple(
        problem(experts, tokens, split) for split in Split for tokens in TOKENS for experts in MODELS
    ),
)
