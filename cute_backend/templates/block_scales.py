"""Loads the scales of blocks into shared memory for the warps that multiply a k tile.

A k tile of fp8 is one block of K. One warp copies the scales of its rows and columns to shared memory by
cp.async, one scale per lane. TMA would need addresses and pitches that are multiples of 16 bytes, and the
scales of M rows meet that only if M is a multiple of 4. On Hopper, the scales are a part of the stage of A
and B: they arrive at its barrier, and are released with it. On Blackwell they have a ring of their own
(`partial_sums.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_backend.planning import TileConfig
from cute_backend.planning.shared_memory import SCALE_ALIGN, SumScales
from cute_backend.templates.crew import WARP


@dataclass(frozen=True)
class ScaleStages:
    """The scales in all stages of a ring. `a` holds the scales of a tile's rows and `b` those of the columns
    of all Bs, each as (scales, stages). `widths` are the numbers of rows and of columns that share a
    scale."""

    a: cute.Tensor
    b: cute.Tensor
    widths: tuple[int, int]

    @staticmethod
    def allocate(smem: SmemAllocator, stages: int, scaling: SumScales, config: TileConfig) -> ScaleStages:
        """Allocates shared memory for the scales of all stages."""

        def scales(count: int) -> cute.Tensor:
            layout = cute.make_layout((count, stages), stride=(1, scaling.pitch(count)))
            return smem.allocate_tensor(Float32, layout, SCALE_ALIGN)

        a, b = map(scales, scaling.counts(config))
        return ScaleStages(a, b, scaling.widths(config))


@cute.jit
def bring(
    source: cute.Tensor,
    target: cute.Tensor,
    offset: cutlass.Constexpr[int],
    count: cutlass.Constexpr[int],
    width: cutlass.Constexpr[int],
    lines: cutlass.Constexpr[int],
    first: Int32,
    lane: Int32,
):
    """Copies `count` scales to `target`, from `offset` on, with one warp. They are the scales of every
    `width`-th row or column from `first` on; in `source`, `lines` rows or columns share a scale. Rows and
    columns beyond the last get the last scale, because their results are never stored."""
    copy = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=Float32.width)
    one = cute.make_layout(1)
    for step in cutlass.range_constexpr((count + WARP - 1) // WARP):
        i = lane + step * WARP
        if i < count:
            index = cutlass.min((first + i * width) // lines, cute.size(source) - 1)
            cute.copy(
                copy,
                cute.make_tensor(source.iterator + cute.crd2idx(index, source.layout), one),
                cute.make_tensor(target.iterator + (offset + i), one),
            )


def bring_tile(
    stages: ScaleStages,
    stage: Int32,
    scales: Sequence[cute.Tensor],
    scaling: SumScales,
    config: TileConfig,
    origin: tuple[Int32, Int32],
    k: Int32,
    lane: Int32,
) -> None:
    """Copies the scales of one k tile of an output tile to a stage. `scales` lists the scales of A, (rows or
    blocks of rows, k tiles), then those of each B, (k tiles, columns or blocks of columns)."""
    of_a, *of_bs = scales
    m0, n0 = origin
    (count_a, count_b), (width_a, width_b) = scaling.counts(config), scaling.widths(config)
    bring(of_a[(None, k)], stages.a[(None, stage)], 0, count_a, width_a, scaling.a.lines, m0, lane)
    piece = count_b // config.pieces
    first = n0 * (config.mma_n // config.pieces // config.tile_n)
    for i, of_b in enumerate(of_bs):
        # The compiler reads three neighbouring scales as four, so the fourth must be initialized too.
        count = scaling.pitch(count_b) - i * piece if i == config.pieces - 1 and count_b > 2 else piece
        target = stages.b[(None, stage)]
        bring(of_b[(k, None)], target, i * piece, count, width_b, scaling.b.lines, first, lane)
