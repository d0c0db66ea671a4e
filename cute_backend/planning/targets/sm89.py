"""Ada, such as the L4, the L40S and the RTX 4090: tiles and shared memory as on sm_86, and fp8."""

from __future__ import annotations

from dataclasses import replace

from cute_backend.planning.targets import sm80, sm86
from cute_backend.planning.targets.data_sheet import DataSheet
from cute_backend.planning.targets.target import Demand, Shape
from cute_backend.spec import DType

_L40S = DataSheet(clock_mhz=2520, products=512, bytes_per_us=0.864e6)
"""NVIDIA L40S data sheet: 362 TFLOP/s in bf16, 733 in fp8, 864 GB/s."""

# A thread keeps a set of promoted sums in registers, in addition to the accumulators.
_TILES = replace(
    sm86.TILES,
    shipped={
        Demand.PLANES: (Shape(128, 64), Shape(64, 128), Shape(64, 64)),
        Demand.PROMOTED: (Shape(64, 128), Shape(64, 64)),
        Demand.CONVERTED: sm80.CONVERTED,
    },
)

TARGET = replace(
    sm86.TARGET,
    name="sm_89",
    family="Ada",
    capability=(8, 9),
    gpu="L40S",
    sm_count=142,
    # Its MMA multiplies e5m2 too, but the DSL's op for it takes two operands of one type, and torch has no
    # product of e5m2 by e5m2 (nvidia-cutlass-dsl 4.8, warp.MmaFP8Op).
    operands=sm86.TARGET.operands | {DType.E4M3},
    promotes=True,
    products_per_cycle=2 * _L40S.products,
    tiles=_TILES,
    timing=_L40S.timing(_TILES),
)
