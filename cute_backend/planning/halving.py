"""Whether two warpgroups share the epilogue of a tile, with half of its columns each: on sm_100a.

One warpgroup puts a single warp on each of the four schedulers of a multiprocessor, and nothing hides what
that warp waits for. Two hide each other's latency, and each thread has half of the columns to keep registers
for. Where the MMA takes longer than either, the second one would only take shared memory from A and B."""

from __future__ import annotations

from dataclasses import replace

from cute_backend.planning.epilogue_time import epilogue_cycles, mma_cycles
from cute_backend.planning.shared_memory import ab_stages
from cute_backend.planning.tiles import TileConfig
from cute_backend.spec import Axis, BColumns, EpilogueSpec

MAX_THREAD_COLUMNS = 128
"""Columns of a tile that one thread has elements in, where a second warpgroup can have the others."""

LEAST_AB_STAGES = 4
"""Stages of A and B that planes of a second warpgroup leave, where those of one do. Each is multiplied in 256
cycles or more, so that four are some 1000 cycles, in which memory answers. Not measured."""


def halving(config: TileConfig, spec: EpilogueSpec, k: int) -> TileConfig:
    """The configuration for a problem of depth `k`, with a second warpgroup where the MMA would not hide the
    epilogue of one."""
    hidden = mma_cycles(config, spec, k) > epilogue_cycles(config, spec)
    return config if hidden or not can_halve(config, spec) else replace(config, column_groups=2)


def can_halve(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a second warpgroup can have half of the tile's columns: whole subtiles of them, whose planes in
    shared memory leave A and B as many stages as they need. A subtile has whole blocks of columns.

    It gives up registers to the second one. With sums of columns or of the plane a kernel spilled 8 bytes
    then (256 x 256 and 128 x 128), with even and odd columns of one B 32 (256 x 128 x 2), and with split-K 8
    (128 x 128).
    """
    if config.target.accumulators.in_registers or config.column_groups > 1:
        return False
    across = any(store.reduce is not None and store.reduce.axis is not Axis.ROW for store in spec.stores)
    if across or spec.b_columns is BColumns.INTERLEAVED or config.split_k > 1:
        return False
    if config.tile_n // 2 % config.subtile_n:
        return False
    enough = min(ab_stages(config, spec), LEAST_AB_STAGES)
    return ab_stages(replace(config, column_groups=2), spec) >= enough
