"""t2 = acc * scale_a * scale_b + bias
   out0 = bf16(t2 * 0.5 * (tanh((t2 + t2 * t2 * t2 * 0.044715) * 0.7978846) + 1) + exact0)

    scale_a  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait
    scale_b  rowvec  f32   register_hoist  the columns of a thread, before the accumulator wait
    bias     rowvec  bf16  register_hoist  the columns of a thread, before the accumulator wait
    exact0   exact   bf16  cp_async        a subtile at a time by cp.async, the first ones ahead of the products

cute_scaled_mm_bias_gelu_residual_128x64_ef6b9b1d:
sm_89, tile 128x64_1x1, planes aligned to 16 bytes:
128 by 64, subtiles of 32 columns, raster 8.
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
from cute_backend.templates.sm80 import Sm80Gemm


class Epilogue:
    loads = ("scale_a", "scale_b", "bias", "exact0")
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
        scale_a = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            scale_a[r] = glob.scale_a[tile.row(r)]
        scale_b = cute.make_rmem_tensor(tile.columns, Float32)
        for c in cutlass.range_constexpr(tile.columns):
            scale_b[c] = glob.scale_b[tile.column(c)]
        bias_read = cute.make_rmem_tensor(tile.columns, BFloat16)
        for c in cutlass.range_constexpr(tile.columns):
            bias_read[c] = glob.bias[tile.column(c)]
        bias = math.pack(bias_read)
        return SimpleNamespace(scale_a=scale_a, scale_b=scale_b, bias=bias)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        scale_b = sub.columns_of(held.scale_b)
        bias_bf16 = sub.columns_of(held.bias)
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
            t3 = t2 * t2
            t4 = t3 * 0.1029432395800235  # 0.7978846 * 2 * log2(e) * 0.044715
            t5 = t4 + 2.302208198144325  # 0.7978846 * 2 * log2(e)
            t6 = t2 * t5
            t7 = math.logistic2(t6)
            t8 = t2 * t7
            t9 = t8 + exact0[e]
            out0[e] = t9
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm80Gemm(Epilogue(), TileConfig(Arch.SM89, 128, 64), Stages(ab=3, exact=4, store=1))


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
