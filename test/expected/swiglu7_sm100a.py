"""t2 = minimum(acc0 + bias0, 7)
   out0 = bf16(t2 * sigmoid(t2 * 1.702) * (minimum(maximum(acc1 + bias1, -7), 7) + 1))

    bias0  rowvec  bf16  smem_staged     the tile's columns in shared memory, ahead of the accumulator wait
    bias1  rowvec  bf16  smem_staged     the tile's columns in shared memory, ahead of the accumulator wait

cute_mm_bias_clamp_swiglu_256x128_e7014195:
sm_100a, tile 256x128x2_2x1_2cta, planes aligned to 16 bytes:
2 accumulators of 256 by 128, 2 CTAs a tile, clusters of 2 by 1, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.spec import BColumns
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.sm100 import Sm100Gemm


class Epilogue:
    loads = ("bias0", "bias1")
    stores = ("out0",)
    staged = (
        SmemOperand("bias0", BFloat16),
        SmemOperand("bias1", BFloat16),
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
            smem.bias0[column] = glob.bias0[tile.clamp_column(column)]
            smem.bias1[column] = glob.bias1[tile.clamp_column(column)]

    @cute.jit
    def begin(self, tile, glob):
        return SimpleNamespace()

    @cute.jit
    def visit(self, sub, acc0, acc1, glob, held, smem):
        bias0_smem = sub.row_slice(smem.bias0)
        bias0_bf16 = cute.make_rmem_tensor(bias0_smem.shape, BFloat16)
        cute.autovec_copy(bias0_smem, bias0_bf16)
        bias0 = math.widen(bias0_bf16, Float32)
        bias1_smem = sub.row_slice(smem.bias1)
        bias1_bf16 = cute.make_rmem_tensor(bias1_smem.shape, BFloat16)
        cute.autovec_copy(bias1_smem, bias1_bf16)
        bias1 = math.widen(bias1_bf16, Float32)
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            c = sub.column_of(e)
            t0 = acc0[e] + bias0[c]
            t1 = acc1[e] + bias1[c]
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


gemm = Sm100Gemm(Epilogue(), TileConfig(Arch.SM100A, 256, 128, cluster_m=2, ctas=2, products=2, b_columns=BColumns.INTERLEAVED), Stages(ab=6, row=2, store=4))


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    bias0: cute.Tensor,
    bias1: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, [b], [bias0, bias1], [out0], max_active_clusters, stream)
