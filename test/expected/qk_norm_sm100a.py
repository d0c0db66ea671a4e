"""t5 = rowvec0 * (acc * rsqrt(block128_mean(acc * acc) + 1e-06))
   out0 = bf16(t5 * exact0 + block128_rotate_half(t5) * exact1) as (B, H, 2048, 128)

    rowvec0  rowvec  bf16  smem_staged     the tile's columns in shared memory, ahead of the accumulator wait, strides (0, 1) from block to block of 128 columns and within one
    exact0   exact   bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait, strides (0, s) along M, strides (0, 1) from block to block of 128 columns and within one
    exact1   exact   bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait, strides (0, s) along M, strides (0, 1) from block to block of 128 columns and within one

cute_mm_square_block_mean_rsqrt_scale_mul_etc_256x128_ec0f3d78:
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
from cute_backend.memory_ops import device_reduce as reduce
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Reduce, Visit
from cute_backend.templates.epilogue import SmemOperand, collapse_n, table, by_heads, pair_halves
from cute_backend.templates.sm100 import Sm100Gemm


class Epilogue:
    loads = ("rowvec0", "exact0", "exact1")
    stores = ("out0",)
    staged = (
        SmemOperand("rowvec0", BFloat16),
    )
    shared_loads = (
        SmemOperand("exact0", BFloat16, repeats=True),
        SmemOperand("exact1", BFloat16, repeats=True),
    )
    shared_stores = (
        SmemOperand("out0", BFloat16, by_heads=True),
    )
    sweeps = (
        Reduce(span=128),
        Visit(planes=("exact0", "exact1")),
    )

    @cute.jit
    def stage(self, tile, glob, smem):
        for i in cutlass.range_constexpr(tile.tile_n // 32):
            column = tile.lane + 32 * i
            smem.rowvec0[column] = glob.rowvec0[tile.clamp_column(column)]

    @cute.jit
    def begin(self, tile, glob):
        return SimpleNamespace()

    @cute.jit
    def reduce_blocks(self, blocks, glob, held, smem):
        t1_parts = reduce.Blocks(reduce.MEAN, 128)
        for i in cutlass.range_constexpr(blocks.subtiles):
            sub, acc = blocks.read(i)
            t1_of = cute.make_rmem_tensor(sub.elements, Float32)
            for e in cutlass.range_constexpr(sub.elements):
                t0 = acc[e] * acc[e]
                t1_of[e] = t0
            t1_parts.take(t1_of, sub)
        t1 = t1_parts.results(blocks.tile)
        return SimpleNamespace(t1=t1)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        rowvec0_smem = sub.row_slice(smem.rowvec0)
        rowvec0_bf16 = cute.make_rmem_tensor(rowvec0_smem.shape, BFloat16)
        cute.autovec_copy(rowvec0_smem, rowvec0_bf16)
        rowvec0 = math.widen(rowvec0_bf16, Float32)
        exact0_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        sub.copy_from(smem.exact0, exact0_bf16)
        exact0 = math.widen(exact0_bf16, Float32)
        exact1_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        sub.copy_from(smem.exact1, exact1_bf16)
        exact1 = math.widen(exact1_bf16, Float32)
        smem.release()
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        t6_kept = cute.make_rmem_tensor(sub.elements, Float32)
        t7_of = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            c = sub.column_of(e)
            t2 = held.t1[r] + 1e-06
            t3 = math.rsqrt(t2)
            t4 = acc[e] * t3
            t5 = rowvec0[c] * t4
            t6 = t5 * exact0[e]
            t6_kept[e] = t6
            t7_of[e] = t5
        t7 = sub.rotate_half(t7_of, 128)
        for e in cutlass.range_constexpr(sub.elements):
            t8 = t7[e] * exact1[e]
            t9 = t6_kept[e] + t8
            out0[e] = t9
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm100Gemm(Epilogue(), TileConfig(Arch.SM100A, 256, 128, cluster_m=2, ctas=2), Stages(ab=5, exact=4, row=2, store=4))


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    rowvec0: cute.Tensor,
    exact0: cute.Tensor,
    exact1: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    rowvec0_paired = pair_halves(collapse_n(rowvec0), 128, 16)
    exact0_paired = pair_halves(table(exact0), 128, 16)
    exact1_paired = pair_halves(table(exact1), 128, 16)
    out0_paired = pair_halves(by_heads(out0, 2048, 128), 128, 16)
    b_paired = pair_halves(b, 128, 16)
    gemm(a, [b_paired], [rowvec0_paired, exact0_paired, exact1_paired], [out0_paired], max_active_clusters, stream)
