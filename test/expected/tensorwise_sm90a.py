"""out0 = bf16(acc * scale_a * scale_b)

    scale_a  scalar  f32   scalar          read once, before the accumulator wait
    scale_b  scalar  f32   scalar          read once, before the accumulator wait

cute_scaled_mm_128x128_250c95bd:
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
        scale_a = cute.make_rmem_tensor(1, Float32)
        for i in cutlass.range_constexpr(1):
            scale_a[i] = glob.scale_a[i]
        scale_b = cute.make_rmem_tensor(1, Float32)
        for i in cutlass.range_constexpr(1):
            scale_b[i] = glob.scale_b[i]
        return SimpleNamespace(scale_a=scale_a, scale_b=scale_b)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            t0 = acc[e] * held.scale_a[0]
            t1 = t0 * held.scale_b[0]
            out0[e] = t1
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 128, 128, cluster_n=2, pingpong=True, raster_m=16), Stages(ab=6, store=4))


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
