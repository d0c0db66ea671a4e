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
from cute_backend.planning.sum_scales import SCALE_ALIGN, SumScales
from cute_backend.templates.crew import WARP


@dataclass(frozen=True)
class Lines:
    """Every `width`-th row or column from `first` on, of which `lines` neighbours share a scale."""

    first: Int32
    width: int
    lines: int

    def scale(self, i: Int32) -> Int32:
        """The index of the scale of the `i`-th of them."""
        return (self.first + i * self.width) // self.lines


@dataclass(frozen=True)
class ScaleStages:
    """The scales in all stages of a ring. `a` holds the scales of a tile's rows and `b` those of the columns
    of all Bs, each as (scales, stages). `widths` are the numbers of rows and of columns that share a
    scale."""

    a: cute.Tensor
    b: cute.Tensor
    widths: tuple[int, int]
    scaling: SumScales
    config: TileConfig

    @staticmethod
    def allocate(smem: SmemAllocator, stages: int, scaling: SumScales, config: TileConfig) -> ScaleStages:
        """Allocates shared memory for the scales of all stages."""

        def scales(count: int) -> cute.Tensor:
            layout = cute.make_layout((count, stages), stride=(1, scaling.pitch(count)))
            return smem.allocate_tensor(Float32, layout, SCALE_ALIGN)

        a, b = map(scales, scaling.counts(config))
        return ScaleStages(a, b, scaling.widths(config), scaling, config)

    def bring_tile(
        self,
        stage: Int32,
        scales: Sequence[cute.Tensor],
        origin: tuple[Int32, Int32],
        k: Int32,
        lane: Int32,
    ) -> None:
        """Copies the scales of one k tile of an output tile to a stage. `scales` lists the scales of A, (rows
        or blocks of rows, k tiles), then those of each B, (k tiles, columns or blocks of columns)."""
        of_a, *of_bs = scales
        m0, n0 = origin
        scaling, config, (width_a, width_b) = self.scaling, self.config, self.widths
        count_a, count_b = scaling.counts(config)
        rows = Lines(m0, width_a, scaling.a.lines)
        bring(of_a[(None, k)], self.a[(None, stage)].iterator, count_a, rows, lane)
        piece = count_b // config.pieces
        columns = Lines(n0 * (config.mma_n // config.pieces // config.tile_n), width_b, scaling.b.lines)
        for i, of_b in enumerate(of_bs):
            # The compiler reads three neighbouring scales as four, so the fourth must be initialized too.
            count = scaling.pitch(count_b) - i * piece if i == config.pieces - 1 and count_b > 2 else piece
            target = self.b[(None, stage)].iterator + i * piece
            bring(of_b[(k, None)], target, count, columns, lane)


@cute.jit
def bring(
    source: cute.Tensor, target: cute.Pointer, count: cutlass.Constexpr[int], lines: Lines, lane: Int32
):
    """Copies `count` scales, those of `lines`, to `target` with one warp. Rows and columns beyond the last
    get the last scale, because their results are never stored."""
    copy = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=Float32.width)
    one = cute.make_layout(1)
    for step in cutlass.range_constexpr((count + WARP - 1) // WARP):
        i = lane + step * WARP
        if i < count:
            index = cutlass.min(lines.scale(i), cute.size(source) - 1)
            cute.copy(
                copy,
                cute.make_tensor(source.iterator + cute.crd2idx(index, source.layout), one),
                cute.make_tensor(target + i, one),
            )
