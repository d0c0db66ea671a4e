"""t1 = acc * scale_a * scale_b
   t4 = t1 / (exp(-t1) + 1)
   out0 = bf16(t4)
   out1 = bf16(row_max(abs(t4)))

    scale_a  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait
    scale_b  rowvec  f32   smem_staged     the tile's columns in shared memory, ahead of the accumulator wait

cute_scaled_mm_silu_amax_128x128_bb415b94:
sm_90a, tile 128x128_1x2_pingpong, planes aligned to 16 bytes:
128 by 128, ping-pong, clusters of 1 by 2, subtiles of 32 columns, raster 16.
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
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ("scale_a", "scale_b")
    stores = ("out0", "out1_max", "out1", "counters")
    staged = (
        SmemOperand("scale_b", Float32),
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
            smem.scale_b[column] = glob.scale_b[tile.clamp_column(column)]

    @cute.jit
    def begin(self, tile, glob):
        scale_a = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            scale_a[r] = glob.scale_a[tile.row(r)]
        out1 = reduce.Partials(reduce.MAX, tile.rows)
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
            t2 = t1 * 1.4426950408889634  # log2(e)
            t3 = math.logistic2(t2)
            t4 = t1 * t3
            t5 = math.abs(t4)
            out0[e] = t4
            out1[e] = t5
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


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 128, 128, cluster_n=2, pingpong=True, raster_m=16), Stages(ab=6, row=2, store=4))
finish = Finish(
    gemm.config,
    reduce.Result(reduce.MAX, Axis.ROW, BFloat16),
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
    counters: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    m, n = a.shape[0], b.shape[1]
    partials = finish.partials(workspace, m, n)
    gemm(a, [b], [scale_a, scale_b], [out0, *partials, out1, counters], max_active_clusters, stream)
    finish(partials, [out1], m, n, stream, counters)
