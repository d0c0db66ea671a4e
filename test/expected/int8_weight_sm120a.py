"""t1 = acc * rowvec0 + rowvec1
   out0 = bf16(t1 / (exp(-t1) + 1))

    rowvec0  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait
    rowvec1  colvec  bf16  row_read        one value for each row of a thread, before the accumulator wait

cute_mm_scale_bias_silu_64x8_9f003dbf:
sm_120a, tile 64x8_1x1_by8_unrolled_transposed, planes aligned to 16 bytes:
64 by 8 of the transposed product, subtiles of 8 columns, unrolled, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.spec import DType, Order
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand, transpose
from cute_backend.templates.warp_converted import Sm80Converted
from cute_backend.templates.sm120 import Sm120Gemm


class Epilogue:
    loads = ("rowvec0", "rowvec1")
    stores = ("out0",)
    staged = ()
    shared_loads = ()
    shared_stores = (
        SmemOperand("out0", BFloat16, Order.COLUMN),
    )
    sweeps = (
        Visit(),
    )

    @cute.jit
    def begin(self, tile, glob):
        rowvec0 = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            rowvec0[r] = glob.rowvec0[tile.row(r)]
        rowvec1_bf16 = cute.make_rmem_tensor(tile.rows, BFloat16)
        for r in cutlass.range_constexpr(tile.rows):
            rowvec1_bf16[r] = glob.rowvec1[tile.row(r)]
        rowvec1 = math.widen(rowvec1_bf16, Float32)
        return SimpleNamespace(rowvec0=rowvec0, rowvec1=rowvec1)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            t0 = acc[e] * held.rowvec0[r]
            t1 = t0 + held.rowvec1[r]
            t2 = t1 * 1.4426950408889634  # log2(e)
            t3 = math.logistic2(t2)
            t4 = t1 * t3
            out0[e] = t4
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm120Gemm(Epilogue(), TileConfig(Arch.SM120A, 64, 8, subtile_n=8, unrolled=True, transposed=True, converts=True), Stages(ab=9, store=1), Sm80Converted(DType.I8))


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    rowvec0: cute.Tensor,
    rowvec1: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    a_t = transpose(a)
    b_t = transpose(b)
    out0_t = transpose(out0)
    gemm(b_t, [a_t], [rowvec0, rowvec1], [out0_t], max_active_clusters, stream)
