"""Ampere's GPUs other than the A100, such as the A10 and the RTX 3090: the same instructions, with less
shared memory."""

from __future__ import annotations

from dataclasses import replace

from cute_backend.planning.targets import sm80
from cute_backend.planning.targets.data_sheet import DataSheet
from cute_backend.planning.targets.target import Demand, Shape, Tiles

TILES = Tiles(
    shipped={
        Demand.PLANES: (
            Shape(128, 128),
            Shape(128, 64),
            Shape(64, 128),
            Shape(64, 64),
        ),
        Demand.CONVERTED: sm80.CONVERTED,
    },
    splits=(2, 4, 8),
    even=sm80.EVEN,
)
"""256 x 128 would have room for two stages, and none for planes."""

_A10 = DataSheet(clock_mhz=1695, products=512, bytes_per_us=0.6e6)
"""NVIDIA A10 data sheet: 125 TFLOP/s in bf16, 600 GB/s. The RTX 3090 multiplies half as much in a cycle."""

TARGET = replace(
    sm80.TARGET,
    name="sm_86",
    capability=(8, 6),
    gpu="A10",
    sm_count=72,
    smem_bytes=99 * 1024,
    # In 128 x 128, the products of a stage take 2048 cycles, during which the next stage is copied. Three
    # stages left no room for planes.
    least_ab_stages=2,
    products_per_cycle=2 * _A10.products,
    tiles=TILES,
    timing=_A10.timing(TILES),
)
