"""out0 = bf16(acc * scale_a * scale_b)

    scale_a  rowvec  f32   register_hoist  the columns of a thread, before the accumulator wait
    scale_b  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait

cute_scaled_mm_64x16_adc99b03:
sm_90a, tile 64x16_1x1_by16_split4_unrolled_transposed, planes aligned to 16 bytes:
64 by 16 of the transposed product, split-K of 4, one CTA per part, subtiles of 16 columns, unrolled, raster 8.
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
    loads = ("scale_a", "scale_b")
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
        scale_a = cute.make_rmem_tensor(tile.columns, Float32)
        for c in cutlass.range_constexpr(tile.columns):
            scale_a[c] = glob.scale_a[tile.column(c)]
        scale_b = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            scale_b[r] = glob.scale_b[tile.row(r)]
        return SimpleNamespace(scale_a=scale_a, scale_b=scale_b)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        scale_a = sub.columns_of(held.scale_a)
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            c = sub.column_of(e)
            t0 = acc[e] * scale_a[c]
            t1 = t0 * held.scale_b[r]
            out0[e] = t1
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 64, 16, subtile_n=16, split_k=4, unrolled=True, transposed=True), Stages(ab=16, store=4))


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
    a_t = transpose(a)
    b_t = transpose(b)
    out0_t = transpose(out0)
    gemm(b_t, [a_t], [scale_a, scale_b], [out0_t], max_active_clusters, stream)
