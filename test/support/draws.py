"""Draws of tokens for tests on any device: distributions to draw from, and how draws are judged."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_backend
from cute_backend.philox import gumbel
from cute_backend.runtime.calls import sample_op as op_module
from cute_backend.spec import EpilogueSpec

BF16 = torch.bfloat16

VOCABULARIES, ROWS, DESCENDING = (100, 200, 256), (1, 2, 130), (False, True)
STEPS = list(product(VOCABULARIES, ROWS, DESCENDING))
"""The sizes and orders of `draw_steps`."""

_SAMPLES = {1: 10_000, 2: 5_000, 130: 80}
"""Samples of a row, by the number of rows: about 10,000 draws in all, in whole passes of eight."""


def p_value(counts: Tensor, expected: Tensor) -> float:
    """The p-value of Pearson's chi-squared, with bins of an expectation below 5 merged; 0 if not finite."""
    counts, expected = counts.double().cpu(), expected.double().cpu()
    small = expected < 5
    if small.any():
        counts = torch.cat([counts[~small], counts[small].sum(0, keepdim=True)])
        expected = torch.cat([expected[~small], expected[small].sum(0, keepdim=True)])
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((counts.numel() - 1) / 2, dtype=torch.float64)
    p = torch.special.gammaincc(freedom, statistic / 2).item()
    return p if math.isfinite(p) else 0.0


def draw_steps(vocabulary: int, rows: int, descending: bool, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """10,000 draws at temperature 5 from logits 0, 1, 2, ..., or from the reverse, and the expected counts.

    A bias shifts all logits by -V, so that a zero from beyond the edge would win.
    """
    numbers = torch.arange(vocabulary, device=device)
    numbers = numbers.flip(0) if descending else numbers
    weight = torch.zeros(vocabulary, 8, dtype=BF16, device=device)
    weight[:, 0], weight[:, 1] = numbers % 16, numbers // 16 * 16  # each of the two digits is exact in bf16
    bias = torch.full((vocabulary,), -float(vocabulary), device=device)
    hidden = torch.ones(rows, 8, dtype=BF16, device=device)
    tokens = cute_backend.sample(
        hidden, weight, temperature=5.0, num_samples=_SAMPLES[rows], seed=vocabulary, bias=bias
    )
    assert tokens.shape == (rows, _SAMPLES[rows]) and tokens.dtype is torch.int64
    logits = numbers.double() - vocabulary
    return tokens, torch.softmax(logits / 5.0, 0) * tokens.numel()


def draw_pairs(device: str = "cpu") -> dict[str, tuple[Tensor, Tensor]]:
    """Independent draws from eight tokens of equal probability, by name."""
    hidden, weight = (torch.zeros(size, 8, dtype=BF16, device=device) for size in (4000, 8))
    first = cute_backend.sample(hidden, weight, num_samples=2, seed=1)
    second = cute_backend.sample(hidden, weight, num_samples=2, seed=2)
    return {
        "samples": (first[:, 0], first[:, 1]),
        "rows": (first[:-1, 0], first[1:, 0]),
        "seeds": (first[:, 0], second[:, 0]),
    }


Call = tuple[list[Tensor], list[Tensor], list[Tensor], EpilogueSpec]
"""The arguments of the fused op: A, B, the epilogue's operands and the spec."""


def recorded(hidden: Tensor, weight: Tensor, **how: Any) -> tuple[list[Call], Any]:
    """The calls of the fused op that `sample` makes, one for each pass, and what it returns."""
    calls: list[Call] = []
    original = op_module.gemm_epilogue

    def spy(a: list[Tensor], b: list[Tensor], loads: list[Tensor], spec: str, *rest: Any) -> Any:
        calls.append((a, b, loads, EpilogueSpec.from_json(spec)))
        return original(a, b, loads, spec, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op_module, "gemm_epilogue", spy)
        return calls, cute_backend.sample(hidden, weight, **how)


def noise(seed: int, rows: int, vocabulary: int, samples: int) -> Tensor:
    """The noise of every draw, (samples, rows, vocabulary), on the CPU."""
    low, high = torch.tensor([seed]).view(torch.int32)
    places = torch.arange(samples)[:, None, None], torch.arange(rows)[:, None], torch.arange(vocabulary)
    return gumbel(low, high, places[2], places[1], places[0])
