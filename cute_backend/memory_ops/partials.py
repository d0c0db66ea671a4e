"""The tensors that a GEMM writes, and the buffer of those that a second kernel reads.

`templates.workspace` places each tensor of partials in the buffer.
"""

from __future__ import annotations

from cute_backend.planning import Plan
from cute_backend.signature import COUNTERS
from cute_backend.spec import EpilogueSpec
from cute_backend.templates.workspace import partials_bytes, sums_bytes


def written(spec: EpilogueSpec, counts: bool = False) -> tuple[str, ...]:
    """The names of all tensors that a GEMM writes, in order: planes and elements of blocks, then the partials
    of reductions. If it `counts` the tiles of rows, the results of reductions follow, and the counters."""
    planes = [store.name for store in spec.stores if store.name not in spec.reductions]
    partials = [part.name for name, each in spec.reductions.items() for part in each.partials(name)]
    return (*planes, *partials, *((*spec.reductions, COUNTERS) if counts else ()))


def workspace_bytes(plan: Plan, m: int, n: int) -> int:
    """The size of the buffer that holds the sums of parts of K, then all partials of a plane of (m, n)."""
    tile = plan.tile
    if tile.transposed:
        m, n = n, m
    return sums_bytes(tile, m, n) + sum(
        partials_bytes(reduction.axis, tile.summing, m, n, part.dtype.bits)
        for name, reduction in plan.computed.reductions.items()
        for part in reduction.partials(name)
    )
