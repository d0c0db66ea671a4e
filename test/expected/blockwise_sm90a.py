"""out0 = bf16(acc)

    a_scales  1x128    f32   k_tile_ring     copied to shared memory ahead of each k tile, by element
    b_scales  128x128  f32   k_tile_ring     copied to shared memory ahead of each k tile, by element

cute_scaled_mm_128x256_abb5a16b:
sm_90a, tile 128x256_2x1, planes aligned to 16 bytes:
128 by 256, clusters of 2 by 1, subtiles of 32 columns, raster 8.
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
    loads = ()
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
        return SimpleNamespace()

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            out0[e] = acc[e]
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 128, 256, cluster_m=2), Stages(ab=4, store=3), Sm90BlockScaled(Scaling.LINE, Scaling.SQUARE, sets=1, k_tiles=8, pieces=2))


@cute.jit
def launch(
    a: cute.Tensor,
    a_scales: cute.Tensor,
    b: cute.Tensor,
    b_scales: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, [b], [], [out0], max_active_clusters, stream, [a_scales, b_scales])
