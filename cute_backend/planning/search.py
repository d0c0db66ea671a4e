"""Chooses the tile configuration for a problem, and the configurations that tuning tries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import lcm

from cute_backend.planning.cost import cost
from cute_backend.planning.fitting import can_split, demand_of, fits, has_registers, in_parts
from cute_backend.planning.halving import can_halve, halving
from cute_backend.planning.hoisting import can_hoist, hoisting
from cute_backend.planning.mainloops import mainloop_of
from cute_backend.planning.naming import words
from cute_backend.planning.registers import holds_values, leaves_registers
from cute_backend.planning.rules import MAX_BLOCK, suited
from cute_backend.planning.rung import Rung
from cute_backend.planning.segment_tiles import serving_all
from cute_backend.planning.shallow import can_be_shallow, shallowed
from cute_backend.planning.shared_memory import holds_planes
from cute_backend.planning.sizes import Sizes
from cute_backend.planning.subtiles import WHOLE_VISITS
from cute_backend.planning.targets import Arch, Demand, Shape, Target
from cute_backend.planning.targets.target import MAX_TILES
from cute_backend.planning.tiles import Alignment, TileConfig
from cute_backend.planning.transposing import Tiled
from cute_backend.planning.widths import evenly, of_name
from cute_backend.spec import (
    BColumns,
    EpilogueSpec,
    Load,
    Op,
    ProductKind,
    Store,
)


def tile_table(arch: Arch, spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """Returns the configurations that may serve a spec, at most five, largest tile first.

    Raises ValueError if no tile holds the spec's blocks of columns whole, or none can rotate its columns.
    """
    if len(spec.segments) > 1:
        return _of_segments(arch, spec, tile_table)
    found = _serving(arch, spec)
    if not found and spec.halved_columns and spec.b_columns is not BColumns.APART:
        raise ValueError(
            f"no tile of {arch.value} rotates blocks of {spec.halved_columns} columns of products of even "
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
    if found[-1].cluster_size > 1:
        found += _smallest_alone(arch, spec)
    *larger, smallest = found
    return *(each for each in larger if _is_listed(each, spec)), smallest


def _is_listed(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a tile of a table is one of those that may serve a spec. If accumulators are in registers,
    shared memory also has to hold all planes."""
    config = Rung.of(spec, config, Alignment.TMA).tile
    held = not config.target.accumulators.in_registers or holds_planes(config, spec)
    return held and has_registers(config, spec)


def _of_segments(
    arch: Arch, spec: EpilogueSpec, of: Callable[[Arch, EpilogueSpec], Iterable[TileConfig]]
) -> tuple[TileConfig, ...]:
    """The tiles that `of` lists for every segment of a spec. Raises ValueError if there is none."""

    def of_one(segment: EpilogueSpec) -> Iterable[TileConfig]:
        return of(arch, segment)

    def of_blocks(segment: EpilogueSpec) -> Iterable[TileConfig]:
        """Lists the tiles for blocks of other segments, too, with one warpgroup or two for the epilogue."""
        whole = (shape for shape in arch.target.tiles.all if shape.split_k == 1)
        further = suited(arch, whole, segment)
        further += tuple(replace(config, column_groups=1) for config in further)
        fitting = (config for config in further if fits(Tiled(segment, config)))
        return *of_one(segment), *fitting

    found = serving_all(spec, of_one) or serving_all(spec, of_blocks)
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
    step = lcm(8, *(store.form.columns_step for store in spec.stores))
    sizes = range(step, MAX_BLOCK + 1, step)
    return tuple(columns for columns in sizes if serves(arch, _resized(spec, columns)))


def _resized(spec: EpilogueSpec, columns: int) -> EpilogueSpec:
    """The spec with blocks of `columns` columns in place of its own. Pairs of neighbours remain,
    unless it rotates larger blocks, too. If it reduces blocks of several sizes, which only visits can hold,
    the smaller ones become blocks of 8."""
    widest = max((op.whole_columns for op in spec.ops), default=0)

    def of_op(op: Op) -> Op:
        kind = op.over_blocks
        if kind is None or (kind.pairs_halves and not spec.reordered_columns):
            return op
        return op.resized(8 if kind.reduction is not None and op.whole_columns < widest else columns)

    def of_load(load: Load) -> Load:
        blocks = load.blocks
        return load if blocks is None else replace(load, blocks=replace(blocks, columns=columns, period=0))

    def of_store(store: Store) -> Store:
        return replace(store, form=store.form.resized(columns))

    ops, loads, stores = map(of_op, spec.ops), map(of_load, spec.loads), map(of_store, spec.stores)
    return replace(spec, loads=tuple(loads), ops=tuple(ops), stores=tuple(stores))


def _serving(arch: Arch, spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """Returns the shipped tiles that can serve a spec: those of its kind or, if none of these holds its
    blocks, those for blocks. A spec that reads planes but tables gets only those that are one visit
    (`WHOLE_VISITS`), unless blocks are rotated or planes are read ahead of passes."""
    shipped = arch.target.tiles.shipped
    found = suited(arch, shipped.get(demand_of(arch, spec), shipped[Demand.PLANES]), spec)
    if found:
        return found
    blocks = shipped.get(Demand.BLOCKS, ())
    tables = all(load.is_table for load in spec.loaded_planes)
    if not (tables or spec.moves_columns or spec.kept):
        blocks = tuple(shape for shape in blocks if shape.tile_n in WHOLE_VISITS)
    return tuple(each for each in suited(arch, blocks, spec) if holds_values(each, spec))[:MAX_TILES]


def _smallest_alone(arch: Arch, spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """The smallest further tile that serves a spec and is in no cluster, of which no CTA lacks rows."""
    alone = [shape for shape in arch.target.tiles.further if shape[2:5] == (1, 1, 1) and shape.split_k == 1]
    able = suited(arch, sorted(alone, key=lambda shape: shape.tile_m * shape.tile_n), spec)
    return tuple(config for config in able if leaves_registers(config, spec))[:1]


def _is_unfitted(arch: Arch, spec: EpilogueSpec) -> bool:
    """Whether the cost model was not fitted to products as a spec has them: without planes, or with such a
    mainloop."""
    return demand_of(arch, spec) is Demand.REDUCED or not mainloop_of(spec, arch.target).is_fitted


@lru_cache(maxsize=512)
def offered(arch: Arch, spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """The tiles that the heuristic chooses from when sizes are known: those of the table, the further tiles
    of the target, and the smallest tile of the table with split-K, if the target supports it. The smallest
    tile that holds blocks may be one of ping-pong, which has no split-K: it is then split without.

    For a batched product it is the table alone, because the number of products is not known. If the cost
    model was not fitted to a spec, only the smallest is split in addition.
    """
    if len(spec.segments) > 1:
        return _of_segments(arch, spec, offered)
    tiles, shipped = arch.target.tiles, tile_table(arch, spec)
    if spec.product.kind is ProductKind.BATCHED:
        return shipped
    listed = () if _is_unfitted(arch, spec) else tiles.further
    further = (config for config in suited(arch, listed, spec) if fits(Tiled(spec, config)))
    smallest = replace(shipped[-1], pingpong=shipped[-1].pingpong and not spec.pass_columns)
    # Where there are clusters, their CTAs add up the sums.
    parts = (each for each in in_parts(smallest) if not (each.sums_in_memory and arch.target.clusters))
    found = dict.fromkeys((*shipped, *further, *parts))
    return tuple(config for config in found if config.split_k == 1 or can_split(config, spec))


def for_rows(arch: Arch, spec: EpilogueSpec, m: int, n: int, sm_count: int) -> tuple[TileConfig, ...]:
    """The tiles that the heuristic chooses from when sizes are known: those offered, and tiles of the
    transposed product as wide as even shares of M (`widths`)."""
    able = offered(arch, spec)
    if _is_unfitted(arch, spec):
        return able
    if len(spec.segments) == 1:
        return *able, *evenly(arch, spec, m, n, sm_count)
    if not spec.product.is_converted:
        return able
    return *able, *serving_all(spec, lambda segment: evenly(arch, segment, m, n, sm_count))


def choose(
    arch: Arch,
    spec: EpilogueSpec,
    sizes: Sizes,
    sm_count: int,
    of: Callable[[Arch, EpilogueSpec], Iterable[TileConfig]] | None = None,
) -> TileConfig:
    """Returns the configuration for a problem that was never tuned: the fastest of those for its M, as
    predicted.

    Among equals the larger tile wins, then the smaller split-K. `of` lists other tiles to choose from: those
    `offered` for any M, or those of the `tile_table`. The best tile is `completed`, and one of it serves
    any K.
    """
    able = for_rows(arch, spec, sizes.m, sizes.n, sm_count) if of is None else of(arch, spec)
    best = fastest(able, spec, sizes, sm_count)
    return completed(best, spec, sizes.k, any_k=of is tile_table)


def completed(config: TileConfig, spec: EpilogueSpec, k: int, any_k: bool = False) -> TileConfig:
    """The configuration with what follows from K, unless it has to serve `any_k`. Its second warpgroup shares
    the epilogue if the MMA does not hide that of one (`halving`), and rowvecs are hoisted if the MMA hides
    that (`hoisting`). Planes get more of the shared memory if K is short (`shallowed`)."""
    if len(spec.segments) > 1:
        return config
    config = hoisting(halving(config, spec, k), spec, k)
    return config if any_k else shallowed(config, spec, k)


def fastest(able: Iterable[TileConfig], spec: EpilogueSpec, sizes: Sizes, sm_count: int) -> TileConfig:
    """Returns the configuration among `able`, which must not be empty, that is predicted to be the fastest
    for a problem; of equals, the first. A tile whose time is not well known has to gain more than the model
    may be wrong about it."""
    return min(able, key=lambda config: cost(config, spec, sizes, sm_count, careful=True))


_CLUSTERS = ((2, 1), (1, 1), (1, 2))
"""The clusters that tuning tries, where there are clusters: `cluster_m` and `cluster_n`."""

_OCCUPANCIES = (1, 2)
"""The numbers of CTAs on a multiprocessor that tuning tries, where there are no clusters."""

_RASTERS = (8, 4, 16)

MAX_CANDIDATES = 12
"""The most configurations that one problem is tuned over: each takes a core seconds to compile."""

_PRUNED_AT = 2.0
"""A configuration is not tried if its predicted time is this many times the best one."""


def candidates(
    arch: Arch, spec: EpilogueSpec, sizes: Sizes, sm_count: int, limit: int = MAX_CANDIDATES
) -> tuple[TileConfig, ...]:
    """Returns the configurations worth timing for a problem, at most `limit`, the heuristic's choice first.

    The cost model predicts them to be fast, and they leave the epilogue room in shared memory. One
    configuration of each tile comes first, then further clusters and rasters of each.
    """
    first = choose(arch, spec, sizes, sm_count)
    able = dict.fromkeys((*tunable(arch, spec), *for_rows(arch, spec, sizes.m, sizes.n, sm_count)))
    whole = (config for config in able if not config.shallow)
    space = list(dict.fromkeys((first, *(shallowed(config, spec, sizes.k) for config in whole))))
    # Rasters with more rows than the problem are all the same.
    effective: dict[TileConfig, TileConfig] = {}
    for config in space:
        rows = -(-(sizes.n if config.transposed else sizes.m) // (config.cta_rows * config.cluster_m))
        effective.setdefault(replace(config, raster_m=min(config.raster_m, rows)), config)
    costs = {config: cost(config, spec, sizes, sm_count) for config in effective.values()}
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


def ranked(arch: Arch, spec: EpilogueSpec, sizes: Sizes, sm_count: int) -> list[TileConfig]:
    """Returns every tile and cluster that may serve a spec, in the default raster: the heuristic's choice
    first, the others by predicted time."""
    first = choose(arch, spec, sizes, sm_count)
    rest = (config for config in clustered(arch, spec) if config != first)
    return [first, *sorted(rest, key=lambda config: cost(config, spec, sizes, sm_count))]


_NAMED = 5
"""The number of tiles that an error names."""


@lru_cache(maxsize=256)
def named(arch: Arch, spec: EpilogueSpec, names: str) -> TileConfig:
    """Returns the first tile in `names` that can serve a spec, in the default raster. Commas or spaces
    separate names. If none can serve it, raises UsageError, which says why the last can't, or which tile was
    meant, and lists the nearest names of tiles that can."""
    able = {config.name: config for config in clustered(arch, spec)}
    asked = names.replace(",", " ").split()
    found = next((each for name in asked if (each := able.get(name) or _even(arch, spec, name))), None)
    if found is None:
        from cute_backend.errors import (  # here, since a process that launches kernels raises none
            UsageError,
            meant,
            nearest,
        )
        from cute_backend.planning.misfits import misfit

        last = asked[-1] if asked else ""
        why, such = misfit(arch, spec, last), nearest(last, able, _NAMED)
        subject = "which" if len(asked) == 1 else f"and {last}"
        near = f", {subject} can't be used: {why}" if why else meant(last, able) if asked else ""
        raise UsageError(
            f"config.tile is {names!r}{near}; {words(spec)} on {arch.value} can take {len(able)} tiles, such "
            f"as {such}; without config.tile, each region of cute_backend.explain lists its own as `tiles`"
        )
    return found


def _even(arch: Arch, spec: EpilogueSpec, name: str) -> TileConfig | None:
    """The tile with a name, of any width, that serves a spec."""
    if len(spec.segments) == 1:
        return of_name(arch, spec, name)

    def of_one(segment: EpilogueSpec) -> Iterator[TileConfig]:
        if (found := of_name(arch, segment, name)) is not None:
            yield found

    return next(iter(serving_all(spec, of_one)), None)


@lru_cache(maxsize=64)
def clustered(arch: Arch, spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """Every tile and cluster that may serve a spec, in the default raster."""
    return tuple(config for config in tunable(arch, spec) if config.raster_m == config.usual_raster)


def tunable(arch: Arch, spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """Returns every configuration that may serve a spec: those offered, and all others that fit it."""
    if len(spec.segments) > 1:
        return _of_segments(arch, spec, tunable)
    whole = suited(arch, dict.fromkeys(_varied(arch.target)), spec)
    found = [replace(config, raster_m=raster_m) for raster_m in _RASTERS for config in whole]
    parted = (each for config in whole for each in in_parts(config))
    found += (config for config in parted if can_split(config, spec))
    fitting = [*offered(arch, spec), *(config for config in found if fits(Tiled(spec, config)))]
    fitting += [replace(config, column_groups=2) for config in fitting if can_halve(config, spec)]
    alone = (replace(config, column_groups=1) for config in fitting if config.column_groups > 1)
    fitting += [config for config in alone if leaves_registers(config, spec)]
    fitting += [replace(config, unrolled=True) for config in fitting if can_hoist(config, spec)]
    shallow = (config for config in fitting if can_be_shallow(Tiled(spec, config)))
    fitting += [replace(config, shallow=True) for config in shallow]
    return tuple(dict.fromkeys(fitting))


def _varied(target: Target) -> Iterator[Shape]:
    """Yields the tiles of a target in every cluster or, where there are no clusters, in every occupancy."""
    for shape in target.tiles.all:
        if target.clusters:
            for cluster_m, cluster_n in _CLUSTERS:
                if shape.ctas == 1 or cluster_n == 1:
                    yield shape._replace(cluster_m=max(cluster_m, shape.ctas), cluster_n=cluster_n, split_k=1)
        else:
            several = shape.tile_m <= target.accumulators.block_m * target.accumulators.group_blocks
            for occupancy in _OCCUPANCIES if several else (1,):
                yield shape._replace(occupancy=occupancy, split_k=1)
