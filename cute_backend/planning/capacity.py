"""The number of planes that one kernel reads and writes.

A few planes always fit: those for which shared memory lacks room are read and written by element. More loads
fit if shared memory holds all planes. More outputs don't: a thread keeps a subtile of each until all are
computed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from cute_backend.planning.registers import NARROW_SUBTILE_N, holds_values, most_written
from cute_backend.planning.rules import WHOLE_SUBTILES
from cute_backend.planning.search import tile_table
from cute_backend.planning.served import unserved
from cute_backend.planning.shared_memory import Rings, room_bytes
from cute_backend.planning.subtiles import WHOLE_VISITS
from cute_backend.planning.targets import Arch
from cute_backend.planning.tiles import EPILOGUE_STAGES, TileConfig
from cute_backend.spec import Accumulator, DType, EpilogueSpec, Op, Store

PLANES = 4
"""The loads, and as many outputs, that fit whatever their dtypes are."""

REDUCTIONS = 2
"""The reductions that fit beside as many outputs: a thread keeps partials of each for the whole tile."""

_LARGE = 128 * 128
"""Elements of a CTA's share of a tile that keep the MMA busy."""


@cache
def plane_bits_held(arch: Arch, accumulators: tuple[Accumulator, ...]) -> int:
    """Returns the bits of one element, summed over planes, for which a large tile has shared memory beside
    the fewest useful stages of A and B. The tile is one of those that serve a product, or a pair of
    products. 0 if the architecture has no kernel for them."""
    spec = _writing(1, *accumulators)
    if unserved(spec, arch.target):
        return 0
    configs = [replace(config, occupancy=1) for config in tile_table(arch, spec)]
    large = min(_LARGE, max(map(_elements, configs)))
    return max(_bits(config) for config in configs if _elements(config) >= large)


@cache
def planes_written(columns: int, read: int = 0, tables: int = 0) -> int:
    """Returns the most planes that a kernel writes, whatever their dtypes are, if ops need blocks of
    `columns` columns whole, and it reads `read` planes, of which `tables` are by blocks."""
    width = next((each for each in WHOLE_SUBTILES if each % columns == 0), WHOLE_VISITS[0])
    most = most_written(width, read, tables)
    most = PLANES if most is None else most
    if width not in WHOLE_VISITS:
        return most
    # Only a tile of one visit has such blocks, and only if it leaves a thread registers.
    tile = TileConfig(Arch.SM90A, 64, width, subtile_n=width)
    product = Accumulator("acc", DType.BF16, DType.BF16)
    able = (each for each in range(1, most + 1) if holds_values(tile, _writing(each, product)))
    return max(able, default=0)


def _writing(planes: int, *accumulators: Accumulator) -> EpilogueSpec:
    """A spec of one product, or of a pair, that writes as many planes."""
    total = Op("t0", "add", (accumulators[0].name, accumulators[-1].name), accumulators[0].dtype)
    stores = tuple(Store(f"out{i}", "t0", total.dtype) for i in range(planes))
    return EpilogueSpec(accumulators, (), (total,), stores)


def _elements(config: TileConfig) -> int:
    return config.mma_m * config.mma_n


def _bits(config: TileConfig) -> int:
    narrow = replace(config, subtile_n=min(config.subtile_n, NARROW_SUBTILE_N))
    return room_bytes(narrow, Rings()) * 8 // (EPILOGUE_STAGES * narrow.stage_elements)
