"""The partial results of a reduction, which a kernel writes to a buffer for a second kernel to finish.

`templates.workspace` places each tensor of partials in the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_backend.planning import Plan
from cute_backend.signature import COUNTERS
from cute_backend.spec import Axis, DType, ReduceKind, Store
from cute_backend.templates.workspace import partials_bytes, sums_bytes


@dataclass(frozen=True)
class Partial:
    """One tensor of partials: a store may need two, such as the key of the largest value and its index."""

    name: str
    dtype: DType


_PARTS: dict[ReduceKind, tuple[tuple[str, DType], ...]] = {
    ReduceKind.SUM: (("_sum", DType.F32),),
    ReduceKind.MEAN: (("_sum", DType.F32),),
    ReduceKind.PROD: (("_product", DType.F32),),
    ReduceKind.MAX: (("_max", DType.F32),),
    ReduceKind.MIN: (("_min", DType.F32),),
    ReduceKind.ARGMAX: (("_key", DType.F32), ("_index", DType.I32)),
    ReduceKind.ARGMIN: (("_key", DType.F32), ("_index", DType.I32)),
    ReduceKind.LOGSUMEXP: (("_top", DType.F32), ("_total", DType.F32)),
}


def partials(store: Store) -> tuple[Partial, ...]:
    """The tensors that a kernel writes for a store that reduces. An index into the plane has 64 bits."""
    assert store.reduce is not None
    wide = store.reduce.kind.is_index and store.reduce.axis is Axis.ALL
    return tuple(
        Partial(store.name + suffix, DType.I64 if wide and suffix == "_index" else dtype)
        for suffix, dtype in _PARTS[store.reduce.kind]
    )


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
