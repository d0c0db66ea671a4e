"""Ampere's A100: mma.sync, whose accumulators lie in the registers of the warps that load and multiply."""

from __future__ import annotations

from cute_backend.planning.targets.data_sheet import DataSheet
from cute_backend.planning.targets.target import (
    MAX_REGISTERS,
    Accumulators,
    Demand,
    EvenTiles,
    Shape,
    Target,
    Tiles,
)
from cute_backend.spec import STORED_DTYPES, DType

CONVERTED = (
    Shape(128, 64, transposed=True),
    Shape(128, 32, transposed=True),
    Shape(64, 64, transposed=True),
    Shape(64, 32, transposed=True),
)
"""Tiles whose rows are converted, and whose columns are the rows of D. Planes move in visits of 32 of these
at least. With few rows, memory takes longer than the products of 32: in 64 x 32 a k tile takes 256 cycles of
an A100's tensor cores, and its 8 KiB of stored values some 600 of its memory (data sheet)."""

EVEN = EvenTiles(rows=(64, 128), accumulators=96)
"""Tiles as wide as even shares of the rows. With up to 128 accumulators, rows would have fewer and wider
shares: in steps of 16 rows, the tiles of 21 drawn problems that then change are predicted to take 1.03 times
as long, in the geometric mean, and at most 1.18 times. No GPU has timed them."""

_TILES = Tiles(
    shipped={
        Demand.PLANES: (
            Shape(256, 128),
            Shape(128, 128, occupancy=2),
            Shape(128, 64),
            Shape(64, 128),
            Shape(64, 64),
        ),
        Demand.CONVERTED: CONVERTED,
    },
    splits=(2, 4, 8),
    even=EVEN,
)

_A100 = DataSheet(clock_mhz=1410, products=1024, bytes_per_us=2.039e6, l2_bytes=5120 / 108)
"""NVIDIA A100 Tensor Core GPU Architecture, 2020; its memory is that of the A100 80GB SXM."""

TARGET = Target(
    name="sm_80",
    family="Ampere",
    capability=(8, 0),
    gpu="A100",
    sm_count=108,
    smem_bytes=163 * 1024,
    least_ab_stages=3,
    template="cute_backend.templates.sm80:Sm80Gemm",
    operands=frozenset((DType.I8, DType.BF16, DType.F16)),
    planes_by_tma=False,
    promotes=False,
    converts=frozenset(STORED_DTYPES),
    products_per_cycle=2 * _A100.products,
    # Threads have the elements that wgmma gives them (PTX ISA, mma.m16n8k16, matrix D). A warp with 32 rows
    # reads less of B for each product.
    accumulators=Accumulators(block_m=64, row_threads=4, in_registers=True, group_blocks=2),
    least_subtile_n=8,
    unrolled_subtile_n=32,
    epilogue_registers=MAX_REGISTERS,
    tiles=_TILES,
    timing=_A100.timing(_TILES),
)
