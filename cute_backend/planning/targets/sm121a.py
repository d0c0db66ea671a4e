"""The GB10 of a DGX Spark: the instructions of sm_120a, with less bandwidth."""

from __future__ import annotations

from dataclasses import replace

from cute_backend.planning.targets import sm120a
from cute_backend.planning.targets.data_sheet import DataSheet

_GB10 = DataSheet(clock_mhz=2400, products=512, bytes_per_us=0.273e6)
"""NVIDIA DGX Spark data sheet: 273 GB/s, and 1 PFLOP/s in sparse fp4, of which bf16 has an eighth. It
names no clock."""

TARGET = replace(
    sm120a.TARGET,
    name="sm_121a",
    capability=(12, 1),
    gpu="GB10",
    sm_count=48,
    products_per_cycle=2 * _GB10.products,
    timing=_GB10.timing(sm120a.TILES),
)
