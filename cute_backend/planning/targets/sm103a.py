"""B300: the tensor-core instructions and the tensor memory of a B200, under a capability of its own."""

from __future__ import annotations

from dataclasses import replace

from cute_backend.planning.targets import sm100a
from cute_backend.spec import DType

TARGET = replace(
    sm100a.TARGET,
    name="sm_103a",
    family="Blackwell Ultra",
    capability=(10, 3),
    gpu="B300",
    sm_count=148,
    # Its tensor cores are slow in int8: on a GB300 torch's own product took 6.4 to 13.4 times as long as one
    # in tf32 (pytorch issue 187094).
    operands=sm100a.TARGET.operands - {DType.I8},
)
