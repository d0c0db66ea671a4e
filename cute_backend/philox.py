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

SHARED_BITS = 0b1001
"""The two bits of the index that select a word of the block: the four indices that differ only in them share
a block."""


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The four words of Philox4x32-10 for a counter of four words and a key of two.

    Words are int64 tensors that broadcast together and hold 0 to 2^32 - 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 holds a product modulo 2^64. The low 32 bits of a value are the word: the bits above are
        # cleared before values are multiplied.
        first, second = (c0 & _MASK) * _MULTIPLIERS[0], (c2 & _MASK) * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second, (first >> 32) ^ c3 ^ k1, first
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return c0 & _MASK, c1 & _MASK, c2 & _MASK, c3 & _MASK


def upper_tail(word: Tensor) -> Tensor:
    """1 - u in fp32 for the uniform number u of a word: its leading 24 bits / 2^32 + 2^-33, neither 0 nor 1.

    The word gives 1 - u and not u, because fp32 resolves small numbers best, and the largest noise, which
    decides most draws, is that of u near 1. There 1 - u is exact to 2^-33; the lower bits of a large word are
    cleared.
    """
    nearest = word.to(torch.float32)
    below = torch.nextafter(nearest, torch.zeros_like(nearest))
    return torch.where(nearest.to(torch.float64) > word, below, nearest) * 2.0**-32 + 2.0**-33


def gumbel(seed_low: Tensor, seed_high: Tensor, index: Tensor, row: Tensor, sample: Tensor) -> Tensor:
    """Standard Gumbel noise -log(-log(u)) in fp32, from -2.9 to 22.9, on int32 operands that broadcast.

    `index` is the token's index in the vocabulary. Philox gets the key (seed_low, seed_high) and the counter
    (index with bits 0 and 3 cleared, 0, row, sample). These two bits of the index select one of the four
    words, b0 + 2 * b3. In every kernel a thread has at least two neighbouring columns of every eight, and so
    all four elements of a row that differ in these bits: one block gives four draws.

    The result is the exact -log(-log(u)) for u = 1 - `upper_tail`, rounded once. Kernels draw the same word.
    Their noise differs from this by at most 2^-20 or, if the noise is larger than 1, by at most 2^-20 of it.
    """
    seed_low, seed_high, index, row, sample = (
        word.to(torch.int64) & _MASK for word in (seed_low, seed_high, index, row, sample)
    )
    words = philox4x32((index & ~SHARED_BITS, torch.zeros_like(index), row, sample), (seed_low, seed_high))
    odd, upper = (index & 1) != 0, (index & 8) != 0
    word = torch.where(upper, torch.where(odd, words[3], words[2]), torch.where(odd, words[1], words[0]))
    exponential = -torch.log1p(-upper_tail(word).to(torch.float64))
    return -torch.log(exponential).to(torch.float32)
