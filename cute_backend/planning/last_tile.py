"""The choice of what finishes reductions of rows: the warp that has a row's last tile, or a second kernel.

A second launch costs 1 to 2 us, and rows with few tiles give it little to do. So kernels have the code for
both ways (`templates/last_tile.py`, `templates/finish.py`), and each launch takes one of them by its N. The
search for a region's end counts the second launch by the same rule (`fx_walk/ends/launches.py`).
"""

from __future__ import annotations

from cute_backend.planning.targets import Arch
from cute_backend.planning.tiles import TileConfig
from cute_backend.spec import EpilogueSpec, ProductKind

MOST_PARTS = 16
"""The partials of a row up to which its last tile finishes it. With 3 to 14 of them, five problems with row
maxima took 0.88 to 1.02 times as long as with a second kernel, 0.94 times in the geometric mean; with 26 to
64, six took 0.95 to 1.07 times, 1.01 in the mean (H100, benchmarks/findings.md)."""

LAST_TILE_RESULTS = 4
"""The most results of a row that its last tile finishes."""

LAST_TILE_ARCHS = frozenset({Arch.SM90A})
"""The architectures whose last tiles finish rows."""


def may_finish_rows(spec: EpilogueSpec, config: TileConfig) -> bool:
    """Whether the kernel of a spec, transposed if the tile is, has the code to finish its reductions in a
    row's last tile, and an argument with the counters of tiles: all its reductions are of rows, and few, and
    their partials are one number each. Other kinds reduce rows of a vocabulary, which have hundreds of tiles.

    A kernel that adds up the parts of K from memory has not.
    """
    return (
        config.arch in LAST_TILE_ARCHS
        and not config.sums_in_memory
        and 0 < len(spec.reductions) <= LAST_TILE_RESULTS
        and all(each.axis.keeps_rows and len(each.kind.parts) == 1 for each in spec.reductions.values())
    )


def counters_needed(kind: ProductKind, config: TileConfig, m: int, n: int) -> int:
    """The counters that a launch on a plane of (m, n) needs, whose kernel may finish rows: one for the rows
    of each warp of a tile or, if tiles may begin at any row because rows are in batches or groups, one for
    each row. 0 if a second kernel finishes the reductions."""
    if config.transposed:
        m, n = n, m
    if -(-n // config.group_n) > MOST_PARTS:
        return 0
    return -(-m // config.warp_rows) if kind is ProductKind.DENSE else m
