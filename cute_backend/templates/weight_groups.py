"""Scales and zeros of a weight's groups of K, in the registers of the threads that convert it.

A thread converts values of a few rows of A, the columns of the weight, as the four lanes beside it do (PTX
ISA, wgmma register fragments, matrix A). Of four neighbouring groups of such a row, each of these lanes loads
the scale and the zero of one. These are a chunk, which lasts for four groups, or for as many fours as a span
has. A lane receives those of the group that it multiplies from the lane that has them. The next chunk is
loaded when one begins, so that memory has the time of a whole chunk. Groups beyond K, and rows beyond the
last one, have scales and zeros of 0.

Weights have the bits of the program's own steps. A scale in fp32 multiplies numbers of fp32, and the product
is rounded twice, as by the program; one in 16 bits multiplies two values at once. Where zeros are integers
and no difference is rounded (`WeightGroups.subtracts_exactly`), they are subtracted as numbers are made of
the stored values (`StoredPairs.start`): both orders have the one exact result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Int32, Int64, Numeric

from cute_backend.spec import DType, WeightGroups
from cute_backend.templates import packed
from cute_backend.templates.instructions import assembled
from cute_backend.templates.stored_values import StoredPairs, pack, unpack

LANES = 4
"""Lanes of a warp that have the same rows of A."""


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of weights: pairs of `stored` values become pairs of weights of dtype `to`."""

    groups: WeightGroups
    stored: StoredPairs
    to: type[Numeric]

    @property
    def is_wide(self) -> bool:
        """Whether products are computed in fp32."""
        return self.groups.is_scaled_wide

    @property
    def subtracts_integers(self) -> bool:
        """Whether zeros are subtracted as integers before numbers are made, or as those are made."""
        zero = self.groups.zero
        if zero is None or not self.groups.subtracts_exactly(self.stored.dtype):
            return False
        return self.is_wide or self.stored.subtracts_packed(zero, self.to)

    def operands(self, loaded: Sequence[Int32]) -> list[Int32]:
        """The operands of the arithmetic that loaded scales, and behind them as many zeros, stand for: bits
        of fp32 or of two equal values of dtype `to`, or by which stored values become less a zero."""
        rows = len(loaded) // len(self.groups.vectors)
        scales, zeros = loaded[:rows], loaded[rows:]
        product, difference = self.groups.product, self.groups.difference
        given = [self._number(bits, self.groups.scale, product) for bits in scales]
        for bits in zeros:
            assert self.groups.zero is not None and difference is not None
            if not self.subtracts_integers:
                given.append(self._number(bits, self.groups.zero, difference))
            elif self.is_wide:
                given.append(self.stored.start(bits))
            else:
                given.append(self.stored.packed_start(bits, self.groups.zero, self.to))
        return given

    def _number(self, bits: Int32, dtype: DType, computed: DType) -> Int32:
        """A number in memory as an operand of arithmetic in another dtype."""
        number = _widened(bits, dtype)
        return number if computed is DType.F32 else pack(number, number, self.to)

    def weights(self, pair: Int32, scale: Int32, zero: Int32 | None) -> Int32:
        """Two weights, of two stored values in the low bits of a register and their operands."""
        both = self._computed("mul", self._differences(pair, zero), scale)
        return both[0] if len(both) == 1 else pack(both[0], both[1], self.to)

    def _differences(self, pair: Int32, zero: Int32 | None) -> list[Int32]:
        """Two stored values, less a zero, as two numbers of fp32 or as a pair of dtype `to`."""
        of = self.groups.zero
        if of is None or zero is None or self.subtracts_integers:
            if self.is_wide:
                return self.stored.numbers(pair, zero)
            if of is None or zero is None:
                return [self.stored.converted(pair, self.to)]
            return [self.stored.less(pair, zero, of, self.to)]
        is_wide = self.groups.difference is DType.F32
        values = self.stored.numbers(pair) if is_wide else [self.stored.converted(pair, self.to)]
        both = self._computed("sub", values, zero)
        if is_wide and not self.is_wide:
            return [pack(both[0], both[1], self.to)]
        return unpack(both[0], self.to) if self.is_wide and not is_wide else both

    def _computed(self, op: str, both: list[Int32], operand: Int32) -> list[Int32]:
        """`op` of two numbers, in fp32 if each has a register, and one operand."""
        if len(both) == 1:
            return [(packed.sub if op == "sub" else packed.mul)(both[0], operand, self.to)]
        return [assembled(f"{op}.rn.f32 $0, $1, $2;", each, operand) for each in both]


@dataclass(frozen=True)
class GroupVectors:
    """Where the scales and zeros of a thread's rows are: `tensors`, each (rows of A, groups of K), the scales
    of all products first.

    The thread has `row` and, of each `block_rows` rows, the one that is eight further on, `rows` in all of
    `products`, the first one's first. `span` is the first span of its part of K, of `span_values` of K each,
    to whose groups it goes on at once.
    """

    arithmetic: Arithmetic
    tensors: list[cute.Tensor]
    rows: int
    block_rows: int
    row: Int32
    span: Int32
    span_values: int
    products: int = 1

    @property
    def groups(self) -> WeightGroups:
        """The groups of K."""
        return self.arithmetic.groups

    @property
    def is_whole(self) -> bool:
        """Whether each span begins a chunk."""
        return self.groups.values * LANES <= self.span_values

    @property
    def fours(self) -> int:
        """The fours of groups in a chunk, of each of which a lane has one."""
        return max(self.span_values // (self.groups.values * LANES), 1)

    def chunk_of(self, span: Int32) -> Int32:
        """The chunk that has the first group of a span."""
        return self.first_group(span) // (LANES * self.fours)

    def first_group(self, span: Int32) -> Int32:
        """The first group of a span."""
        values, each = self.groups.values, self.span_values
        return span * (each // values) if values <= each else span // (values // each)

    def begins_chunk(self, span: Int32) -> Boolean:
        """Whether a span is the first of a chunk."""
        return span % (self.groups.values * LANES // self.span_values) == 0

    def load(self, chunk: Int32) -> list[Int32]:
        """The lane's part of a chunk, of each tensor and each four that of every row."""
        loaded: list[Int32] = []
        for vector, dtype in enumerate(self.groups.vectors):
            for four in range(self.fours):
                group = (chunk * self.fours + four) * LANES + cute.arch.lane_idx() % LANES
                for r in range(self.rows):
                    tensor, row = self._of_row(vector, r)
                    inside = (row < cute.size(tensor, mode=[0])) & (group < cute.size(tensor, mode=[1]))
                    place = cute.crd2idx((row, group), tensor.layout)
                    address = tensor.iterator.toint() + Int64(place) * (dtype.bits // 8)
                    loaded.append(_loaded(address, inside, dtype))
        return loaded

    def _of_row(self, vector: int, r: int) -> tuple[cute.Tensor, Int32]:
        """The scales or zeros of the product that has the thread's row number `r`, and the row's place in
        them."""
        blocks = self.rows // (2 * self.products)
        product, block = divmod(r // 2, blocks)
        row = self.row + (block * self.block_rows + r % 2 * 8)
        return self.tensors[vector * self.products + product], row

    def of_group(self, chunk: Sequence[Int32], group: Int32) -> list[Int32]:
        """The operands of the arithmetic in a group, which are those of a lane's part of the chunk."""
        source = cute.arch.lane_idx() // LANES * LANES + group % LANES
        parts = [cute.arch.shuffle_sync(part, source) for part in chunk]
        if self.fours == 1:
            return parts
        four, found = group // LANES % self.fours, list[Int32]()
        for first in range(0, len(parts), self.fours * self.rows):
            for r in range(first, first + self.rows):
                every = parts[r : first + self.fours * self.rows : self.rows]
                part = every[0]
                for number, other in enumerate(every[1:], 1):
                    part = cutlass.select_(four == number, other, part)
                found.append(part)
        return found


@dataclass(frozen=True)
class KGroup:
    """The scales of a thread's rows in one group of K, and its zeros, if there are any, as operands of the
    arithmetic."""

    arithmetic: Arithmetic
    scales: list[Int32]
    zeros: list[Int32]

    def weights(self, row: int, pair: Int32) -> Int32:
        """Two weights of a row, of two stored values in the low bits of a register."""
        return self.arithmetic.weights(pair, self.scales[row], self.zeros[row] if self.zeros else None)


@dataclass(frozen=True)
class HeldGroups:
    """The chunk of groups that a thread multiplies by, as operands of the arithmetic, and the next one, as it
    was loaded, during an output tile. Spans are counted on from those of the stages before, so that the first
    span of K has the count -`first`. A span within one group has the operands of that `whole` group."""

    vectors: GroupVectors
    first: Int32
    now: cute.Tensor
    following: cute.Tensor
    whole: cute.Tensor

    @staticmethod
    def of(vectors: GroupVectors, count: Int32) -> HeldGroups:
        """Loads the chunk of the first span of a part of K, which has this count, and the next."""
        whole = len(vectors.groups.vectors) * vectors.rows
        parts = vectors.fours * whole
        chunk = vectors.chunk_of(vectors.span)
        tensors = [cute.make_rmem_tensor(size, Int32) for size in (parts, parts, whole)]
        held = HeldGroups(vectors, vectors.span - count, *tensors)
        _put(held.now, vectors.arithmetic.operands(vectors.load(chunk)))
        _put(held.following, vectors.load(chunk + 1))
        held._begin(count)
        return held

    @cute.jit
    def advance(self, count: Int32):
        """Goes on to a span, with which a chunk may begin."""
        if cutlass.const_expr(self.vectors.is_whole):
            self._next_chunk(count)
        else:
            if self.vectors.begins_chunk(self.first + count):
                self._next_chunk(count)
        self._begin(count)

    def group(self, count: Int32, index: int | Int32) -> KGroup:
        """The `index`-th group of a span, which is the last one that was gone on to. The group may differ
        between lanes."""
        found = _list(self.whole) if self._is_in_one else self._of_lane(count, index)
        rows = self.vectors.rows
        return KGroup(self.vectors.arithmetic, found[:rows], found[rows:])

    @property
    def _is_in_one(self) -> bool:
        """Whether a span is within one group."""
        return self.vectors.groups.values >= self.vectors.span_values

    def _begin(self, count: Int32) -> None:
        if self._is_in_one:
            _put(self.whole, self._of_lane(count, 0))

    def _of_lane(self, count: Int32, index: int | Int32) -> list[Int32]:
        first = self.vectors.first_group(self.first + count)
        return self.vectors.of_group(_list(self.now), first + index)

    def _next_chunk(self, count: Int32) -> None:
        vectors = self.vectors
        _put(self.now, vectors.arithmetic.operands(_list(self.following)))
        _put(self.following, vectors.load(vectors.chunk_of(self.first + count) + 1))


def _list(held: cute.Tensor) -> list[Int32]:
    return [held[i] for i in range(cute.size(held))]


def _put(held: cute.Tensor, values: Sequence[Int32]) -> None:
    for i, value in enumerate(values):
        held[i] = value


def _loaded(address: Int64, wanted: Boolean, dtype: DType) -> Int32:
    """The bits of a number in memory, an integer with its sign; 0, and no access, unless `wanted`."""
    kind = "s8" if dtype is DType.I8 else f"u{dtype.bits}"
    text = f"{{ .reg .pred p; setp.ne.s32 p, $3, 0; @p ld.global.{kind} $0, [$2]; }}"
    return assembled(text, 0, address, Int32(wanted), tied=True)


def _widened(bits: Int32, dtype: DType) -> Int32:
    """The bits of a number of a dtype as those of the same number in fp32."""
    if dtype is DType.F32:
        return bits
    if dtype is DType.BF16:
        return bits << 16
    if dtype is DType.F16:
        return unpack(bits, Float16)[0]
    return assembled("cvt.rn.f32.s32 $0, $1;", bits)
