"""t2 = (acc * 0.5 + bias) * rowvec0
   t6 = t2 / (exp(-t2) + 1) + exact0
   out0 = bf16(t6)
   out1 = f32(row_max(t6))

    bias     colvec  bf16  row_read        one value for each row of a thread, before the accumulator wait, strides (s, 0) along M
    rowvec0  rowvec  f32   smem_staged     the tile's columns in shared memory, ahead of the accumulator wait
    exact0   exact   bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait

cute_bmm_bias_scale_silu_residual_max_256x128_62178ea8:
sm_100a, tile 256x128_2x1_2cta, planes aligned to 16 bytes:
256 by 128, 2 CTAs a tile, clusters of 2 by 1, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
Strides are 0, 1 or s, any other stride.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.memory_ops import device_reduce as reduce
from cute_backend.spec import Axis, ProductKind
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand, collapse_m
from cute_backend.templates.finish import Finish
from cute_backend.templates.sm100 import Sm100Gemm


class Epilogue:
    loads = ("bias", "rowvec0", "exact0")
    stores = ("out0", "out1_max")
    staged = (
        SmemOperand("rowvec0", Float32),
    )
    shared_loads = (
        SmemOperand("exact0", BFloat16),
    )
    shared_stores = (
        SmemOperand("out0", BFloat16),
    )
    sweeps = (
        Visit(planes=("exact0",), ends=True),
    )

    @cute.jit
    def stage(self, tile, glob, smem):
        for i in cutlass.range_constexpr(tile.tile_n // 32):
            column = tile.lane + 32 * i
            smem.rowvec0[column] = glob.rowvec0[tile.clamp_column(column)]

    @cute.jit
    def begin(self, tile, glob):
        bias_bf16 = cute.make_rmem_tensor(tile.rows, BFloat16)
        for r in cutlass.range_constexpr(tile.rows):
            bias_bf16[r] = glob.bias[tile.row(r)]
        bias = math.widen(bias_bf16, Float32)
        out1 = reduce.Partials(reduce.MAX, tile.rows)
        return SimpleNamespace(bias=bias, out1=out1)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        rowvec0_smem = sub.row_slice(smem.rowvec0)
        rowvec0 = cute.make_rmem_tensor(rowvec0_smem.shape, Float32)
        cute.autovec_copy(rowvec0_smem, rowvec0)
        exact0_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        sub.copy_from(smem.exact0, exact0_bf16)
        exact0 = math.widen(exact0_bf16, Float32)
        smem.release()
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        out1 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            c = sub.column_of(e)
            t0 = acc[e] * 0.5
            t1 = t0 + held.bias[r]
            t2 = t1 * rowvec0[c]
            t3 = t2 * 1.4426950408889634  # log2(e)
            t4 = math.logistic2(t3)
            t5 = t2 * t4
            t6 = t5 + exact0[e]
            out0[e] = t6
            out1[e] = t6
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


gemm = Sm100Gemm(Epilogue(), TileConfig(Arch.SM100A, 256, 128, cluster_m=2, ctas=2), Stages(ab=6, exact=4, row=2, store=4), kind=ProductKind.BATCHED)
finish = Finish(
    gemm.config,
    reduce.Result(reduce.MAX, Axis.ROW, Float32),
)


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    bias: cute.Tensor,
    rowvec0: cute.Tensor,
    exact0: cute.Tensor,
    out0: cute.Tensor,
    out1: cute.Tensor,
    workspace: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    bias_plane = collapse_m(bias, 2)
    m, n = a.shape[0] * a.shape[1], b.shape[2]
    partials = finish.partials(workspace, m, n)
    gemm(a, [b], [bias_plane, rowvec0, exact0], [out0, *partials], max_active_clusters, stream)
    finish(partials, [out1], m, n, stream)
