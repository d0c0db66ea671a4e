"""t2 = acc * scale_a * scale_b + exact0
   out0 = bf16(t2)
   out1 = e4m3(minimum(maximum(t2 * scalar0, -448), 448))

    scale_a  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait
    scale_b  rowvec  f32   smem_staged     the tile's columns in shared memory, ahead of the accumulator wait
    exact0   exact   bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait
    scalar0  scalar  f32   scalar          read once, before the accumulator wait

cute_scaled_mm_residual_quant_128x128_40b6f91c:
sm_90a, tile 128x128_1x2_pingpong, planes aligned to 16 bytes:
128 by 128, ping-pong, clusters of 1 by 2, subtiles of 32 columns, raster 16.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Float8E4M3FN, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ("scale_a", "scale_b", "exact0", "scalar0")
    stores = ("out0", "out1")
    staged = (
        SmemOperand("scale_b", Float32),
    )
    shared_loads = (
        SmemOperand("exact0", BFloat16),
    )
    shared_stores = (
        SmemOperand("out0", BFloat16),
        SmemOperand("out1", Float8E4M3FN),
    )
    sweeps = (
        Visit(planes=("exact0",)),
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
        scalar0 = cute.make_rmem_tensor(1, Float32)
        for i in cutlass.range_constexpr(1):
            scalar0[i] = glob.scalar0[i]
        return SimpleNamespace(scale_a=scale_a, scalar0=scalar0)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        scale_b_smem = sub.row_slice(smem.scale_b)
        scale_b = cute.make_rmem_tensor(scale_b_smem.shape, Float32)
        cute.autovec_copy(scale_b_smem, scale_b)
        exact0_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        sub.copy_from(smem.exact0, exact0_bf16)
        exact0 = math.widen(exact0_bf16, Float32)
        smem.release()
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        out1 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            c = sub.column_of(e)
            t0 = acc[e] * held.scale_a[r]
            t1 = t0 * scale_b[c]
            t2 = t1 + exact0[e]
            t3 = t2 * held.scalar0[0]
            out0[e] = t2
            out1[e] = t3
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)
        sub.copy_to(math.narrow(out1, Float8E4M3FN), smem.out1)


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 128, 128, cluster_n=2, pingpong=True, raster_m=16), Stages(ab=5, exact=4, row=2, store=2))


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    scale_a: cute.Tensor,
    scale_b: cute.Tensor,
    exact0: cute.Tensor,
    scalar0: cute.Tensor,
    out0: cute.Tensor,
    out1: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, [b], [scale_a, scale_b, exact0, scalar0], [out0, out1], max_active_clusters, stream)
