"""The mainloop of block-scaled products: DeepSeek's fp8, with separate scales for every 128 elements of K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from cute_backend.planning.shared_memory import SumScales
from cute_backend.spec import Scaling
from cute_backend.templates.block_scales import ScaleStages
from cute_backend.templates.mainloop import Partial, Sm90Promoted, State, WarpgroupOperands


@dataclass(frozen=True)
class KTileScales:
    """The scales of a k tile, by which its sums are multiplied: the scales of the thread's rows, in
    registers, and the scales of columns. If each column has its own scale, `columns` is a view of the stage
    in shared memory, (2 neighbours, every 8 columns)."""

    rows: list[Float32]
    columns: cute.Tensor
    width: int
    """The number of columns that share a scale."""

    def pair(self, group: int) -> list[Float32]:
        """The scales of the thread's two columns in the `group`-th block of 8 columns."""
        if self.width > 1:
            return [self.columns[8 * group // self.width]] * 2
        both = cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(self.columns[(None, group)], both)
        return [both[0], both[1]]


class Sm90BlockScaled(Sm90Promoted):
    """Multiplies the sums of each k tile in fp32 by the scales of its blocks of A and B, then adds them to
    the accumulators. A k tile is one block of K."""

    def __init__(self, a: Scaling, b: Scaling, sets: int, pieces: int = 1) -> None:
        # In 128 x 256, which has one set, two k tiles instead of four take 0.98 to 1.00 times as long with
        # blocks of 128 columns, and 1.02 times with lines (H100, benchmarks/findings/block-scales.md).
        few = sets == 1 and b is not Scaling.LINE
        super().__init__(sets, k_tiles_a_step=2 if few else 4, pieces=pieces)
        self.scaling = SumScales(a, b)
        self.reads_stages_late = b is Scaling.LINE

    def scales(self, operands: WarpgroupOperands, held: Partial, state: State) -> KTileScales:
        tile, stages = held.tile, cast(ScaleStages, operands.scales)
        height, width = stages.widths
        of_rows, of_columns = stages.a[(None, state.index)], stages.b[(None, state.index)]
        rows = [of_rows[(tile.raw_row(r) - tile.m0) // height] for r in range(tile.rows)]
        count = cute.size(of_columns)
        if width > 1:
            columns = cute.make_rmem_tensor(count, Float32)
            cute.autovec_copy(of_columns, columns)
        else:
            lanes = cute.make_layout((4, 2, count // 8), stride=(2, 1, 8))
            columns = cute.make_tensor(of_columns.iterator, lanes)[(tile.lane % 4, None, None)]
        return KTileScales(rows, columns, width)

    def promote(
        self, acc: cute.Tensor, sums: cute.Tensor, scales: KTileScales | None = None, piece: int = 0
    ) -> None:
        """Adds the scaled sums of a piece of a k tile to the accumulators. The sums are in wgmma's register
        order: two neighbouring columns, the same two columns 8 rows below, then the next 8 columns, then the
        next 64 rows (PTX ISA, wgmma register fragments, matrix D)."""
        assert scales is not None
        blocks = len(scales.rows) // 2
        in_block = cute.size(sums) // blocks
        first = piece * cute.size(sums)
        for group in range(in_block // 4):
            pair = scales.pair(first // 4 + group)
            for block in range(blocks):
                for e in range(4):
                    i = block * in_block + group * 4 + e
                    scale = scales.rows[2 * block + e // 2] * pair[e % 2]
                    acc[first + i] = _multiply_add(sums[i], scale, acc[first + i])


def _multiply_add(x: Float32, y: Float32, z: Float32) -> Float32:
    """x * y + z, rounded once, which the compiler must not move. It would otherwise move the operation behind
    the next wait for the tensor cores, which would then idle while the sums are added."""
    operands = [Float32(each).ir_value() for each in (x, y, z)]
    text = "fma.rn.f32 $0, $1, $2, $3;"
    return Float32(llvm.inline_asm(T.f32(), operands, text, "=f,f,f,f", has_side_effects=True))
