"""Decides whether two warpgroups share the epilogue of a tile on sm_100a, each with half of the columns.

One warpgroup puts a single warp on each of the four schedulers of a multiprocessor, and nothing hides the
latency of that warp. Two warpgroups hide each other's latency, and each thread keeps registers for only half
of the columns. If the MMA takes longer than the epilogue of one warpgroup, a second one gains nothing and
takes shared memory from A and B."""

from __future__ import annotations

from dataclasses import replace

from cute_backend.planning.epilogue_time import epilogue_cycles, mma_cycles
from cute_backend.planning.mainloops import mainloop_of
from cute_backend.planning.shared_memory import ab_stages
from cute_backend.planning.tiles import TileConfig
from cute_backend.spec import EpilogueSpec

MAX_THREAD_COLUMNS = 128
"""The most columns of a tile that one thread works on, if a second warpgroup can take the others."""

LEAST_AB_STAGES = 4
"""Stages of A and B that must remain beside the planes of a second warpgroup, if that many remain beside
those of one. The MMA takes at least 256 cycles for each stage, so four stages cover some 1000 cycles of
memory latency. Not measured."""


def halving(config: TileConfig, spec: EpilogueSpec, k: int) -> TileConfig:
    """Returns the configuration for a problem of depth `k`.

    It adds a second warpgroup if the MMA does not hide the epilogue of one, as it never does whose warps have
    other work while it multiplies.
    """
    hidden = mma_cycles(config, spec, k) > epilogue_cycles(config, spec)
    hidden = hidden and mainloop_of(spec, config.target).frees_epilogue
    return config if hidden or not can_halve(config, spec) else replace(config, column_groups=2)


def can_halve(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a second warpgroup can take half of the tile's columns.

    Each half must consist of whole subtiles, which hold whole blocks of columns, and the planes of both must
    leave A and B enough stages in shared memory.
    """
    if config.target.accumulators.in_registers or config.column_groups > 1:
        return False
    if config.tile_n // 2 % config.subtile_n or config.tile_n // 2 % spec.whole_columns:
        return False
    enough = min(ab_stages(config, spec), LEAST_AB_STAGES)
    return ab_stages(replace(config, column_groups=2), spec) >= enough
