"""t4 = (acc * scale_a * scale_b + exact0) * colvec0 + exact1
   out0 = bf16(t4 * colvec1)
   out1 = f32(row_max(abs(t4)))

    scale_a  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait
    scale_b  rowvec  f32   register_hoist  the columns of a thread, before the accumulator wait
    exact0   exact   bf16  vector          by element when needed, strides (0, s) along M
    colvec0  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait, strides (s, 0) along M
    exact1   exact   bf16  vector          by element when needed, strides (s, 0) along M
    colvec1  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait, strides (0, s) along M

cute_scaled_mm_residual_scale_amax_128x128_f5282e2c:
sm_90a, tile 128x128_1x2, planes aligned to 16 bytes:
128 by 128, clusters of 1 by 2, subtiles of 32 columns, raster 16.
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
from cute_backend.spec import Axis
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand, collapse_m
from cute_backend.templates.finish import Finish
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ("scale_a", "scale_b", "exact0", "colvec0", "exact1", "colvec1")
    stores = ("out0", "out1_max", "out1", "counters")
    staged = ()
    shared_loads = ()
    shared_stores = (
        SmemOperand("out0", BFloat16),
    )
    sweeps = (
        Visit(ends=True),
    )

    @cute.jit
    def begin(self, tile, glob):
        scale_a = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            scale_a[r] = glob.scale_a[tile.row(r)]
        scale_b = cute.make_rmem_tensor(tile.columns, Float32)
        for c in cutlass.range_constexpr(tile.columns):
            scale_b[c] = glob.scale_b[tile.column(c)]
        colvec0 = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            colvec0[r] = glob.colvec0[tile.row(r)]
        colvec1 = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            colvec1[r] = glob.colvec1[tile.row(r)]
        out1 = reduce.Partials(reduce.MAX, tile.rows)
        return SimpleNamespace(scale_a=scale_a, scale_b=scale_b, colvec0=colvec0, colvec1=colvec1, out1=out1)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        scale_b = sub.columns_of(held.scale_b)
        exact0_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        for e in cutlass.range_constexpr(sub.elements):
            exact0_bf16[e] = glob.exact0[sub.row(e), sub.column(e)]
        exact0 = math.widen(exact0_bf16, Float32)
        exact1_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        for e in cutlass.range_constexpr(sub.elements):
            exact1_bf16[e] = glob.exact1[sub.row(e), sub.column(e)]
        exact1 = math.widen(exact1_bf16, Float32)
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        out1 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            c = sub.column_of(e)
            t0 = acc[e] * held.scale_a[r]
            t1 = t0 * scale_b[c]
            t2 = t1 + exact0[e]
            t3 = t2 * held.colvec0[r]
            t4 = t3 + exact1[e]
            t5 = t4 * held.colvec1[r]
            t6 = math.abs(t4)
            out0[e] = t5
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
        finish.rows(tile, glob.counters, [glob.out1_max], [glob.out1])


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 128, 128, cluster_n=2, raster_m=16), Stages(ab=6, store=4))
finish = Finish(
    gemm.config,
    reduce.Result(reduce.MAX, Axis.ROW, Float32),
)


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    scale_a: cute.Tensor,
    scale_b: cute.Tensor,
    exact0: cute.Tensor,
    colvec0: cute.Tensor,
    exact1: cute.Tensor,
    colvec1: cute.Tensor,
    out0: cute.Tensor,
    out1: cute.Tensor,
    workspace: cute.Tensor,
    counters: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    exact0_plane = collapse_m(exact0, 2)
    colvec0_plane = collapse_m(colvec0, 2)
    exact1_plane = collapse_m(exact1, 2)
    colvec1_plane = collapse_m(colvec1, 2)
    m, n = a.shape[0], b.shape[1]
    partials = finish.partials(workspace, m, n)
    gemm(a, [b], [scale_a, scale_b, exact0_plane, colvec0_plane, exact1_plane, colvec1_plane], [out0, *partials, out1, counters], max_active_clusters, stream)
    finish(partials, [out1], m, n, stream, counters)
