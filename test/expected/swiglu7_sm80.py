"""t2 = minimum(acc0 + bias0, 7)
   out0 = bf16(t2 * sigmoid(t2 * 1.702) * (minimum(maximum(acc1 + bias1, -7), 7) + 1))

    bias0  rowvec  bf16  register_hoist  the columns of a thread, before the accumulator wait
    bias1  rowvec  bf16  register_hoist  the columns of a thread, before the accumulator wait

cute_mm_bias_clamp_swiglu_128x64_1dd734bd:
sm_80, tile 128x64x2_1x1_occupancy2, planes aligned to 16 bytes:
2 accumulators of 128 by 64, 2 CTAs on a multiprocessor, subtiles of 32 columns, raster 8.
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
from cute_backend.templates.sm80 import Sm80Gemm


class Epilogue:
    loads = ("bias0", "bias1")
    stores = ("out0",)
    staged = ()
    shared_loads = ()
    shared_stores = (
        SmemOperand("out0", BFloat16),
    )
    sweeps = (
        Visit(),
    )

    @cute.jit
    def begin(self, tile, glob):
        bias0_read = cute.make_rmem_tensor(tile.columns, BFloat16)
        for c in cutlass.range_constexpr(tile.columns):
            bias0_read[c] = glob.bias0[tile.column(c)]
        bias0 = math.pack(bias0_read)
        bias1_read = cute.make_rmem_tensor(tile.columns, BFloat16)
        for c in cutlass.range_constexpr(tile.columns):
            bias1_read[c] = glob.bias1[tile.column(c)]
        bias1 = math.pack(bias1_read)
        return SimpleNamespace(bias0=bias0, bias1=bias1)

    @cute.jit
    def visit(self, sub, acc0, acc1, glob, held, smem):
        bias0_bf16 = sub.columns_of(held.bias0)
        bias0 = math.widen(bias0_bf16, Float32)
        bias1_bf16 = sub.columns_of(held.bias1)
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


gemm = Sm80Gemm(Epilogue(), TileConfig(Arch.SM80, 128, 64, products=2, b_columns=BColumns.INTERLEAVED, occupancy=2), Stages(ab=2, store=1))


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
