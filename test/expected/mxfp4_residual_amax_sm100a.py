"""t0 = acc + exact0
   out0 = bf16(t0)
   out1 = bf16(row_max(abs(t0)))

    a_scales  1x32     e8m0  tensor_memory   brought by TMA with each k tile, and copied there for the MMA
    b_scales  1x32     e8m0  tensor_memory   brought by TMA with each k tile, and copied there for the MMA
    exact0    exact    bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait

cute_scaled_mm_residual_amax_256x128_5aaf2e62:
sm_100a, tile 256x128_2x1_2cta, planes aligned to 16 bytes:
256 by 128, 2 CTAs a tile, clusters of 2 by 1, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.memory_ops import device_reduce as reduce
from cute_backend.spec import Axis, DType, Scaling
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.finish import Finish
from cute_backend.templates.mma_scaled import Sm100MmaScaled
from cute_backend.templates.sm100 import Sm100Gemm


class Epilogue:
    loads = ("exact0",)
    stores = ("out0", "out1_max")
    staged = ()
    shared_loads = (
        SmemOperand("exact0", BFloat16),
    )
    shared_stores = (
        SmemOperand("out0", BFloat16),
    )
    sweeps = (
        Visit(planes=("exact0",), ends=True),
    )

    @cute.jit
    def begin(self, tile, glob):
        out1 = reduce.Partials(reduce.MAX, tile.rows)
        return SimpleNamespace(out1=out1)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        exact0_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        sub.copy_from(smem.exact0, exact0_bf16)
        exact0 = math.widen(exact0_bf16, Float32)
        smem.release()
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        out1 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            t0 = acc[e] + exact0[e]
            t1 = math.abs(t0)
            out0[e] = t0
            out1[e] = t1
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)
        held.out1.take_rows(out1, sub)

    @cute.jit
    def end(self, tile, glob, held):
        held.out1.across(tile.row_lanes)
        out1_max_glob = glob.out1_max
        for r in cutlass.range_constexpr(tile.rows):
            part, row, inside = tile.row_target(r)
            (out1_max_part,) = held.out1[r]
            if inside:
                out1_max_glob[part, row] = out1_max_part


gemm = Sm100Gemm(Epilogue(), TileConfig(Arch.SM100A, 256, 128, cluster_m=2, ctas=2), Stages(ab=6, exact=4, store=4), Sm100MmaScaled(Scaling.MX, DType.E2M1X2))
finish = Finish(
    gemm.config,
    reduce.Result(reduce.MAX, Axis.ROW, BFloat16),
)


@cute.jit
def launch(
    a: cute.Tensor,
    a_scales: cute.Tensor,
    b: cute.Tensor,
    b_scales: cute.Tensor,
    exact0: cute.Tensor,
    out0: cute.Tensor,
    out1: cute.Tensor,
    workspace: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    m, n = a.shape[0], b.shape[1]
    partials = finish.partials(workspace, m, n)
    gemm(a, [b], [exact0], [out0, *partials], max_active_clusters, stream, [a_scales, b_scales])
    finish(partials, [out1], m, n, stream)
