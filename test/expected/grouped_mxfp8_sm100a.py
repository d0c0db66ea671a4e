"""out0 = bf16(acc0 / (exp(-acc0) + 1) * acc1 * colvec0)

    a_scales   1x32     e8m0  tensor_memory   brought by TMA with each k tile, and copied there for the MMA
    b0_scales  1x32     e8m0  tensor_memory   brought by TMA with each k tile, and copied there for the MMA
    b1_scales  1x32     e8m0  tensor_memory   brought by TMA with each k tile, and copied there for the MMA
    colvec0    colvec   f32   row_read        one value for each row of a thread, before the accumulator wait

cute_scaled_grouped_mm_swiglu_scale_128x128_2155fc6c:
sm_100a, tile 128x128x2_1x1, planes aligned to 16 bytes:
2 accumulators of 128 by 128, subtiles of 32 columns, raster 8.
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
from cute_backend.spec import DType, ProductKind, Scaling
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.mma_scaled import Sm100MmaScaled
from cute_backend.templates.sm100 import Sm100Gemm


class Epilogue:
    loads = ("colvec0",)
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
        colvec0 = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            colvec0[r] = glob.colvec0[tile.row(r)]
        return SimpleNamespace(colvec0=colvec0)

    @cute.jit
    def visit(self, sub, acc0, acc1, glob, held, smem):
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            t0 = acc0[e] * 1.4426950408889634  # log2(e)
            t1 = math.logistic2(t0)
            t2 = acc0[e] * t1
            t3 = t2 * acc1[e]
            t4 = t3 * held.colvec0[r]
            out0[e] = t4
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm100Gemm(Epilogue(), TileConfig(Arch.SM100A, 128, 128, products=2), Stages(ab=4, store=3), Sm100MmaScaled(Scaling.MX, DType.E4M3), kind=ProductKind.GROUPED)


@cute.jit
def launch(
    a: cute.Tensor,
    offsets: cute.Tensor,
    a_scales: cute.Tensor,
    b0: cute.Tensor,
    b1: cute.Tensor,
    b0_scales: cute.Tensor,
    b1_scales: cute.Tensor,
    colvec0: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, [b0, b1], [colvec0], [out0], max_active_clusters, stream, [a_scales, b0_scales, b1_scales], offsets=offsets)
