"""Products of values of 8 bits by values of 16, on Hopper: wgmma takes the former from registers. All GPUs
convert alike (`converted`).

The stored values, as those of a quantised weight, are the rows of A. TMA brings them to shared memory as they
lie in memory. Each thread reads those of its fragments, two neighbours of K at a time, and converts them to
the dtype of B, which has all of them, while the tensor cores work on those before. Values in groups of K it
also subtracts zeros from, and multiplies by scales (`weight_groups.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float8E5M2, Int8, Int32, Numeric, Uint8
from cutlass.cute.nvgpu import warpgroup

from cute_backend.planning import TILE_K_BYTES
from cute_backend.spec import WeightGroups
from cute_backend.templates import packed
from cute_backend.templates.instructions import assembled
from cute_backend.templates.mainloop import State, WarpgroupOperands
from cute_backend.templates.weight_groups import GroupVectors, HeldGroups, KGroup

WARP_ROWS = 16
"""Rows of a block of 64 that one warp has."""

K_BYTES = 16
"""Stored bytes of K that one MMA multiplies."""

PARTS = 2
"""The parts of a k tile. The values of one are converted while the tensor cores multiply the other's."""


@dataclass(frozen=True)
class StoredTile:
    """The rows of A in shared memory of which a thread has values, and the registers of the converted values.

    A row is a line of 128 bytes, the values of a k tile, whose vectors of 16 bytes are swizzled by the number
    of the line. A thread has two rows of each block of 64, eight apart, and of the 16 values of K of an MMA
    two neighbours from each half (PTX ISA, wgmma register fragments, matrix A).
    """

    stored: type[Numeric]
    fragments: cute.Tensor
    first: Int32
    """The address of its first value in stage 0."""
    first_row: Int32
    """The first of its rows, among those of the CTA's tile."""
    stage_bytes: int
    block_bytes: int
    vectors: GroupVectors | None = None
    """The scales and zeros of its groups of K, if it has such."""

    @staticmethod
    def of(
        s_a: cute.Tensor, stored: type[Numeric], fragments: cute.Tensor, row: Int32, block_rows: int
    ) -> StoredTile:
        """The tile of a thread whose warp has the 16 rows from `row` on of each `block_rows` rows of A, of
        values of dtype `stored`."""
        lane = cute.arch.lane_idx()
        line = lane // 4
        first = Int32(s_a.iterator.toint()) + (row + line) * TILE_K_BYTES
        first += (line << 4) + lane % 4 * 2
        rows = cute.size(s_a, mode=[0])
        stage, block = rows * TILE_K_BYTES, block_rows * TILE_K_BYTES
        return StoredTile(stored, fragments, first, row + line, stage, block)

    def with_groups(self, groups: WeightGroups, tensors: Sequence[cute.Tensor]) -> StoredTile:
        """The tile with the scales and zeros of its groups, each (rows, groups of K)."""
        rows, block_rows = 2 * cute.size(self.fragments, mode=[1]), self.block_bytes // TILE_K_BYTES
        to = self.fragments.element_type
        vectors = GroupVectors(groups, to, list(tensors), rows, block_rows, self.first_row, Int32(0))
        return replace(self, vectors=vectors)

    def at(self, row: Int32, k_tile: Int32) -> StoredTile:
        """The tile of A whose first row is this, and whose part of K begins with this k tile."""
        return self if self.vectors is None else replace(self, vectors=self.vectors.at(row, k_tile))

    def load(self, k_block: int, stage: Int32) -> list[Int32]:
        """Reads the pairs of values that one MMA multiplies, of all blocks of rows."""
        # The bits of the vector's place in its line are 0 in all other terms, so one instruction swizzles it.
        place = (self.first + stage * self.stage_bytes) ^ (k_block * K_BYTES)
        blocks = range(0, cute.size(self.fragments, mode=[1]) * self.block_bytes, self.block_bytes)
        return [
            assembled("ld.shared.u16 $0, [$1];", place + (block + half + rows))
            for block in blocks
            for half in (0, K_BYTES // 2)
            for rows in (0, 8 * TILE_K_BYTES)
        ]

    def convert(self, k_block: int, pairs: list[Int32], group: KGroup | None) -> None:
        """Puts the converted values of pairs that were read where the MMA takes them from. `group` has their
        scales and zeros, if they have such."""
        words, to = cute.recast_tensor(self.fragments, Int32), self.fragments.element_type
        for i, pair in enumerate(pairs):
            word = converted(pair, self.stored, to)
            if group is not None:
                word = group.scaled(i // 4 * 2 + i % 2, word)
            words[k_block * len(pairs) + i] = word


class Sm90Converted:
    """The tensor cores add up all k tiles. A k tile is multiplied in two parts: while they work on one, a
    thread reads and converts the other. Their registers are free again once the part before last has been
    waited for. A stage is released when both parts of the next k tile have waited for those of its own."""

    lead, k_tiles_a_step, pieces = 1, 1, 1
    scaling = None
    converts = True

    def __init__(self, groups: WeightGroups | None = None, *, unsigned: bool = False) -> None:
        """Integers are `unsigned` only if this says so: a kernel's tensors have the same type for both."""
        self.groups, self.unsigned = groups, unsigned

    def stored(
        self,
        s_a: cute.Tensor,
        vectors: Sequence[cute.Tensor],
        fragments: cute.Tensor,
        row: Int32,
        block_rows: int,
    ) -> StoredTile:
        """The rows of A that a thread converts, as `StoredTile.of` has them. `vectors` are the scales and
        zeros of its groups of K, each (rows, groups)."""
        dtype = Uint8 if self.unsigned else s_a.element_type
        tile = StoredTile.of(s_a, dtype, fragments, row, block_rows)
        return tile if self.groups is None else tile.with_groups(self.groups, vectors)

    def begin(
        self, tile: Any, operands: WarpgroupOperands, acc: cute.Tensor, state: State
    ) -> tuple[HeldGroups | None, State]:
        held = self._held(operands, state)
        operands.ring.consumer_wait(state)
        for part in range(PARTS):
            pairs = self._read(operands, state, part)
            self._multiply(operands, acc, held, pairs, state, part, anew=part == 0)
        state.advance()
        return held, state

    def step(
        self,
        operands: WarpgroupOperands,
        acc: cute.Tensor,
        held: HeldGroups | None,
        state: State,
        release: State,
        count: int,
    ) -> tuple[State, State]:
        if held is not None:
            held.advance(state.count)
        operands.ring.consumer_wait(state)
        for part in range(PARTS):
            pairs = self._read(operands, state, part)
            # The registers of this part, and in the end the stage, are those of the k tile before.
            warpgroup.wait_group(PARTS - 1)
            if part == PARTS - 1:
                _release(operands, release)
                release.advance()
            self._multiply(operands, acc, held, pairs, state, part)
        state.advance()
        return state, release

    def end(
        self, operands: WarpgroupOperands, acc: cute.Tensor, held: HeldGroups | None, release: State
    ) -> None:
        warpgroup.wait_group(0)
        _release(operands, release)

    def _held(self, operands: WarpgroupOperands, state: State) -> HeldGroups | None:
        """The scales and zeros of a tile's groups, from its first k tile on."""
        tile: StoredTile = operands.a
        return None if tile.vectors is None else HeldGroups.of(tile.vectors, state.count)

    def _k_blocks(self, operands: WarpgroupOperands, part: int) -> range:
        """The MMAs of a part of a k tile."""
        count = cute.size(operands.b[0], mode=[2]) // PARTS
        return range(part * count, (part + 1) * count)

    def _read(self, operands: WarpgroupOperands, state: State, part: int) -> list[list[Int32]]:
        """Reads the stored values of a part."""
        tile: StoredTile = operands.a
        return [tile.load(k_block, state.index) for k_block in self._k_blocks(operands, part)]

    def _multiply(
        self,
        operands: WarpgroupOperands,
        acc: cute.Tensor,
        held: HeldGroups | None,
        pairs: list[list[Int32]],
        state: State,
        part: int,
        anew: bool = False,
    ) -> None:
        """Converts the stored values of a part and issues its wgmmas as one group; `anew` overwrites the
        sums."""
        tile: StoredTile = operands.a
        k_blocks = self._k_blocks(operands, part)
        groups: dict[int, KGroup] = {}
        for k_block, read in zip(k_blocks, pairs, strict=True):
            index = 0 if self.groups is None else k_block * K_BYTES // self.groups.values
            if held is not None and index not in groups:
                groups[index] = held.group(state.count, index)
            tile.convert(k_block, read, groups.get(index))
        warpgroup.fence()
        for k_block in k_blocks:
            mma = operands.setting if anew and k_block == 0 else operands.adding
            a = tile.fragments[(None, None, k_block)]
            cute.gemm(mma, acc, a, operands.b[0][(None, None, k_block, state.index)], acc)
        warpgroup.commit_group()


def _release(operands: WarpgroupOperands, state: State) -> None:
    """Releases a stage that the warp has read. One lane arrives, after all lanes have read A."""
    cute.arch.sync_warp()
    operands.ring.consumer_release(state)


def converted(pair: Int32, stored: type[Numeric], to: type[Numeric], by_bits: bool = False) -> Int32:
    """Two stored values, in the low 16 bits of a register, as two of 16 bits. No rounding takes place.
    `by_bits` is for GPUs without conversions of fp8."""
    if stored is Int8:
        return _integers(pair, to)
    if stored is Uint8:
        return _unsigned(pair, to)
    if stored is Float8E5M2:
        halves = _prmt(pair, 0, 0x1404)  # the bits of fp16 begin with those of e5m2
    else:
        assert stored is Float8E4M3FN
        instruction = "{ .reg .b16 low; mov.b32 {low, _}, $1; cvt.rn.f16x2.e4m3x2 $0, low; }"
        halves = _e4m3_bits(pair) if by_bits else assembled(instruction, pair)
    if to is not BFloat16:
        return halves
    low, high = (
        assembled(f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.f32.f16 $0, {half}; }}", halves)
        for half in ("low", "high")
    )
    return assembled("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low)


def _integers(pair: Int32, to: type[Numeric]) -> Int32:
    """Two int8 as two of 16 bits, by bits that make numbers of 8 bits the last ones of a larger number."""
    if to is not BFloat16:
        # 1024 + (x + 128) in fp16, less 1152.
        words = _prmt(pair ^ 0x8080, 0x64646464, 0x4140)
        return assembled("sub.rn.f16x2 $0, $1, $2;", words, 0x64806480)
    # The low 7 bits behind the exponent of 128, less 128, or 256 if the sign has made the exponent that.
    words = _prmt(pair, 0x43434343, 0x4140)
    return assembled(
        "fma.rn.bf16x2 $0, $1, $2, $3;", words & ~0x007F007F, 0xBF80BF80 - (1 << 32), words & ~0x00800080
    )


def _e4m3_bits(pair: Int32) -> Int32:
    """Two e4m3 as two fp16, whose exponents are larger by 8 than the same bits say: 15 is the bias of one,
    7 that of the other. The largest magnitude is NaN; it alone has a carry, which completes NaN's
    exponent."""
    words = _prmt(pair, 0, 0x1404)
    magnitude = words >> 1 & 0x3F803F80
    nan = magnitude + 0x00800080 & 0x40004000
    signed = magnitude | nan | words & 0x80008000 - (1 << 32)
    return assembled("mul.rn.f16x2 $0, $1, $2;", signed, 0x5C005C00)


def _unsigned(pair: Int32, to: type[Numeric]) -> Int32:
    """Two uint8 as two of 16 bits."""
    if to is not BFloat16:
        # 1024 + x in fp16, less 1024.
        words = _prmt(pair, 0x64646464, 0x4140)
        return assembled("sub.rn.f16x2 $0, $1, $2;", words, 0x64006400)
    # As above: 128 or 256, less 256, plus the low 7 bits behind the exponent of 128.
    words = _prmt(pair, 0x43434343, 0x4140)
    high = packed.sub(words & ~0x007F007F, 0x43804380, BFloat16)
    return packed.add(high, words & ~0x00800080, BFloat16)


def _prmt(low: Int32, high: int, selector: int) -> Int32:
    """The bytes of two registers that the digits of `selector` name, the last one first (PTX ISA, prmt)."""
    return assembled("prmt.b32 $0, $1, $2, $3;", low, high, selector)
