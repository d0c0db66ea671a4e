"""Ampere's A100: mma.sync, whose accumulators lie in the registers of the warps that load and multiply."""

from __future__ import annotations

from ...spec import DType
from .target import MAX_REGISTERS, Accumulators, Cut, Shape, Target, Tiles, TileTime, Timing

_TILES = Tiles(
    shipped=(
        Shape(256, 128),
        Shape(128, 128),
        Shape(64, 128),
        Shape(64, 64),
    ),
    tried=(
        Shape(256, 128),
        Shape(128, 128),
        Shape(128, 64),
        Shape(64, 128),
        Shape(64, 64),
    ),
    clusters=((1, 1),),
)

_CLOCK_MHZ, _PRODUCTS, _SHARED_BYTES, _L2_BYTES = 1410, 1024, 128, 5120 / 108
"""Of a multiprocessor: its boost clock; the products of 16 bits that it sums up in a cycle; the bytes of
shared memory that it reads or writes in one; the bytes that it reads of L2, its share of what all do (NVIDIA
A100 Tensor Core GPU Architecture, 2020)."""


def _time(rows: int, columns: int) -> TileTime:
    """The time of a KiB of K by the data sheet, because nothing was measured on an A100.

    It is the longer of two times: that of the tensor cores, and that of shared memory, from which each warp
    reads its rows of A and all columns of B. With all multiprocessors busy, L2 may take longer than both.
    """
    warps, warp_rows = max(rows // 32, 4), min(rows // 4, 32)
    multiplied = rows * columns * 512 / _PRODUCTS
    shared = (warps * (warp_rows + columns) + rows + columns) * 1024 / _SHARED_BYTES
    read = (rows + columns) * 1024 / _L2_BYTES
    least = max(multiplied, shared)
    return TileTime(0.0, 1.0, least / _CLOCK_MHZ, max(read - least, 0.0) / _CLOCK_MHZ, 0.0)


TARGET = Target(
    name="sm_80",
    family="Ampere",
    capability=(8, 0),
    gpu="A100",
    sm_count=108,
    smem_bytes=163 * 1024,
    template="cute_backend.templates.sm80:Sm80Gemm",
    operands=frozenset((DType.BF16, DType.F16)),
    tma=False,
    promotes=False,
    products_per_cycle=2 * _PRODUCTS,
    # As wgmma's (PTX ISA, mma.m16n8k16, matrix D). A warp with 32 rows reads less of B for each product.
    accumulators=Accumulators(block_m=64, row_threads=4, in_registers=True, group_blocks=2),
    least_subtile_n=8,
    unrolled_subtile_n=32,
    row_bits=512,
    epilogue_registers=MAX_REGISTERS,
    tiles=_TILES,
    timing=Timing(
        tiles={Cut(*shape[:2]): _time(*shape[:2]) for shape in _TILES.all},
        reached={},
        beyond_us=0.0,  # rows beyond the last are not read
        bytes_per_us=2.039e6,  # NVIDIA's data sheet of the A100 80GB SXM: 2039 GB/s
    ),
)
