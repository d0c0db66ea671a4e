"""t1 = acc0 * scale_a * scale_b0
   out0 = bf16(t1 / (exp(-t1) + 1) * (acc1 * scale_a * scale_b1))

    scale_a   rowvec  f32   smem_staged     the tile's columns in shared memory, ahead of the accumulator wait
    scale_b0  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait
    scale_b1  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait

cute_scaled_mm_swiglu_64x136_7a969118:
sm_90a, tile 64x136x2_2x1_pingpong_by8_unrolled_transposed, planes aligned to 16 bytes:
2 accumulators of 64 by 136 of the transposed product, ping-pong, clusters of 2 by 1, subtiles of 8 columns, unrolled, raster 16.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.spec import Order
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand, transpose
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ("scale_a", "scale_b0", "scale_b1")
    stores = ("out0",)
    staged = (
        SmemOperand("scale_a", Float32),
    )
    shared_loads = ()
    shared_stores = (
        SmemOperand("out0", BFloat16, Order.COLUMN),
    )
    sweeps = (
        Visit(),
    )

    @cute.jit
    def stage(self, tile, glob, smem):
        for i in cutlass.range_constexpr(cute.ceil_div(tile.tile_n, 32)):
            column = tile.lane + 32 * i
            smem.scale_a[column] = glob.scale_a[tile.clamp_column(column)]

    @cute.jit
    def begin(self, tile, glob):
        scale_b0 = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            scale_b0[r] = glob.scale_b0[tile.row(r)]
        scale_b1 = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            scale_b1[r] = glob.scale_b1[tile.row(r)]
        return SimpleNamespace(scale_b0=scale_b0, scale_b1=scale_b1)

    @cute.jit
    def visit(self, sub, acc0, acc1, glob, held, smem):
        scale_a_smem = sub.row_slice(smem.scale_a)
        scale_a = cute.make_rmem_tensor(scale_a_smem.shape, Float32)
        cute.autovec_copy(scale_a_smem, scale_a)
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            c = sub.column_of(e)
            t0 = acc0[e] * scale_a[c]
            t1 = t0 * held.scale_b0[r]
            t2 = acc1[e] * scale_a[c]
            t3 = t2 * held.scale_b1[r]
            t4 = t1 * 1.4426950408889634  # log2(e)
            t5 = math.logistic2(t4)
            t6 = t1 * t5
            t7 = t6 * t3
            out0[e] = t7
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 64, 136, cluster_m=2, subtile_n=8, pingpong=True, raster_m=16, products=2, unrolled=True, transposed=True), Stages(ab=6, row=2, store=4))


@cute.jit
def launch(
    a: cute.Tensor,
    b0: cute.Tensor,
    b1: cute.Tensor,
    scale_a: cute.Tensor,
    scale_b0: cute.Tensor,
    scale_b1: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    a_t = transpose(a)
    b0_t = transpose(b0)
    b1_t = transpose(b1)
    out0_t = transpose(out0)
    gemm(b0_t, [a_t], [scale_a, scale_b0, scale_b1], [out0_t], max_active_clusters, stream, further_as=[b1_t])
