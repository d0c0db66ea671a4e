"""A matrix product in Triton that uses mma.sync on every GPU: a peer for our kernels that use it too.

On Hopper Triton uses wgmma, unless the environment variable that is set here disables it.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

os.environ["DISABLE_MMA_V3"] = "1"


class Tile(NamedTuple):
    """The tile and the schedule of the kernel, by Triton's names."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int


TILES = (
    Tile(256, 128, 64, 3, 8),
    Tile(128, 256, 64, 3, 8),
    Tile(128, 128, 64, 3, 4),
    Tile(128, 64, 64, 4, 4),
    Tile(64, 128, 64, 4, 4),
    Tile(64, 64, 128, 4, 4),
)
"""The tiles that were fastest for some problem, or nearly so, of eleven that were tried on an H200."""


@triton.jit
def _kernel(
    a,
    b,
    c,
    m,
    n,
    k,
    stride_a,
    stride_b,
    stride_c,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group_m: tl.constexpr,
):
    rows, columns = tl.cdiv(m, block_m), tl.cdiv(n, block_n)
    group = tl.program_id(0) // (group_m * columns)
    first = group * group_m
    height = min(rows - first, group_m)
    row = first + tl.program_id(0) % height
    column = (tl.program_id(0) % (group_m * columns)) // height
    at_m, at_n = row * block_m + tl.arange(0, block_m), column * block_n + tl.arange(0, block_n)
    in_m = tl.max_contiguous(tl.multiple_of(at_m % m, block_m), block_m)
    in_n = tl.max_contiguous(tl.multiple_of(at_n % n, block_n), block_n)
    at_k = tl.arange(0, block_k)
    a_at = a + in_m.to(tl.int64)[:, None] * stride_a + at_k[None, :]
    b_at = b + in_n.to(tl.int64)[None, :] * stride_b + at_k[:, None]
    acc = tl.zeros((block_m, block_n), dtype=tl.float32)
    for _ in range(tl.cdiv(k, block_k)):  # K is a multiple of block_k
        acc = tl.dot(tl.load(a_at), tl.load(b_at), acc)
        a_at += block_k
        b_at += block_k
    c_at = c + at_m.to(tl.int64)[:, None] * stride_c + at_n[None, :]
    tl.store(c_at, acc.to(c.dtype.element_ty), mask=(at_m[:, None] < m) & (at_n[None, :] < n))


def mm(tile: Tile, a: Tensor, b: Tensor, out: Tensor) -> Any:
    """Computes `out` (M, N), the product of `a` (M, K) with the transpose of `b` (N, K). All are contiguous,
    and K is a multiple of the tile's. Returns Triton's compiled kernel."""
    (m, k), n = a.shape, b.shape[0]
    if k % tile.block_k:
        raise ValueError(f"K is {k}; the tile takes multiples of {tile.block_k}")
    grid = (triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n),)
    how = {"group_m": 8, "num_stages": tile.num_stages, "num_warps": tile.num_warps}
    blocks = {"block_m": tile.block_m, "block_n": tile.block_n, "block_k": tile.block_k}
    return _kernel[grid](a, b, out, m, n, k, a.stride(0), b.stride(0), out.stride(0), **blocks, **how)


def assert_mma_sync(compiled: Any) -> None:
    """Raises AssertionError if a kernel multiplies by anything but mma.sync."""
    ptx = compiled.asm["ptx"]
    assert "mma.sync" in ptx and "wgmma" not in ptx, "Triton did not take mma.sync"


def fits(tile: Tile) -> bool:
    """Whether a tile's stages of A and B in 16 bits fit the shared memory of this GPU."""
    stage = (tile.block_m + tile.block_n) * tile.block_k * 2
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    return stage * tile.num_stages <= limit
