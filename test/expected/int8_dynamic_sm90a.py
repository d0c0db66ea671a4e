"""out0 = bf16(acc * colvec0 * rowvec0 + rowvec1)

    colvec0  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait
    rowvec0  rowvec  f32   smem_staged     the tile's columns in shared memory, ahead of the accumulator wait
    rowvec1  rowvec  bf16  smem_staged     the tile's columns in shared memory, ahead of the accumulator wait

cute_int_mm_scale_bias_128x128_a17ef2cb:
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
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ("colvec0", "rowvec0", "rowvec1")
    stores = ("out0",)
    staged = (
        SmemOperand("rowvec0", Float32),
        SmemOperand("rowvec1", BFloat16),
    )
    shared_loads = ()
    shared_stores = (
        SmemOperand("out0", BFloat16),
    )
    sweeps = (
        Visit(),
    )

    @cute.jit
    def stage(self, tile, glob, smem):
        for i in cutlass.range_constexpr(tile.tile_n // 32):
            column = tile.lane + 32 * i
            smem.rowvec0[column] = glob.rowvec0[tile.clamp_column(column)]
            smem.rowvec1[column] = glob.rowvec1[tile.clamp_column(column)]

    @cute.jit
    def begin(self, tile, glob):
        colvec0 = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            colvec0[r] = glob.colvec0[tile.row(r)]
        return SimpleNamespace(colvec0=colvec0)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        rowvec0_smem = sub.row_slice(smem.rowvec0)
        rowvec0 = cute.make_rmem_tensor(rowvec0_smem.shape, Float32)
        cute.autovec_copy(rowvec0_smem, rowvec0)
        rowvec1_smem = sub.row_slice(smem.rowvec1)
        rowvec1_bf16 = cute.make_rmem_tensor(rowvec1_smem.shape, BFloat16)
        cute.autovec_copy(rowvec1_smem, rowvec1_bf16)
        rowvec1 = math.widen(rowvec1_bf16, Float32)
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            c = sub.column_of(e)
            t0 = math.to_f32(acc[e]) * held.colvec0[r]
            t1 = t0 * rowvec0[c]
            t2 = t1 + rowvec1[c]
            out0[e] = t2
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 128, 128, cluster_n=2, pingpong=True, raster_m=16), Stages(ab=6, row=2, store=4))


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    colvec0: cute.Tensor,
    rowvec0: cute.Tensor,
    rowvec1: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, [b], [colvec0, rowvec0, rowvec1], [out0], max_active_clusters, stream)
