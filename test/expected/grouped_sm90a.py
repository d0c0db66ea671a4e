"""out0 = bf16(acc0 / (exp(-acc0) + 1) * acc1)


cute_grouped_mm_swiglu_64x128_087a7cd0:
sm_90a, tile 64x128x2_1x1_pingpong, planes aligned to 16 bytes:
2 accumulators of 64 by 128, ping-pong, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
Rows lie in groups. If the columns of a program's product do, this kernel computes the transposed one:
its rows are the columns of the program's result.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.spec import ProductKind
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ()
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
        return SimpleNamespace()

    @cute.jit
    def visit(self, sub, acc0, acc1, glob, held, smem):
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            t0 = acc0[e] * 1.4426950408889634  # log2(e)
            t1 = math.logistic2(t0)
            t2 = acc0[e] * t1
            t3 = t2 * acc1[e]
            out0[e] = t3
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 64, 128, pingpong=True, products=2), Stages(ab=5, store=3), kind=ProductKind.GROUPED)


@cute.jit
def launch(
    a: cute.Tensor,
    offsets: cute.Tensor,
    b0: cute.Tensor,
    b1: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, [b0, b1], [], [out0], max_active_clusters, stream, offsets=offsets)
