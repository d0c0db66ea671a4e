"""t0 = minimum(acc0, 7)
   out0 = bf16(t0 * sigmoid(t0 * 1.702) * (minimum(maximum(acc1, -7), 7) + 1))


cute_grouped_mm_clamp_swiglu_128x64_9db46f0b:
sm_100a, tile 128x64x2_1x1, planes aligned to 16 bytes:
2 accumulators of 128 by 64, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.spec import BColumns, ProductKind
from cute_backend.planning import Arch, TileConfig
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.sm100 import Sm100Gemm


class Epilogue:
    loads = ()
    stores = ("out0",)
    staged = ()
    shared_loads = ()
    shared_stores = (
        SmemOperand("out0", BFloat16),
    )

    @cute.jit
    def begin(self, tile, glob):
        return SimpleNamespace()

    @cute.jit
    def visit(self, sub, acc0, acc1, glob, held, smem):
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            t0 = math.minimum(acc0[e], 7.0)
            t2_argument = t0 * 2.4554669595930156  # 1.702 * log2(e)
            t2 = math.logistic2(t2_argument)
            t3 = t0 * t2
            t4 = math.maximum(acc1[e], -7.0)
            t5 = math.minimum(t4, 7.0)
            t6 = t5 + 1.0
            t7 = t3 * t6
            out0[e] = t7
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm100Gemm(Epilogue(), TileConfig(Arch.SM100A, 128, 64, products=2, b_columns=BColumns.INTERLEAVED), kind=ProductKind.GROUPED)


@cute.jit
def launch(
    a: cute.Tensor,
    offsets: cute.Tensor,
    b: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, [b], [], [out0], max_active_clusters, stream, offsets=offsets)
