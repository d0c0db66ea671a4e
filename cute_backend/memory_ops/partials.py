"""What a kernel leaves of a reduction: one partial for each tile, which the op then finishes.

A row's partials are one for each tile of columns, (tiles, M); a column's, one for each piece of rows that a
warp has, (pieces, N). What is reduced along both is left by rows. Which tile gave which partial follows
from its place alone, so equal inputs give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..spec import Axis, DType, ReduceKind, Store
from ..templates.config import TileConfig


@dataclass(frozen=True)
class Partial:
    """One tensor of partials: a store may need two, such as a largest value's key and where it was."""

    name: str
    dtype: DType


_PARTS: dict[ReduceKind, tuple[tuple[str, DType], ...]] = {
    ReduceKind.SUM: (("", DType.F32),),
    ReduceKind.MEAN: (("", DType.F32),),
    ReduceKind.MAX: (("", DType.F32),),
    ReduceKind.MIN: (("", DType.F32),),
    ReduceKind.ARGMAX: (("_key", DType.I32), ("_index", DType.I32)),
    ReduceKind.ARGMIN: (("_key", DType.I32), ("_index", DType.I32)),
    ReduceKind.LOGSUMEXP: (("_top", DType.F32), ("_total", DType.F32)),
}


def partials(store: Store) -> tuple[Partial, ...]:
    """The tensors that a kernel writes for a store that reduces."""
    assert store.reduce is not None
    return tuple(Partial(store.name + suffix, dtype) for suffix, dtype in _PARTS[store.reduce.kind])


def outputs(stores: tuple[Store, ...]) -> tuple[str, ...]:
    """The names of all tensors that a kernel writes, in order: planes, and the partials of reductions."""
    names: list[str] = []
    for store in stores:
        names += [store.name] if store.reduce is None else [part.name for part in partials(store)]
    return tuple(names)


def partial_shape(store: Store, config: TileConfig, m: int, n: int) -> tuple[int, int]:
    """The shape of a store's partials for a plane of (m, n)."""
    assert store.reduce is not None
    if store.reduce.axis is Axis.COLUMN:
        return -(-m // config.warp_rows), n
    return -(-n // config.tile_n), m
