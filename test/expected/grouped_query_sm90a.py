"""out0 = bf16(acc0 * exact0 + block64_rotate_half(acc0) * exact1)
   out1 = bf16(acc1 * exact2 + block64_rotate_half(acc1) * exact3)
   out2 = bf16(acc2 + bias0)

    exact0  exact   bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait, strides (0, s) along M, strides (0, 1) from block to block of 64 columns and within one
    exact1  exact   bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait, strides (0, s) along M, strides (0, 1) from block to block of 64 columns and within one
    exact2  exact   bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait, strides (0, s) along M, strides (0, 1) from block to block of 64 columns and within one
    exact3  exact   bf16  tma             a subtile at a time by TMA, ahead of the accumulator wait, strides (0, s) along M, strides (0, 1) from block to block of 64 columns and within one
    bias0   rowvec  bf16  smem_staged     the tile's columns in shared memory, ahead of the accumulator wait

cute_mm_by_3_mul_block_rotate_half_add_bias_128x128_12348328:
sm_90a, tile 128x128_1x2_pingpong, planes aligned to 16 bytes:
128 by 128, ping-pong, clusters of 1 by 2, subtiles of 32 columns in boxes of 64, raster 16.
templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come
from memory_ops/simplify.py, which replaces ops by cheaper ones.
Strides are 0, 1 or s, any other stride.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_backend.memory_ops import device_math as math
from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand, table, pair_halves
from cute_backend.templates.segments import Segments
from cute_backend.templates.sm90 import Sm90Gemm


class Epilogue0:
    loads = ("exact0", "exact1")
    stores = ("out0",)
    staged = ()
    shared_loads = (
        SmemOperand("exact0", BFloat16, repeats=True),
        SmemOperand("exact1", BFloat16, repeats=True),
    )
    shared_stores = (
        SmemOperand("out0", BFloat16),
    )
    sweeps = (
        Visit(planes=("exact0", "exact1")),
    )

    @cute.jit
    def begin(self, tile, glob):
        return SimpleNamespace()

    @cute.jit
    def visit(self, sub, acc0, glob, held, smem):
        exact0_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        sub.copy_from(smem.exact0, exact0_bf16)
        exact0 = math.widen(exact0_bf16, Float32)
        exact1_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        sub.copy_from(smem.exact1, exact1_bf16)
        exact1 = math.widen(exact1_bf16, Float32)
        smem.release()
        out0 = cute.make_rmem_tensor(sub.elements, Float32)
        t0_kept = cute.make_rmem_tensor(sub.elements, Float32)
        t1_of = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            t0 = acc0[e] * exact0[e]
            t0_kept[e] = t0
            t1_of[e] = acc0[e]
        t1 = sub.rotate_half(t1_of, 64)
        for e in cutlass.range_constexpr(sub.elements):
            t2 = t1[e] * exact1[e]
            t3 = t0_kept[e] + t2
            out0[e] = t3
        sub.copy_to(math.narrow(out0, BFloat16), smem.out0)


class Epilogue1:
    loads = ("exact2", "exact3")
    stores = ("out1",)
    staged = ()
    shared_loads = (
        SmemOperand("exact2", BFloat16, repeats=True),
        SmemOperand("exact3", BFloat16, repeats=True),
    )
    shared_stores = (
        SmemOperand("out1", BFloat16),
    )
    sweeps = (
        Visit(planes=("exact2", "exact3")),
    )

    @cute.jit
    def begin(self, tile, glob):
        return SimpleNamespace()

    @cute.jit
    def visit(self, sub, acc1, glob, held, smem):
        exact2_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        sub.copy_from(smem.exact2, exact2_bf16)
        exact2 = math.widen(exact2_bf16, Float32)
        exact3_bf16 = cute.make_rmem_tensor(sub.elements, BFloat16)
        sub.copy_from(smem.exact3, exact3_bf16)
        exact3 = math.widen(exact3_bf16, Float32)
        smem.release()
        out1 = cute.make_rmem_tensor(sub.elements, Float32)
        t4_kept = cute.make_rmem_tensor(sub.elements, Float32)
        t5_of = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            t4 = acc1[e] * exact2[e]
            t4_kept[e] = t4
            t5_of[e] = acc1[e]
        t5 = sub.rotate_half(t5_of, 64)
        for e in cutlass.range_constexpr(sub.elements):
            t6 = t5[e] * exact3[e]
            t7 = t4_kept[e] + t6
            out1[e] = t7
        sub.copy_to(math.narrow(out1, BFloat16), smem.out1)


class Epilogue2:
    loads = ("bias0",)
    stores = ("out2",)
    staged = (
        SmemOperand("bias0", BFloat16),
    )
    shared_loads = ()
    shared_stores = (
        SmemOperand("out2", BFloat16),
    )
    sweeps = (
        Visit(),
    )

    @cute.jit
    def stage(self, tile, glob, smem):
        for i in cutlass.range_constexpr(tile.tile_n // 32):
            column = tile.lane + 32 * i
            smem.bias0[column] = glob.bias0[tile.clamp_column(column)]

    @cute.jit
    def begin(self, tile, glob):
        return SimpleNamespace()

    @cute.jit
    def visit(self, sub, acc2, glob, held, smem):
        bias0_smem = sub.row_slice(smem.bias0)
        bias0_bf16 = cute.make_rmem_tensor(bias0_smem.shape, BFloat16)
        cute.autovec_copy(bias0_smem, bias0_bf16)
        bias0 = math.widen(bias0_bf16, Float32)
        out2 = cute.make_rmem_tensor(sub.elements, Float32)
        for e in cutlass.range_constexpr(sub.elements):
            c = sub.column_of(e)
            t8 = acc2[e] + bias0[c]
            out2[e] = t8
        sub.copy_to(math.narrow(out2, BFloat16), smem.out2)


gemm = Sm90Gemm(Segments([Epilogue0(), Epilogue1(), Epilogue2()], [4096, 1024, 1024]), TileConfig(Arch.SM90A, 128, 128, cluster_n=2, pingpong=True, raster_m=16, box_subtiles=2), Stages(ab=5, exact=1, row=2, store=2))


@cute.jit
def launch(
    a: cute.Tensor,
    b0: cute.Tensor,
    b1: cute.Tensor,
    b2: cute.Tensor,
    exact0: cute.Tensor,
    exact1: cute.Tensor,
    exact2: cute.Tensor,
    exact3: cute.Tensor,
    bias0: cute.Tensor,
    out0: cute.Tensor,
    out1: cute.Tensor,
    out2: cute.Tensor,
    max_active_clusters: Int32,
    stream: cuda.CUstream,
):
    exact0_paired = pair_halves(table(exact0), 64, 32)
    exact1_paired = pair_halves(table(exact1), 64, 32)
    b0_paired = pair_halves(b0, 64, 16)
    out0_paired = pair_halves(out0, 64, 32)
    exact2_paired = pair_halves(table(exact2), 64, 32)
    exact3_paired = pair_halves(table(exact3), 64, 32)
    b1_paired = pair_halves(b1, 64, 16)
    out1_paired = pair_halves(out1, 64, 32)
    gemm(a, [b0_paired, b1_paired, b2], [exact0_paired, exact1_paired, exact2_paired, exact3_paired, bias0], [out0_paired, out1_paired, out2], max_active_clusters, stream)
