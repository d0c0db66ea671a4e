"""Products of values of 8 or 4 bits by values of 16, on mma.sync: each warp converts its rows as it reads
them.

The stored values, as those of a quantised weight, are the rows of A, which no two warps share. The rows of
both products of a pair lie below each other. All 128 bytes of K of a stage's row are in one line of shared
memory; the values of a row of B, of 16 bits, are in two, or in four if each byte has two values.

An MMA sums up over 16 values of K, of which each lane of four has four, two neighbours from either half (PTX
ISA, mma.m16n8k16). It doesn't matter which values of K these are, as long as they are the same in A and B.
So a lane takes those that lie together in memory:

    vector of A        16 values of K of a row, the lane's values for four MMAs: 0-3, 4-7, 8-11 and 12-15
    two vectors of B   the same 16 values of K of another row
    halves             a lane has two vectors of a row, and reads one for each half of a k tile

    lane of the four       0  1  2  3
    vector of one half     0  3  5  6
    vector of the other    1  2  4  7

So all values that a lane has of a k tile are of one group of K, if there are such groups: of the lane's own
32 values, or of more. It loads scales and zeros as wgmma's threads do (`weight_groups.py`).

These are without bank conflicts. Eight lanes read at once: four vectors of two neighbouring rows, whose
numbers are swizzled by the row's. In A the four are in different pairs (0, 1), (2, 3), ..., and in B, where a
line has half as many values, they are different modulo four.

If each byte has two values, a vector of A has 32, those of four vectors of B, and a lane multiplies half of
them at a time: lanes 0 and 2 the first half first, and the others the second. Sixteen lanes read halves of
vectors of A at once, and none meets another. Of B, the four lanes read vectors 0, 6, 4 and 2 of their lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd

import cutlass.cute as cute
from cutlass import AddressSpace, Int32, Numeric

from cute_backend.spec import DType, WeightGroups
from cute_backend.templates.cp_async import SWIZZLED_BYTES, VECTOR_BYTES
from cute_backend.templates.crew import WARP
from cute_backend.templates.opaque import opaque
from cute_backend.templates.staged import WARP_ROWS, Stage
from cute_backend.templates.stored_values import StoredPairs, stored_pairs
from cute_backend.templates.warp_columns import MMA_N
from cute_backend.templates.warp_mainloop import Copies
from cute_backend.templates.weight_groups import LANES, Arithmetic, GroupVectors, HeldGroups, KGroup

HALVES = 2
"""Vectors of a line that a lane reads."""

WORDS = VECTOR_BYTES // 4
"""Words of a vector of B, and the MMAs whose values of a lane two of them have."""

MOST_AT_ONCE = 4
"""The most blocks of 8 rows of B that a thread reads at once, and multiplies one after the other."""


Convert = Callable[[int, Int32], Int32]
"""The conversion of two values of a thread's row, as `ConvertedOperands.rows` calls it."""


@dataclass(frozen=True)
class ConvertedOperands:
    """The operands that a thread reads by vectors from shared memory, of which it converts A."""

    mma: cute.TiledMma
    a: Stage
    b: Stage
    first_a: Int32
    """The address of its vector of one half in its first row of A, in stage 0."""
    first_b: Int32
    """The address of the first of two vectors of the same values of K in its first row of B."""
    first_row: Int32
    """The first of its rows of A."""
    block_rows: int
    """Rows of A from one of its blocks of 16 rows to the next."""
    packing: int
    """Values in an element of A."""

    @staticmethod
    def of(
        mma: cute.TiledMma, a: Stage, b: Stage, s_a: cute.Tensor, s_b: cute.Tensor, thread: Int32
    ) -> ConvertedOperands:
        """The operands of a thread, whose warp has 16 rows of each block of all warps' rows."""
        row, lane, packing = thread % WARP // 4, thread % 4, b.columns // a.columns
        vector = _first_vector(lane)
        # The part of a vector that is read first.
        part = lane & packing - 1
        first_row = thread // WARP * WARP_ROWS + row
        first_a = first_row * SWIZZLED_BYTES + ((vector ^ row) << 4) + part * (VECTOR_BYTES // packing)
        # A stage of B has a box of each 64 values of K, of as many vectors of A as make four of these.
        of_b = vector * packing + part
        first_b = (of_b >> 2) * b.box.bytes + row * SWIZZLED_BYTES + ((2 * (of_b & 3) ^ row) << 4)
        return ConvertedOperands(
            mma,
            a,
            b,
            opaque(Int32(s_a.iterator.toint()) + first_a),
            opaque(Int32(s_b.iterator.toint()) + first_b),
            first_row,
            mma.size // WARP * WARP_ROWS,
            packing,
        )

    @property
    def blocks(self) -> int:
        """The thread's blocks of rows of A, of each of which it has two rows."""
        return self.a.rows // self.block_rows

    @property
    def steps(self) -> int:
        """The steps in which a k tile is read: a vector of each row of A, or a half of one if its elements
        have two values, and two vectors of each row of B."""
        return HALVES * self.packing

    def rows(self, step: int, stage: Int32, pairs: StoredPairs, convert: Convert) -> cute.Tensor:
        """The fragments of A of one step, ((2, 2, 2), blocks, MMAs). `convert` takes the number of the
        thread's row, and a pair of its values."""
        blocks, read_bytes = self.blocks, VECTOR_BYTES // self.packing
        words = cute.make_rmem_tensor((4, blocks, WORDS), Int32)
        # The bits of the place in a line are 0 in all other terms.
        place = self.first_a + stage * self.a.bytes ^ step * read_bytes
        in_word = 4 // pairs.bytes
        for block in range(blocks):
            for i in range(2):
                of_row = cute.make_rmem_tensor(read_bytes // 4, Int32)
                _read(place + (block * self.block_rows + i * 8) * SWIZZLED_BYTES, of_row)
                for number in range(2 * WORDS):
                    mma, pair = divmod(number, 2)
                    values = pairs.of_word(of_row[number // in_word], number % in_word)
                    words[i + 2 * pair, block, mma] = convert(2 * block + i, values)
        return _as(self.b.dtype, words, ((2, 2, 2), blocks, WORDS), ((1, 2, 4), 8, 8 * blocks))

    @property
    def at_once(self) -> int:
        """Blocks of 8 rows of B that the thread reads at once. All rows are some of these groups."""
        return gcd(self.b.rows // MMA_N, MOST_AT_ONCE)

    def columns(self, step: int, stage: Int32, group: int) -> cute.Tensor:
        """The fragments of B of one step and a group of its rows, ((2, 2), blocks of 8 rows, MMAs)."""
        blocks = self.at_once
        words = cute.make_rmem_tensor((WORDS, 2, blocks), Int32)
        for i in range(2):
            place = self.first_b + stage * self.b.bytes ^ (2 * step + i) * VECTOR_BYTES
            for block in range(blocks):
                row = (group * blocks + block) * MMA_N
                _read(place + row * SWIZZLED_BYTES, words[None, i, block])
        return _as(self.b.dtype, words, ((2, 2), blocks, WORDS), ((1, 2), 4 * WORDS, 4))


@dataclass(frozen=True)
class Held:
    """A thread's stored values of an output tile, and the scales and zeros of their groups of K, if they have
    such."""

    pairs: StoredPairs
    groups: HeldGroups | None


class Sm80Converted:
    """The tensor cores add up all k tiles. `stored` is the dtype of A, as a kernel's tensors have bytes for
    several, and `by_bits` is as for `stored_pairs`. With `groups` of K, the values that a lane has of a k
    tile are those of one group, or each vector of A has its own."""

    operands = staticmethod(ConvertedOperands.of)

    def __init__(self, stored: DType, groups: WeightGroups | None = None, *, by_bits: bool = False) -> None:
        self.pairs, self.groups = stored_pairs(stored, by_bits=by_bits), groups

    def begin(
        self,
        operands: ConvertedOperands,
        acc: cute.Tensor,
        scales: Sequence[cute.Tensor],
        row: Int32,
        k_tile: Int32,
    ) -> Held:
        acc.fill(0)
        pairs = self.pairs.in_thread(row)
        if self.groups is None:
            return Held(pairs, None)
        rows, first_row = 2 * operands.blocks, operands.first_row + row
        arithmetic = Arithmetic(self.groups, pairs, operands.b.dtype)
        products = len(scales) // len(self.groups.vectors)
        vectors = GroupVectors(
            arithmetic,
            list(scales),
            rows,
            operands.block_rows,
            first_row,
            k_tile,
            operands.b.columns,
            products,
        )
        return Held(pairs, HeldGroups.of(vectors, Int32(0)))

    def step(
        self,
        operands: ConvertedOperands,
        acc: cute.Tensor,
        held: Held,
        count: Int32,
        stage: Int32,
        copies: Copies,
    ) -> None:
        grouped = cute.logical_divide(acc, (None, None, operands.at_once))
        groups = self._groups(operands, held.groups, count)
        for step in range(operands.steps):
            convert = partial(self._convert, operands, held.pairs, groups[step // operands.packing])
            a = operands.rows(step, stage, held.pairs, convert)
            for group in range(cute.size(grouped, mode=[2, 1])):
                b, sums = operands.columns(step, stage, group), grouped[None, None, (None, group)]
                for k in range(WORDS):
                    cute.gemm(operands.mma, sums, a[None, None, k], b[None, None, k], sums)
            for copy in copies[step : step + 1]:
                copy()

    def _groups(
        self, operands: ConvertedOperands, held: HeldGroups | None, count: Int32
    ) -> list[KGroup | None]:
        """The lane's group of a k tile in each half. Its scales and zeros are in registers of their own, so
        those of the next k tile may be loaded."""
        if held is None:
            return [None] * HALVES
        lane, values = cute.arch.lane_idx() % LANES, held.vectors.groups.values
        of_lane = HALVES * VECTOR_BYTES * operands.packing
        if values < of_lane:
            vector = _first_vector(lane)
            found = [held.group(count, vector ^ half) for half in range(HALVES)]
        else:
            found = [held.group(count, lane // (values // of_lane))] * HALVES
        held.advance(count + 1)
        return [*found]

    def _convert(
        self, operands: ConvertedOperands, pairs: StoredPairs, group: KGroup | None, row: int, pair: Int32
    ) -> Int32:
        """Two values of a row of a thread, as the MMA takes them."""
        return pairs.converted(pair, operands.b.dtype) if group is None else group.weights(row, pair)


def _first_vector(lane: Int32) -> Int32:
    """The vector of a line of A that a lane of four reads in the first half of a k tile."""
    return 2 * lane + ((lane ^ lane >> 1) & 1)


def _read(address: Int32, words: cute.Tensor) -> None:
    """Reads consecutive words of shared memory, at a multiple of their bytes."""
    start = cute.make_ptr(Int32, address, AddressSpace.smem, assumed_align=4 * cute.size(words))
    cute.autovec_copy(cute.make_tensor(start, cute.make_layout(cute.size(words))), words)


def _as(dtype: type[Numeric], words: cute.Tensor, shape: tuple, stride: tuple) -> cute.Tensor:
    """Registers as values of 16 bits."""
    values = cute.recast_ptr(words.iterator, dtype=dtype)
    return cute.make_tensor(values, cute.make_layout(shape, stride=stride))
