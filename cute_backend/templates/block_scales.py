"""Loads the scales of blocks into shared memory for the warps that multiply a k tile.

A k tile of fp8 is one block of K. One warp copies the scales of its rows and columns to shared memory by
cp.async, one scale per lane. TMA would need addresses and pitches that are multiples of 16 bytes, and the
scales of M rows meet that only if M is a multiple of 4. Each stage of A and B has a stage of scales, so a
warpgroup uses the same stage index in both rings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_backend.planning import TileConfig
from cute_backend.planning.shared_memory import SCALE_ALIGN, BlockScales
from cute_backend.templates.crew import WARP, Ring
from cute_backend.templates.rings import stages_of


@dataclass(frozen=True)
class ScaleStages:
    """The ring of scales. `a` holds the scales of a tile's rows and `b` those of the columns of all Bs, each
    as (scales, stages). `widths` are the numbers of rows and of columns that share a scale."""

    ring: pipeline.PipelineCpAsync
    a: cute.Tensor
    b: cute.Tensor
    widths: tuple[int, int]

    @staticmethod
    def allocate(smem: SmemAllocator, ring: Ring, scaling: BlockScales, config: TileConfig) -> ScaleStages:
        """Allocates shared memory for the stages and their barriers."""

        def stages(count: int) -> cute.Tensor:
            layout = cute.make_layout((count, ring.stages), stride=(1, scaling.pitch(count)))
            return smem.allocate_tensor(Float32, layout, SCALE_ALIGN)

        a, b = map(stages, scaling.counts(config))
        of_ring = pipeline.PipelineCpAsync.create(**stages_of(smem, ring))
        return ScaleStages(of_ring, a, b, scaling.widths(config))

    def release(self, state: pipeline.PipelineState) -> None:
        """Releases a stage that a warp has read, with one arrival per warp. A barrier serializes arrivals,
        and one per thread would make 256 for each k tile."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.ring.consumer_release(state)


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
    scaling: BlockScales,
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
