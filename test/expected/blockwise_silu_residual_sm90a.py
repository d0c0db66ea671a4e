"""t0 = acc + bias
   out0 = bf16(t0 / (exp(-t0) + 1) + exact0)

    a_scales  1x128    f32   k_tile_ring     copied to shared memory ahead of each k tile, by element
    b_scales  128x128  f32   k_tile_ring     copied to shared memory ahead of each k tile, by element
    bias      rowvec   bf16  smem_staged     the tile's columns in shared memory, ahead of the accumulator wait
    exact0    exact    bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait

cute_scaled_mm_bias_silu_residual_128x256_4e1a7876:
sm_90a, tile 128x256_2x1, planes aligned to 16 bytes:
128 by 256, clusters of 2 by 1, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.spec import Scaling
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.block_scaled import Sm90BlockScaled
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ("bias", "exact0")
    stores = ("out0",)
    staged = (
        SmemOperand("bias", BFloat16),
    )
    shared_loads = (
        SmemOperand("exact0", BFloat16),
    )
    shared_stores = (
        SmemOperand("out0", BFloat16),
    )
    sweeps = (
        Visit(planes=("exact0",)),
    )

    @cute.jit
    def stage(self, tile, glob, smem):
        for i in cutlass.range_constexpr(tile.tile_n // 32):
            column = tile.lane + 32 * i
            smem.bias[column] = glob.bias[tile.clamp_column(column)]

    @cute.jit
    def begin(self, tile, glob):
        return SimpleNamespace()

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        bias_smem = sub.row_slice(smem.bias)
        bias_bf16 = cute.make_rmem_tensor(bias_smem.shape, BFloat16)
        cute.autovec_copy(bias_smem, bias_bf16)
        bias = math.widen(bias_bf16, Float32)
        exact0_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        sub.copy_from(smem.exact0, exact0_bf16)
        exact0 = math.widen(exact0_bf16, Float32)
        smem.release()
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            c = sub.column_of(e)
            t0 = acc[e] + bias[c]
            t1 = t0 * 1.4426950408889634  # log2(e)
            t2 = math.logistic2(t1)
            t3 = t0 * t2
            t4 = t3 + exact0[e]
            out0[e] = t4
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 128, 256, cluster_m=2), Stages(ab=3, exact=4, row=2, store=4), Sm90BlockScaled(Scaling.LINE, Scaling.SQUARE, sets=1, k_tiles=2, pieces=2))


@cute.jit
def launch(
    a: cute.Tensor,
    a_scales: cute.Tensor,
    b: cute.Tensor,
    b_scales: cute.Tensor,
    bias: cute.Tensor,
    exact0: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, [b], [bias, exact0], [out0], max_active_clusters, stream, [a_scales, b_scales])
