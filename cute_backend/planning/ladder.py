"""The rungs of a kernel: the tiles that are compiled, one after another, until one spills nothing.

Whether a tile leaves a thread registers enough for an epilogue is the compiler's answer. Here is the order in
which it is asked.
"""

from __future__ import annotations

from cute_backend.planning.kernel_plan import Plan, plan
from cute_backend.planning.search import table
from cute_backend.planning.tiles import TileConfig


def rungs(first: Plan) -> tuple[Plan, ...]:
    """A plan, and those that may take its place if its kernel spills, at most three in all: the one in the
    next smaller tile of the same cluster, and the one in the smallest tile. They are of the tiles that serve
    any sizes (`table`)."""
    tile, able = first.tile, table(first.arch, first.spec)
    smaller = [each for each in able if each.thread_accumulators < tile.thread_accumulators]
    alike = [each for each in smaller if _cluster(each) == _cluster(tile)]
    plans = [plan(first.spec, each, first.alignment) for each in (*alike[:1], *smaller[-1:])]
    return tuple(dict.fromkeys((first, *plans)))


def _cluster(tile: TileConfig) -> tuple[int, int, int]:
    return tile.cluster_m, tile.cluster_n, tile.ctas
