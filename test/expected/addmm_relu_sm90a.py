"""out0 = bf16(relu(acc + bias))

    bias  rowvec  bf16  smem_staged     the tile's columns in shared memory, ahead of the accumulator wait

cute_mm_bias_relu_128x128_e545d7f7:
sm_90a, tile 128x128_1x2_pingpong_by64, planes aligned to 16 bytes:
128 by 128, ping-pong, clusters of 1 by 2, subtiles of 64 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.planning import Arch, TileConfig
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue:
    loads = ("bias",)
    stores = ("out0",)
    staged = (
        SmemOperand("bias", BFloat16),
    )
    shared_loads = ()
    shared_stores = (
        SmemOperand("out0", BFloat16),
    )

    @cute.jit
    def stage(self, tile, glob, smem):
        for i in cutlass.range_constexpr(tile.tile_n // 32):
            column = tile.lane + 32 * i
            smem.bias[column] = glob.bias[tile.clamp_column(column)]

    @cute.jit
    def begin(self, tile, glob):
        return SimpleNamespace()

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        bias_smem = sub.row_slice(smem.bias)
        bias_bf16 = cute.make_rmem_tensor(bias_smem.shape, BFloat16)
        cute.autovec_copy(bias_smem, bias_bf16)
        bias = math.widen(bias_bf16, Float32)
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            c = sub.column_of(e)
            t0 = acc[e] + bias[c]
            t1 = math.maximum(t0, 0.0)
            out0[e] = t1
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


gemm = Sm90Gemm(Epilogue(), TileConfig(Arch.SM90A, 128, 128, cluster_n=2, subtile_n=64, pingpong=True))


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
