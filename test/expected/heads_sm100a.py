"""out0 = bf16(((acc + bias) * rowvec0 + exact0) * rowvec1)

    bias     rowvec  bf16  smem_staged     the tile's columns in shared memory, ahead of the accumulator wait
    rowvec0  rowvec  bf16  smem_staged     the tile's columns in shared memory, ahead of the accumulator wait, strides (0, 1) from block to block of 128 columns and within one
    exact0   exact   bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait, strides (0, s) along M, strides (0, 1) from block to block of 128 columns and within one
    rowvec1  rowvec  bf16  smem_staged     the tile's columns in shared memory, ahead of the accumulator wait, strides (1, 0) from block to block of 128 columns and within one

cute_mm_bias_scale_residual_256x128_b6992681:
sm_100a, tile 256x128_2x1_2cta, planes aligned to 16 bytes:
256 by 128, 2 CTAs a tile, clusters of 2 by 1, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
Strides are 0, 1 or s, any other stride.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand, collapse_n, table
from cute_backend.templates.sm100 import Sm100Gemm


class Epilogue:
    loads = ("bias", "rowvec0", "exact0", "rowvec1")
    stores = ("out0",)
    staged = (
        SmemOperand("bias", BFloat16),
        SmemOperand("rowvec0", BFloat16),
        SmemOperand("rowvec1", BFloat16),
    )
    shared_loads = (
        SmemOperand("exact0", BFloat16, repeats=True),
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
            smem.rowvec0[column] = glob.rowvec0[tile.clamp_column(column)]
            smem.rowvec1[column] = glob.rowvec1[tile.clamp_column(column)]

    @cute.jit
    def begin(self, tile, glob):
        return SimpleNamespace()

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        bias_smem = sub.row_slice(smem.bias)
        bias_bf16 = cute.make_rmem_tensor(bias_smem.shape, BFloat16)
        cute.autovec_copy(bias_smem, bias_bf16)
        bias = math.widen(bias_bf16, Float32)
        rowvec0_smem = sub.row_slice(smem.rowvec0)
        rowvec0_bf16 = cute.make_rmem_tensor(rowvec0_smem.shape, BFloat16)
        cute.autovec_copy(rowvec0_smem, rowvec0_bf16)
        rowvec0 = math.widen(rowvec0_bf16, Float32)
        rowvec1_smem = sub.row_slice(smem.rowvec1)
        rowvec1_bf16 = cute.make_rmem_tensor(rowvec1_smem.shape, BFloat16)
        cute.autovec_copy(rowvec1_smem, rowvec1_bf16)
        rowvec1 = math.widen(rowvec1_bf16, Float32)
        exact0_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        sub.copy_from(smem.exact0, exact0_bf16)
        exact0 = math.widen(exact0_bf16, Float32)
        smem.release()
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            c = sub.column_of(e)
            t0 = acc[e] + bias[c]
            t1 = t0 * rowvec0[c]
            t2 = t1 + exact0[e]
            t3 = t2 * rowvec1[c]
            out0[e] = t3
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm100Gemm(Epilogue(), TileConfig(Arch.SM100A, 256, 128, cluster_m=2, ctas=2), Stages(ab=6, exact=4, row=2, store=4))


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    bias: cute.Tensor,
    rowvec0: cute.Tensor,
    exact0: cute.Tensor,
    rowvec1: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    rowvec0_plane = collapse_n(rowvec0)
    exact0_plane = table(exact0)
    rowvec1_plane = collapse_n(rowvec1)
    gemm(a, [b], [bias, rowvec0_plane, exact0_plane, rowvec1_plane], [out0], max_active_clusters, stream)
