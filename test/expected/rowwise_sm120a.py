"""out0 = bf16(acc * scale_a * scale_b)

    scale_a  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait
    scale_b  rowvec  f32   register_hoist  the columns of a thread, before the accumulator wait

cute_scaled_mm_64x64_25c0bbeb:
sm_120a, tile 64x64_1x1, planes aligned to 16 bytes:
64 by 64, subtiles of 32 columns, raster 8.
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
from cute_backend.templates.sm120 import Sm120Gemm


class Epilogue:
    loads = ("scale_a", "scale_b")
    stores = ("out0",)
    staged = ()
    shared_loads = ()
    shared_stores = (
        SmemOperand("out0", BFloat16),
    )
    sweeps = (
        Visit(),
    )

    @cute.jit
    def begin(self, tile, glob):
        scale_a = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            scale_a[r] = glob.scale_a[tile.row(r)]
        scale_b = cute.make_rmem_tensor(tile.columns, Float32)
        for c in cutlass.range_constexpr(tile.columns):
            scale_b[c] = glob.scale_b[tile.column(c)]
        return SimpleNamespace(scale_a=scale_a, scale_b=scale_b)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        scale_b = sub.columns_of(held.scale_b)
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            c = sub.column_of(e)
            t0 = acc[e] * held.scale_a[r]
            t1 = t0 * scale_b[c]
            out0[e] = t1
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm120Gemm(Epilogue(), TileConfig(Arch.SM120A, 64, 64), Stages(ab=5, store=1))


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    scale_a: cute.Tensor,
    scale_b: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, [b], [scale_a, scale_b], [out0], max_active_clusters, stream)
