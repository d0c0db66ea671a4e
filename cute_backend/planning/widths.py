"""Tiles of transposed products whose width follows from a known M.

The rows of D lie along the columns of such a tile. A tile of a pair has two accumulators, for the same
columns of both products. M is divided evenly among the fewest tiles that hold it, or among a few more, and
the tiles have the rows of a share, rounded up to the columns that an MMA takes at a time. These are 8 on
Hopper, where 257 rows are two tiles of 136, three of 88, or four of 72. In tiles of 160, of which M takes
two, a fifth of the work would be wasted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache

from cute_backend.planning.fitting import can_split, fits, in_parts
from cute_backend.planning.halving import can_halve
from cute_backend.planning.hoisting import can_hoist
from cute_backend.planning.mainloops import mainloop_of
from cute_backend.planning.registers import NARROW_SUBTILE_N
from cute_backend.planning.rules import suited
from cute_backend.planning.shallow import can_be_shallow
from cute_backend.planning.subtiles import LEAST_COLUMNS
from cute_backend.planning.targets import Arch, Shape
from cute_backend.planning.targets.target import WIDEST
from cute_backend.planning.tiles import TileConfig
from cute_backend.planning.transposing import Tiled, can_transpose
from cute_backend.spec import EpilogueSpec, Major

LARGEST_M = 1024
"""The largest M that is divided evenly. More rows waste little of the tiles that serve any M."""

FURTHER_SHARES = 2
"""How many more shares than the fewest are tried. Narrower tiles leave room for further stages, and are more,
if there are few for the multiprocessors."""

LEAST_SHARE = 64
"""Rows of a share that are not divided further, since the columns of D make up most of the bytes of such a
tile already."""

PINGPONG_ROWS = 128
"""The most rows of the MMA of one warpgroup under ping-pong."""


def visit_columns(width: int, step: int = LEAST_COLUMNS) -> int:
    """The columns of a visit of a tile of `width` columns, a multiple of `step`: the widest visits of at most
    32 columns that cover it, a multiple of `step` too. So 88 columns have 11 visits of 8."""
    return max(each for each in range(step, NARROW_SUBTILE_N + 1, step) if width % each == 0)


def widths(m: int, most: int, step: int = LEAST_COLUMNS) -> tuple[int, ...]:
    """The widths of at most `most` columns, multiples of `step`, in which `m` rows are a few even shares, the
    widest first."""
    fewest = -(-m // most)
    shares = [-(-m // count) for count in range(fewest, fewest + FURTHER_SHARES + 1)]
    kept = [shares[0], *(share for share in shares[1:] if share > LEAST_SHARE)]
    return tuple(dict.fromkeys(-(-share // step) * step for share in kept))


def evenly(arch: Arch, spec: EpilogueSpec, m: int, n: int, sm_count: int) -> tuple[TileConfig, ...]:
    """The tiles for a known M, in every cluster that N fills, under ping-pong if there are more tiles than
    multiprocessors, and with each split-K of which all parts are computed at once."""
    if m > LARGEST_M or not _is_served(spec):
        return ()
    found: list[TileConfig] = []
    even = arch.target.tiles.even
    for tile_m in (each for each in _heights(arch, spec) if m <= even.up_to.get(each, LARGEST_M)):
        rows = -(-n // tile_m)
        for width in widths(m, _widest(arch, spec, tile_m), even.step):
            ctas = rows * -(-m // width)
            for config in _of_width(arch, spec, tile_m, width):
                at_once = config.split_k == 1 or ctas * config.split_k <= sm_count
                if at_once and config.cluster_m <= rows and (ctas > sm_count or not config.pingpong):
                    found.append(config)
    return tuple(found)


@lru_cache(maxsize=1024)
def _is_served(spec: EpilogueSpec) -> bool:
    """Whether a spec has tiles of any width: operands that are contiguous along K, and no reduction of rows,
    which lie across the threads of such a tile (`cost.TRANSPOSED_ROWS`)."""
    along_k = {spec.product.a_major, spec.product.b_major} == {Major.K}
    return can_transpose(spec) and along_k and not spec.reduces_rows


def of_name(arch: Arch, spec: EpilogueSpec, name: str) -> TileConfig | None:
    """The tile with a name such as `64x88_4x1_by8_unrolled_transposed`, of any width, if there is one that
    serves a spec."""
    shape = re.match(r"(\d+)x(\d+)(?:x\d+)?_", name)
    if shape is None or not _is_served(spec):
        return None
    tile_m, width = map(int, shape.groups())
    if tile_m not in _heights(arch, spec):
        return None
    if width not in arch.target.tiles.even.columns or width > _widest(arch, spec, tile_m):
        return None
    able = [*_of_width(arch, spec, tile_m, width)]
    able += [replace(each, column_groups=2) for each in able if can_halve(each, spec)]
    able += [replace(each, unrolled=True) for each in able if can_hoist(each, spec)]
    able += [replace(each, shallow=True) for each in able if can_be_shallow(Tiled(spec, each))]
    return next((each for each in able if each.name == name), None)


def _heights(arch: Arch, spec: EpilogueSpec) -> tuple[int, ...]:
    """The rows of tiles for a spec. All products together have as many as a tile of one product may have: a
    stage of 256 rows of both products of a pair would be 64 KiB."""
    rows, products = arch.target.tiles.even.rows, len(spec.accumulators)
    return tuple(each // products for each in rows if each // products in rows)


def _widest(arch: Arch, spec: EpilogueSpec, tile_m: int) -> int:
    """The most columns of a tile that has `tile_m` rows of each product of a spec."""
    even = arch.target.tiles.even
    narrow = TileConfig(arch, tile_m, even.step, products=len(spec.accumulators), transposed=True)
    column = narrow.thread_accumulators / even.step
    most = min(even.accumulators / column, even.up_to.get(tile_m, WIDEST))
    return max(width for width in even.columns if width <= most)


@lru_cache(maxsize=4096)
def _of_width(arch: Arch, spec: EpilogueSpec, tile_m: int, width: int) -> tuple[TileConfig, ...]:
    """The tiles of a width, with `tile_m` rows of each product, that serve a spec, in every cluster and with
    every split-K. If accumulators are in registers, narrow visits are unrolled, as the rules unroll those of
    planes."""
    mma_m = tile_m * len(spec.accumulators)
    columns = visit_columns(width, arch.target.tiles.even.step)
    shape = Shape(mma_m, width, subtile_n=columns, transposed=True)
    unrolls = arch.target.accumulators.in_registers
    able = (replace(config, unrolled=unrolls and config.rolled) for config in suited(arch, (shape,), spec))
    return tuple(each for config in able if fits(Tiled(spec, config)) for each in _varied(config, spec))


def _varied(config: TileConfig, spec: EpilogueSpec) -> Iterator[TileConfig]:
    """Yields a tile in every cluster, with every split-K, and under ping-pong if a warpgroup has registers
    for the accumulators of a tile, as far as the spec's mainloop has such tiles."""
    target = config.target
    mainloop = mainloop_of(Tiled(spec, config).computed, target)

    @cache
    def splits(parted: TileConfig) -> bool:
        return can_split(parted, spec) and fits(Tiled(spec, parted))

    for cluster_m in target.tiles.even.clusters:
        clustered = mainloop.suited(replace(config, cluster_m=cluster_m))
        if clustered is None:
            continue
        clustered = replace(clustered, raster_m=clustered.usual_raster)
        yield clustered
        for each in in_parts(clustered):
            # If sums go through memory, neither the number of parts nor the cluster decides.
            alike = replace(config, split_k=target.tiles.splits[-1]) if each.sums_in_memory else each
            if splits(alike):
                yield each
        if target.by_wgmma and config.mma_m <= PINGPONG_ROWS:
            pingpong = mainloop.suited(replace(clustered, pingpong=True))
            if pingpong is not None and fits(Tiled(spec, pingpong)):
                yield pingpong
