"""Counter-based random numbers: Philox4x32-10, and the Gumbel noise that sampling draws from it.

Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. A number is a function
of its counter and its key alone, so a draw depends on nothing that a kernel is free to choose: not on the
tile, the architecture or the order of a batch. Kernels compute the same function on 32-bit registers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

LARGEST_BELOW_ONE = 1.0 - 2.0**-24
"""fp32's."""


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The four words of Philox4x32-10 for a counter of four words and a key of two.

    Words are int64 tensors that broadcast together and hold 0 to 2^32 - 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 holds a product modulo 2^64. The low 32 bits of a value are the word: what lies above is cut
        # off before they are multiplied.
        first, second = (c0 & _MASK) * _MULTIPLIERS[0], (c2 & _MASK) * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second, (first >> 32) ^ c3 ^ k1, first
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return c0 & _MASK, c1 & _MASK, c2 & _MASK, c3 & _MASK


def upper_tail(word: Tensor) -> Tensor:
    """1 - u in fp32 for the uniform number u of a word: (word + 1/2) / 2^32, never 0 and never 1.

    The word counts u down from 1, because fp32 resolves what is near 0, and the largest noise, which decides
    most draws, is that of u near 1. There it is exact to 2^-33; beyond 1/2 it is rounded to 2^-24.
    """
    return (word.to(torch.float32) * 2.0**-32 + 2.0**-33).clamp(max=LARGEST_BELOW_ONE)


def gumbel(seed_low: Tensor, seed_high: Tensor, index: Tensor, row: Tensor, sample: Tensor) -> Tensor:
    """Standard Gumbel noise -log(-log(u)) in fp32, from -2.9 to 22.9, on int32 operands that broadcast.

    u comes from the first word of Philox with the counter (index, 0, row, sample) and the key (seed_low,
    seed_high): `index` is the place in the vocabulary, whose high word is 0 here. This is the logarithm of
    `upper_tail` rounded once; kernels are within 4 ulp of it, or 4 * 2^-24 where it is below 1.
    """
    seed_low, seed_high, index, row, sample = (
        word.to(torch.int64) & _MASK for word in (seed_low, seed_high, index, row, sample)
    )
    word, *_ = philox4x32((index, torch.zeros_like(index), row, sample), (seed_low, seed_high))
    exponential = -torch.log1p(-upper_tail(word).to(torch.float64))
    return -torch.log(exponential).to(torch.float32)
