"""t0 = acc + bias
   out0 = bf16(row_max(where(column == colvec0, t0, -inf)))
   out1 = bf16(row_logsumexp(t0))

    bias     rowvec  bf16  register_hoist  the columns of a thread, before the accumulator wait
    colvec0  colvec  i64   row_read        one value for each row of a thread, before the accumulator wait

cute_mm_bias_pick_logsumexp_64x64_c7e1e8b6:
sm_120a, tile 64x64_1x1, planes aligned to 16 bytes:
64 by 64, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from cute_backend.memory_ops import device_math as math
from cute_backend.memory_ops import device_reduce as reduce
from cute_backend.memory_ops.device_cache import saturated
from cute_backend.spec import Axis
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.finish import Finish
from cute_backend.templates.sm120 import Sm120Gemm


class Epilogue:
    loads = ("bias", "colvec0")
    stores = ("out0_max", "out1_top", "out1_total")
    staged = ()
    shared_loads = ()
    shared_stores = ()
    sweeps = (
        Visit(ends=True),
    )

    @cute.jit
    def begin(self, tile, glob):
        bias_read = cute.make_rmem_tensor(tile.columns, BFloat16)
        for c in cutlass.range_constexpr(tile.columns):
            bias_read[c] = glob.bias[tile.column(c)]
        bias = math.pack(bias_read)
        colvec0_i64 = cute.make_rmem_tensor(tile.rows, Int64)
        for r in cutlass.range_constexpr(tile.rows):
            colvec0_i64[r] = glob.colvec0[tile.row(r)]
        colvec0 = saturated(colvec0_i64)
        out0 = reduce.Partials(reduce.MAX, tile.rows)
        out1 = reduce.Partials(reduce.LOGSUMEXP, tile.rows)
        return SimpleNamespace(bias=bias, colvec0=colvec0, out0=out0, out1=out1)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        bias_bf16 = sub.columns_of(held.bias)
        bias = math.widen(bias_bf16, Float32)
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        out1 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            c = sub.column_of(e)
            t0 = acc[e] + bias[c]
            t1 = sub.column(e)
            t2 = t1 == held.colvec0[r]
            t3 = math.where(t2, t0, float("-inf"))
            out0[e] = t3
            out1[e] = t0
        held.out0.take_rows(out0, sub)
        held.out1.take_rows(out1, sub)

    @cute.jit
    def end(self, tile, glob, held):
        held.out0.across(tile.row_lanes)
        out0_max_glob = glob.out0_max
        for r in cutlass.range_constexpr(tile.rows):
            part, row, inside = tile.row_target(r)
            (out0_max_part,) = held.out0[r]
            if inside:
                out0_max_glob[part, row] = out0_max_part
        held.out1.across(tile.row_lanes)
        out1_top_glob = glob.out1_top
        out1_total_glob = glob.out1_total
        for r in cutlass.range_constexpr(tile.rows):
            part, row, inside = tile.row_target(r)
            out1_top_part, out1_total_part = held.out1[r]
            if inside:
                out1_top_glob[part, row] = out1_top_part
                out1_total_glob[part, row] = out1_total_part


gemm = Sm120Gemm(Epilogue(), TileConfig(Arch.SM120A, 64, 64), Stages(ab=6))
finish = Finish(
    gemm.config,
    reduce.Result(reduce.MAX, Axis.ROW, BFloat16),
    reduce.Result(reduce.LOGSUMEXP, Axis.ROW, BFloat16),
)


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    bias: cute.Tensor,
    colvec0: cute.Tensor,
    out0: cute.Tensor,
    out1: cute.Tensor,
    workspace: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    m, n = a.shape[0], b.shape[1]
    partials = finish.partials(workspace, m, n)
    gemm(a, [b], [bias, colvec0], partials, max_active_clusters, stream)
    finish(partials, [out0, out1], m, n, stream)
