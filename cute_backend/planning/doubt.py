"""The tiles between which the cost model can't decide, for a measurement to decide."""

from __future__ import annotations

from functools import partial

from cute_backend.planning.cost import cost
from cute_backend.planning.search import completed, for_rows
from cute_backend.planning.sizes import Sizes
from cute_backend.planning.targets import Arch
from cute_backend.planning.tiles import TileConfig
from cute_backend.spec import EpilogueSpec

DOUBTED = 3
"""The most tiles that are in doubt. Of 92 drawn problems in 16 bits, M of 1 to 1,024, of each of which some
12 tiles were timed, the model's choice takes 1.068 times as long as the fastest tile, the best of these three
1.019 times, and the best of five 1.014 times (H200, benchmarks/findings.md)."""

DOUBT = 1.15
"""How many times as long as the choice a tile in doubt may be predicted to take."""


def doubted(arch: Arch, spec: EpilogueSpec, sizes: Sizes, sm_count: int) -> tuple[TileConfig, ...]:
    """Returns at most DOUBTED configurations for a problem: the model's choice, and those that it predicts
    to take about as long, the least wrong ones first."""
    able = for_rows(arch, spec, sizes.m, sizes.n, sm_count)
    us = partial(cost, spec=spec, sizes=sizes, sm_count=sm_count)
    ranked = sorted(able, key=lambda config: us(config, careful=True))
    most = DOUBT * us(ranked[0])
    near = (completed(config, spec, sizes.k) for config in ranked if us(config) < most)
    return tuple(dict.fromkeys(near))[:DOUBTED]
