"""A simple FP64 GEMM in the CuTe DSL: the kernel that `operators_fp64_gemm.py` brings into a registry.

One thread computes one element of the result, and nothing is kept in shared memory: it is simple, not fast.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float64


class Fp64GemmKernel:
    """out (L, M, N) = a (L, M, K) @ b (L, K, N), by tiles of (rows, columns), a thread for each element."""

    def __init__(self, tile: tuple[int, int]) -> None:
        self.tile = tile

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream) -> None:
        rows, columns = self.tile
        batches, m, n = out.shape
        grid = (cute.ceil_div(n, columns), cute.ceil_div(m, rows), batches)
        self.kernel(a, b, out).launch(grid=grid, block=(columns, rows, 1), stream=stream)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor) -> None:
        x, y, _ = cute.arch.thread_idx()
        tile_x, tile_y, batch = cute.arch.block_idx()
        row = tile_y * self.tile[0] + y
        column = tile_x * self.tile[1] + x  # neighbouring threads write neighbouring columns
        if row < out.shape[1] and column < out.shape[2]:
            total = Float64(0.0)
            for k in range(a.shape[2]):
                total += a[batch, row, k] * b[batch, k, column]
            out[batch, row, column] = total
