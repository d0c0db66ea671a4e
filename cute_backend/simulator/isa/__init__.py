"""The opcodes, one module per family. Importing this package fills the table in `opcodes.py`."""

from cute_backend.simulator.isa import (  # noqa: F401
    barrier,
    bulk,
    control,
    convert,
    floating,
    integer,
    matrix,
    memory,
    tcgen05,
    warpwide,
    wgmma,
)
