"""The noise of generated epilogues: Philox4x32-10 on 32-bit registers, and Gumbel noise from its words.

Generated modules import this as `noise`. `cute_backend.philox` defines what is drawn here.
"""

from __future__ import annotations

from typing import Any, Union

from cutlass import Float32, Int32, Uint32, Uint64
from cutlass._mlir.dialects import llvm
from cutlass._mlir.extras import types as T
from cutlass.cute.math import fma

from cute_backend.memory_ops import device_math as math
from cute_backend.philox import SHARED_BITS

__all__ = ["Draws", "gumbel"]

Integer = Union[Int32, int]
Words = tuple[Uint32, Uint32, Uint32, Uint32]


class Draws:
    """The draws of a subtile's elements, which share one seed and one sample.

    A Philox block is computed when it is first read, so a thread computes one for every four of its elements.
    """

    def __init__(self, sub: Any) -> None:
        self._sub = sub
        self._blocks: dict[tuple[int, int], Words] = {}

    def gumbel(self, e: int, seed_low: Integer, seed_high: Integer, sample: Integer) -> Float32:
        """Returns the noise of element e. Beyond the plane, it is the noise of an index past the last one."""
        sub = self._sub
        r, c = sub.row_of(e), sub.column_of(e)
        row = sub.tile.raw_row(r)
        place = sub.noise_word(e)
        if place is None:
            return gumbel(seed_low, seed_high, sub.raw_column(c), row, sample)
        first, word = place
        if (r, first) not in self._blocks:
            self._blocks[r, first] = _philox(seed_low, seed_high, sub.raw_column(first), row, sample)
        return _gumbel_of(self._blocks[r, first][word])


def gumbel(seed_low: Integer, seed_high: Integer, index: Integer, row: Integer, sample: Integer) -> Float32:
    """Gumbel noise as `philox.gumbel` draws it, within 2^-20 * max(1, |noise|), from a block of its own."""
    index = Uint32(index)
    words = _philox(seed_low, seed_high, index & ~SHARED_BITS, row, sample)
    odd, upper = (index & 1) != 0, (index & 8) != 0
    low, high = math.where(odd, words[1], words[0]), math.where(odd, words[3], words[2])
    return _gumbel_of(math.where(upper, high, low))


def _philox(seed_low: Integer, seed_high: Integer, block: Integer, row: Integer, sample: Integer) -> Words:
    """Returns the four words for the counter (block, 0, row, sample)."""
    c0, c1, c2, c3 = Uint32(block), Uint32(0), Uint32(row), Uint32(sample)
    k0, k1 = Uint32(seed_low), Uint32(seed_high)
    for _ in range(10):
        first, second = Uint64(c0) * Uint64(0xD2511F53), Uint64(c2) * Uint64(0xCD9E8D57)
        c0, c1 = Uint32(second >> 32) ^ c1 ^ k0, Uint32(second)
        c2, c3 = Uint32(first >> 32) ^ c3 ^ k1, Uint32(first)
        k0, k1 = k0 + Uint32(0x9E3779B9), k1 + Uint32(0xBB67AE85)
    return c0, c1, c2, c3


_LN_2 = 0.6931471805599453
_MINUS_LN_LN_2 = 0.36651292058166435


def _gumbel_of(word: Uint32) -> Float32:
    """Returns the noise for a word, computed with two approximate logarithms.

    A logarithm has an absolute error of up to 2^-22 for arguments between 1/2 and 2, and a relative error of
    up to 2^-22 elsewhere (PTX ISA, lg2.approx). So if the upper tail x is below 1/4, -log2(1 - x) is computed
    as x times a polynomial, minimax to 2^-24.
    """
    number = _to_f32_towards_zero(word)
    x = fma(number, 2.0**-32, 2.0**-33)
    series = x * math.polynomial(x, 1.44269502, 0.72136265, 0.480210632, 0.37192595, 0.207625523, 0.490224332)
    exponential = math.where(x < 0.25, series, -_log2(fma(number, -(2.0**-32), 1.0)))
    return fma(_log2(exponential), -_LN_2, _MINUS_LN_LN_2)


def _log2(x: Float32) -> Float32:
    """Returns log2 of a normal number, with one approximate instruction."""
    return Float32(llvm.call_intrinsic(T.f32(), "llvm.nvvm.lg2.approx.ftz.f", [x.ir_value()], [], []))


def _to_f32_towards_zero(word: Uint32) -> Float32:
    return Float32(llvm.call_intrinsic(T.f32(), "llvm.nvvm.ui2f.rz", [word.ir_value()], [], []))
