"""out0 = bf16(acc * scale_b + exact0)

    scale_b  colvec  f32   row_read        one value for each row of a thread, before the accumulator wait
    exact0   exact   bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait

cute_scaled_mm_residual_64x8_49ce7ecc:
sm_90a, tile 64x8_1x1_by8_split2_unrolled_transposed, planes aligned to 16 bytes:
64 by 8 of the transposed product, split-K of 2, one CTA per part, subtiles of 8 columns, unrolled, raster 8.
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
from cute_backend.templates.converted import Sm90Converted
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ("scale_b", "exact0")
    stores = ("out0",)
    staged = ()
    shared_loads = (
        SmemOperand("exact0", BFloat16, Order.COLUMN),
    )
    shared_stores = (
        SmemOperand("out0", BFloat16, Order.COLUMN),
    )
    sweeps = (
        Visit(planes=("exact0",)),
    )

    @cute.jit
    def begin(self, tile, glob):
        scale_b = cute.make_rmem_tensor(tile.rows, Float32)
        for r in cutlass.range_constexpr(tile.rows):
            scale_b[r] = glob.scale_b[tile.row(r)]
        return SimpleNamespace(scale_b=scale_b)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        exact0_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        sub.copy_from(smem.exact0, exact0_bf16)
        exact0 = math.widen(exact0_bf16, Float32)
        smem.release()
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            t0 = acc[e] * held.scale_b[r]
            t1 = t0 + exact0[e]
            out0[e] = t1
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 64, 8, subtile_n=8, split_k=2, unrolled=True, transposed=True, converts=True), Stages(ab=16, exact=4, store=4), Sm90Converted(DType.E4M3))


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    scale_b: cute.Tensor,
    exact0: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    a_t = transpose(a)
    b_t = transpose(b)
    exact0_t = transpose(exact0)
    out0_t = transpose(out0)
    gemm(b_t, [a_t], [scale_b, exact0_t], [out0_t], max_active_clusters, stream)
