"""t1 = acc * scale_a * scale_b
   out0 = f32(column_sum(t1))
   out1 = f32(row_logsumexp(t1))

    scale_a  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait
    scale_b  rowvec  f32   smem_staged     the tile's columns in shared memory, ahead of the accumulator wait

cute_scaled_mm_sum_logsumexp_128x128_6ef84496:
sm_90a, tile 128x128_2x1_pingpong, planes aligned to 16 bytes:
128 by 128, ping-pong, clusters of 2 by 1, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.memory_ops import device_reduce as reduce
from cute_backend.spec import Axis
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.finish import Finish
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ("scale_a", "scale_b")
    stores = ("out0_sum", "out1_top", "out1_total")
    staged = (
        SmemOperand("scale_b", Float32),
    )
    shared_loads = ()
    shared_stores = ()
    sweeps = (
        Visit(ends=True),
    )

    @cute.jit
    def stage(self, tile, glob, smem):
        for i in cutlass.range_constexpr(tile.tile_n // 32):
            column = tile.lane + 32 * i
            smem.scale_b[column] = glob.scale_b[tile.clamp_column(column)]

    @cute.jit
    def begin(self, tile, glob):
        scale_a = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            scale_a[r] = glob.scale_a[tile.row(r)]
        out1 = reduce.Partials(reduce.LOGSUMEXP, tile.rows)
        return SimpleNamespace(scale_a=scale_a, out1=out1)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        scale_b_smem = sub.row_slice(smem.scale_b)
        scale_b = cute.make_rmem_tensor(scale_b_smem.shape, Float32)
        cute.autovec_copy(scale_b_smem, scale_b)
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        out1 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            c = sub.column_of(e)
            t0 = acc[e] * held.scale_a[r]
            t1 = t0 * scale_b[c]
            out0[e] = t1
            out1[e] = t1
        out0_parts = reduce.Partials(reduce.SUM, sub.columns)
        out0_parts.take_columns(out0, sub)
        out0_parts.across(sub.column_lanes)
        out0_sum_glob = glob.out0_sum
        for c in cutlass.range_constexpr(sub.columns):
            piece, column, inside = sub.column_target(c)
            (out0_sum_part,) = out0_parts[c]
            if inside:
                out0_sum_glob[piece, column] = out0_sum_part
        held.out1.take_rows(out1, sub)

    @cute.jit
    def end(self, tile, glob, held):
        held.out1.across(tile.row_lanes)
        out1_top_glob = glob.out1_top
        out1_total_glob = glob.out1_total
        for r in cutlass.range_constexpr(tile.rows):
            part, row, inside = tile.row_target(r)
            out1_top_part, out1_total_part = held.out1[r]
            if inside:
                out1_top_glob[part, row] = out1_top_part
                out1_total_glob[part, row] = out1_total_part


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 128, 128, cluster_m=2, pingpong=True), Stages(ab=7, row=2))
finish = Finish(
    gemm.config,
    reduce.Result(reduce.SUM, Axis.COLUMN, Float32),
    reduce.Result(reduce.LOGSUMEXP, Axis.ROW, Float32),
)


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    scale_a: cute.Tensor,
    scale_b: cute.Tensor,
    out0: cute.Tensor,
    out1: cute.Tensor,
    workspace: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    m, n = a.shape[0], b.shape[1]
    partials = finish.partials(workspace, m, n)
    gemm(a, [b], [scale_a, scale_b], partials, max_active_clusters, stream)
    finish(partials, [out0, out1], m, n, stream)
