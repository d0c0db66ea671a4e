"""Products of values of 8 or 4 bits by values of 16, on Hopper: wgmma takes the former from registers. All
GPUs convert alike (`stored_values.py`).

The stored values, as those of a quantised weight, are the rows of A. TMA brings them to shared memory as they
lie in memory. Each thread reads those of its fragments, two neighbours of K at a time, and converts them to
the dtype of B, which has all of them, while the tensor cores work on those before. From values in groups of K
it makes the weights of a program that subtracts zeros and multiplies by scales (`weight_groups.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from cute_backend.kinds.scales import SPAN
from cute_backend.planning import TILE_K_BYTES
from cute_backend.planning.converting import SUMS_IN_TURN
from cute_backend.planning.stage_scales import NO_SCALES
from cute_backend.spec import DType, WeightGroups
from cute_backend.templates.instructions import assembled
from cute_backend.templates.mainloop import State, WarpgroupOperands
from cute_backend.templates.stored_values import StoredPairs, stored_pairs
from cute_backend.templates.weight_groups import Arithmetic, GroupVectors, HeldGroups, KGroup

VECTOR_BYTES = 16
"""Bytes of a line that the swizzle moves together."""

WARP_ROWS = 16
"""Rows of a block of 64 that one warp has."""

MMA_VALUES = 16
"""Values of K that one MMA multiplies."""

PART = 4
"""The MMAs of a part of a k tile, of all products that have a weight each. The values of one part are
converted while the tensor cores multiply those of the one before, so that a thread has registers for two."""

HELD_VALUES = 2 * PART * MMA_VALUES
"""Values of K of which a thread has registers, of all products."""


@dataclass(frozen=True)
class StoredTile:
    """The rows of A in shared memory of which a thread has values, and the registers of the converted values.

    A row is a line of 128 bytes, the values of a k tile, whose vectors of 16 bytes are swizzled by the number
    of the line. A thread has two rows of each block of 64, eight apart, and of the 16 values of K of an MMA
    two neighbours from each half (PTX ISA, wgmma register fragments, matrix A). The registers of MMA i are
    those of MMA i - 2 * `part` too.

    Rows of `products` lie one below the other, and each product has its own blocks of them.
    """

    stored: StoredPairs
    fragments: cute.Tensor
    first: Int32
    """The address of its first value in stage 0."""
    first_row: Int32
    """The first of its rows, among those of the CTA's tile."""
    stage_bytes: int
    block_bytes: int
    products: int
    groups: WeightGroups | None
    vectors: GroupVectors | None = None
    """The scales and zeros of its groups of K, if it has such, once it is `at` a place."""

    @staticmethod
    def of(
        s_a: cute.Tensor,
        stored: StoredPairs,
        fragments: cute.Tensor,
        row: Int32,
        block_rows: int,
        products: int,
        groups: WeightGroups | None,
    ) -> StoredTile:
        """The tile of a thread whose warp has the 16 rows from `row` on of each `block_rows` rows of A."""
        lane = cute.arch.lane_idx()
        line = lane // 4
        first = Int32(s_a.iterator.toint()) + (row + line) * TILE_K_BYTES
        first += (line << 4) + lane % 4 * stored.bytes
        rows = cute.size(s_a, mode=[0])
        stage, block = rows * TILE_K_BYTES, block_rows * TILE_K_BYTES
        return StoredTile(stored, fragments, first, row + line, stage, block, products, groups)

    def at(self, row: Int32, k_tile: Int32, tensors: Sequence[cute.Tensor]) -> StoredTile:
        """The tile of A whose first row is this, and whose part of K begins with this k tile. `tensors` are
        the scales and zeros of its groups of K, each (rows, groups)."""
        if self.groups is None:
            return self
        rows, block_rows = 2 * cute.size(self.fragments, mode=[1]), self.block_bytes // TILE_K_BYTES
        arithmetic = Arithmetic(self.groups, self.stored, self.fragments.element_type)
        first, span = self.first_row + row, k_tile * self.spans
        vectors = GroupVectors(arithmetic, list(tensors), rows, block_rows, first, span, SPAN, self.products)
        return replace(self, vectors=vectors)

    @property
    def part(self) -> int:
        """The MMAs along K of a part of a k tile."""
        return PART // self.products

    @property
    def k_blocks(self) -> int:
        """The MMAs along K of a k tile."""
        return TILE_K_BYTES // (MMA_VALUES // 2 * self.stored.bytes)

    @property
    def spans(self) -> int:
        """The spans of groups of a k tile."""
        return self.k_blocks * MMA_VALUES // SPAN

    def load(self, k_block: int, stage: Int32) -> list[Int32]:
        """Reads the pairs of values that one MMA multiplies, of all blocks of rows."""
        half_bytes = MMA_VALUES // 4 * self.stored.bytes
        vector, within = divmod(k_block * 2 * half_bytes, VECTOR_BYTES)
        # The bits of the vector's place in its line are 0 in all other terms, so one instruction swizzles it.
        place = (self.first + stage * self.stage_bytes) ^ (vector * VECTOR_BYTES)
        blocks = range(0, cute.size(self.fragments, mode=[1]) * self.block_bytes, self.block_bytes)
        return [
            assembled(f"ld.shared.u{8 * self.stored.bytes} $0, [$1];", place + (block + within + half + rows))
            for block in blocks
            for half in (0, half_bytes)
            for rows in (0, 8 * TILE_K_BYTES)
        ]

    def convert(self, k_block: int, pairs: list[Int32], group: KGroup | None) -> None:
        """Puts the converted values of pairs that were read where the MMA takes them from. `group` has their
        scales and zeros, if they have such."""
        words, to = cute.recast_tensor(self.fragments, Int32), self.fragments.element_type
        for i, pair in enumerate(pairs):
            row = i // 4 * 2 + i % 2
            word = self.stored.converted(pair, to) if group is None else group.weights(row, pair)
            words[k_block % (2 * self.part) * len(pairs) + i] = word


@dataclass(frozen=True)
class Held:
    """A thread's values from one step to the next: the stored values of the part of a k tile that it
    converts next, as they were read, and the scales and zeros of its groups of K, if it has such."""

    read: cute.Tensor
    groups: HeldGroups | None
    other_sums: cute.Tensor | None
    """The sums of every other MMA, if those have registers of their own."""


class Sm90Converted:
    """The tensor cores add up all k tiles. A k tile is multiplied in parts: while they work on one, a thread
    converts the next. It reads a part's stored values as it converts those of the part before, so that it
    does not wait for them: a step multiplies the last part of the k tile before, and all but the last of its
    own. The registers of a part are free again once its products have been waited for. So is a stage, all of
    whose values have been read by then."""

    lead, k_tiles_a_step, pieces = 1, 1, 1
    scaling = NO_SCALES
    converts = True

    def __init__(self, stored: DType, groups: WeightGroups | None = None) -> None:
        """`stored` is the dtype of A, since a kernel's tensors have bytes for several."""
        self.pairs, self.groups = stored_pairs(stored), groups

    def stored(
        self,
        s_a: cute.Tensor,
        fragments: cute.Tensor,
        row: Int32,
        block_rows: int,
        rows: Int32,
        products: int,
    ) -> StoredTile:
        """The rows of A that a thread converts, as `StoredTile.of` has them, of `rows` rows in all of each
        product."""
        pairs = self.pairs.in_thread(rows)
        return StoredTile.of(s_a, pairs, fragments, row, block_rows, products, self.groups)

    def begin(
        self, tile: Any, operands: WarpgroupOperands, acc: cute.Tensor, state: State
    ) -> tuple[Held, State]:
        stored: StoredTile = operands.a
        groups = None
        if stored.vectors is not None:
            groups = HeldGroups.of(stored.vectors, state.count * stored.spans)
        others = cute.make_rmem_tensor_like(acc) if cute.size(acc) <= SUMS_IN_TURN else None
        held = Held(cute.make_rmem_tensor(self._pairs(operands), Int32), groups, others)
        operands.ring.consumer_wait(state)
        first = [stored.load(k_block, state.index) for k_block in range(stored.part)]
        for i, pair in enumerate(pair for pairs in first for pair in pairs):
            held.read[i] = pair
        self._multiply(operands, acc, held, state, 0, state, anew=True)
        self._further_parts(operands, acc, held, state)
        state.advance()
        return held, state

    def step(
        self,
        operands: WarpgroupOperands,
        acc: cute.Tensor,
        held: Held,
        state: State,
        release: State,
        count: int,
    ) -> tuple[State, State]:
        operands.ring.consumer_wait(state)
        tile: StoredTile = operands.a
        self._multiply(operands, acc, held, release, self._last(operands), state)
        if held.groups is not None:
            held.groups.advance(state.count * tile.spans)
        # The registers of the first part are those of the k tile before.
        warpgroup.wait_group(1)
        self._multiply(operands, acc, held, state, 0, state)
        # The registers of the second part, and the stage, are those of the k tile before.
        warpgroup.wait_group(1)
        _release(operands, release)
        release.advance()
        self._further_parts(operands, acc, held, state)
        state.advance()
        return state, release

    def end(self, operands: WarpgroupOperands, acc: cute.Tensor, held: Held, release: State) -> None:
        self._multiply(operands, acc, held, release, self._last(operands), None)
        warpgroup.wait_group(0)
        if held.other_sums is not None:
            _add(held.other_sums, acc)
        _release(operands, release)

    def _last(self, operands: WarpgroupOperands) -> int:
        """The last part of a k tile."""
        tile: StoredTile = operands.a
        return tile.k_blocks // tile.part - 1

    def _further_parts(self, operands: WarpgroupOperands, acc: cute.Tensor, held: Held, state: State) -> None:
        """Multiplies the parts of a k tile between the first one and the last. No products are in flight but
        those of the first one."""
        tile: StoredTile = operands.a
        for part in range(1, self._last(operands)):
            if part > 1:
                warpgroup.wait_group(1)
            first = part * tile.part * MMA_VALUES
            if held.groups is not None and first % SPAN == 0:
                held.groups.advance(state.count * tile.spans + first // SPAN)
            self._multiply(operands, acc, held, state, part, state)

    def _pairs(self, operands: WarpgroupOperands) -> int:
        """The pairs of stored values of a part that a thread reads."""
        tile: StoredTile = operands.a
        return cute.size(cute.recast_tensor(tile.fragments, Int32)) // 2

    def _multiply(
        self,
        operands: WarpgroupOperands,
        acc: cute.Tensor,
        held: Held,
        state: State,
        part: int,
        following: State | None,
        anew: bool = False,
    ) -> None:
        """Converts the stored values of a part of a stage, which `held` has, and issues its wgmmas as one
        group; `anew` overwrites the sums. In the place of those of each MMA it reads those of the next part,
        which is in the stage `following`."""
        tile: StoredTile = operands.a
        k_blocks = range(part * tile.part, (part + 1) * tile.part)
        span = part * tile.part * MMA_VALUES // SPAN
        groups: dict[int, KGroup] = {}
        each = self._pairs(operands) // tile.part
        for i, k_block in enumerate(k_blocks):
            index = 0 if self.groups is None else k_block * MMA_VALUES % SPAN // self.groups.values
            if held.groups is not None and index not in groups:
                groups[index] = held.groups.group(state.count * tile.spans + span, index)
            place = range(i * each, (i + 1) * each)
            pairs = [held.read[at] for at in place]
            if following is not None:
                read = tile.load((k_block + tile.part) % tile.k_blocks, following.index)
                for at, pair in zip(place, read, strict=True):
                    held.read[at] = pair
            tile.convert(k_block, pairs, groups.get(index))
        warpgroup.fence()
        sums = [acc] if held.other_sums is None else [acc, held.other_sums]
        for k_block in k_blocks:
            mma = operands.setting if anew and k_block < len(sums) else operands.adding
            a = tile.fragments[(None, None, k_block % (2 * tile.part))]
            to = sums[k_block % len(sums)]
            cute.gemm(mma, to, a, operands.b[0][(None, None, k_block, state.index)], to)
        warpgroup.commit_group()


def _add(sums: cute.Tensor, acc: cute.Tensor) -> None:
    """Adds sums to the accumulators."""
    for i in range(cute.size(acc)):
        acc[i] = acc[i] + sums[i]


def _release(operands: WarpgroupOperands, state: State) -> None:
    """Releases a stage that the warp has read. One lane arrives, after all lanes have read A."""
    cute.arch.sync_warp()
    operands.ring.consumer_release(state)
