"""out0 = f32(acc * scale_a * scale_b + exact0)

    scale_a  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait
    scale_b  groupvec  f32   group_staged    the tile's columns of its group in shared memory, ahead of the accumulator wait
    exact0   exact   f32   tma             a subtile at a time by TMA, ahead of the accumulator wait

cute_scaled_grouped_k_mm_residual_128x192_ff9925d9:
sm_90a, tile 128x192_2x1_pingpong, planes aligned to 16 bytes:
128 by 192, ping-pong, clusters of 2 by 1, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.spec import ProductKind
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ("scale_a", "scale_b", "exact0")
    stores = ("out0",)
    staged = (
        SmemOperand("scale_b", Float32),
    )
    shared_loads = (
        SmemOperand("exact0", Float32),
    )
    shared_stores = (
        SmemOperand("out0", Float32),
    )
    sweeps = (
        Visit(planes=("exact0",)),
    )

    @cute.jit
    def stage(self, tile, glob, smem):
        for i in cutlass.range_constexpr(tile.tile_n // 32):
            column = tile.lane + 32 * i
            smem.scale_b[column] = glob.scale_b[tile.group, tile.clamp_column(column)]

    @cute.jit
    def begin(self, tile, glob):
        scale_a = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            scale_a[r] = glob.scale_a[tile.row(r)]
        return SimpleNamespace(scale_a=scale_a)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        scale_b_smem = sub.row_slice(smem.scale_b)
        scale_b = cute.make_rmem_tensor(scale_b_smem.shape, Float32)
        cute.autovec_copy(scale_b_smem, scale_b)
        exact0 = cute.make_rmem_tensor(sub.elements, Float32)
        sub.copy_from(smem.exact0, exact0)
        smem.release()
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            c = sub.column_of(e)
            t0 = acc[e] * held.scale_a[r]
            t1 = t0 * scale_b[c]
            t2 = t1 + exact0[e]
            out0[e] = t2
        sub.copy_to(math.narrow(out0, Float32), smem.out0)


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 128, 192, cluster_m=2, pingpong=True), Stages(ab=4, exact=2, row=2, store=2), kind=ProductKind.K_GROUPED)


@cute.jit
def launch(
    a: cute.Tensor,
    offsets: cute.Tensor,
    b: cute.Tensor,
    scale_a: cute.Tensor,
    scale_b: cute.Tensor,
    exact0: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, [b], [scale_a, scale_b, exact0], [out0], max_active_clusters, stream, offsets=offsets)
