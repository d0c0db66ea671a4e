"""The partial results of a reduction, which a kernel writes to a buffer for a second kernel to finish.

`templates.workspace` places each tensor of partials in the buffer.
"""

from __future__ import annotations

from dataclasses import replace

from cute_backend.kinds.reductions import Part
from cute_backend.planning import Plan
from cute_backend.signature import COUNTERS
from cute_backend.spec import Store
from cute_backend.templates.workspace import partials_bytes, sums_bytes


def partials(store: Store) -> tuple[Part, ...]:
    """The tensors that a kernel writes for a store that reduces, such as the key of the largest value and its
    index, by the names of these tensors."""
    assert store.reduce is not None
    return tuple(replace(part, name=store.name + part.name) for part in store.reduce.parts)


def written(stores: tuple[Store, ...], counts: bool = False) -> tuple[str, ...]:
    """The names of all tensors that a GEMM writes, in order: planes and elements of blocks, then the partials
    of reductions. If it `counts` the tiles of rows, the results of reductions follow, and the counters."""
    planes = [store.name for store in stores if store.reduce is None]
    reducing = [store for store in stores if store.reduce is not None]
    finished = (*(store.name for store in reducing), COUNTERS) if counts else ()
    return (*planes, *(part.name for store in reducing for part in partials(store)), *finished)


def workspace_bytes(plan: Plan, m: int, n: int) -> int:
    """The size of the buffer that holds the sums of parts of K, then all partials of a plane of (m, n)."""
    tile = plan.tile
    if tile.transposed:
        m, n = n, m
    return sums_bytes(tile, m, n) + sum(
        partials_bytes(store.reduce.axis, tile.summing, m, n, part.dtype.bits)
        for store in plan.computed.stores
        if store.reduce is not None
        for part in partials(store)
    )
