"""The choice for a problem that was not tuned, and what follows from it about launches.

The runtime chooses a tile by it, and the search for a region's end asks whether a launch needs a second
kernel. So what is fused depends on the plan alone: neither on the results of tuning nor on `config.tile`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from functools import lru_cache

from cute_backend.planning.cost import cost
from cute_backend.planning.kernel_plan import plan
from cute_backend.planning.last_tile import LAST_TILE_ARCHS
from cute_backend.planning.search import choose, tile_table
from cute_backend.planning.sizes import Sizes
from cute_backend.planning.targets import Arch
from cute_backend.planning.tiles import Alignment, TileConfig
from cute_backend.spec import EpilogueSpec

BUCKETS = (
    *(16, 32, 64, 128, 160, 192, 224, 256, 320, 384, 448, 512, 576),
    *(step << i for i in range(7, 14) for step in (5, 6, 7, 8)),
)
"""The values that an M that varies is rounded up to when a configuration is chosen: whole tiles of 64 rows,
or of the 160 and 224 of transposed products; from 640 on by at most a quarter. With powers of two, 320 rows
would get the tile that is best for 512, and take 1.6 times as long as they need (fp8, N = 28672, K = 8192,
H200)."""

INVARIANT_M = 512
"""The M for which the only configuration of a batch-invariant region is chosen. The tiles for a step of
decoding would be slow in a large batch, and the tiles for a large batch would leave most SMs idle in a step
of decoding; this M is between the two."""


def bucket_of(m: int) -> int:
    """The M that a configuration is chosen for in place of an `m` that varies: the next larger of BUCKETS, if
    there is one.

    So a new M seldom needs a new configuration, and the set of configurations that a region can need is known
    in advance.
    """
    return BUCKETS[min(bisect_left(BUCKETS, m), len(BUCKETS) - 1)]


def buckets_of(low: int, high: int) -> tuple[int, ...]:
    """The buckets (`bucket_of`) of every M from `low` to `high`."""
    return tuple(bucket for bucket in BUCKETS if bucket_of(low) <= bucket <= bucket_of(high))


def untuned(
    arch: Arch, spec: EpilogueSpec, sizes: Sizes, sm_count: int, batch_invariant: bool = False
) -> TileConfig:
    """The configuration for a problem that was not tuned: the cost model's choice. A batch-invariant region
    has one for all M. Raises ValueError if no tile serves the spec."""
    if batch_invariant:
        # A launch that was prepared for any N and K has kernels of the table alone.
        return choose(arch, spec, sizes._replace(m=INVARIANT_M), sm_count, tile_table)
    return choose(arch, spec, sizes, sm_count)


def covering(
    chosen: Mapping[int, TileConfig], spec: EpilogueSpec, n: int, k: int, sm_count: int, most: int
) -> list[TileConfig]:
    """Returns at most `most` of the configurations that were chosen for several M, by M: one after another,
    each the one that lowers the predicted times of all M the most, as a geometric mean. A launch whose own
    configuration is left out takes the fastest of these.

    With eight for the 41 buckets, launches of drawn M take 1.05 times as long as with their own, and with the
    eight that most buckets share, 1.12 times, as predicted for nine linears of models (bf16, H200).
    """
    able = list(dict.fromkeys(chosen.values()))
    if len(able) <= most:
        return able
    every = [Sizes(m, n, k) for m in chosen]
    us = {each: [cost(each, spec, sizes, sm_count, careful=True) for sizes in every] for each in able}
    kept: list[TileConfig] = []
    best = [math.inf] * len(chosen)

    def total(config: TileConfig) -> float:
        return sum(math.log(min(pair)) for pair in zip(us[config], best, strict=True))

    while len(kept) < most:
        kept.append(min((each for each in able if each not in kept), key=total))
        best = [min(pair) for pair in zip(us[kept[-1]], best, strict=True)]
    return kept


@lru_cache(maxsize=1024)
def needs_second_kernel(arch: Arch, spec: EpilogueSpec, sizes: Sizes, batch_invariant: bool = False) -> bool:
    """Whether a launch that was not tuned has reductions that a second kernel finishes, on the GPU that the
    target plans for. True for reductions that the architecture has no kernel for."""
    if arch not in LAST_TILE_ARCHS or not spec.reductions:
        return bool(spec.reductions)
    try:
        config = untuned(arch, spec, sizes, arch.target.sm_count, batch_invariant)
    except ValueError:  # no tile serves the spec
        return True
    return plan(spec, config, Alignment.TMA).finishes_apart(sizes.m, sizes.n)
