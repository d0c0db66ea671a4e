"""Which tile configuration a problem gets, and which ones tuning tries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..spec import EpilogueSpec, LoadKind, Major
from .tiles import EPILOGUE_STAGES, Arch, TileConfig, tile_k

_TABLE = {
    Arch.SM90A: (
        TileConfig(Arch.SM90A, 128, 128, 2, pingpong=True),
        TileConfig(Arch.SM90A, 128, 128, cluster_n=2, pingpong=True, subtile_n=64),
        TileConfig(Arch.SM90A, 64, 192, 3, pingpong=True),
        TileConfig(Arch.SM90A, 64, 128, 2),
        TileConfig(Arch.SM90A, 64, 64),
    ),
    Arch.SM100A: (
        TileConfig(Arch.SM100A, 256, 256, 2, ctas=2),
        TileConfig(Arch.SM100A, 256, 128, 2, ctas=2),
        TileConfig(Arch.SM100A, 128, 128),
        TileConfig(Arch.SM100A, 128, 64),
    ),
}

NARROW_SUBTILE_N = 32
"""Columns of a subtile where wider ones leave planes no room in shared memory, or gain nothing."""

_PROMOTED = (
    TileConfig(Arch.SM90A, 128, 128, 2),
    TileConfig(Arch.SM90A, 64, 128, 2, pingpong=True),
    TileConfig(Arch.SM90A, 64, 64),
)
"""For fp8 sums promoted on Hopper, which keep two sets of sums beside the accumulators in registers."""


_MAX_PROMOTED_LOADS = 3
"""Exact loads beside which promoted sums of 128 rows leave registers: with four, 8 bytes were spilled."""

_REDUCED = (
    TileConfig(Arch.SM90A, 128, 128, 2, pingpong=True),
    TileConfig(Arch.SM90A, 128, 128, pingpong=True),
    TileConfig(Arch.SM90A, 64, 192, 3, pingpong=True),
    TileConfig(Arch.SM90A, 64, 128, pingpong=True),
    TileConfig(Arch.SM90A, 64, 64),
)
"""For specs on Hopper that neither read nor write a plane. What they have most of is columns, and of few rows
two turns of 64 x 128 hide all but the reading of B: the argmax of 16 rows over 128256 columns of 4096 in bf16
took 267 us so, 274 by 64 x 64 and 275 without ping-pong; torch's product alone 263 (H200). Of up to 128 rows
all lie in one tile: 96 took 294 us by 128 x 128, 431 by 64 x 128. Of up to 192 rows all lie in one cluster of
three: 136 took 320 us so, 566 by 64 x 128, 670 by two of 128 x 128 (H200)."""


_ALONE = TileConfig(Arch.SM90A, 64, 128, pingpong=True)
"""For few rows, where 64 x 64 can't be cut for a spec: pairs whose B is contiguous along N have no 32 columns
of each. No CTA of it is without rows."""


def table(arch: Arch, spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """The configurations that may serve a spec, at most five, largest tile first.

    On Hopper all but the smallest hold every plane in shared memory: beside their accumulators, addresses of
    elements would spill.
    """
    if arch is not Arch.SM90A:
        return _suited(_TABLE[arch], spec)
    shipped = _PROMOTED if not spec.product.fast_accum else _TABLE[arch] if _has_planes(spec) else _REDUCED
    suited = _suited(shipped, spec)
    if suited[-1].cluster_size > 1:
        suited += _suited((_ALONE,), spec)
    *larger, smallest = suited
    if not spec.product.fast_accum and len(spec.loads_of(LoadKind.EXACT)) > _MAX_PROMOTED_LOADS:
        larger = [each for each in larger if each.tile_m == smallest.tile_m]
    return *(each for each in larger if holds_planes(_narrow(each), spec)), smallest


_MAX_PAIRED_LOADS = 2
"""Exact loads beside which a pair's 128 accumulators of a thread leave registers: with three, 16 bytes were
spilled, with four and as many results 184."""

_SPLITS = (2, 4)
"""Parts of K. Eight were slower than four wherever they were tried: M of 16 and 128, N from 512, K up to 8192
in fp8 (H200)."""


def offered(arch: Arch, spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """What the heuristic chooses from: the table and, on Hopper, its smallest tile with K in parts; not where
    products are batched, for it isn't told how many there are."""
    shipped = table(arch, spec)
    return shipped if spec.product.batched else (*shipped, *_split(shipped[-1:]))


def _split(configs: Iterable[TileConfig]) -> Iterator[TileConfig]:
    """With K in parts: those of few columns that are in no cluster yet and are worked on one at a time."""
    for config in configs:
        alone = config.arch is Arch.SM90A and config.cluster_size == 1 and not config.pingpong
        if alone and config.tile_n * config.products <= 64:
            yield from (replace(config, split_k=parts) for parts in _SPLITS)


def _narrow(config: TileConfig) -> TileConfig:
    return replace(config, subtile_n=min(config.subtile_n, NARROW_SUBTILE_N))


def _suited(configs: Iterable[TileConfig], spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """Configurations for one product and a short chain, as they serve a spec; each once.

    Left out are those whose accumulators leave no registers for a crowded epilogue.
    """
    suited = (_relieved(_narrowed(config, spec), spec) for config in _shared_out(configs, spec))
    kept = (
        config
        for config in suited
        if config.thread_accumulators <= _MAX_CROWDED or not _is_crowded(config, spec)
    )
    return tuple(dict.fromkeys(kept))


_MAX_CROWDED = 64
"""Accumulators that leave a crowded thread its registers: with the 96 of 64 x 192, 40 bytes were spilled."""


def _relieved(config: TileConfig, spec: EpilogueSpec) -> TileConfig:
    """With half the rows for a crowded epilogue, and with no wide subtiles where every alignment reads planes
    by element, because M is several modes there."""
    if _is_crowded(config, spec) and config.tile_m > 64:
        config = replace(config, tile_m=config.tile_m // 2)
    by_element = any(load.m_modes for load in spec.loads_of(LoadKind.EXACT))
    return replace(config, subtile_n=min(config.subtile_n, 32)) if by_element else config


def _is_crowded(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a thread under ping-pong, which has a whole tile's accumulators of its rows, lacks registers:
    more than one plane is read by element whatever the alignment, or a pair reads many.

    What is read by element takes two registers of address for each element of a subtile.
    """
    exact = spec.loads_of(LoadKind.EXACT)
    by_element = sum(bool(load.m_modes) for load in exact)
    many = config.products > 1 and len(exact) > _MAX_PAIRED_LOADS
    return config.pingpong and (by_element > 1 or many)


def _has_planes(spec: EpilogueSpec) -> bool:
    return bool(spec.planes or spec.loads_of(LoadKind.EXACT))


_DRAWS_AT_ONCE = 8
"""Draws of noise in one visit of a thread, which hide each other's latency; but four elements at the least,
which is what wgmma's accumulators have in eight columns."""


def _narrowed(config: TileConfig, spec: EpilogueSpec) -> TileConfig:
    """With subtiles of few columns where a spec draws noise, and two warpgroups on a tile of 128 rows.

    A draw takes some hundred instructions, and the compilers interleave all that one visit or several written
    out one after the other have: those of a whole tile took two minutes to compile, and spilled. Ping-pong
    hides nothing of so many where there are rows for clusters of tiles: 256 rows over 128256 columns took
    579 us with it and 537 without. Where B is but read it does: 96 rows took 312 us (H200).
    """
    draws = _draws(spec)
    if not draws or config.products > 1 or _has_planes(spec):
        return config
    elements = max(_DRAWS_AT_ONCE // draws, 4)
    pingpong = config.pingpong and (config.cta_rows <= 64 or config.cluster_m == 1)
    return replace(config, pingpong=pingpong, subtile_n=elements * 128 // config.block_m)


def _draws(spec: EpilogueSpec) -> int:
    return sum(op.op == "gumbel" for op in spec.ops)


def _shared_out(configs: Iterable[TileConfig], spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """Configurations for one product, with the columns of their MMA shared out among a spec's accumulators.

    Left out are those that would not cut them evenly.
    """
    products = len(spec.accumulators)
    shared = (
        replace(config, tile_n=config.tile_n // products, products=products, neighbours=spec.neighbours)
        for config in configs
    )
    return tuple(config for config in shared if _cuts_evenly(config, spec))


def _cuts_evenly(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether subtiles divide a pair's columns, and its pieces of a stage of B are whole rows of the swizzle.

    And whether the CTAs of a cluster can share out a stage of B: its columns, or where B is contiguous along
    N its rows of K, of which each of TMA's boxes has all.
    """
    along_n = spec.product.b_major is not Major.K
    stage_k = tile_k(spec.product.b_dtype)
    if (stage_k if along_n else config.piece_n) % config.cluster_m:
        return False
    whole_rows = config.piece_n % (stage_k if along_n else 8) == 0
    return config.products == 1 or (config.tile_n // config.ctas % config.subtile_n == 0 and whole_rows)


_SHORT_K = 2048
"""Bytes of K up to which the epilogue counts for more than the mainloop. There subtiles of 64 columns, which
wait half as often, were faster by up to 5 percent; beyond, slower by 1, since they leave the mainloop
a stage less (H200, fp8, K of 1024 to 8192)."""

_TILE_US = {64 * 64: (1.1, 1.6), 64 * 128: (2.1, 1.9), 64 * 192: (2.0, 2.5), 128 * 128: (1.3, 3.25)}
"""Microseconds of a tile by its area: some of its own, and so many for each KiB of K. Fitted to an H200
with fp8, scales, bias, gelu and a residual, K of 1024 to 14336 (benchmarks/README.md). 64 x 128 is not
ping-pong, so its epilogue shows. 64 x 192 was timed with 8 KiB of K alone: its own time is that of 64 x 128.
Other tiles count as the largest, by their area."""

_SPLIT_US = {2: 1.8, 4: 3.0}
"""Microseconds that a cluster takes to begin together and to gather its sums, by parts of K (the same)."""

_REACHED = {3: 117 / 132, 4: 120 / 132}
"""The share of the multiprocessors that clusters of so many CTAs reach: an H200 has room for 132, 66, 39 and
30 clusters of 1, 2, 3 and 4."""

_BEYOND_US = 0.006
"""Microseconds that TMA takes to fill a row of A that is none with zeros, for each KiB of K (the same)."""

_READ_US = 0.0125
"""Microseconds that a CTA waits for a row of A or B from L2, for each KiB of K, while all others read theirs:
a tile takes no less. 64 x 128 without a cluster reads 192 rows, and took 20 to 23 us for 8 KiB (H200)."""


def choose(arch: Arch, spec: EpilogueSpec, m: int, n: int, k: int, sm_count: int) -> TileConfig:
    """The configuration for a problem that was never tuned: of those offered, the one that should be fastest.

    Among equals the larger tile wins, and the fewer parts of K.
    """
    k_bytes = k * spec.product.a_dtype.bits // 8
    return min(offered(arch, spec), key=lambda config: _cost(config, m, n, k_bytes, sm_count))


def _cost(config: TileConfig, m: int, n: int, k_bytes: int, sm_count: int) -> float:
    """How long a problem should take on `sm_count` multiprocessors, in microseconds of an H200, by waves.

    Tiles of 64 rows whose A is not multicast leave out those beyond the last row; of others, the last row of
    tiles is seldom full, the CTAs of a cluster wait for the slowest, and multicast zeros are written by each.
    """
    rows, columns = config.cta_rows * config.cluster_m, config.tile_n * config.cluster_n
    cluster_rows = -(-m // rows)
    clusters = cluster_rows * -(-n // columns)
    in_flight = int(sm_count * _REACHED.get(config.cluster_size, 1.0)) // config.cluster_size
    waves = -(-clusters // max(in_flight, 1))
    k_bytes = -(-k_bytes // config.split_k)
    area = config.cta_rows * config.mma_n
    largest = max(_TILE_US)
    own, for_k = _TILE_US.get(area) or (us * area / largest for us in _TILE_US[largest])
    whole = config.cta_rows > 64 or config.cluster_n > 1
    beyond = min(cluster_rows * rows - m, config.cta_rows) * config.cluster_n / cluster_rows if whole else 0
    unsuited = config.pingpong and (config.subtile_n == 64) != (k_bytes <= _SHORT_K)
    own += _SPLIT_US.get(config.split_k, 0.0)
    read = config.cta_rows / config.cluster_n + config.mma_n / config.cluster_m
    for_k = max(for_k, read * _READ_US)
    return waves * (own + (for_k + beyond * _BEYOND_US) * k_bytes / 1024) * (1.01 if unsuited else 1.0)


_SHAPES = {
    Arch.SM90A: (
        TileConfig(Arch.SM90A, 256, 128),
        TileConfig(Arch.SM90A, 128, 256),
        TileConfig(Arch.SM90A, 128, 192),
        TileConfig(Arch.SM90A, 128, 128),
        TileConfig(Arch.SM90A, 128, 64),
        TileConfig(Arch.SM90A, 64, 64),
        TileConfig(Arch.SM90A, 128, 128, pingpong=True),
        TileConfig(Arch.SM90A, 128, 128, pingpong=True, subtile_n=64),
        TileConfig(Arch.SM90A, 64, 256, pingpong=True),
        TileConfig(Arch.SM90A, 64, 192, pingpong=True),
        TileConfig(Arch.SM90A, 64, 128, pingpong=True),
        TileConfig(Arch.SM90A, 64, 64, pingpong=True),
    ),
    Arch.SM100A: (
        TileConfig(Arch.SM100A, 256, 256, 2, ctas=2),
        TileConfig(Arch.SM100A, 256, 128, 2, ctas=2),
        TileConfig(Arch.SM100A, 256, 64, 2, ctas=2),
        TileConfig(Arch.SM100A, 128, 256),
        TileConfig(Arch.SM100A, 128, 128),
        TileConfig(Arch.SM100A, 128, 64),
    ),
}
"""Tiles, with the schedule of each, that kernels may be tuned over; clusters and rasters come on top."""

_CLUSTERS = ((2, 1), (1, 1), (1, 2))
_RASTERS = (8, 4, 16)

MAX_CANDIDATES = 12
"""Configurations that one problem is tuned over: each takes seconds of a core to compile."""

_MAX_ACCUMULATORS = 128
"""fp32 accumulators of a Hopper epilogue thread that leave registers for the epilogue; promoted sums count
twice."""

_MAX_KEPT = 160
"""Accumulators and partials of a Hopper epilogue thread that leave registers for a few draws of noise."""

_PRUNED_AT = 2.0
"""A configuration that should take this many times as long as the best of them is not tried."""


def candidates(
    arch: Arch, spec: EpilogueSpec, m: int, n: int, k: int, sm_count: int, limit: int = MAX_CANDIDATES
) -> tuple[TileConfig, ...]:
    """What is worth timing for a problem, at most `limit`, the heuristic's own choice first.

    Every configuration of which the model thinks well and beside whose operands the epilogue has room in
    shared memory. The tiles that differ most in kind come first, then further clusters and rasters of each.
    """
    first = choose(arch, spec, m, n, k, sm_count)
    space = [first, *(config for config in tunable(arch, spec) if config != first)]
    # A raster of more rows than there are is the same as any other such raster.
    effective: dict[TileConfig, TileConfig] = {}
    for config in space:
        rows = -(-m // (config.cta_rows * config.cluster_m))
        effective.setdefault(replace(config, raster_m=min(config.raster_m, rows)), config)
    k_bytes = k * spec.product.a_dtype.bits // 8
    costs = {config: _cost(config, m, n, k_bytes, sm_count) for config in effective.values()}
    best = min(costs.values())
    ranked = sorted((config for config in costs if costs[config] < _PRUNED_AT * best), key=costs.__getitem__)
    seen: Counter[tuple[int, int, int, bool]] = Counter()
    turns = {}
    for config in ranked:
        shape = (config.tile_m, config.tile_n, config.ctas, config.pingpong)
        turns[config] = seen[shape]
        seen[shape] += 1
    chosen = sorted((config for config in ranked if config != first), key=turns.__getitem__)
    return (first, *chosen)[:limit]


def ranked(arch: Arch, spec: EpilogueSpec, m: int, n: int, k: int, sm_count: int) -> list[TileConfig]:
    """Every tile and cluster that may serve a spec, in the default raster, by how fast the model thinks each:
    the heuristic's own choice first."""
    k_bytes = k * spec.product.a_dtype.bits // 8
    first = choose(arch, spec, m, n, k, sm_count)
    rest = (config for config in clustered(arch, spec) if config != first)
    return [first, *sorted(rest, key=lambda config: _cost(config, m, n, k_bytes, sm_count))]


def clustered(arch: Arch, spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """Every tile and cluster that may serve a spec, in the default raster."""
    return tuple(config for config in tunable(arch, spec) if config.raster_m == _RASTERS[0])


def tunable(arch: Arch, spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """Every configuration that may serve a spec: those of its table, and all that fit it."""
    shipped = table(arch, spec)
    found = [
        replace(shape, cluster_m=max(cluster_m, shape.ctas), cluster_n=cluster_n, raster_m=raster_m)
        for raster_m in _RASTERS
        for cluster_m, cluster_n in _CLUSTERS
        for shape in _suited(_SHAPES[arch], spec)
        if shape.ctas == 1 or cluster_n == 1
    ]
    found += _split(_suited(_SHAPES[arch], spec))
    return tuple(dict.fromkeys([*shipped, *(config for config in found if _fits(config, spec))]))


def _fits(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether the accumulators fit in registers, and the epilogue's operands and outputs in shared memory."""
    accumulators = config.thread_accumulators * (1 if spec.product.fast_accum else 2)
    if config.arch is Arch.SM90A and accumulators > _MAX_ACCUMULATORS:
        return False
    partials = 2 * len(spec.reductions) * config.cta_rows // (32 * config.sharing)
    if _draws(spec) and config.arch is Arch.SM90A and config.thread_accumulators + partials > _MAX_KEPT:
        return False
    return holds_planes(config, spec)


def holds_planes(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether all that the epilogue may pass through shared memory fits there."""
    planes = [store.dtype for store in spec.planes]
    planes += [load.dtype for load in spec.loads_of(LoadKind.EXACT)]
    bits = config.stage_elements * sum(dtype.bits for dtype in planes)
    bits += config.tile_n * sum(load.dtype.bits for load in spec.loads_of(LoadKind.ROWVEC))
    return EPILOGUE_STAGES * bits // 8 <= config.epilogue_smem_bytes
