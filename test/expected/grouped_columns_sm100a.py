"""t4 = acc / (exp(-acc) + 1) * colvec0 + exact0
   out0 = bf16(t4)
   out1 = f32(row_max(t4))

    colvec0  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait
    exact0   exact   bf16  vector          by element when needed

cute_grouped_mm_silu_scale_residual_max_128x128_fdf1e085:
sm_100a, tile 128x128_1x1_by16, planes aligned to 16 bytes:
128 by 128, subtiles of 16 columns, raster 8.
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
from cute_backend.memory_ops import device_reduce as reduce
from cute_backend.spec import Axis, ProductKind
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.finish import Finish
from cute_backend.templates.sm100 import Sm100Gemm


class Epilogue:
    loads = ("colvec0", "exact0")
    stores = ("out0", "out1_max")
    staged = ()
    shared_loads = ()
    shared_stores = ()
    sweeps = (
        Visit(ends=True),
    )

    @cute.jit
    def begin(self, tile, glob):
        colvec0 = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            colvec0[r] = glob.colvec0[tile.row(r)]
        out1 = reduce.Partials(reduce.MAX, tile.rows)
        return SimpleNamespace(colvec0=colvec0, out1=out1)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        exact0_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        for e in cutlass.range_constexpr(sub.elements):
            exact0_bf16[e] = glob.exact0[sub.row(e), sub.column(e)]
        exact0 = math.widen(exact0_bf16, Float32)
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        out1 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            t0 = acc[e] * 1.4426950408889634  # log2(e)
            t1 = math.logistic2(t0)
            t2 = acc[e] * t1
            t3 = t2 * held.colvec0[r]
            t4 = t3 + exact0[e]
            out0[e] = t4
            out1[e] = t4
        out0_glob = glob.out0
        out0_rmem = math.narrow(out0, BFloat16)
        for e in cutlass.range_constexpr(sub.elements):
            row, column, inside = sub.target(e)
            if inside:
                out0_glob[row, column] = out0_rmem[e]
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


gemm = Sm100Gemm(Epilogue(), TileConfig(Arch.SM100A, 128, 128, subtile_n=16), Stages(ab=7), kind=ProductKind.GROUPED)
finish = Finish(
    gemm.config,
    reduce.Result(reduce.MAX, Axis.ROW, Float32),
)


@cute.jit
def launch(
    a: cute.Tensor,
    offsets: cute.Tensor,
    b: cute.Tensor,
    colvec0: cute.Tensor,
    exact0: cute.Tensor,
    out0: cute.Tensor,
    out1: cute.Tensor,
    workspace: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    m, n = a.shape[0], b.shape[2]
    partials = finish.partials(workspace, m, n)
    gemm(a, [b], [colvec0, exact0], [out0, *partials], max_active_clusters, stream, offsets=offsets)
    finish(partials, [out1], m, n, stream)
