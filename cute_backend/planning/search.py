"""Chooses the tile configuration for a problem, and the configurations that tuning tries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from cute_backend.planning.cost import cost, work_of
from cute_backend.planning.halving import can_halve, halving
from cute_backend.planning.hoisting import can_hoist, hoisting
from cute_backend.planning.naming import words
from cute_backend.planning.registers import NARROW_SUBTILE_N, leaves_registers, long_ops
from cute_backend.planning.rules import MAX_BLOCK, subtiled, suited, with_half_subtiles
from cute_backend.planning.segment_tiles import serving_all
from cute_backend.planning.shallow import shallowed
from cute_backend.planning.shared_memory import SumScales, can_be_shallow, has_planes, holds_planes
from cute_backend.planning.targets import Arch, Shape
from cute_backend.planning.tiles import Alignment, TileConfig
from cute_backend.planning.transposing import multiplied
from cute_backend.spec import (
    BLOCK_PART,
    HEAD_COLUMNS,
    ROTATE_FIRST,
    ROTATE_HALF,
    Axis,
    BColumns,
    Const,
    EpilogueSpec,
    Load,
    LoadKind,
    Op,
    ProductKind,
    Store,
)


def table(arch: Arch, spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """Returns the configurations that may serve a spec, at most five, largest tile first.

    Raises ValueError if no tile holds the spec's blocks of columns whole, or none can rotate its columns.
    """
    if len(spec.segments) > 1:
        return _of_segments(arch, spec, table)
    alone = arch.target.tiles.alone
    found = _serving(arch, spec)
    if not found and spec.rotated_columns and spec.b_columns is not BColumns.APART:
        raise ValueError(
            f"no tile of {arch.value} rotates blocks of {spec.rotated_columns} columns of products of even "
            "and of odd columns; columns of whole products are rotated"
        )
    if not found and (block := spec.product.b_block):
        raise ValueError(
            f"no tile of {arch.value} has blocks of {block} columns of B; supported are blocks that divide "
            "the columns of a tile, and multiples of these"
        )
    if not found:
        sizes = ", ".join(map(str, held(arch, spec)))
        raise ValueError(
            f"no tile of {arch.value} holds blocks of {spec.block_columns} columns whole; "
            f"supported block sizes: {sizes or 'none'}"
        )
    if alone is not None and found[-1].cluster_size > 1:
        found += suited(arch, (alone,), spec)
    *larger, smallest = found
    return *(each for each in larger if _is_listed(each, spec)), smallest


def _is_listed(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a tile of a table is one of those that may serve a spec. If accumulators are in registers,
    shared memory also has to hold all planes."""
    config = subtiled(spec, config, Alignment.TMA)
    held = not config.target.accumulators.in_registers or holds_planes(config, spec)
    return held and _leaves_registers(config, spec)


def _of_segments(
    arch: Arch, spec: EpilogueSpec, of: Callable[[Arch, EpilogueSpec], Iterable[TileConfig]]
) -> tuple[TileConfig, ...]:
    """The tiles that `of` lists for every segment of a spec. Raises ValueError if there is none."""

    def of_one(segment: EpilogueSpec) -> Iterable[TileConfig]:
        return of(arch, segment)

    def of_blocks(segment: EpilogueSpec) -> Iterable[TileConfig]:
        """Lists the tiles for blocks of other segments, too, with one warpgroup or two for the epilogue."""
        tiles = arch.target.tiles
        listed = (*tiles.shipped, *tiles.sized, *tiles.blocks, *tiles.whole_blocks)
        further = suited(arch, listed, segment)
        further += tuple(replace(config, column_groups=1) for config in further)
        fitting = (config for config in further if _fits(config, segment))
        return *of_one(segment), *fitting

    def of_packed(segment: EpilogueSpec) -> Iterable[TileConfig]:
        return (each for each in suited(arch, arch.target.tiles.packed, segment) if _fits(each, segment))

    found = serving_all(spec, of_one) or serving_all(spec, of_blocks)
    if spec.product.b_block:
        found = tuple(dict.fromkeys((*found, *serving_all(spec, of_packed))))
    if not found:
        raise ValueError(f"no tile of {arch.value} serves these {len(spec.segments)} products in one launch")
    return found


@lru_cache(maxsize=4096)
def serves(arch: Arch, spec: EpilogueSpec) -> bool:
    """Whether some tile holds the blocks of columns that a spec reduces, and rotates those that it rotates,
    all of them at once and beside the planes of the spec."""
    return bool(_serving(arch, spec))


@lru_cache(maxsize=256)
def held(arch: Arch, spec: EpilogueSpec) -> tuple[int, ...]:
    """Returns the sizes that all blocks of a spec could have instead, so that some tile serves it."""
    step = HEAD_COLUMNS if any(store.heads for store in spec.stores) else 8
    sizes = range(step, MAX_BLOCK + 1, step)
    return tuple(columns for columns in sizes if serves(arch, _resized(spec, columns)))


def _resized(spec: EpilogueSpec, columns: int) -> EpilogueSpec:
    """The spec with blocks and heads of `columns` columns in place of its own. Pairs of neighbours remain,
    unless it rotates larger blocks, too. If it reduces blocks of several sizes, which only visits can hold,
    the smaller ones become blocks of 8."""
    widest = max((op.reduced_columns for op in spec.ops), default=0)

    def of_op(op: Op) -> Op:
        if op.op == BLOCK_PART:
            return replace(op, operands=(Const(columns),), block=columns)
        if op.op == ROTATE_FIRST:
            first = Const(min(op.first_columns, columns))
            return replace(op, operands=(*op.values, first), block=columns)
        if op.block == 0 or (op.op == ROTATE_HALF and not spec.reordered_columns):
            return op
        return replace(op, block=8 if 0 < op.reduced_columns < widest else columns)

    def of_load(load: Load) -> Load:
        blocks = load.blocks
        return load if blocks is None else replace(load, blocks=replace(blocks, columns=columns, period=0))

    def of_store(store: Store) -> Store:
        heads = store.heads and replace(store.heads, columns=columns)
        return replace(store, block=columns if store.block else 0, heads=heads)

    ops, loads, stores = map(of_op, spec.ops), map(of_load, spec.loads), map(of_store, spec.stores)
    return replace(spec, loads=tuple(loads), ops=tuple(ops), stores=tuple(stores))


def _serving(arch: Arch, spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """Returns the shipped tiles that can serve a spec. If none of them holds the blocks that it reduces, or
    rotates its blocks, returns further tiles of the target that do: those that are one visit, unless blocks
    are rotated, or planes are read ahead of passes, or not at all."""
    found = suited(arch, _shipped(arch, spec), spec)
    if found:
        return found
    tiles = arch.target.tiles

    def able(shapes: tuple[Shape, ...]) -> tuple[TileConfig, ...]:
        return tuple(each for each in suited(arch, shapes, spec) if leaves_registers(each, spec))

    further: tuple[TileConfig, ...] = ()
    if all(load.is_table for load in spec.loads_of(LoadKind.EXACT)) or spec.rotates or spec.kept:
        further = able(tiles.sized) or able(tiles.blocks)
    return further or able(tiles.whole_blocks)


def _shipped(arch: Arch, spec: EpilogueSpec) -> tuple[Shape, ...]:
    """The tiles that a target ships for the kind of a spec."""
    target = arch.target
    if spec.product.a_scaling.by_mma:
        return target.tiles.scaled
    if target.promotes and not spec.product.fast_accum:
        return target.tiles.promoted
    return target.tiles.shipped if has_planes(spec) else target.tiles.reduced or target.tiles.shipped


def offered(arch: Arch, spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """The tiles that the heuristic chooses from when sizes are known: those of the table, the further tiles
    of the target, and the smallest tile of the table with split-K, if the target supports it. The smallest
    tile that holds blocks may be one of ping-pong, which has no split-K: it is then split without.

    For a batched product it is the table alone, because the number of products is not known.
    """
    if len(spec.segments) > 1:
        return _of_segments(arch, spec, offered)
    tiles, shipped = arch.target.tiles, table(arch, spec)
    if spec.product.kind is ProductKind.BATCHED:
        return shipped
    pairs = tiles.pairs if len(spec.accumulators) > 1 else ()
    clusters = tiles.large_clusters if spec.product.kind is ProductKind.DENSE else ()
    sized = (*tiles.sized, *tiles.middle, *clusters, *pairs) if _shipped(arch, spec) is tiles.shipped else ()
    if SumScales.of(spec) is not None:
        sized = tiles.sized_by_blocks
    further = (config for config in suited(arch, sized, spec) if _fits(config, spec))
    # Where accumulators are in tensor memory, each pass would read the sums of other CTAs again.
    again = spec.pass_columns > NARROW_SUBTILE_N and not arch.target.accumulators.in_registers
    splits = tiles.splits if _can_split(arch, spec) and not again else ()
    alone = [config for config in shipped[-1:] if not config.multicasts]
    if spec.pass_columns:
        alone = [replace(config, pingpong=False) for config in alone]
    parted = _parted(arch, spec, tiles.parted, tiles.parts)
    shared = _parted(arch, spec, tiles.parted_clusters, tiles.tried_splits)
    return tuple(dict.fromkeys((*shipped, *further, *_split(alone, splits), *parted, *shared)))


def _fits(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a tile outside the table leaves the epilogue enough registers and shared memory."""
    spec = multiplied(spec, config)
    return holds_planes(config, spec) and _leaves_registers(config, spec)


def _leaves_registers(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a thread has registers by the estimate. If accumulators are in tensor memory, subtiles of half
    the columns are enough (`ladder`)."""
    if leaves_registers(config, spec):
        return True
    in_registers = config.target.accumulators.in_registers
    narrower = None if in_registers else with_half_subtiles(config, spec, Alignment.TMA)
    return narrower is not None and leaves_registers(narrower, spec)


def _can_split(arch: Arch, spec: EpilogueSpec) -> bool:
    """Whether K may be split. It may not for groups, whose tiles or k tiles are only counted on the device,
    nor for scales that the MMA applies, nor if a value is kept in tensor memory, to which each read adds the
    sums of other CTAs."""
    if spec.product.kind.has_offsets or spec.product.a_scaling.by_mma:
        return False
    if spec.kept and not arch.target.accumulators.in_registers:
        return False
    if arch.target.clusters:
        return True
    return len(spec.accumulators) == 1 and _can_leave_sums(spec) and not spec.reductions


def _can_leave_sums(spec: EpilogueSpec) -> bool:
    """Whether the sums of parts of K may go through memory. Only those of dense products may, and those of a
    pair only if each product has a B of its own."""
    return (
        spec.product.kind is ProductKind.DENSE
        and not spec.product.is_block_scaled
        and spec.b_columns is BColumns.APART
        and spec.block_columns == 1
        and not long_ops(spec)
    )


def _parted(
    arch: Arch, spec: EpilogueSpec, shapes: Iterable[Shape], parts: Iterable[int]
) -> Iterator[TileConfig]:
    """Yields the tiles of some shapes whose CTAs leave the sums of parts of K in memory although the target
    has clusters. Their second kernel does not use TMA, which a repeating operand with blocks needs."""
    tiles = arch.target.tiles
    tables = any(load.is_table and load.blocks is not None for load in spec.loads_of(LoadKind.EXACT))
    if tiles.parts and not tables and _shipped(arch, spec) is tiles.shipped and _can_leave_sums(spec):
        for config in _split(suited(arch, shapes, spec), parts):
            by_tma, plain = (subtiled(spec, config, alignment).summing for alignment in Alignment)
            if by_tma == config.summing and (plain.tile_m, plain.tile_n) == (by_tma.tile_m, by_tma.tile_n):
                yield config


def _split(configs: Iterable[TileConfig], parts: Iterable[int]) -> Iterator[TileConfig]:
    """Yields split-K variants of the configurations that can have it."""
    for config in configs:
        if config.splittable:
            yield from (replace(config, split_k=each) for each in parts)


def choose(
    arch: Arch,
    spec: EpilogueSpec,
    m: int,
    n: int,
    k: int,
    sm_count: int,
    of: Callable[[Arch, EpilogueSpec], Iterable[TileConfig]] | None = None,
    groups: int | None = None,
) -> TileConfig:
    """Returns the configuration for a problem that was never tuned: the fastest of those offered, as
    predicted.

    Among equals the larger tile wins, then the smaller split-K. `of` lists other tiles to choose from.
    `groups` is the number of groups of a grouped product's M rows; None stands for one. A second warpgroup
    shares the epilogue if the MMA does not hide that of one (`halving`), and rowvecs are hoisted if the MMA
    hides that (`hoisting`). Planes get more of the shared memory if K is short (`shallowed`), unless `of`
    lists the tiles.
    """
    if of is None and (small := _for_small_groups(arch, spec, m, groups)) is not None:
        return small
    able = offered(arch, spec) if of is None else of(arch, spec)
    best = fastest(able, spec, m, n, k, sm_count, groups)
    if len(spec.segments) > 1:
        return best
    best = hoisting(halving(best, spec, k), spec, k)
    return best if of is not None else shallowed(best, spec, k)


def fastest(
    able: Iterable[TileConfig],
    spec: EpilogueSpec,
    m: int,
    n: int,
    k: int,
    sm_count: int,
    groups: int | None = None,
) -> TileConfig:
    """Returns the configuration among `able`, which must not be empty, that is predicted to be the fastest
    for a problem; of equals, the first."""

    def time(config: TileConfig) -> tuple[bool, float]:
        tiles = config.target.tiles
        untimed = m > tiles.middle_rows and config in _listed(config.arch, spec, tiles.middle)
        margin = _UNTIMED_MARGIN if untimed else 1.0
        waved = False
        if config in _listed(config.arch, spec, tiles.large_clusters):
            margin = _LARGE_CLUSTER_MARGIN
            waved = work_of(config, spec, m, n, k, sm_count, groups).waves > 1
        if config.products > 1 and config.tile_n % NARROW_SUBTILE_N:
            margin = _NARROW_PAIR_MARGIN
        slow = waved or (config.transposed and (untimed or _reduces_rows(spec)))
        return slow, margin * cost(config, spec, m, n, k, sm_count, groups)

    return min(able, key=time)


def _reduces_rows(spec: EpilogueSpec) -> bool:
    """Whether a spec reduces rows. With each row's largest element, transposed tiles took 1.13 to 1.38 times
    as long as the cost model predicts, and others 0.90 to 1.14 times, as medians of 40 drawn problems in bf16
    (seed 53, H200, benchmarks/findings/tiles.md)."""
    return any(store.reduce is not None and store.reduce.axis is Axis.ROW for store in spec.reductions)


_SMALL_GROUPS = range(65, 193)
"""The mean numbers of rows in a group for which a target's tile for small groups was fastest."""


def _for_small_groups(arch: Arch, spec: EpilogueSpec, m: int, groups: int | None) -> TileConfig | None:
    """Returns the tile for products with rows in small groups, or None if this is no such problem or the tile
    can't serve it."""
    shape = arch.target.tiles.small_groups
    if shape is None or spec.product.kind is not ProductKind.GROUPED or not groups:
        return None
    if -(-m // groups) not in _SMALL_GROUPS:
        return None
    return next((each for each in suited(arch, (shape,), spec) if _fits(each, spec)), None)


_UNTIMED_MARGIN = 1.08
"""The predicted speed-up that a tile needs if it was only timed for fewer rows. With a margin of 1.05, and
before the model counted what CTAs receive from L2, the chosen tile took 1.032 (fp8) and 1.019 (bf16) times
as long as the fastest for 86 problems of more rows; without these tiles, 1.036 and 1.025 times. Without a
margin, the model would also choose them for large squares, where it predicts gains of up to 4 percent: 4103
x 26176 x 14976 took 2.4 percent longer in fp8 on an H200 (benchmarks/findings/tiles.md). Transposed tiles
are left out: of the four that the model would choose there, one was more than 2 percent faster."""


_NARROW_PAIR_MARGIN = 1.05
"""The predicted speed-up that a pair needs in tiles of 112 columns of each product. Where they are few, these
tiles took down to 0.73 times as long as others, but large pairs took 1.01 (bf16) and 1.06 (fp8) times as
long, as geometric means, where gains of up to 4.9 percent were predicted (H100,
benchmarks/findings/tiles.md)."""


_LARGE_CLUSTER_MARGIN = 1.08
"""The predicted speed-up that a tile of a large cluster needs. It also needs to have no second wave, in
which fewer multiprocessors than with small clusters would work. For 92 drawn problems, the chosen tile took
0.956 times as long as without these tiles, 0.963 times without a margin and 0.962 times with 1.1 (H100,
benchmarks/findings/tiles.md)."""


@lru_cache(maxsize=256)
def _listed(arch: Arch, spec: EpilogueSpec, shapes: tuple[Shape, ...]) -> frozenset[TileConfig]:
    """The tiles of a list as they serve a spec."""
    return frozenset(config for segment in spec.segments for config in suited(arch, shapes, segment))


_RASTERS = (8, 4, 16)

MAX_CANDIDATES = 12
"""The most configurations that one problem is tuned over: each takes a core seconds to compile."""

_PRUNED_AT = 2.0
"""A configuration is not tried if its predicted time is this many times the best one."""


def candidates(
    arch: Arch,
    spec: EpilogueSpec,
    m: int,
    n: int,
    k: int,
    sm_count: int,
    limit: int = MAX_CANDIDATES,
    groups: int | None = None,
) -> tuple[TileConfig, ...]:
    """Returns the configurations worth timing for a problem, at most `limit`, the heuristic's choice first.

    The cost model predicts them to be fast, and they leave the epilogue room in shared memory. One
    configuration of each tile comes first, then further clusters and rasters of each. `groups` is the number
    of groups of a grouped product's M rows.
    """
    first = choose(arch, spec, m, n, k, sm_count, groups=groups)
    whole = (config for config in tunable(arch, spec) if not config.shallow)
    space = list(dict.fromkeys((first, *(shallowed(config, spec, k) for config in whole))))
    # Rasters with more rows than the problem are all the same.
    effective: dict[TileConfig, TileConfig] = {}
    for config in space:
        rows = -(-(n if config.transposed else m) // (config.cta_rows * config.cluster_m))
        effective.setdefault(replace(config, raster_m=min(config.raster_m, rows)), config)
    costs = {config: cost(config, spec, m, n, k, sm_count, groups) for config in effective.values()}
    best = min(costs.values())
    ranked = sorted((config for config in costs if costs[config] < _PRUNED_AT * best), key=costs.__getitem__)
    seen: Counter[tuple[int, int, int, bool, bool]] = Counter()
    turns = {}
    for config in ranked:
        shape = (config.tile_m, config.tile_n, config.ctas, config.pingpong, config.transposed)
        turns[config] = seen[shape]
        seen[shape] += 1
    chosen = sorted((config for config in ranked if config != first), key=turns.__getitem__)
    return (first, *chosen)[:limit]


def ranked(arch: Arch, spec: EpilogueSpec, m: int, n: int, k: int, sm_count: int) -> list[TileConfig]:
    """Returns every tile and cluster that may serve a spec, in the default raster: the heuristic's choice
    first, the others by predicted time."""
    first = choose(arch, spec, m, n, k, sm_count)
    rest = (config for config in clustered(arch, spec) if config != first)
    return [first, *sorted(rest, key=lambda config: cost(config, spec, m, n, k, sm_count))]


_NAMED = 5
"""The number of tiles that an error names."""


@lru_cache(maxsize=256)
def named(arch: Arch, spec: EpilogueSpec, names: str) -> TileConfig:
    """Returns the first tile in `names` that can serve a spec, in the default raster. Commas or spaces
    separate names. If none can serve it, raises UsageError, which lists the nearest names of tiles that
    can."""
    able = {config.name: config for config in clustered(arch, spec)}
    asked = names.replace(",", " ").split()
    found = next((able[name] for name in asked if name in able), None)
    if found is None:
        from cute_backend.errors import (  # here, since a process that launches kernels raises none
            UsageError,
            meant,
            nearest,
        )

        last = asked[-1] if asked else ""
        near, such = meant(last, able) if asked else "", nearest(last, able, _NAMED)
        raise UsageError(
            f"config.tile is {names!r}{near}; {words(spec)} on {arch.value} can take {len(able)} tiles, such "
            f"as {such}; without config.tile, each region of cute_backend.explain lists its own as `tiles`"
        )
    return found


def clustered(arch: Arch, spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """Every tile and cluster that may serve a spec, in the default raster."""
    return tuple(config for config in tunable(arch, spec) if config.raster_m == config.usual_raster)


def tunable(arch: Arch, spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """Returns every configuration that may serve a spec: those offered, and all others that fit it."""
    if len(spec.segments) > 1:
        return _of_segments(arch, spec, tunable)
    tiles = arch.target.tiles
    tried = suited(arch, tiles.tried, spec)
    found = [
        replace(config, cluster_m=max(cluster_m, config.ctas), cluster_n=cluster_n, raster_m=raster_m)
        for raster_m in _RASTERS
        for cluster_m, cluster_n in tiles.clusters
        for config in tried
        if config.ctas == 1 or cluster_n == 1
    ]
    if _can_split(arch, spec):
        found += _split(tried, tiles.tried_splits)
    fitting = [*offered(arch, spec), *(config for config in found if _fits(config, spec))]
    fitting += _parted(arch, spec, tiles.tried_parted, (*tiles.tried_splits, *tiles.parts))
    fitting += [replace(config, column_groups=2) for config in fitting if can_halve(config, spec)]
    alone = (replace(config, column_groups=1) for config in fitting if config.column_groups > 1)
    fitting += [config for config in alone if leaves_registers(config, spec)]
    fitting += [replace(config, unrolled=True) for config in fitting if can_hoist(config, spec)]
    shallow = (config for config in fitting if can_be_shallow(config, multiplied(spec, config)))
    fitting += [replace(config, shallow=True) for config in shallow]
    return tuple(dict.fromkeys(fitting))
