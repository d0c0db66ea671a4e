"""out0 = bf16(relu(acc + bias))

    bias  colvec  bf16  row_read        one value for each row of a thread, before the accumulator wait

cute_mm_bias_relu_64x16_99c4f4f0:
sm_80, tile 64x16_1x1_by16_split4_unrolled_transposed, planes aligned to 16 bytes:
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
from cute_backend.templates.sm80 import Sm80Gemm
from cute_backend.templates.split_sums import SplitGemm


class Epilogue:
    loads = ("bias",)
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
        bias_bf16 = cute.make_rmem_tensor(tile.rows, BFloat16)
        for r in cutlass.range_constexpr(tile.rows):
            bias_bf16[r] = glob.bias[tile.row(r)]
        bias = math.widen(bias_bf16, Float32)
        return SimpleNamespace(bias=bias)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            r = sub.row_of(e)
            t0 = acc[e] + held.bias[r]
            t1 = math.maximum(t0, 0.0)
            out0[e] = t1
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = SplitGemm(Sm80Gemm, Epilogue(), TileConfig(Arch.SM80, 64, 16, subtile_n=16, split_k=4, unrolled=True, transposed=True), Stages(ab=16, store=1))


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    bias: cute.Tensor,
    out0: cute.Tensor,
    workspace: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    a_t = transpose(a)
    b_t = transpose(b)
    out0_t = transpose(out0)
    gemm(b_t, [a_t], [bias], [out0_t], workspace, max_active_clusters, stream)
