"""The built-in table of decoding: drawing a token, choosing the best one, and writing the logits of both.

Results are checked by their meaning. A draw of `sample` depends on its seed alone, so the check draws again
with torch, in fp32. The noise of torch's own draws is not known, so only their range is checked. The best
token is the one with the largest logit. Sums in another order, or logits that are rounded to bf16 first, may
order nearly equal logits differently, so the check measures by how much the chosen logit falls short.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import cute_backend
from cute_backend.bench.table import Cell, Problem, Rate, Ratio, Runner, Table, Workload
from cute_backend.philox import gumbel

BF16 = torch.bfloat16


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """The bare product, which writes the logits: the baseline of sampling."""
    return torch.mm(hidden, weight.t())


def sample(hidden: Tensor, weight: Tensor, seed: Tensor) -> Tensor:
    """A token for each row, drawn from the softmax at temperature 1."""
    return cute_backend.sample(hidden, weight, seed=seed)


def multinomial(hidden: Tensor, weight: Tensor) -> Tensor:
    """A token for each row, as torch draws it from probabilities in bf16, which take the fewest bytes."""
    return torch.multinomial(torch.softmax(torch.mm(hidden, weight.t()), -1), 1)


def greedy(hidden: Tensor, weight: Tensor) -> Tensor:
    """The most likely token of each row."""
    return torch.argmax(torch.mm(hidden, weight.t()), -1)


def _shortfall(scores: Tensor, tokens: Tensor) -> float:
    """The largest distance of a chosen token's score from the largest of its row, relative to the latter.

    It is infinite if a token is out of range.
    """
    if not _are_tokens(tokens, *scores.shape):
        return float("inf")
    best = scores.amax(1)
    chosen = scores.gather(1, tokens.reshape(-1, 1)).squeeze(1)
    return ((best - chosen) / best.abs()).max().item()


def _are_tokens(tokens: Tensor, rows: int, vocabulary: int) -> bool:
    return tokens.numel() == rows and bool(((tokens >= 0) & (tokens < vocabulary)).all())


def _of_draws(args: tuple[Any, ...], tokens: Tensor) -> float:
    """The shortfall of draws, computed with their noise; the seed has been advanced since."""
    hidden, weight, seed = args
    low, high = (seed - 1).reshape(1).view(torch.int32).split(1)
    column, row = (torch.arange(len(each), device=each.device) for each in (weight, hidden))
    noise = gumbel(low, high, column, row[:, None], torch.zeros_like(low))
    return _shortfall(hidden.float() @ weight.float().t() + noise, tokens)


def _of_the_best(args: tuple[Any, ...], tokens: Tensor) -> float:
    hidden, weight = args
    return _shortfall(hidden.float() @ weight.float().t(), tokens)


def _of_any(args: tuple[Any, ...], tokens: Tensor) -> float:
    """0 if all tokens are in range, else infinity."""
    hidden, weight = args
    return 0.0 if _are_tokens(tokens, len(hidden), len(weight)) else float("inf")


def problem(rows: int, vocabulary: int, depth: int) -> Problem:
    """One batch and one vocabulary. Weights are (N, K), as a linear holds them, and logits have a spread of
    2."""

    def inputs() -> tuple[Tensor, Tensor]:
        weight = torch.randn(vocabulary, depth, dtype=BF16)
        return torch.randn(rows, depth, dtype=BF16) * (2 / depth**0.5), weight

    def seeded() -> tuple[Tensor, Tensor, Tensor]:
        return *inputs(), torch.zeros(1, dtype=torch.int64)

    workload = partial(Workload, rate=Rate.BF16, operations=2 * rows * vocabulary * depth)
    eager, inductor, cute = Runner.EAGER, Runner.INDUCTOR, Runner.CUTE
    return Problem(
        f"H{rows}-V{vocabulary}-D{depth}",
        (
            workload("logits", logits, inputs, runners=(eager,)),
            workload(
                "sample",
                sample,
                seeded,
                runners=(cute,),
                tolerance=1e-3,
                check=_of_draws,
                calls_kernels=True,
            ),
            workload("multinomial", multinomial, inputs, runners=(inductor,), tolerance=0.0, check=_of_any),
            workload("greedy", greedy, inputs, runners=(inductor, cute), check=_of_the_best),
        ),
    )


_BATCHES, _VOCABULARIES, _DEPTHS = (1, 4, 16, 64, 256), (128256, 151936), (4096, 8192)
"""The rows H of a decoding step, and the vocabularies and widths of two families of models: 1.0 to 2.5 GB of
weights."""

_SAMPLE, _GREEDY = Cell("sample", Runner.CUTE), Cell("greedy", Runner.CUTE)
_LOGITS = Cell("logits", Runner.EAGER)

SAMPLING = Table(
    "sampling",
    title="A decoding step's tokens, of H rows. logits: the bare bf16 matmul; sample: cute_backend.sample; "
    "multinomial: softmax and torch.multinomial; greedy: argmax of the matmul. The limit is that of reading "
    "the weights once",
    baseline=_LOGITS,
    ratios=(
        Ratio(_SAMPLE, _LOGITS),
        Ratio(_SAMPLE, Cell("multinomial", Runner.INDUCTOR)),
        Ratio(_GREEDY, _LOGITS),
        Ratio(_GREEDY, Cell("greedy", Runner.INDUCTOR)),
    ),
    problems=tuple(
        problem(rows, vocabulary, depth)
        for vocabulary in _VOCABULARIES
        for depth in _DEPTHS
        for rows in _BATCHES
    ),
)
