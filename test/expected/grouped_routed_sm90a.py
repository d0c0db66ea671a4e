"""t1 = acc * colvec0 + exact0
   out0 = bf16(t1)
   out1 = f32(row_max(abs(t1)))

    colvec0  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait
    exact0   exact   bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait

cute_grouped_mm_scale_residual_amax_64x256_1b78e942:
sm_90a, tile 64x256_1x1_pingpong, planes aligned to 16 bytes:
64 by 256, ping-pong, subtiles of 32 columns, raster 8.
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
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ("colvec0", "exact0")
    stores = ("out0", "out1_max", "out1", "counters")
    staged = ()
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
    def begin(self, tile, glob):
        colvec0 = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            colvec0[r] = glob.colvec0[tile.row(r)]
        out1 = reduce.Partials(reduce.MAX, tile.rows)
        return SimpleNamespace(colvec0=colvec0, out1=out1)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        exact0_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        sub.copy_from(smem.exact0, exact0_bf16)
        exact0 = math.widen(exact0_bf16, Float32)
        smem.release()
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        out1 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            t0 = acc[e] * held.colvec0[r]
            t1 = t0 + exact0[e]
            t2 = math.abs(t1)
            out0[e] = t1
            out1[e] = t2
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


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 64, 256, pingpong=True), Stages(ab=4, exact=4, store=4), kind=ProductKind.GROUPED)
finish = Finish(
    gemm.config,
    reduce.Result(reduce.MAX, Axis.ROW, Float32),
    kind=ProductKind.GROUPED,
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
    counters: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    m, n = a.shape[0], b.shape[2]
    partials = finish.partials(workspace, m, n)
    gemm(a, [b], [colvec0, exact0], [out0, *partials, out1, counters], max_active_clusters, stream, offsets=offsets)
    finish(partials, [out1], m, n, stream, counters)
