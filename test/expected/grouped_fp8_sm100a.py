"""out0 = bf16(acc * scale_a * scale_b * colvec0)

    scale_a  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait
    scale_b  groupvec  f32   group_staged    the tile's columns of its group in shared memory, ahead of the accumulator wait
    colvec0  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait

cute_scaled_grouped_mm_scale_128x128_88e6ef40:
sm_100a, tile 128x128_1x1, planes aligned to 16 bytes:
128 by 128, subtiles of 32 columns, raster 8.
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
from cute_backend.spec import ProductKind
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.sm100 import Sm100Gemm


class Epilogue:
    loads = ("scale_a", "scale_b", "colvec0")
    stores = ("out0",)
    staged = (
        SmemOperand("scale_b", Float32),
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
            smem.scale_b[column] = glob.scale_b[tile.group, tile.clamp_column(column)]

    @cute.jit
    def begin(self, tile, glob):
        scale_a = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            scale_a[r] = glob.scale_a[tile.row(r)]
        colvec0 = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            colvec0[r] = glob.colvec0[tile.row(r)]
        return SimpleNamespace(scale_a=scale_a, colvec0=colvec0)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        scale_b_smem = sub.row_slice(smem.scale_b)
        scale_b = cute.make_rmem_tensor(scale_b_smem.shape, Float32)
        cute.autovec_copy(scale_b_smem, scale_b)
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            c = sub.column_of(e)
            t0 = acc[e] * held.scale_a[r]
            t1 = t0 * scale_b[c]
            t2 = t1 * held.colvec0[r]
            out0[e] = t2
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm100Gemm(Epilogue(), TileConfig(Arch.SM100A, 128, 128), Stages(ab=6, row=2, store=4), kind=ProductKind.GROUPED)


@cute.jit
def launch(
    a: cute.Tensor,
    offsets: cute.Tensor,
    b: cute.Tensor,
    scale_a: cute.Tensor,
    scale_b: cute.Tensor,
    colvec0: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, [b], [scale_a, scale_b, colvec0], [out0], max_active_clusters, stream, offsets=offsets)
