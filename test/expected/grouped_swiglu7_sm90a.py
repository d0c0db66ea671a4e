"""t2 = minimum(acc0 + groupvec0, 7)
   out0 = bf16(t2 * sigmoid(t2 * 1.702) * (minimum(maximum(acc1 + groupvec1, -7), 7) + 1))

    groupvec0  groupvec  bf16  group_staged    the tile's columns of its group in shared memory, ahead of the accumulator wait
    groupvec1  groupvec  bf16  group_staged    the tile's columns of its group in shared memory, ahead of the accumulator wait

cute_grouped_mm_bias_clamp_swiglu_64x128_2925c13b:
sm_90a, tile 64x128x2_1x1_pingpong, planes aligned to 16 bytes:
2 accumulators of 64 by 128, ping-pong, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
Rows lie in groups. If the columns of a program's product do, this kernel computes the transposed one:
its rows are the columns of the program's result.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.spec import BColumns, ProductKind
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ("groupvec0", "groupvec1")
    stores = ("out0",)
    staged = (
        SmemOperand("groupvec0", BFloat16),
        SmemOperand("groupvec1", BFloat16),
    )
    shared_loads = ()
    shared_stores = (
        SmemOperand("out0", BFloat16),
    )
    sweeps = (
        Visit(),
    )

    @cute.jit
    def stage(self, tile, glob, smem):
        for i in cutlass.range_constexpr(tile.tile_n // 32):
            column = tile.lane + 32 * i
            smem.groupvec0[column] = glob.groupvec0[tile.group, tile.clamp_column(column)]
            smem.groupvec1[column] = glob.groupvec1[tile.group, tile.clamp_column(column)]

    @cute.jit
    def begin(self, tile, glob):
        return SimpleNamespace()

    @cute.jit
    def visit(self, sub, acc0, acc1, glob, held, smem):
        groupvec0_smem = sub.row_slice(smem.groupvec0)
        groupvec0_bf16 = cute.make_rmem_tensor(groupvec0_smem.shape, BFloat16)
        cute.autovec_copy(groupvec0_smem, groupvec0_bf16)
        groupvec0 = math.widen(groupvec0_bf16, Float32)
        groupvec1_smem = sub.row_slice(smem.groupvec1)
        groupvec1_bf16 = cute.make_rmem_tensor(groupvec1_smem.shape, BFloat16)
        cute.autovec_copy(groupvec1_smem, groupvec1_bf16)
        groupvec1 = math.widen(groupvec1_bf16, Float32)
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            c = sub.column_of(e)
            t0 = acc0[e] + groupvec0[c]
            t1 = acc1[e] + groupvec1[c]
            t2 = math.minimum(t0, 7.0)
            t3 = t2 * 2.4554669595930156  # 1.702 * log2(e)
            t4 = math.logistic2(t3)
            t5 = t2 * t4
            t6 = math.maximum(t1, -7.0)
            t7 = math.minimum(t6, 7.0)
            t8 = t7 + 1.0
            t9 = t5 * t8
            out0[e] = t9
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 64, 128, pingpong=True, products=2, b_columns=BColumns.INTERLEAVED), Stages(ab=5, row=2, store=3), kind=ProductKind.GROUPED)


@cute.jit
def launch(
    a: cute.Tensor,
    offsets: cute.Tensor,
    b: cute.Tensor,
    groupvec0: cute.Tensor,
    groupvec1: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, [b], [groupvec0, groupvec1], [out0], max_active_clusters, stream, offsets=offsets)
