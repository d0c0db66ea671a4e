"""out0 = bf16(acc + rowvec0)

    b_scales  by 128   f32   registers       of groups of K, loaded four groups ahead, by element
    b_zeros   by 128   i8    registers       of groups of K, loaded four groups ahead, by element
    rowvec0   colvec   bf16  row_read        one value for each row of a thread, before the accumulator wait

cute_mm_bias_128x16_f817955c:
sm_90a, tile 128x16_1x1_by16_unrolled_transposed, planes aligned to 16 bytes:
128 by 16 of the transposed product, subtiles of 16 columns, unrolled, raster 16.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.spec import DType, Order, WeightGroups
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand, transpose
from cute_backend.templates.converted import Sm90Converted
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ("rowvec0",)
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
        rowvec0_bf16 = cute.make_rmem_tensor(tile.rows, BFloat16)
        for r in cutlass.range_constexpr(tile.rows):
            rowvec0_bf16[r] = glob.rowvec0[tile.row(r)]
        rowvec0 = math.widen(rowvec0_bf16, Float32)
        return SimpleNamespace(rowvec0=rowvec0)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            t0 = acc[e] + held.rowvec0[r]
            out0[e] = t0
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 128, 16, subtile_n=16, raster_m=16, unrolled=True, transposed=True, converts=True, packing=2), Stages(ab=8, store=4), Sm90Converted(DType.U4X2, WeightGroups(128, DType.F32, DType.BF16, DType.I8, DType.BF16)))


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    b_scales: cute.Tensor,
    b_zeros: cute.Tensor,
    rowvec0: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    a_t = transpose(a)
    b_t = transpose(b)
    b_scales_t = transpose(b_scales)
    b_zeros_t = transpose(b_zeros)
    out0_t = transpose(out0)
    gemm(b_t, [a_t], [rowvec0], [out0_t], max_active_clusters, stream, [b_scales_t, b_zeros_t])
