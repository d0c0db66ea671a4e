"""Products of values of 8 bits by values of 16, on mma.sync: each warp converts its rows as it reads them.

The stored values, as those of a quantised weight, are the rows of A, which no two warps share. All 128 values
of K of a stage's row are in one line of shared memory; those of a row of B, of 16 bits, are in two.

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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd

import cutlass.cute as cute
from cutlass import AddressSpace, Int32, Numeric, Uint8

from cute_backend.spec import WeightGroups
from cute_backend.templates.cp_async import SWIZZLED_BYTES, VECTOR_BYTES
from cute_backend.templates.crew import WARP
from cute_backend.templates.opaque import opaque
from cute_backend.templates.staged import WARP_ROWS, Stage
from cute_backend.templates.stored_values import converted
from cute_backend.templates.warp_columns import MMA_N
from cute_backend.templates.warp_mainloop import Copies
from cute_backend.templates.weight_groups import LANES, Arithmetic, GroupVectors, HeldGroups, KGroup

HALVES = 2
"""Vectors of a line that a lane reads."""

WORDS = VECTOR_BYTES // 4
"""Words of a vector. One word of stored values becomes a lane's rows of A for one MMA, two words of each."""

LANE_VALUES = HALVES * VECTOR_BYTES
"""Values of K of a k tile of each row that a lane has, all of one group of K."""

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

    @staticmethod
    def of(
        mma: cute.TiledMma, a: Stage, b: Stage, s_a: cute.Tensor, s_b: cute.Tensor, thread: Int32
    ) -> ConvertedOperands:
        """The operands of a thread, whose warp has 16 rows of each block of all warps' rows."""
        row, lane = thread % WARP // 4, thread % 4
        vector = 2 * lane + ((lane ^ lane >> 1) & 1)
        first_row = thread // WARP * WARP_ROWS + row
        first_a = first_row * SWIZZLED_BYTES + ((vector ^ row) << 4)
        # A stage of B has a box of 64 values of K, vectors 0 to 3, and then one of the others.
        first_b = (vector >> 2) * b.box.bytes + row * SWIZZLED_BYTES + ((2 * (vector & 3) ^ row) << 4)
        return ConvertedOperands(
            mma,
            a,
            b,
            opaque(Int32(s_a.iterator.toint()) + first_a),
            opaque(Int32(s_b.iterator.toint()) + first_b),
            first_row,
            mma.size // WARP * WARP_ROWS,
        )

    @property
    def blocks(self) -> int:
        """The thread's blocks of rows of A, of each of which it has two rows."""
        return self.a.rows // self.block_rows

    def rows(self, half: int, stage: Int32, convert: Convert) -> cute.Tensor:
        """The fragments of A of one half, ((2, 2, 2), blocks, MMAs). `convert` takes the number of the
        thread's row, and two of its values in the low bits of a register."""
        blocks = self.blocks
        words = cute.make_rmem_tensor((2 * HALVES, blocks, WORDS), Int32)
        # The bits of the vector's place in its line are 0 in all other terms.
        place = self.first_a + stage * self.a.bytes ^ half * VECTOR_BYTES
        for block in range(blocks):
            for i in range(2):
                of_row = cute.make_rmem_tensor(WORDS, Int32)
                _read(place + (block * self.block_rows + i * 8) * SWIZZLED_BYTES, of_row)
                for mma in range(WORDS):
                    for pair in range(2):
                        word = convert(2 * block + i, of_row[mma] >> 16 * pair)
                        words[i + 2 * pair, block, mma] = word
        return _as(self.b.dtype, words, ((2, 2, 2), blocks, WORDS), ((1, 2, 4), 8, 8 * blocks))

    @property
    def at_once(self) -> int:
        """Blocks of 8 rows of B that the thread reads at once. All rows are some of these groups."""
        return gcd(self.b.rows // MMA_N, MOST_AT_ONCE)

    def columns(self, half: int, stage: Int32, group: int) -> cute.Tensor:
        """The fragments of B of one half and a group of its rows, ((2, 2), blocks of 8 rows, MMAs)."""
        blocks = self.at_once
        words = cute.make_rmem_tensor((WORDS, 2, blocks), Int32)
        for i in range(2):
            place = self.first_b + stage * self.b.bytes ^ (2 * half + i) * VECTOR_BYTES
            for block in range(blocks):
                row = (group * blocks + block) * MMA_N
                _read(place + row * SWIZZLED_BYTES, words[None, i, block])
        return _as(self.b.dtype, words, ((2, 2), blocks, WORDS), ((1, 2), 4 * WORDS, 4))


class Sm80Converted:
    """The tensor cores add up all k tiles. `by_bits` is as for `converted`, and integers are `unsigned` only
    if this says so: a kernel's tensors have the same type for both. With `groups` of K, the values of a k
    tile are those of one group of each lane."""

    operands = staticmethod(ConvertedOperands.of)

    def __init__(
        self, groups: WeightGroups | None = None, *, unsigned: bool = False, by_bits: bool = False
    ) -> None:
        self.groups, self.unsigned, self.by_bits = groups, unsigned, by_bits

    def begin(
        self,
        operands: ConvertedOperands,
        acc: cute.Tensor,
        scales: Sequence[cute.Tensor],
        row: Int32,
        k_tile: Int32,
    ) -> HeldGroups | None:
        acc.fill(0)
        if self.groups is None:
            return None
        rows, first_row = 2 * operands.blocks, operands.first_row + row
        arithmetic = Arithmetic(self.groups, self._stored(operands), operands.b.dtype, self.by_bits)
        vectors = GroupVectors(arithmetic, list(scales), rows, operands.block_rows, first_row, k_tile)
        return HeldGroups.of(vectors, Int32(0))

    def step(
        self,
        operands: ConvertedOperands,
        acc: cute.Tensor,
        held: HeldGroups | None,
        count: Int32,
        stage: Int32,
        copies: Copies,
    ) -> None:
        grouped = cute.logical_divide(acc, (None, None, operands.at_once))
        convert = partial(self._convert, operands, self._group(held, count))
        for half in range(HALVES):
            a = operands.rows(half, stage, convert)
            for group in range(cute.size(grouped, mode=[2, 1])):
                b, sums = operands.columns(half, stage, group), grouped[None, None, (None, group)]
                for k in range(WORDS):
                    cute.gemm(operands.mma, sums, a[None, None, k], b[None, None, k], sums)
            for copy in copies[half : half + 1]:
                copy()

    def _group(self, held: HeldGroups | None, count: Int32) -> KGroup | None:
        """The lane's group of a k tile. Its scales and zeros are in registers of their own, so those of the
        next k tile may be loaded."""
        if held is None:
            return None
        index = cute.arch.lane_idx() % LANES // max(held.vectors.groups.values // LANE_VALUES, 1)
        group = held.group(count, index)
        held.advance(count + 1)
        return group

    def _convert(self, operands: ConvertedOperands, group: KGroup | None, row: int, values: Int32) -> Int32:
        """Two values of a row of a thread, as the MMA takes them."""
        if group is not None:
            return group.weights(row, values)
        return converted(values, self._stored(operands), operands.b.dtype, self.by_bits)

    def _stored(self, operands: ConvertedOperands) -> type[Numeric]:
        """The type of the stored values."""
        return Uint8 if self.unsigned else operands.a.dtype


def _read(address: Int32, words: cute.Tensor) -> None:
    """Reads a vector of shared memory."""
    start = cute.make_ptr(Int32, address, AddressSpace.smem, assumed_align=VECTOR_BYTES)
    cute.autovec_copy(cute.make_tensor(start, cute.make_layout(WORDS)), words)


def _as(dtype: type[Numeric], words: cute.Tensor, shape: tuple, stride: tuple) -> cute.Tensor:
    """Registers as values of 16 bits."""
    values = cute.recast_ptr(words.iterator, dtype=dtype)
    return cute.make_tensor(values, cute.make_layout(shape, stride=stride))
