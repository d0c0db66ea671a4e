"""out0 = bf16(acc * 0.5 * (tanh((acc + acc * acc * acc * 0.044715) * 0.7978846) + 1) * exact0)

    a_scales  1x128    f32   k_tile_ring     copied to shared memory ahead of each k tile, by element
    b_scales  1x128    f32   k_tile_ring     copied to shared memory ahead of each k tile, by element
    exact0    exact    bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait

cute_scaled_mm_gelu_mul_256x128_281304dd:
sm_90a, tile 256x128_1x2, planes aligned to 16 bytes:
256 by 128, clusters of 1 by 2, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.spec import Scaling
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.block_scaled import Sm90BlockScaled
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ("exact0",)
    stores = ("out0",)
    staged = ()
    shared_loads = (
        SmemOperand("exact0", BFloat16),
    )
    shared_stores = (
        SmemOperand("out0", BFloat16),
    )
    sweeps = (
        Visit(planes=("exact0",)),
    )

    @cute.jit
    def begin(self, tile, glob):
        return SimpleNamespace()

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        exact0_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        sub.copy_from(smem.exact0, exact0_bf16)
        exact0 = math.widen(exact0_bf16, Float32)
        smem.release()
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            t0 = acc[e] * acc[e]
            t1 = t0 * 0.1029432395800235  # 0.7978846 * 2 * log2(e) * 0.044715
            t2 = t1 + 2.302208198144325  # 0.7978846 * 2 * log2(e)
            t3 = acc[e] * t2
            t4 = math.logistic2(t3)
            t5 = acc[e] * t4
            t6 = t5 * exact0[e]
            out0[e] = t6
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 256, 128, cluster_n=2), Stages(ab=3, exact=4, store=4), Sm90BlockScaled(Scaling.LINE, Scaling.LINE, sets=1, k_tiles=2, pieces=2))


@cute.jit
def launch(
    a: cute.Tensor,
    a_scales: cute.Tensor,
    b: cute.Tensor,
    b_scales: cute.Tensor,
    exact0: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, [b], [exact0], [out0], max_active_clusters, stream, [a_scales, b_scales])
