"""out0 = f32(acc + exact0)

    exact0  exact   f32   tma             a subtile at a time by TMA, ahead of the accumulator wait

cute_grouped_k_mm_residual_128x192_86108b78:
sm_90a, tile 128x192_2x1_pingpong, planes aligned to 16 bytes:
128 by 192, ping-pong, clusters of 2 by 1, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.spec import ProductKind
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ("exact0",)
    stores = ("out0",)
    staged = ()
    shared_loads = (
        SmemOperand("exact0", Float32),
    )
    shared_stores = (
        SmemOperand("out0", Float32),
    )
    sweeps = (
        Visit(planes=("exact0",)),
    )

    @cute.jit
    def begin(self, tile, glob):
        return SimpleNamespace()

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        exact0 = cute.make_rmem_tensor(sub.elements, Float32)
        sub.copy_from(smem.exact0, exact0)
        smem.release()
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            t0 = acc[e] + exact0[e]
            out0[e] = t0
        sub.copy_to(math.narrow(out0, Float32), smem.out0)


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 128, 192, cluster_m=2, pingpong=True), Stages(ab=4, exact=2, store=2), kind=ProductKind.K_GROUPED)


@cute.jit
def launch(
    a: cute.Tensor,
    offsets: cute.Tensor,
    b: cute.Tensor,
    exact0: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, [b], [exact0], [out0], max_active_clusters, stream, offsets=offsets)
