"""Pairs of warps: each warp multiplies the rows of both by half of the columns, and then they exchange sums.

The epilogue needs whole rows of a tile in a warp. A warp that multiplies whole rows reads all columns of B
for few rows of A: 32 rows and 128 columns of K are 160 lines of shared memory, but 64 rows and 64 columns
give as many products for 128 lines. So two consecutive warps multiply the rows of both:

    multiplied by      warp 2 p        warp 2 p + 1
    rows of 2 p        columns 0-15,   columns 16-31,
    rows of 2 p + 1    of every 32     of every 32

Once a tile's products are done, each warp exchanges the sums of its partner's rows for those of its own,
through a stage of A or B that no warp reads any more.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Numeric

from cute_backend.planning import TileConfig
from cute_backend.templates.crew import WARP, WARPS

PAIR = 2
"""Warps that exchange sums."""

MMA_M, MMA_N = 16, 8
"""Rows and columns of an instruction's sums (PTX ISA, mma.m16n8k16 and mma.m16n8k32)."""


def pairs_pay(config: TileConfig) -> bool:
    """Whether a pair of warps reads fewer lines of shared memory, with 32 columns of B for both. Rows that a
    warp converts are its own, so that no other warp converts them too."""
    rows = MMA_M * config.thread_rows // 2
    able = not config.converts and config.mma_n % (4 * MMA_N) == 0
    return able and 2 * rows + config.mma_n // 2 < rows + config.mma_n


def pair_arrangement(config: TileConfig, mma_k: int) -> tuple[cute.Layout, tuple]:
    """The layout of warps and the order of rows and columns, as `cute.make_tiled_mma` takes them.

    Instructions count their rows within an instruction, by warps, then by the rows of a warp and of its
    partner; their columns likewise, by both instructions that read 16 columns of B at once.
    """
    pairs = WARPS * config.sharing // PAIR
    warps = cute.make_layout((pairs, PAIR, 1), stride=(PAIR, 1, 0))
    rows = cute.make_layout((MMA_M, pairs, PAIR), stride=(1, PAIR * MMA_M, MMA_M))
    columns = cute.make_layout((MMA_N, PAIR, 2), stride=(1, 2 * MMA_N, MMA_N))
    return warps, (rows, columns, mma_k)


def pair_sums(config: TileConfig, blocks: int, dtype: type[Numeric]) -> cute.Tensor:
    """The sums that a warp multiplies: ((2, 2), rows of one warp and of the other in each block, its
    instructions' columns)."""
    return cute.make_rmem_tensor(((2, 2), PAIR * blocks, config.mma_n // (PAIR * MMA_N)), dtype)


@cute.jit
def exchange_sums(
    multiplied: cute.Tensor,
    acc: cute.Tensor,
    stage: cute.Tensor,
    thread: Int32,
    meet: cutlass.Constexpr[Callable[[], None]],
):
    """Fills `acc`, whole rows as ((2, 2), blocks, all instructions' columns), with the sums of both warps.

    `stage` is shared memory, as sums, that no other code reads or writes at this time, with room for 128
    elements for each instruction's columns of each warp. `thread` counts in the CTA. At `meet` the warps of a
    warpgroup wait for each other.
    """
    warp, lane = thread // WARP, thread % WARP
    right = warp % PAIR == 1
    _, blocks, columns = (cute.size(acc, mode=[i]) for i in range(3))
    mine = columns // PAIR
    room = cute.make_layout((4, mine, WARP, WARPS * 8), stride=(1, 4 * WARP, 4, 4 * WARP * mine))
    shared = cute.make_tensor(stage.iterator, room)
    for block in cutlass.range_constexpr(blocks):
        # A warp's place can't index registers, so both rows of a pair are read, and one is selected.
        given, theirs = (cute.make_rmem_tensor((4, mine), acc.element_type) for _ in range(2))
        for i in cutlass.range_constexpr(4 * mine):
            j, column = i % 4, i // 4
            rows = [multiplied[j, PAIR * block + row, column] for row in range(PAIR)]
            given[j, column] = cutlass.select_(right, rows[0], rows[1])
        cute.autovec_copy(given, shared[(None, None, lane, warp)])
        meet()
        cute.autovec_copy(shared[(None, None, lane, warp ^ 1)], theirs)
        meet()
        for i in cutlass.range_constexpr(4 * mine):
            j, column = i % 4, i // 4
            rows = [multiplied[j, PAIR * block + row, column] for row in range(PAIR)]
            kept = cutlass.select_(right, rows[1], rows[0])
            place = column // 2 * 4 + column % 2
            acc[j, block, place] = cutlass.select_(right, theirs[j, column], kept)
            acc[j, block, place + 2] = cutlass.select_(right, kept, theirs[j, column])
