"""The opcodes, one module per family. Importing this package fills the table in `opcodes.py`."""

from cute_backend.simulator.isa import (  # noqa: F401
    addresses,
    atomics,
    barrier,
    bulk,
    cluster_launch,
    control,
    convert,
    copies,
    floating,
    integer,
    logic,
    matrix,
    memory,
    mma,
    select,
    tcgen05,
    tcgen05_mma,
    tensor,
    warpwide,
    wgmma,
)
