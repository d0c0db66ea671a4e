"""Scales and zeros of a weight's groups of K, in the registers of the threads that convert it.

A thread converts values of a few rows of A, the columns of the weight, as the four lanes beside it do (PTX
ISA, wgmma register fragments, matrix A). Of four neighbouring groups of such a row, each of these lanes loads
the scale and the zero of one: a chunk, which lasts for four groups. A lane receives those of the group that
it multiplies from the lane that has them. The next chunk is loaded when one begins, so that memory has the
time of a whole chunk. Groups beyond K, and rows beyond the last one, have scales and zeros of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Int32, Int64, Numeric

from cute_backend.planning import TILE_K_BYTES
from cute_backend.spec import DType, WeightGroups
from cute_backend.templates import packed
from cute_backend.templates.instructions import assembled

LANES = 4
"""Lanes of a warp that have the same rows of A."""


@dataclass(frozen=True)
class GroupVectors:
    """Where the scales and zeros of a thread's rows are: `tensors`, each (rows of A, groups of K).

    The thread has `row` and, of each `block_rows` rows, the one that is eight further on, `rows` in all.
    `k_tile` is the first k tile of its part of K. Weights are of dtype `to`.
    """

    groups: WeightGroups
    to: type[Numeric]
    tensors: list[cute.Tensor]
    rows: int
    block_rows: int
    row: Int32
    k_tile: Int32

    def at(self, row: Int32, k_tile: Int32) -> GroupVectors:
        """The vectors of a tile whose first row, and part of K whose first k tile, are these."""
        return replace(self, row=self.row + row, k_tile=k_tile)

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

    def load(self, chunk: Int32, wanted: Boolean, kept: Sequence[Int32]) -> list[Int32]:
        """The lane's part of a chunk, of each tensor that of every row; `kept` if it is not `wanted`."""
        group = chunk * LANES + cute.arch.lane_idx() % LANES
        loaded: list[Int32] = []
        for tensor, dtype in zip(self.tensors, self.groups.vectors, strict=True):
            for r in range(self.rows):
                row = self.row + (r // 2 * self.block_rows + r % 2 * 8)
                inside = (row < cute.size(tensor, mode=[0])) & (group < cute.size(tensor, mode=[1]))
                place = cute.crd2idx((row, group), tensor.layout)
                address = tensor.iterator.toint() + Int64(place) * (dtype.bits // 8)
                old = cutlass.select_(wanted, Int32(0), kept[len(loaded)])
                loaded.append(_loaded(address, inside & wanted, old, dtype))
        return loaded

    def of_group(self, chunk: Sequence[Int32], group: Int32) -> KGroup:
        """The scales and zeros of a group of the chunk, as they are computed with."""
        source = cute.arch.lane_idx() // LANES * LANES + group % LANES
        computed = (self.groups.product, self.groups.difference)
        found = []
        for i, part in enumerate(chunk):
            given = cute.arch.shuffle_sync(part, source)
            number = _widened(given, self.groups.vectors[i // self.rows])
            is_wide = computed[i // self.rows] is DType.F32
            found.append(number if is_wide else pack(number, number, self.to))
        return KGroup(self.groups, self.to, found[: self.rows], found[self.rows :])


@dataclass(frozen=True)
class KGroup:
    """The scales of a thread's rows in one group of K, and its zeros, if there are any: bits of fp32, or of
    two equal values of dtype `to`."""

    groups: WeightGroups
    to: type[Numeric]
    scales: list[Int32]
    zeros: list[Int32]

    def scaled(self, row: int, pair: Int32) -> Int32:
        """Two values of dtype `to` of a row, less their zero, times their scale, each step rounded."""
        both = [pair]
        if self.zeros:
            both = self._computed("sub", both, self.zeros[row], self.groups.difference is DType.F32)
        both = self._computed("mul", both, self.scales[row], self.groups.product is DType.F32)
        return both[0] if len(both) == 1 else pack(both[0], both[1], self.to)

    def _computed(self, op: str, both: list[Int32], operand: Int32, is_wide: bool) -> list[Int32]:
        """`op` of two numbers and one operand, in fp32 if it `is_wide`: in a register each, or both in
        one."""
        if is_wide and len(both) == 1:
            both = unpack(both[0], self.to)
        elif not is_wide and len(both) == 2:
            both = [pack(both[0], both[1], self.to)]
        if not is_wide:
            return [(packed.sub if op == "sub" else packed.mul)(both[0], operand, self.to)]
        return [assembled(f"{op}.rn.f32 $0, $1, $2;", each, operand) for each in both]


@dataclass(frozen=True)
class HeldGroups:
    """The chunk of groups that a thread multiplies by, and the next one, during an output tile. Its k tiles
    are known by the counts of their stages, of which the first k tile of K has the count -`first`."""

    vectors: GroupVectors
    first: Int32
    now: cute.Tensor
    following: cute.Tensor

    @staticmethod
    def of(vectors: GroupVectors, count: Int32) -> HeldGroups:
        """Loads the chunk of the first k tile of a part of K, whose stage has this count, and the next."""
        parts, zeros = len(vectors.tensors) * vectors.rows, Int32(0)
        chunk = vectors.first_group(vectors.k_tile) // LANES
        held = [cute.make_rmem_tensor(parts, Int32) for _ in range(2)]
        for ahead, each in enumerate(held):
            _put(each, vectors.load(chunk + ahead, Boolean(True), [zeros] * parts))
        return HeldGroups(vectors, vectors.k_tile - count, *held)

    def advance(self, count: Int32) -> None:
        """Goes on to the next k tile, with which a chunk may begin."""
        vectors, k_tile = self.vectors, self.first + count
        begins = Boolean(True) if vectors.is_whole else vectors.begins_chunk(k_tile)
        now, following = _list(self.now), _list(self.following)
        _put(self.now, [cutlass.select_(begins, new, old) for new, old in zip(following, now, strict=True)])
        chunk = vectors.first_group(k_tile) // LANES + 1
        _put(self.following, vectors.load(chunk, begins, following))

    def group(self, count: Int32, index: int | Int32) -> KGroup:
        """The `index`-th group of a k tile, which may differ between lanes."""
        first = self.vectors.first_group(self.first + count)
        return self.vectors.of_group(_list(self.now), first + index)


def _list(held: cute.Tensor) -> list[Int32]:
    return [held[i] for i in range(cute.size(held))]


def _put(held: cute.Tensor, values: Sequence[Int32]) -> None:
    for i, value in enumerate(values):
        held[i] = value


def _loaded(address: Int64, wanted: Boolean, kept: Int32, dtype: DType) -> Int32:
    """The bits of a number in memory, an integer with its sign; `kept`, and no access, unless `wanted`."""
    kind = "s8" if dtype is DType.I8 else f"u{dtype.bits}"
    text = f"{{ .reg .pred p; setp.ne.s32 p, $3, 0; @p ld.global.{kind} $0, [$2]; }}"
    return assembled(text, kept, address, Int32(wanted), tied=True)


def _widened(bits: Int32, dtype: DType) -> Int32:
    """The bits of a number of a dtype as those of the same number in fp32."""
    if dtype is DType.F32:
        return bits
    if dtype is DType.BF16:
        return bits << 16
    if dtype is DType.F16:
        return assembled("{ .reg .b16 low; mov.b32 {low, _}, $1; cvt.f32.f16 $0, low; }", bits)
    return assembled("cvt.rn.f32.s32 $0, $1;", bits)


def pack(low: Int32, high: Int32, to: type[Numeric]) -> Int32:
    """Two numbers of fp32, each rounded to 16 bits."""
    return assembled(f"cvt.rn.{_NAMES[to]}x2.f32 $0, $1, $2;", high, low)


def unpack(pair: Int32, of: type[Numeric]) -> list[Int32]:
    """Two numbers of 16 bits as two of fp32."""
    if of is BFloat16:
        return [assembled("shl.b32 $0, $1, 16;", pair), assembled("and.b32 $0, $1, 0xffff0000;", pair)]
    return [
        assembled(f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.f32.f16 $0, {half}; }}", pair)
        for half in ("low", "high")
    ]


_NAMES = {BFloat16: "bf16", Float16: "f16"}
