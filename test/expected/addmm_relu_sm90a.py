"""out0 = bf16(relu(acc + bias))

    bias  rowvec  bf16  register_hoist  the columns of a thread, before the accumulator wait

sm_90a, tile 128x128_2x1_pingpong, planes aligned to 16 bytes.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.templates.config import Arch, TileConfig
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ("bias",)
    stores = ("out0",)
    staged = ()
    tma_loads = ()
    tma_stores = (
        SmemOperand("out0", BFloat16),
    )

    @cute.jit
    def begin(self, tile, glob):
        bias = cute.make_rmem_tensor(tile.columns, BFloat16)
        for c in cutlass.range_constexpr(tile.columns):
            bias[c] = glob.bias[tile.column(c)]
        bias = math.widen(bias, Float32)
        return SimpleNamespace(bias=bias)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        out0_smem = sub.partition(smem.out0)
        out0 = cute.make_rmem_tensor(out0_smem.shape, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            c = sub.column_of(e)
            t0 = acc[e] + held.bias[sub.first_column + c]
            t1 = math.maximum(t0, 0.0)
            out0[e] = t1
        cute.autovec_copy(math.narrow(out0, BFloat16), out0_smem)


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 128, 128, cluster_m=2, pingpong=True))


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    bias: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, b, [bias], [out0], max_active_clusters, stream)
