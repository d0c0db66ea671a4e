"""out0 = bf16(acc0 / (exp(-acc0) + 1) * acc1)

    b0_scales  by 128   f32   registers       of groups of K, loaded four groups ahead, by element
    b1_scales  by 128   f32   registers       of groups of K, loaded four groups ahead, by element
    b0_zeros   by 128   i8    registers       of groups of K, loaded four groups ahead, by element
    b1_zeros   by 128   i8    registers       of groups of K, loaded four groups ahead, by element

cute_mm_swiglu_128x16_e6a07665:
sm_90a, tile 128x16x2_1x1_by16_unrolled_transposed, planes aligned to 16 bytes:
2 accumulators of 128 by 16 of the transposed product, subtiles of 16 columns, unrolled, raster 16.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.spec import DType, Order, WeightGroups
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand, transpose
from cute_backend.templates.converted import Sm90Converted
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ()
    stores = ("out0",)
    staged = ()
    shared_loads = ()
    shared_stores = (
        SmemOperand("out0", BFloat16, Order.COLUMN),
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


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 128, 16, subtile_n=16, raster_m=16, products=2, unrolled=True, transposed=True, converts=True, packing=2), Stages(ab=5, store=4), Sm90Converted(DType.U4X2, WeightGroups(128, DType.F32, DType.BF16, DType.I8, DType.BF16)))


@cute.jit
def launch(
    a: cute.Tensor,
    b0: cute.Tensor,
    b1: cute.Tensor,
    b0_scales: cute.Tensor,
    b1_scales: cute.Tensor,
    b0_zeros: cute.Tensor,
    b1_zeros: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    a_t = transpose(a)
    b0_t = transpose(b0)
    b1_t = transpose(b1)
    b0_scales_t = transpose(b0_scales)
    b1_scales_t = transpose(b1_scales)
    b0_zeros_t = transpose(b0_zeros)
    b1_zeros_t = transpose(b1_zeros)
    out0_t = transpose(out0)
    gemm(b0_t, [a_t], [], [out0_t], max_active_clusters, stream, [b0_scales_t, b1_scales_t, b0_zeros_t, b1_zeros_t], further_as=[b1_t])
