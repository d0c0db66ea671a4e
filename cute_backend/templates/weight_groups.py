"""Scales and zeros of a weight's groups of K, in the registers of the threads that convert it.

A thread converts values of a few rows of A, the columns of the weight, as the four lanes beside it do (PTX
ISA, wgmma register fragments, matrix A). Of four neighbouring groups of such a row, each of these lanes loads
the scale and the zero of one: a chunk, which lasts for four groups. A lane receives those of the group that
it multiplies from the lane that has them. The next chunk is loaded when one begins, so that memory has the
time of a whole chunk. Groups beyond K, and rows beyond the last one, have scales and zeros of 0.

Weights have the bits of the program's own steps. A scale in fp32 multiplies numbers of fp32, and the product
is rounded twice, as by the program; one in 16 bits multiplies two values at once. Where zeros are integers
and no difference is rounded (`WeightGroups.subtracts_exactly`), they are subtracted as integers before
numbers are made of the stored values (`stored_values.numbers`): both orders have the one exact result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Int8, Int32, Int64, Numeric, Uint8

from cute_backend.planning import TILE_K_BYTES
from cute_backend.spec import DType, WeightGroups
from cute_backend.templates import packed
from cute_backend.templates.instructions import assembled
from cute_backend.templates.stored_values import MAGIC, converted, numbers, pack, unpack

LANES = 4
"""Lanes of a warp that have the same rows of A."""

_INTEGERS = {Int8: DType.I8, Uint8: DType.U8}


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of weights: values of dtype `stored` become weights of dtype `to`. `by_bits` is as for
    `stored_values.converted`."""

    groups: WeightGroups
    stored: type[Numeric]
    to: type[Numeric]
    by_bits: bool = False

    @property
    def subtracts_integers(self) -> bool:
        """Whether zeros are subtracted as integers, which serves numbers of fp32 alone."""
        stored = _INTEGERS.get(self.stored)
        return stored is not None and self.groups.is_scaled_wide and self.groups.subtracts_exactly(stored)

    def operands(self, loaded: Sequence[Int32]) -> list[Int32]:
        """The operands of the arithmetic that loaded scales, and behind them as many zeros, stand for: bits
        of fp32 or of two equal values of dtype `to`, or a start of `stored_values.numbers`."""
        rows = len(loaded) // len(self.groups.vectors)
        given = []
        for i, bits in enumerate(loaded):
            is_zero, dtype = i >= rows, self.groups.vectors[i // rows]
            computed = self.groups.difference if is_zero else self.groups.product
            if is_zero and self.subtracts_integers:
                given.append(MAGIC - bits)
                continue
            number = _widened(bits, dtype)
            given.append(number if computed is DType.F32 else pack(number, number, self.to))
        return given

    def weights(self, pair: Int32, scale: Int32, zero: Int32 | None) -> Int32:
        """Two weights, of two stored values in the low 16 bits of a register and their operands."""
        groups, wide = self.groups, self.groups.is_scaled_wide
        if zero is None or self.subtracts_integers:
            both = self._numbers(pair, wide, MAGIC if zero is None else zero)
        else:
            is_wide = groups.difference is DType.F32
            both = self._computed("sub", self._numbers(pair, is_wide), zero)
            if is_wide and not wide:
                both = [pack(both[0], both[1], self.to)]
            elif wide and not is_wide:
                both = unpack(both[0], self.to)
        both = self._computed("mul", both, scale)
        return both[0] if len(both) == 1 else pack(both[0], both[1], self.to)

    def _numbers(self, pair: Int32, is_wide: bool, start: Int32 | int = MAGIC) -> list[Int32]:
        """Two stored values as two numbers of fp32 if it `is_wide`, and otherwise as a pair of dtype `to`."""
        if is_wide:
            return numbers(pair, self.stored, start, self.by_bits)
        return [converted(pair, self.stored, self.to, self.by_bits)]

    def _computed(self, op: str, both: list[Int32], operand: Int32) -> list[Int32]:
        """`op` of two numbers, in fp32 if each has a register, and one operand."""
        if len(both) == 1:
            return [(packed.sub if op == "sub" else packed.mul)(both[0], operand, self.to)]
        return [assembled(f"{op}.rn.f32 $0, $1, $2;", each, operand) for each in both]


@dataclass(frozen=True)
class GroupVectors:
    """Where the scales and zeros of a thread's rows are: `tensors`, each (rows of A, groups of K).

    The thread has `row` and, of each `block_rows` rows, the one that is eight further on, `rows` in all.
    `k_tile` is the first k tile of its part of K.
    """

    arithmetic: Arithmetic
    tensors: list[cute.Tensor]
    rows: int
    block_rows: int
    row: Int32
    k_tile: Int32

    def at(self, row: Int32, k_tile: Int32) -> GroupVectors:
        """The vectors of a tile whose first row, and part of K whose first k tile, are these."""
        return replace(self, row=self.row + row, k_tile=k_tile)

    @property
    def groups(self) -> WeightGroups:
        """The groups of K."""
        return self.arithmetic.groups

    @property
    def is_whole(self) -> bool:
        """Whether each k tile begins a chunk."""
        return self.groups.values * LANES <= TILE_K_BYTES

    def first_group(self, k_tile: Int32) -> Int32:
        """The first group of a k tile."""
        values = self.groups.values
        if values <= TILE_K_BYTES:
            return k_tile * (TILE_K_BYTES // values)
        return k_tile // (values // TILE_K_BYTES)

    def begins_chunk(self, k_tile: Int32) -> Boolean:
        """Whether a k tile is the first of a chunk."""
        return k_tile % (self.groups.values * LANES // TILE_K_BYTES) == 0

    def load(self, chunk: Int32) -> list[Int32]:
        """The lane's part of a chunk, of each tensor that of every row."""
        group = chunk * LANES + cute.arch.lane_idx() % LANES
        loaded: list[Int32] = []
        for tensor, dtype in zip(self.tensors, self.groups.vectors, strict=True):
            for r in range(self.rows):
                row = self.row + (r // 2 * self.block_rows + r % 2 * 8)
                inside = (row < cute.size(tensor, mode=[0])) & (group < cute.size(tensor, mode=[1]))
                place = cute.crd2idx((row, group), tensor.layout)
                address = tensor.iterator.toint() + Int64(place) * (dtype.bits // 8)
                loaded.append(_loaded(address, inside, dtype))
        return loaded

    def of_group(self, chunk: Sequence[Int32], group: Int32) -> list[Int32]:
        """The operands of the arithmetic in a group, which are those of a lane's part of the chunk."""
        source = cute.arch.lane_idx() // LANES * LANES + group % LANES
        return [cute.arch.shuffle_sync(part, source) for part in chunk]


@dataclass(frozen=True)
class KGroup:
    """The scales of a thread's rows in one group of K, and its zeros, if there are any, as operands of the
    arithmetic."""

    arithmetic: Arithmetic
    scales: list[Int32]
    zeros: list[Int32]

    def weights(self, row: int, pair: Int32) -> Int32:
        """Two weights of a row, of two stored values in the low 16 bits of a register."""
        return self.arithmetic.weights(pair, self.scales[row], self.zeros[row] if self.zeros else None)


@dataclass(frozen=True)
class HeldGroups:
    """The chunk of groups that a thread multiplies by, as operands of the arithmetic, and the next one, as it
    was loaded, during an output tile. Its k tiles are known by the counts of their stages, of which the first
    k tile of K has the count -`first`. A k tile within one group has the operands of that `whole` group."""

    vectors: GroupVectors
    first: Int32
    now: cute.Tensor
    following: cute.Tensor
    whole: cute.Tensor

    @staticmethod
    def of(vectors: GroupVectors, count: Int32) -> HeldGroups:
        """Loads the chunk of the first k tile of a part of K, whose stage has this count, and the next."""
        parts = len(vectors.tensors) * vectors.rows
        chunk = vectors.first_group(vectors.k_tile) // LANES
        tensors = [cute.make_rmem_tensor(parts, Int32) for _ in range(3)]
        held = HeldGroups(vectors, vectors.k_tile - count, *tensors)
        _put(held.now, vectors.arithmetic.operands(vectors.load(chunk)))
        _put(held.following, vectors.load(chunk + 1))
        held._begin(count)
        return held

    @cute.jit
    def advance(self, count: Int32):
        """Goes on to the k tile of a stage, with which a chunk may begin."""
        if cutlass.const_expr(self.vectors.is_whole):
            self._next_chunk(count)
        else:
            if self.vectors.begins_chunk(self.first + count):
                self._next_chunk(count)
        self._begin(count)

    def group(self, count: Int32, index: int | Int32) -> KGroup:
        """The `index`-th group of the k tile of a stage, which is the last one that was gone on to. The group
        may differ between lanes."""
        found = _list(self.whole) if self._is_in_one else self._of_lane(count, index)
        rows = self.vectors.rows
        return KGroup(self.vectors.arithmetic, found[:rows], found[rows:])

    @property
    def _is_in_one(self) -> bool:
        """Whether a k tile is within one group."""
        return self.vectors.groups.of_k_tile == 1

    def _begin(self, count: Int32) -> None:
        if self._is_in_one:
            _put(self.whole, self._of_lane(count, 0))

    def _of_lane(self, count: Int32, index: int | Int32) -> list[Int32]:
        first = self.vectors.first_group(self.first + count)
        return self.vectors.of_group(_list(self.now), first + index)

    def _next_chunk(self, count: Int32) -> None:
        vectors = self.vectors
        _put(self.now, vectors.arithmetic.operands(_list(self.following)))
        _put(self.following, vectors.load(vectors.first_group(self.first + count) // LANES + 1))


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
