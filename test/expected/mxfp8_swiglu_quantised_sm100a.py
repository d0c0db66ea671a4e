"""t3 = acc0 / (exp(-acc0) + 1) * acc1
   t10 = exp2(ceil(log2(maximum(block32_max(abs(t3)), 7.888609e-31) / 448)))
   out0 = e4m3(t3 / t10)
   out1 = e8m0(t10)[:, ::32] in tiles

    a_scales   1x32     e8m0  tensor_memory   brought by TMA with each k tile, and copied there for the MMA
    b0_scales  1x32     e8m0  tensor_memory   brought by TMA with each k tile, and copied there for the MMA
    b1_scales  1x32     e8m0  tensor_memory   brought by TMA with each k tile, and copied there for the MMA

cute_scaled_mm_swiglu_abs_block_max_clamp_log2_etc_128x128_50099d18:
sm_100a, tile 128x128x2_1x1, planes aligned to 16 bytes:
2 accumulators of 128 by 128, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float8E4M3FN, Int32, Uint8

from cute_backend.memory_ops import device_math as math
from cute_backend.memory_ops import device_reduce as reduce
from cute_backend.memory_ops.device_scales import store_scale
from cute_backend.spec import DType, Scaling
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.mma_scaled import Sm100MmaScaled
from cute_backend.templates.sm100 import Sm100Gemm


class Epilogue:
    loads = ()
    stores = ("out0", "out1")
    staged = ()
    shared_loads = ()
    shared_stores = (
        SmemOperand("out0", Float8E4M3FN),
    )
    sweeps = (
        Visit(pads_rows=True),
    )

    @cute.jit
    def begin(self, tile, glob):
        return SimpleNamespace()

    @cute.jit
    def visit(self, sub, acc0, acc1, glob, held, smem):
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        out1 = cute.make_rmem_tensor(sub.elements, Float32)
        t3_kept = cute.make_rmem_tensor(sub.elements, Float32)
        t5_of = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            t0 = acc0[e] * 1.4426950408889634  # log2(e)
            t1 = math.logistic2(t0)
            t2 = acc0[e] * t1
            t3 = t2 * acc1[e]
            t3_kept[e] = t3
            t4 = math.abs(t3)
            t5_of[e] = t4
        t5 = reduce.of_blocks(reduce.MAX, t5_of, sub, 32)
        for e in cutlass.range_constexpr(sub.elements):
            t6 = math.maximum(t5[e], 7.888609052210118e-31)
            t7 = math.div(t6, 448.0)
            t8 = math.log2(t7)
            t9 = math.ceil(t8)
            t10 = math.exp2(t9)
            t11 = math.div(t3_kept[e], t10)
            out0[e] = t11
            out1[e] = t10
        sub.copy_to(math.narrow(out0, Float8E4M3FN), smem.out0)
        out1_glob = glob.out1
        out1_rmem = math.e8m0_codes(out1)
        for e in cutlass.range_constexpr(sub.elements):
            if cutlass.const_expr(sub.begins_block(e, 32)):
                row, column, _ = sub.target(e)
                store_scale(out1_glob, out1_rmem[e], row, column, sub.tile.m, sub.tile.n, 32)


gemm = Sm100Gemm(Epilogue(), TileConfig(Arch.SM100A, 128, 128, products=2), Stages(ab=4, store=4), Sm100MmaScaled(Scaling.MX, DType.E4M3))


@cute.jit
def launch(
    a: cute.Tensor,
    a_scales: cute.Tensor,
    b0: cute.Tensor,
    b1: cute.Tensor,
    b0_scales: cute.Tensor,
    b1_scales: cute.Tensor,
    out0: cute.Tensor,
    out1: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, [b0, b1], [], [out0, out1], max_active_clusters, stream, [a_scales, b0_scales, b1_scales])
