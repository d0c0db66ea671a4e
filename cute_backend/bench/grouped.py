"""The table of experts: the grouped products of a mixture of experts, gate and up, and the block around them.

The baseline is torch's bare `grouped_mm`. It writes gate and up, and the gated product writes one plane.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend.bench.table import Cell, Problem, Rate, Ratio, Runner, Table, Workload

BF16 = torch.bfloat16


class Split(Enum):
    """The distribution of rows among experts."""

    ROUTED = "routed"
    """Each token goes to different experts, which are drawn at random."""
    SKEWED = "skewed"
    """Every other token goes to the first expert only, and the rest to the other experts at random."""


@dataclass(frozen=True)
class Experts:
    """The experts of a model: their number, the number that each token goes to, and the widths of a token's
    state and of an expert's inner layer."""

    name: str
    count: int
    chosen: int
    hidden: int
    inner: int

    def rows(self, tokens: int, split: Split) -> list[int]:
        """The rows of each expert, the same in every process."""
        draw = torch.Generator().manual_seed(0)
        if split is Split.ROUTED:
            picked = torch.rand(tokens, self.count, generator=draw, device="cpu").topk(self.chosen).indices
        else:
            picked = torch.randint(1, self.count, (tokens, self.chosen), generator=draw, device="cpu")
            picked[::2] = 0
        return picked.flatten().bincount(minlength=self.count).tolist()


MODELS = (
    Experts("mixtral", 8, 2, 4096, 14336),
    Experts("qwen3-30b-a3b", 128, 8, 2048, 768),
    Experts("gpt-oss-20b", 32, 4, 2880, 2880),
    Experts("deepseek-v3", 256, 8, 7168, 2048),
)


def gate_up(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The bare product with the weights of gate and up, both halves written: (rows, 2 * inner)."""
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


def gated(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """silu(gate) * up: (rows, inner)."""
    gate, up = gate_up(x, weight, ends).chunk(2, -1)
    return F.silu(gate) * up


def block(x: Tensor, weight: Tensor, down: Tensor, ends: Tensor, routing: Tensor) -> Tensor:
    """The output of each expert for its rows, times their routing weights: (rows, hidden)."""
    y = F.grouped_mm(gated(x, weight, ends), down.transpose(1, 2), offs=ends)
    return y * routing[:, None]


def problem(experts: Experts, tokens: int, split: Split) -> Problem:
    """The products for `tokens` tokens, and the block."""
    counts = experts.rows(tokens, split)
    rows, hidden, inner = sum(counts), experts.hidden, experts.inner
    ends = list(accumulate(counts))
    idle = counts.count(0)

    def inputs() -> tuple[Tensor, ...]:
        weight = torch.randn(experts.count, 2 * inner, hidden, dtype=BF16).div_(hidden**0.5)
        return torch.randn(rows, hidden, dtype=BF16), weight, torch.tensor(ends, dtype=torch.int32)

    def block_inputs() -> tuple[Tensor, ...]:
        x, weight, offsets = inputs()
        down = torch.randn(experts.count, hidden, inner, dtype=BF16).div_(inner**0.5)
        return x, weight, down, offsets, torch.rand(rows, dtype=BF16)

    def workload(name: str, fn: Any, runners: tuple[Runner, ...]) -> Workload:
        matrices = 3 if fn is block else 2
        return Workload(
            name,
            fn,
            block_inputs if fn is block else inputs,
            Rate.BF16,
            operations=2 * rows * matrices * hidden * inner,
            runners=runners,
            unread=2 * idle * matrices * hidden * inner,
        )

    suffix = "-skewed" if split is Split.SKEWED else ""
    return Problem(
        f"{experts.name}-{tokens}{suffix}",
        (
            workload("gate_up", gate_up, (Runner.EAGER,)),
            workload("gated", gated, (Runner.CUTE,)),
            workload("block", block, (Runner.INDUCTOR, Runner.CUTE)),
        ),
    )


TOKENS = (64, 4096)
"""Numbers of tokens, for a step of decoding and for a prompt."""

_GATE_UP, _GATED, _BLOCK = (
    Cell("gate_up", Runner.EAGER),
    Cell("gated", Runner.CUTE),
    Cell("block", Runner.CUTE),
)

GROUPED = Table(
    "grouped",
    title="Experts, bf16, by model and tokens. gate_up: torch's grouped_mm, which writes gate and up; gated: "
    "silu(gate) * up; block: gated, down, routing weights. -skewed: half of the rows in one expert",
    baseline=_GATE_UP,
    ratios=(
        Ratio(_GATED, _GATE_UP),
        Ratio(_BLOCK, Cell("block", Runner.INDUCTOR)),
    ),
    problems=tuple(
        problem(experts, tokens, split) for split in Split for tokens in TOKENS for experts in MODELS
    ),
)
