"""Blackwell's smaller GPUs, such as the RTX 5090 and the RTX PRO 6000: Ada's instructions and shared memory.

They have TMA, which brings A and B, and no instructions of a warpgroup or of tensor memory. Planes are copied
by cp.async.
"""

from __future__ import annotations

from dataclasses import replace

from cute_backend.planning.targets import sm86, sm89
from cute_backend.planning.targets.data_sheet import DataSheet

_RTX_5090 = DataSheet(clock_mhz=2407, products=256, bytes_per_us=1.792e6)
"""NVIDIA RTX Blackwell GPU Architecture, 2025: 209.5 TFLOP/s in bf16 with sums in fp32, 1792 GB/s. The RTX
PRO 6000 multiplies twice as much in a cycle."""

TILES = sm86.TILES

TARGET = replace(
    sm89.TARGET,
    name="sm_120a",
    template="cute_backend.templates.sm120:Sm120Gemm",
    family="RTX Blackwell",
    capability=(12, 0),
    gpu="RTX 5090",
    sm_count=170,
    promotes=False,
    products_per_cycle=2 * _RTX_5090.products,
    tiles=TILES,
    timing=_RTX_5090.timing(TILES),
)
