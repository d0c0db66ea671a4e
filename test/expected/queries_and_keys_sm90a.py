"""out0 = bf16(acc0 + rowvec0)
   out1 = bf16(acc1)

    b0_scales  by 128   f32   registers       of groups of K, loaded four groups ahead, by element
    b1_scales  by 128   f32   registers       of groups of K, loaded four groups ahead, by element
    b0_zeros   by 128   i8    registers       of groups of K, loaded four groups ahead, by element
    b1_zeros   by 128   i8    registers       of groups of K, loaded four groups ahead, by element
    rowvec0    colvec   bf16  row_read        one value for each row of a thread, before the accumulator wait

cute_mm_by_2_bias_64x16_55b0869d:
sm_90a, tile 64x16_1x1_by16_unrolled_transposed, planes aligned to 16 bytes:
64 by 16 of the transposed product, subtiles of 16 columns, unrolled, raster 8.
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
from cute_backend.templates.segments import RowSegments
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue0:
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
    def visit(self, sub, acc0, glob, held, smem):
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            t0 = acc0[e] + held.rowvec0[r]
            out0[e] = t0
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


class Epilogue1:
    loads = ()
    stores = ("out1",)
    staged = ()
    shared_loads = ()
    shared_stores = (
        SmemOperand("out1", BFloat16, Order.COLUMN),
    )
    sweeps = (
        Visit(),
    )

    @cute.jit
    def begin(self, tile, glob):
        return SimpleNamespace()

    @cute.jit
    def visit(self, sub, acc1, glob, held, smem):
        out1 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            out1[e] = acc1[e]
        sub.copy_to(math.narrow(out1, BFloat16), smem.out1)


gemm = Sm90Gemm(RowSegments([Epilogue0(), Epilogue1()], [4096, 1024]), TileConfig(Arch.SM90A, 64, 16, subtile_n=16, unrolled=True, transposed=True, converts=True), Stages(ab=16, store=4), Sm90Converted(DType.I8, WeightGroups(128, DType.F32, DType.F32, DType.I8, DType.BF16)))


@cute.jit
def launch(
    a: cute.Tensor,
    b0: cute.Tensor,
    b1: cute.Tensor,
    b0_scales: cute.Tensor,
    b1_scales: cute.Tensor,
    b0_zeros: cute.Tensor,
    b1_zeros: cute.Tensor,
    rowvec0: cute.Tensor,
    out0: cute.Tensor,
    out1: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    a_t = transpose(a)
    b0_t = transpose(b0)
    b0_scales_t = transpose(b0_scales)
    b1_scales_t = transpose(b1_scales)
    b0_zeros_t = transpose(b0_zeros)
    b1_zeros_t = transpose(b1_zeros)
    out0_t = transpose(out0)
    b1_t = transpose(b1)
    out1_t = transpose(out1)
    gemm(b0_t, [a_t], [rowvec0], [out0_t, out1_t], max_active_clusters, stream, [b0_scales_t, b1_scales_t, b0_zeros_t, b1_zeros_t], further_as=[b1_t])
