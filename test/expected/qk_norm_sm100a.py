"""out0 = bf16(rowvec0 * (acc * rsqrt(block64_mean(acc * acc) + 1e-06)))

    rowvec0  rowvec  bf16  register_hoist  the columns of a thread, before the accumulator wait, strides (0, 1) from block to block of 64 columns and within one

cute_mm_square_block_mean_rsqrt_scale_256x128_f44f5acf:
sm_100a, tile 256x128_2x1_2cta_by64_unrolled, planes aligned to 16 bytes:
256 by 128, 2 CTAs a tile, clusters of 2 by 1, subtiles of 64 columns, unrolled, raster 8.
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
from cute_backend.planning import Arch, TileConfig
from cute_backend.templates.epilogue import SmemOperand, collapse_n
from cute_backend.templates.sm100 import Sm100Gemm


class Epilogue:
    loads = ("rowvec0",)
    stores = ("out0",)
    staged = ()
    shared_loads = ()
    shared_stores = (
        SmemOperand("out0", BFloat16),
    )

    @cute.jit
    def begin(self, tile, glob):
        rowvec0_read = cute.make_rmem_tensor(tile.columns, BFloat16)
        for c in cutlass.range_constexpr(tile.columns):
            rowvec0_read[c] = glob.rowvec0[tile.column(c)]
        rowvec0 = math.pack(rowvec0_read)
        return SimpleNamespace(rowvec0=rowvec0)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        rowvec0_bf16 = sub.columns_of(held.rowvec0)
        rowvec0 = math.widen(rowvec0_bf16, Float32)
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        t1_of = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            t0 = acc[e] * acc[e]
            t1_of[e] = t0
        t1 = reduce.of_blocks(reduce.MEAN, t1_of, sub, 64)
        for e in cutlass.range_constexpr(sub.elements):
            c = sub.column_of(e)
            t2 = t1[e] + 1e-06
            t3 = math.rsqrt(t2)
            t4 = acc[e] * t3
            t5 = rowvec0[c] * t4
            out0[e] = t5
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm100Gemm(Epilogue(), TileConfig(Arch.SM100A, 256, 128, cluster_m=2, ctas=2, subtile_n=64, unrolled=True))


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    rowvec0: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    rowvec0_plane = collapse_n(rowvec0)
    gemm(a, [b], [rowvec0_plane], [out0], max_active_clusters, stream)
