"""Times of regions by the cost model, on the GPU that they are planned for."""

from __future__ import annotations

from functools import lru_cache

from cute_backend.fx_walk.products.capability import target_of
from cute_backend.fx_walk.region.region import Region
from cute_backend.fx_walk.search.walk import Walk
from cute_backend.planning import Arch, Sizes, Target, choose
from cute_backend.planning.cost import cost
from cute_backend.spec import EpilogueSpec

CONVERTED_ROWS = (16, 256)
"""Two numbers of rows that one graph may serve, in decoding and for a short prompt. If M is symbolic, one
kernel of several products whose weights it converts has to pay in the mean of both."""


def planned_for(walk: Walk, region: Region) -> Target:
    """The target of a region; the first of all for a CPU, whose graphs are replayed."""
    return target_of(region.first.device, walk.capability) or next(iter(Arch)).target


@lru_cache(maxsize=256)
def predicted(arch: Arch, spec: EpilogueSpec, m: int, n: int, k: int) -> float:
    """The time of a region in microseconds, by the model. Layers of one graph are mostly alike. Raises
    ValueError if no tile serves the spec."""
    sizes, sm_count = Sizes(m, n, k), arch.target.sm_count
    return cost(choose(arch, spec, sizes, sm_count), spec, sizes, sm_count)
