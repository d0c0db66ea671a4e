"""The random numbers: against published vectors, against an evaluation in Python's integers, and as noise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_backend.philox import gumbel, philox4x32, upper_tail

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""Random123's tests/kat_vectors, the lines `philox4x32 10`."""

WEYL = (0x9E3779B9, 0xBB67AE85)
WORDS = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1]))


def tensors(words: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([word]) for word in words)


def in_integers(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 as the paper's figure has it, the keys made beforehand, in unbounded integers."""
    state = list(counter)
    keys = [[(word + i * weyl) % 2**32 for i in range(10)] for word, weyl in zip(key, WEYL, strict=True)]
    for k0, k1 in zip(*keys, strict=True):
        left, right = divmod(0xD2511F53 * state[0], 2**32), divmod(0xCD9E8D57 * state[2], 2**32)
        state = [right[0] ^ state[1] ^ k0, right[1], left[0] ^ state[3] ^ k1, left[1]]
    return tuple(state)


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS)
def test_published_vectors(counter, key, expected) -> None:
    assert tuple(word.item() for word in philox4x32(tensors(counter), tensors(key))) == expected
    assert in_integers(counter, key) == expected


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.tuples(WORDS, WORDS, WORDS, WORDS), st.tuples(WORDS, WORDS))
def test_words_are_those_of_another_evaluation(counter, key) -> None:
    assert tuple(word.item() for word in philox4x32(tensors(counter), tensors(key))) == in_integers(
        counter, key
    )


def test_a_uniform_number_is_never_an_end() -> None:
    words = torch.tensor([0, 1, 2**24 - 1, 2**31, 2**32 - 257, 2**32 - 256, 2**32 - 2, 2**32 - 1])
    tail = upper_tail(words)
    assert tail.dtype is torch.float32
    assert tail[0] == 2.0**-33 and tail[-1] == 1.0 - 2.0**-24 < 1.0
    assert (tail > 0).all() and (tail.diff() >= 0).all() and tail[0] < tail[1]
    assert (tail[-3:] == tail[-1]).all() and tail[-4] < tail[-1]  # bits beyond the leading 24 are cut off


OPERANDS = [
    (7, -2, 128255, 31, 3),
    (7, -2, 128255, 31, 4),
    (7, -2, 128255, 30, 3),
    *((7, -2, 128255 - bits, 31, 3) for bits in (1, 2, 8, 9)),
    (7, -1, 128255, 31, 3),
    (8, -2, 128255, 31, 3),
    (-1, 0, 0, 0, 0),
]
"""Seed low, seed high, index, row and sample of draws that all differ."""


def test_noise_is_that_of_the_exact_uniform_number() -> None:
    """Every operand counts, as an unsigned word. Bits 0 and 3 of the index choose a word of the block that
    the other bits count; the noise is that of u = 1 - (word + 1/2) / 2^32."""
    columns = [torch.tensor(column, dtype=torch.int32) for column in zip(*OPERANDS, strict=True)]
    noise = gumbel(*columns)
    assert noise.dtype is torch.float32 and noise.unique().numel() == len(OPERANDS)
    for (low, high, index, row, sample), got in zip(OPERANDS, noise.tolist(), strict=True):
        words = in_integers(
            (index - index % 2 - index // 8 % 2 * 8, 0, row, sample), (low % 2**32, high % 2**32)
        )
        word = words[index % 2 + index // 8 % 2 * 2]
        exact = -math.log(-math.log1p(-(word + 0.5) / 2**32))
        assert abs(got - exact) < 1e-6 * max(1.0, abs(exact))


def test_four_indices_share_a_block() -> None:
    """The promise of docs/guides.md, on the published vector of a counter of zeros."""
    zero = torch.tensor(0, dtype=torch.int32)
    drawn = gumbel(zero, zero, torch.tensor([0, 1, 8, 9], dtype=torch.int32), zero, zero)
    words = torch.tensor(KNOWN_ANSWERS[0][2])
    exact = -torch.log(-torch.log1p(-upper_tail(words).double())).float()
    assert torch.equal(drawn, exact)


def test_the_ends_of_the_noise() -> None:
    ends = -torch.log(-torch.log1p(-upper_tail(torch.tensor([0, 2**32 - 1])).double()))
    assert 22.8 < ends[0] < 22.9 and -2.9 < ends[1] < -2.7


def test_noise_has_gumbels_distribution() -> None:
    """Kolmogorov-Smirnov on a million draws, by rows, samples and places: p > 0.001."""
    index = torch.arange(1000, dtype=torch.int32)
    row = torch.arange(100, dtype=torch.int32)[:, None]
    sample = torch.arange(10, dtype=torch.int32)[:, None, None]
    seed = torch.tensor(11, dtype=torch.int32)
    draws = gumbel(seed, seed, index, row, sample).flatten().double().sort().values
    cumulative = torch.exp(-torch.exp(-draws))
    steps = torch.arange(draws.numel() + 1, dtype=torch.float64) / draws.numel()
    distance = torch.maximum((cumulative - steps[:-1]).max(), (steps[1:] - cumulative).max())
    assert distance * math.sqrt(draws.numel()) < 1.95


def test_words_of_a_block_have_nothing_to_do_with_one_another() -> None:
    """Pearson's correlation of the noise of indices that share a block, of 100,000 blocks: below 4 sigma."""
    block = torch.arange(100_000, dtype=torch.int32)
    first = block // 4 * 16 + block % 4 * 2  # every index without bits 0 and 3
    seed = torch.tensor(5, dtype=torch.int32)
    indices = first[:, None] + torch.tensor([0, 1, 8, 9], dtype=torch.int32)
    assert indices.unique().numel() == indices.numel()
    draws = gumbel(seed, seed, indices, torch.zeros_like(seed), torch.zeros_like(seed)).double()
    correlation = torch.corrcoef(draws.t()) - torch.eye(4)
    assert 0 < correlation.abs().max() < 4 / math.sqrt(len(block))
