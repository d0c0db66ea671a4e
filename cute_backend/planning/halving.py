"""Decides whether two warpgroups share the epilogue of a tile on sm_100a, each with half of the columns.

One warpgroup puts a single warp on each of the four schedulers of a multiprocessor, and nothing hides the
latency of that warp. Two warpgroups hide each other's latency, and each thread keeps registers for only half
of the columns. If the MMA takes longer than the epilogue of one warpgroup, a second one gains nothing and
takes shared memory from A and B."""

from __future__ import annotations

from dataclasses import replace

from cute_backend.planning.epilogue_time import epilogue_cycles, mma_cycles
from cute_backend.planning.shared_memory import SumScales, ab_stages
from cute_backend.planning.tiles import TileConfig
from cute_backend.spec import ROTATE_FIRST, Axis, BColumns, EpilogueSpec, LoadKind, ProductKind, Scaling

MAX_THREAD_COLUMNS = 128
"""The most columns of a tile that one thread works on, if a second warpgroup can take the others."""

LEAST_AB_STAGES = 4
"""Stages of A and B that must remain beside the planes of a second warpgroup, if that many remain beside
those of one. The MMA takes at least 256 cycles for each stage, so four stages cover some 1000 cycles of
memory latency. Not measured."""


LEAST_KEPT_COLUMNS = 128
"""Columns of the smallest blocks whose values a thread of two warpgroups keeps (`can_halve`)."""


def halving(config: TileConfig, spec: EpilogueSpec, k: int) -> TileConfig:
    """Returns the configuration for a problem of depth `k`.

    It adds a second warpgroup if the MMA does not hide the epilogue of one. If the warps of the epilogue add
    up the sums of k tiles, the MMA never hides it, since they do that while the MMA multiplies. So such
    kernels have a second warpgroup wherever they can.
    """
    hidden = mma_cycles(config, spec, k) > epilogue_cycles(config, spec) and SumScales.of(spec) is None
    return config if hidden or not can_halve(config, spec) else replace(config, column_groups=2)


def can_halve(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a second warpgroup can take half of the tile's columns.

    Each half must consist of whole subtiles, which hold whole blocks of columns, and the planes of both must
    leave A and B enough stages in shared memory.

    Threads have fewer registers with two warpgroups. Kernels then spilled 8 bytes with sums of columns or of
    the plane (256 x 256 and 128 x 128), 32 bytes with even and odd columns of one B (256 x 128 x 2), 8 bytes
    with split-K (128 x 128), 24 and 32 bytes where the first columns of blocks are rotated (256 x 160 and 256
    x 256), and by element 16 and 24 bytes where passes reduce the one block of each half (128 x 160 and 128
    x 192). Where planes are read ahead of passes, they spilled 8 to 32 bytes by element with blocks of 48 and
    96 columns (128 x 192), and 16 with blocks of 128 and two results (256 x 256). In NVFP4 with rows in
    groups, a pair spilled 8 bytes beside a rowvec (128 x 128 x 2), and a plane that is read 24 beside two
    (256 x 192).
    """
    if config.target.accumulators.in_registers or config.column_groups > 1:
        return False
    across = any(store.reduce is not None and store.reduce.axis is not Axis.ROW for store in spec.stores)
    if across or spec.b_columns is BColumns.INTERLEAVED or config.split_k > 1:
        return False
    in_groups = spec.product.kind is ProductKind.GROUPED
    crowded = config.products > 1 or len(spec.loads_of(LoadKind.EXACT)) > 0
    if in_groups and spec.product.a_scaling is Scaling.NV and crowded:
        return False
    if config.ctas == 1 and spec.pass_columns == config.tile_n // 2:
        return False
    whole = config.tile_n // 2 % config.subtile_n == config.tile_n // 2 % spec.whole_columns == 0
    if not whole or any(op.op == ROTATE_FIRST for op in spec.ops):
        return False
    if spec.kept and (spec.pass_columns < LEAST_KEPT_COLUMNS or len(spec.planes) > 1):
        return False
    enough = min(ab_stages(config, spec), LEAST_AB_STAGES)
    return ab_stages(replace(config, column_groups=2), spec) >= enough
