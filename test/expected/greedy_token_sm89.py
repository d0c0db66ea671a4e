"""out0 = i64(row_argmax(acc + bias))

    bias  rowvec  bf16  register_hoist  the columns of a thread, before the accumulator wait

cute_mm_bias_argmax_128x64_86a89d3b:
sm_89, tile 128x64_1x1, planes aligned to 16 bytes:
128 by 64, subtiles of 32 columns, raster 8.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from cute_backend.memory_ops import device_math as math
from cute_backend.memory_ops import device_reduce as reduce
from cute_backend.spec import Axis
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.finish import Finish
from cute_backend.templates.sm80 import Sm80Gemm


class Epilogue:
    loads = ("bias",)
    stores = ("out0_key", "out0_index")
    staged = ()
    shared_loads = ()
    shared_stores = ()
    sweeps = (
        Visit(ends=True),
    )

    @cute.jit
    def begin(self, tile, glob):
        bias_read = cute.make_rmem_tensor(tile.columns, BFloat16)
        for c in cutlass.range_constexpr(tile.columns):
            bias_read[c] = glob.bias[tile.column(c)]
        bias = math.pack(bias_read)
        out0 = reduce.Partials(reduce.ARGMAX, tile.rows)
        return SimpleNamespace(bias=bias, out0=out0)

    @cute.jit
    def visit(self, sub, acc, glob, held, smem):
        bias_bf16 = sub.columns_of(held.bias)
        bias = math.widen(bias_bf16, Float32)
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            c = sub.column_of(e)
            t0 = acc[e] + bias[c]
            out0[e] = t0
        held.out0.take_rows(out0, sub)

    @cute.jit
    def end(self, tile, glob, held):
        held.out0.across(tile.row_lanes)
        out0_key_glob = glob.out0_key
        out0_index_glob = glob.out0_index
        for r in cutlass.range_constexpr(tile.rows):
            part, row, inside = tile.row_target(r)
            out0_key_part, out0_index_part = held.out0[r]
            if inside:
                out0_key_glob[part, row] = out0_key_part
                out0_index_glob[part, row] = out0_index_part


gemm = Sm80Gemm(Epilogue(), TileConfig(Arch.SM89, 128, 64), Stages(ab=4))
finish = Finish(
    gemm.config,
    reduce.Result(reduce.ARGMAX, Axis.ROW, Int64),
)


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
    m, n = a.shape[0], b.shape[1]
    partials = finish.partials(workspace, m, n)
    gemm(a, [b], [bias], partials, max_active_clusters, stream)
    finish(partials, [out0], m, n, stream)
