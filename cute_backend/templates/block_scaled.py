"""The mainloop of DeepSeek's fp8 on Hopper, with separate scales for every 128 elements of K."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from cute_backend.planning.sum_scales import SumScales
from cute_backend.spec import Scaling
from cute_backend.templates.block_scales import ScaleStages
from cute_backend.templates.mainloop import Partial, Sm90Promoted, State, WarpgroupOperands

KEPT_PAIRS = 8
"""The pairs of columns whose scales a thread keeps from one block of rows to the next, if each column has a
scale of its own. With 4 or 10 pairs, products of 4096 rows took 1.01 times as long, and 12 pairs spilled 104
bytes (benchmarks/findings.md)."""


@dataclass(frozen=True)
class KTileScales:
    """The scales of a k tile, by which its sums are multiplied: the scales of the thread's rows, in
    registers, and the scales of columns. If each column has its own scale, `columns` is a view of the stage
    in shared memory, (2 neighbours, every 8 columns)."""

    rows: list[Float32]
    columns: cute.Tensor
    width: int
    """The number of columns that share a scale."""
    kept: dict[int, list[Float32]] = field(default_factory=dict)
    """The first pairs of scales of columns that were read, if several blocks of rows need them."""

    def pair(self, group: int, keeps: bool) -> list[Float32]:
        """The scales of the thread's two columns in the `group`-th block of 8 columns. With `keeps`, a later
        block of rows gets the first of them from registers."""
        if self.width > 1:
            return [self.columns[8 * group // self.width]] * 2
        if group in self.kept:
            return self.kept[group]
        both = cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(self.columns[(None, group)], both)
        pair = [both[0], both[1]]
        if keeps and group < KEPT_PAIRS:
            self.kept[group] = pair
        return pair


class Sm90BlockScaled(Sm90Promoted):
    """Multiplies the sums of each k tile in fp32 by the scales of its blocks of A and B, then adds them to
    the accumulators. A k tile is one block of K."""

    def __init__(self, a: Scaling, b: Scaling, sets: int, k_tiles: int, pieces: int = 1) -> None:
        super().__init__(sets, k_tiles_a_step=k_tiles, pieces=pieces)
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
        blocks, first = cute.size(sums, mode=[1]), piece * cute.size(sums)
        by_rows = blocks < len(scales.rows) // 2
        in_block = cute.size(sums) // blocks
        first_row, first_group = (2 * blocks * piece, 0) if by_rows else (0, first // 4)
        for group in range(in_block // 4):
            pair = scales.pair(first_group + group, keeps=by_rows)
            for block in range(blocks):
                for e in range(4):
                    i = block * in_block + group * 4 + e
                    scale = scales.rows[first_row + 2 * block + e // 2] * pair[e % 2]
                    acc[first + i] = _multiply_add(sums[i], scale, acc[first + i])


def _multiply_add(x: Float32, y: Float32, z: Float32) -> Float32:
    """x * y + z, rounded once, which the compiler must not move. It would otherwise move the operation behind
    the next wait for the tensor cores, which would then idle while the sums are added."""
    operands = [Float32(each).ir_value() for each in (x, y, z)]
    text = "fma.rn.f32 $0, $1, $2, $3;"
    return Float32(llvm.inline_asm(T.f32(), operands, text, "=f,f,f,f", has_side_effects=True))
