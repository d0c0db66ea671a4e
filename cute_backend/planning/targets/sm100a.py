"""Data center Blackwell: tcgen05, whose accumulators lie in tensor memory, those of two tiles at a time."""

from __future__ import annotations

from cute_backend.planning.targets.target import (
    MAX_REGISTERS,
    Accumulators,
    Cut,
    Demand,
    EvenTiles,
    Shape,
    Target,
    Tiles,
    TileTime,
    Timing,
)
from cute_backend.spec import DType, Scaling

_TILES = Tiles(
    shipped={
        Demand.PLANES: (
            Shape(256, 256, 2, ctas=2),
            Shape(256, 128, 2, ctas=2),
            Shape(128, 128),
            Shape(128, 64),
        ),
        Demand.SCALED: (
            Shape(256, 192, 2, ctas=2),
            Shape(256, 128, 2, ctas=2),
            Shape(128, 256),
            Shape(128, 128),
            Shape(128, 64),
        ),
        Demand.BLOCKS: (
            Shape(256, 192, 2, ctas=2),
            Shape(256, 160, 2, ctas=2),
            Shape(128, 256),
            Shape(128, 192),
            Shape(128, 160),
        ),
    },
    splits=(2, 4),
    # The MMA of 128 rows has any multiple of 16 columns (PTX ISA, tcgen05.mma of kind f16, f8f6f4 and i8), as
    # visits have.
    even=EvenTiles(rows=(128,), step=16, clusters=(1, 2)),
)

# Nothing was measured on a B200: each tile has the constants of an H200's tile of the same area.
_TIMING = Timing(
    tiles={
        Cut(128, 256): TileTime(0.0, 2.6, 6.5, 0.0, 0.0),
        Cut(128, 128): TileTime(0.0, 1.3, 3.25, 0.0, 0.0),
        Cut(128, 64): TileTime(0.0, 2.1, 2.4, 0.0, 0.0),
        Cut(128, 64, cluster_m=2): TileTime(0.0, 2.1, 2.0, 0.0, 0.0),
        # An assumption: with split-K, passing sums on takes 2 and 3 microseconds, less than on an H200.
        Cut(128, 64, split_k=2): TileTime(0.0, 4.1, 2.4, 0.0, 0.0),
        Cut(128, 64, split_k=4): TileTime(0.0, 5.1, 2.4, 0.0, 0.0),
    },
    reached={},
    beyond_us=0.006,
    bytes_per_us=8e6,  # NVIDIA's data sheet of the B200: 8 TB/s
)

TARGET = Target(
    name="sm_100a",
    family="Blackwell",
    capability=(10, 0),
    gpu="B200",
    sm_count=148,
    smem_bytes=227 * 1024,
    least_ab_stages=3,
    template="cute_backend.templates.sm100:Sm100Gemm",
    operands=frozenset((DType.E4M3, DType.E5M2, DType.E2M1X2, DType.I8, DType.BF16, DType.F16)),
    planes_by_tma=True,
    promotes=False,
    # The data sheet's 4.5 PFLOP/s in fp8, without sparsity, of 148 multiprocessors at 1.86 GHz.
    products_per_cycle=8192,
    # A row of tensor memory is one thread's (PTX ISA, tcgen05.ld.32x32b).
    accumulators=Accumulators(block_m=128, row_threads=1, in_registers=False),
    least_subtile_n=16,  # the bytes of TMA's least box
    unrolled_subtile_n=None,
    epilogue_registers=MAX_REGISTERS,  # a CTA has too few threads to have fewer
    tiles=_TILES,
    segment_tile_n=256,
    scalings=frozenset((Scaling.LINE, Scaling.SQUARE, Scaling.MX, Scaling.NV)),
    timing=_TIMING,
)
