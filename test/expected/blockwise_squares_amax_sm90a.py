"""out0 = bf16(acc)
   out1 = f32(row_max(abs(acc)))

    a_scales  128x128  f32   k_tile_ring     copied to shared memory ahead of each k tile, by element
    b_scales  1x128    f32   k_tile_ring     copied to shared memory ahead of each k tile, by element

cute_scaled_mm_amax_128x256_72af4308:
sm_90a, tile 128x256_2x1, planes aligned to 16 bytes:
128 by 256, clusters of 2 by 1, subtiles of 32 columns, raster 8.
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
from cute_backend.spec import Axis, Scaling
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.finish import Finish
from cute_backend.templates.block_scaled import Sm90BlockScaled
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ()
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
        out1 = reduce.Partials(reduce.MAX, tile.rows)
        return SimpleNamespace(out1=out1)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        out1 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            t0 = math.abs(acc[e])
            out0[e] = acc[e]
            out1[e] = t0
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


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 128, 256, cluster_m=2), Stages(ab=4, store=3), Sm90BlockScaled(Scaling.SQUARE, Scaling.LINE, sets=1, k_tiles=4, pieces=2))
finish = Finish(
    gemm.config,
    reduce.Result(reduce.MAX, Axis.ROW, Float32),
)


@cute.jit
def launch(
    a: cute.Tensor,
    a_scales: cute.Tensor,
    b: cute.Tensor,
    b_scales: cute.Tensor,
    out0: cute.Tensor,
    out1: cute.Tensor,
    workspace: cute.Tensor,
    counters: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    m, n = a.shape[0], b.shape[1]
    partials = finish.partials(workspace, m, n)
    gemm(a, [b], [], [out0, *partials, out1, counters], max_active_clusters, stream, [a_scales, b_scales])
    finish(partials, [out1], m, n, stream, counters)
