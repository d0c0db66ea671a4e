"""The built-in table of losses: the cross entropy of a language model's head, without gradients.

The baseline is the head's bare product, which writes the logits. The kernel of the loss writes none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend.bench.table import Cell, Problem, Rate, Ratio, Runner, Table, Workload

BF16 = torch.bfloat16

HEADS = {"llama3-8b": (128256, 4096), "qwen3-8b": (151936, 4096)}
"""The vocabulary and the width of models' heads."""

IGNORED = -100


def head(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The logits (rows, vocabulary) alone."""
    return F.linear(x, weight)


def loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy of the rows whose label counts, 0-d fp32."""
    return F.cross_entropy(F.linear(x, weight).float(), labels)


def problem(model: str, rows: int) -> Problem:
    """A head of a model for a number of rows, of which every seventh has no label."""
    vocabulary, width = HEADS[model]

    def inputs() -> tuple[Tensor, ...]:
        labels = torch.randint(0, vocabulary, (rows,))
        labels[::7] = IGNORED
        weight = torch.randn(vocabulary, width, dtype=BF16).div_(width**0.5)
        return torch.randn(rows, width, dtype=BF16), weight, labels

    operations = 2 * rows * vocabulary * width
    return Problem(
        f"{model}-{rows}-loss",
        (
            Workload("head", head, inputs, Rate.BF16, operations, (Runner.EAGER,)),
            Workload("loss", loss, inputs, Rate.BF16, operations, (Runner.INDUCTOR, Runner.CUTE), 1e-4),
        ),
    )


_HEAD, _LOSS = Cell("head", Runner.EAGER), Cell("loss", Runner.CUTE)

LOSSES = Table(
    "losses",
    title="Cross entropy of a head without gradients, bf16, by model and rows. head: the logits alone; loss: "
    "F.cross_entropy(F.linear(x, w).float(), labels)",
    baseline=_HEAD,
    ratios=(Ratio(_LOSS, _HEAD), Ratio(_LOSS, Cell("loss", Runner.INDUCTOR))),
    problems=tuple(problem(model, rows) for model in HEADS for rows in (512, 4096)),
)
