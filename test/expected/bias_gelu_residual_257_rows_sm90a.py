"""t2 = acc * scale_a * scale_b + bias
   out0 = bf16(t2 * 0.5 * (tanh((t2 + t2 * t2 * t2 * 0.044715) * 0.7978846) + 1) + exact0)

    scale_a  rowvec  f32   register_hoist  the columns of a thread, before the accumulator wait
    scale_b  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait
    bias     colvec  bf16  row_read        one value for each row of a thread, before the accumulator wait
    exact0   exact   bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait

cute_scaled_mm_bias_gelu_residual_64x88_84f6d7b3:
sm_90a, tile 64x88_2x1_by8_unrolled_transposed, planes aligned to 16 bytes:
64 by 88 of the transposed product, clusters of 2 by 1, subtiles of 8 columns, unrolled, raster 16.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.spec import Order
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand, transpose
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ("scale_a", "scale_b", "bias", "exact0")
    stores = ("out0",)
    staged = ()
    shared_loads = (
        SmemOperand("exact0", BFloat16, Order.COLUMN),
    )
    shared_stores = (
        SmemOperand("out0", BFloat16, Order.COLUMN),
    )
    sweeps = (
        Visit(planes=("exact0",)),
    )

    @cute.jit
    def begin(self, tile, glob):
        scale_a = cute.make_rmem_tensor(tile.columns, Float32)
        for c in cutlass.range_constexpr(tile.columns):
            scale_a[c] = glob.scale_a[tile.column(c)]
        scale_b = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            scale_b[r] = glob.scale_b[tile.row(r)]
        bias_bf16 = cute.make_rmem_tensor(tile.rows, BFloat16)
        for r in cutlass.range_constexpr(tile.rows):
            bias_bf16[r] = glob.bias[tile.row(r)]
        bias = math.widen(bias_bf16, Float32)
        return SimpleNamespace(scale_a=scale_a, scale_b=scale_b, bias=bias)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        scale_a = sub.columns_of(held.scale_a)
        exact0_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        sub.copy_from(smem.exact0, exact0_bf16)
        exact0 = math.widen(exact0_bf16, Float32)
        smem.release()
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            c = sub.column_of(e)
            t0 = acc[e] * scale_a[c]
            t1 = t0 * held.scale_b[r]
            t2 = t1 + held.bias[r]
            t3 = t2 * t2
            t4 = t3 * 0.1029432395800235  # 0.7978846 * 2 * log2(e) * 0.044715
            t5 = t4 + 2.302208198144325  # 0.7978846 * 2 * log2(e)
            t6 = t2 * t5
            t7 = math.logistic2(t6)
            t8 = t2 * t7
            t9 = t8 + exact0[e]
            out0[e] = t9
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 64, 88, cluster_m=2, subtile_n=8, raster_m=16, unrolled=True, transposed=True), Stages(ab=11, exact=4, store=4))


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
    a_t = transpose(a)
    b_t = transpose(b)
    exact0_t = transpose(exact0)
    out0_t = transpose(out0)
    gemm(b_t, [a_t], [scale_a, scale_b, bias, exact0_t], [out0_t], max_active_clusters, stream)
