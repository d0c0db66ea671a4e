"""out0 = bf16(relu(acc + bias))

    bias  rowvec  bf16  register_hoist  the columns of a thread, before the accumulator wait

cute_mm_bias_relu_128x64_abe8fb44:
sm_86, tile 128x64_1x1, planes aligned to 16 bytes:
128 by 64, subtiles of 32 columns, raster 8.
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
from cute_backend.templates.sm80 import Sm80Gemm


class Epilogue:
    loads = ("bias",)
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
        bias_read = cute.make_rmem_tensor(tile.columns, BFloat16)
        for c in cutlass.range_constexpr(tile.columns):
            bias_read[c] = glob.bias[tile.column(c)]
        bias = math.pack(bias_read)
        return SimpleNamespace(bias=bias)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        bias_bf16 = sub.columns_of(held.bias)
        bias = math.widen(bias_bf16, Float32)
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            c = sub.column_of(e)
            t0 = acc[e] + bias[c]
            t1 = math.maximum(t0, 0.0)
            out0[e] = t1
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm80Gemm(Epilogue(), TileConfig(Arch.SM86, 128, 64), Stages(ab=3, store=1))


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    bias: cute.Tensor,
    out0: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    gemm(a, [b], [bias], [out0], max_active_clusters, stream)
