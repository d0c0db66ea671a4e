"""out0 = bf16(where(column % 64 // 8 < 3, acc * exact0 + block64_rotate_first(acc, 24) * exact1, acc)) as (B, H, 2048, 64)

    exact0  exact   bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait, strides (0, s) along M, strides (0, 1) from block to block of the first 24 of 64 columns and within one
    exact1  exact   bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait, strides (0, s) along M, strides (0, 1) from block to block of the first 24 of 64 columns and within one

cute_mm_mul_block_rotate_first_add_where_256x128_d17a580c:
sm_100a, tile 256x128_2x1_2cta, planes aligned to 16 bytes:
256 by 128, 2 CTAs a tile, clusters of 2 by 1, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
Strides are 0, 1 or s, any other stride.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand, table, by_heads
from cute_backend.templates.sm100 import Sm100Gemm


class Epilogue:
    loads = ("exact0", "exact1")
    stores = ("out0",)
    staged = ()
    shared_loads = (
        SmemOperand("exact0", BFloat16, repeats=True),
        SmemOperand("exact1", BFloat16, repeats=True),
    )
    shared_stores = (
        SmemOperand("out0", BFloat16, by_heads=True),
    )
    sweeps = (
        Visit(planes=("exact0", "exact1")),
    )

    @cute.jit
    def begin(self, tile, glob):
        return SimpleNamespace()

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        exact0_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        sub.copy_from(smem.exact0, exact0_bf16)
        exact0 = math.widen(exact0_bf16, Float32)
        exact1_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        sub.copy_from(smem.exact1, exact1_bf16)
        exact1 = math.widen(exact1_bf16, Float32)
        smem.release()
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        t0_kept = cute.make_rmem_tensor(sub.elements, Float32)
        t1_of = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            t0 = acc[e] * exact0[e]
            t0_kept[e] = t0
            t1_of[e] = acc[e]
        t1 = sub.rotate_first(t1_of, 64, 24)
        for e in cutlass.range_constexpr(sub.elements):
            t2 = t1[e] * exact1[e]
            t3 = t0_kept[e] + t2
            t4 = sub.part_of(e, 64, 8)
            t5 = t4 < 3
            t6 = math.where(t5, t3, acc[e])
            out0[e] = t6
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm100Gemm(Epilogue(), TileConfig(Arch.SM100A, 256, 128, cluster_m=2, ctas=2), Stages(ab=5, exact=4, store=4))


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    exact0: cute.Tensor,
    exact1: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    exact0_plane = table(exact0)
    exact1_plane = table(exact1)
    out0_heads = by_heads(out0, 2048, 64)
    gemm(a, [b], [exact0_plane, exact1_plane], [out0_heads], max_active_clusters, stream)
