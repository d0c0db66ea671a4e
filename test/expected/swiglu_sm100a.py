"""t1 = acc0 * scale_a * scale_b0
   t7 = t1 / (exp(-t1) + 1) * (acc1 * scale_a * scale_b1)
   out0 = bf16(t7)
   out1 = bf16(row_max(abs(t7)))

    scale_a   colvec  f32   row_read        one value for each row of a thread, before the accumulator wait
    scale_b0  rowvec  f32   smem_staged     the tile's columns in shared memory, ahead of the accumulator wait
    scale_b1  rowvec  f32   smem_staged     the tile's columns in shared memory, ahead of the accumulator wait

cute_scaled_mm_swiglu_amax_256x128_1ee884f1:
sm_100a, tile 256x128x2_2x1_2cta, planes aligned to 16 bytes:
2 accumulators of 256 by 128, 2 CTAs a tile, clusters of 2 by 1, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.memory_ops import device_reduce as reduce
from cute_backend.spec import Axis
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.finish import Finish
from cute_backend.templates.sm100 import Sm100Gemm


class Epilogue:
    loads = ("scale_a", "scale_b0", "scale_b1")
    stores = ("out0", "out1_max")
    staged = (
        SmemOperand("scale_b0", Float32),
        SmemOperand("scale_b1", Float32),
    )
    shared_loads = ()
    shared_stores = (
        SmemOperand("out0", BFloat16),
    )
    sweeps = (
        Visit(ends=True),
    )

    @cute.jit
    def stage(self, tile, glob, smem):
        for i in cutlass.range_constexpr(tile.tile_n // 32):
            column = tile.lane + 32 * i
            smem.scale_b0[column] = glob.scale_b0[tile.clamp_column(column)]
            smem.scale_b1[column] = glob.scale_b1[tile.clamp_column(column)]

    @cute.jit
    def begin(self, tile, glob):
        scale_a = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            scale_a[r] = glob.scale_a[tile.row(r)]
        out1 = reduce.Partials(reduce.MAX, tile.rows)
        return SimpleNamespace(scale_a=scale_a, out1=out1)

    @cute.jit
    def visit(self, sub, acc0, acc1, glob, held, smem):
        scale_b0_smem = sub.row_slice(smem.scale_b0)
        scale_b0 = cute.make_rmem_tensor(scale_b0_smem.shape, Float32)
        cute.autovec_copy(scale_b0_smem, scale_b0)
        scale_b1_smem = sub.row_slice(smem.scale_b1)
        scale_b1 = cute.make_rmem_tensor(scale_b1_smem.shape, Float32)
        cute.autovec_copy(scale_b1_smem, scale_b1)
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        out1 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            c = sub.column_of(e)
            t0 = acc0[e] * held.scale_a[r]
            t1 = t0 * scale_b0[c]
            t2 = acc1[e] * held.scale_a[r]
            t3 = t2 * scale_b1[c]
            t4 = t1 * 1.4426950408889634  # log2(e)
            t5 = math.logistic2(t4)
            t6 = t1 * t5
            t7 = t6 * t3
            t8 = math.abs(t7)
            out0[e] = t7
            out1[e] = t8
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)
        held.out1.take_rows(out1, sub)

    @cute.jit
    def end(self, tile, glob, held):
        held.out1.across(tile.row_lanes)
        out1_max_glob = glob.out1_max
        for r in cutlass.range_constexpr(tile.rows):
            part, row, inside = tile.row_target(r)
            (out1_max_part,) = held.out1[r]
            if inside:
                out1_max_glob[part, row] = out1_max_part


gemm = Sm100Gemm(Epilogue(), TileConfig(Arch.SM100A, 256, 128, cluster_m=2, ctas=2, products=2), Stages(ab=5, row=2, store=4))
finish = Finish(
    gemm.config,
    reduce.Result(reduce.MAX, Axis.ROW, BFloat16),
)


@cute.jit
def launch(
    a: cute.Tensor,
    b0: cute.Tensor,
    b1: cute.Tensor,
    scale_a: cute.Tensor,
    scale_b0: cute.Tensor,
    scale_b1: cute.Tensor,
    out0: cute.Tensor,
    out1: cute.Tensor,
    workspace: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    m, n = a.shape[0], b0.shape[1]
    partials = finish.partials(workspace, m, n)
    gemm(a, [b0, b1], [scale_a, scale_b0, scale_b1], [out0, *partials], max_active_clusters, stream)
    finish(partials, [out1], m, n, stream)
