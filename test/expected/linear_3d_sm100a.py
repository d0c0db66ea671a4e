"""out0 = bf16(acc * scale_a * scale_b + bias + exact0)

    scale_a  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait
    scale_b  rowvec  f32   smem_staged     the tile's columns in shared memory, ahead of the accumulator wait
    bias     rowvec  bf16  smem_staged     the tile's columns in shared memory, ahead of the accumulator wait
    exact0   exact   bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait

cute_scaled_mm_bias_residual_256x128_8e03744f:
sm_100a, tile 256x128_2x1_2cta, planes aligned to 16 bytes:
256 by 128, 2 CTAs a tile, clusters of 2 by 1, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.sm100 import Sm100Gemm


class Epilogue:
    loads = ("scale_a", "scale_b", "bias", "exact0")
    stores = ("out0",)
    staged = (
        SmemOperand("scale_b", Float32),
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
            smem.scale_b[column] = glob.scale_b[tile.clamp_column(column)]
            smem.bias[column] = glob.bias[tile.clamp_column(column)]

    @cute.jit
    def begin(self, tile, glob):
        scale_a = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            scale_a[r] = glob.scale_a[tile.row(r)]
        return SimpleNamespace(scale_a=scale_a)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        scale_b_smem = sub.row_slice(smem.scale_b)
        scale_b = cute.make_rmem_tensor(scale_b_smem.shape, Float32)
        cute.autovec_copy(scale_b_smem, scale_b)
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
            r = sub.row_of(e)
            c = sub.column_of(e)
            t0 = acc[e] * held.scale_a[r]
            t1 = t0 * scale_b[c]
            t2 = t1 + bias[c]
            t3 = t2 + exact0[e]
            out0[e] = t3
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm100Gemm(Epilogue(), TileConfig(Arch.SM100A, 256, 128, cluster_m=2, ctas=2), Stages(ab=6, exact=4, row=2, store=4))


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    scale_a: cute.Tensor,
    scale_b: cute.Tensor,
    bias: cute.Tensor,
    exact0: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, [b], [scale_a, scale_b, bias, exact0], [out0], max_active_clusters, stream)
