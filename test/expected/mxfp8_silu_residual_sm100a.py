"""t0 = acc + bias
   out0 = bf16(t0 / (exp(-t0) + 1) + exact0)

    a_scales  1x32     e8m0  tensor_memory   brought by TMA with each k tile, and copied there for the MMA
    b_scales  1x32     e8m0  tensor_memory   brought by TMA with each k tile, and copied there for the MMA
    bias      rowvec   bf16  register_hoist  the columns of a thread, before the accumulator wait
    exact0    exact    bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait

cute_scaled_mm_bias_silu_residual_256x128_f28b2d4e:
sm_100a, tile 256x128_2x1_2cta_unrolled, planes aligned to 16 bytes:
256 by 128, 2 CTAs a tile, clusters of 2 by 1, subtiles of 32 columns, unrolled, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.spec import DType, Scaling
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.mma_scaled import Sm100MmaScaled
from cute_backend.templates.sm100 import Sm100Gemm


class Epilogue:
    loads = ("bias", "exact0")
    stores = ("out0",)
    staged = ()
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
    def begin(self, tile, glob):
        bias_read = cute.make_rmem_tensor(tile.columns, BFloat16)
        for c in cutlass.range_constexpr(tile.columns):
            bias_read[c] = glob.bias[tile.column(c)]
        bias = math.pack(bias_read)
        return SimpleNamespace(bias=bias)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        bias_bf16 = sub.columns_of(held.bias)
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


gemm = Sm100Gemm(Epilogue(), TileConfig(Arch.SM100A, 256, 128, cluster_m=2, ctas=2, unrolled=True), Stages(ab=6, exact=4, store=4), Sm100MmaScaled(Scaling.MX, DType.E4M3))


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
