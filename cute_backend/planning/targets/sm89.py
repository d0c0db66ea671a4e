"""Ada, such as the L4, the L40S and the RTX 4090: tiles and shared memory as on sm_86."""

from __future__ import annotations

from dataclasses import replace

from . import sm86
from .data_sheet import DataSheet

_L40S = DataSheet(clock_mhz=2520, products=512, bytes_per_us=0.864e6)
"""NVIDIA L40S data sheet: 362 TFLOP/s in bf16, 864 GB/s."""

TARGET = replace(
    sm86.TARGET,
    name="sm_89",
    family="Ada",
    capability=(8, 9),
    gpu="L40S",
    sm_count=142,
    products_per_cycle=2 * _L40S.products,
    timing=_L40S.timing(sm86.TILES),
)
