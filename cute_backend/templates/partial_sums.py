"""The mainloop of DeepSeek's fp8 on sm_100a: the sums of each k tile are scaled and added up in fp32.

The MMA leaves the sums of every k tile, which is one block of K, in a stage of tensor memory of its own. The
warps of the epilogue read them, multiply them by the scales of their blocks, and add them to sums in fp32
registers. They leave these in the stage of the tile's last k tile, from where the epilogue reads them as it
reads those of any other mainloop. So an epilogue has all registers, whatever it does.

    MMA       | k tile 0 | k tile 1 | k tile 2 | k tile 3 | next tile, into the stages that are free
    epilogue             | adds 0   | adds 1   | adds 2   | adds 3 | begins to visit subtiles
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05
from cutlass.memory import SmemAllocator

from cute_backend.planning import TileConfig
from cute_backend.planning.sum_scales import SumScales
from cute_backend.spec import Scaling
from cute_backend.templates.block_scales import ScaleStages
from cute_backend.templates.crew import Ring
from cute_backend.templates.mainloop import Sm100Plain
from cute_backend.templates.rings import stages_of

READ_COLUMNS = 32
"""Columns of a row that a thread reads from tensor memory at once, while it adds up as many others."""

FEW_COLUMNS = 8
"""`READ_COLUMNS` for threads with 128 columns, if two warpgroups share the registers, or of a pair of
products. With 32 columns, 256 x 256 spilled up to 64 bytes (rowwise scales in the epilogue), and with 16
columns 8 bytes. 256 x 64 x 2 spilled 16 bytes with 32 columns if planes are written by element."""


class Sm100BlockScaled(Sm100Plain):
    """Sums of k tiles that are scaled by the blocks of A and B (`add_up`)."""

    def __init__(self, a: Scaling, b: Scaling) -> None:
        self.scaling = SumScales(a, b)


@dataclass(frozen=True)
class ScaleRing:
    """A ring of stages of scales. The stages of A and B can't include them, since the sums of a k tile wait
    for their scales in tensor memory after its stage of A and B was released."""

    pipeline: pipeline.PipelineCpAsync
    stages: ScaleStages

    @staticmethod
    def allocate(
        smem: SmemAllocator, ring: Ring | None, scaling: SumScales | None, config: TileConfig
    ) -> ScaleRing | None:
        """Allocates shared memory for the stages and their barriers; None if there is no ring."""
        if ring is None or scaling is None:
            return None
        stages = ScaleStages.allocate(smem, ring.stages, scaling, config)
        return ScaleRing(pipeline.PipelineCpAsync.create(**stages_of(smem, ring)), stages)

    def release(self, state: pipeline.PipelineState) -> None:
        """Releases a stage that a warp has read, with one arrival per warp. A barrier serializes arrivals,
        and one per thread would make 256 for each k tile."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.pipeline.consumer_release(state)


@dataclass(frozen=True)
class PartialSums:
    """A thread's row of accumulators in tensor memory: the columns of one warpgroup, of all Bs.

    `read` and `write` copy `width` neighbouring columns at a time; the last modes of `source` and `target`
    are these pieces and the stage.
    """

    config: TileConfig
    group: Any
    thread: Int32
    width: int
    read: cute.TiledCopy
    source: cute.Tensor
    write: cute.TiledCopy
    target: cute.Tensor
    shape: Any

    @staticmethod
    def of(acc: cute.Tensor, config: TileConfig, group: Any, thread: Int32) -> PartialSums:
        """The row of a thread of warpgroup `group` in accumulators (MMA, MMA_M, MMA_N, stage)."""
        crowded = config.column_groups > 1 or config.products > 1
        many = crowded and config.mma_n // config.column_groups > 64
        width = min(FEW_COLUMNS if many else READ_COLUMNS, config.piece_n)
        box = (config.cta_rows, width)
        pieces = cute.flat_divide(acc[((None, None), 0, 0, None)], box)
        read, write = (
            tcgen05.make_tmem_copy(
                cute.make_copy_atom(op(tcgen05.Repetition(width)), Float32), pieces[(None, None, 0, 0, 0)]
            )
            for op in (tcgen05.Ld32x32bOp, tcgen05.St32x32bOp)
        )
        reading, writing = read.get_slice(thread), write.get_slice(thread)
        shape = reading.partition_D(cute.make_identity_tensor(box)).shape
        source, target = reading.partition_S(pieces), writing.partition_D(pieces)
        return PartialSums(config, group, thread, width, read, source, write, target, shape)

    @property
    def columns(self) -> int:
        """Accumulators of the thread."""
        return self.config.mma_n // self.config.column_groups

    def pieces(self) -> Iterator[tuple[int, int, Any]]:
        """Yields B, the first of its columns and the place among the MMA's columns, counted in pieces, of
        each piece. The columns of a B are counted from the warpgroup's first."""
        config, width = self.config, self.width
        of_b = self.columns // config.pieces
        part = config.piece_n // width
        for b in range(config.pieces):
            for first in range(0, of_b, width):
                piece = (self.group * of_b + first) // width
                yield b, first, piece // part * (part * config.pieces) + b * part + piece % part

    def begin_read(self, place: Any, stage: Int32) -> cute.Tensor:
        """Begins to read a piece, and returns its registers."""
        registers = cute.make_rmem_tensor(self.shape, Float32)
        cute.copy(self.read, self.source[(None, None, None, 0, place, stage)], registers)
        return registers

    @cute.jit
    def leave(self, sums: cute.Tensor, stage: Int32):
        """Leaves the thread's sums in a stage, where its warp can read them."""
        for i, (_, _, place) in enumerate(self.pieces()):
            piece = cute.make_tensor(sums.iterator + i * self.width, cute.make_layout(self.shape))
            cute.copy(self.write, piece, self.target[(None, None, None, 0, place, stage)])
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def add_up(
        self,
        ring: pipeline.PipelineUmmaAsync,
        state: pipeline.PipelineState,
        scales: ScaleRing,
        scale_state: pipeline.PipelineState,
        k_tiles: Int32,
    ) -> tuple[pipeline.PipelineState, pipeline.PipelineState]:
        """Adds up the scaled sums of all k tiles, and leaves them in the stage of the last. Returns that
        stage, which is not released, and the next stage of scales."""
        sums = cute.make_rmem_tensor(self.columns, Float32)
        sums.fill(0.0)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            scales.pipeline.consumer_wait(scale_state)
            ring.consumer_wait(state)
            self._add(sums, state.index, scales.stages, scale_state.index)
            scales.release(scale_state)
            scale_state.advance()
            if k_tile < k_tiles - 1:
                with cute.arch.elect_one():
                    ring.consumer_release(state)
                state.advance()
        self.leave(sums, state.index)
        return state, scale_state

    def _add(self, sums: cute.Tensor, stage: Int32, scales: ScaleStages, scale_stage: Int32) -> None:
        """Adds the scaled sums of a k tile. While those of one piece are added, the next one is read."""
        of_rows, of_columns = scales.a[(None, scale_stage)], scales.b[(None, scale_stage)]
        height, _ = scales.widths
        row = of_rows[self.thread // height]
        pieces = list(self.pieces())
        following = self.begin_read(pieces[0][2], stage)
        for i, (b, first, _) in enumerate(pieces):
            cute.arch.fence_view_async_tmem_load()
            read = following
            if i + 1 < len(pieces):
                following = self.begin_read(pieces[i + 1][2], stage)
            columns = self._column_scales(of_columns, scales, b, first)
            for e in range(0, self.width, 2):
                at = i * self.width + e
                pair = row * columns[e], row * columns[e + 1]
                added = cute.arch.fma_packed_f32x2((read[e], read[e + 1]), pair, (sums[at], sums[at + 1]))
                sums[at], sums[at + 1] = added

    def _column_scales(self, of_columns: cute.Tensor, scales: ScaleStages, b: int, first: int) -> Any:
        """The scales of the columns of the piece of B number `b` that begins at its column `first`, counted
        from the warpgroup's first."""
        _, width = scales.widths
        of_b = self.columns // self.config.pieces
        at = (self.group * of_b + first) // width + b * (cute.size(of_columns) // self.config.pieces)
        if width > 1:
            return [of_columns[at]] * self.width
        each = cute.make_rmem_tensor(self.width, Float32)
        cute.autovec_copy(cute.make_tensor(of_columns.iterator + at, each.layout), each)
        return each
