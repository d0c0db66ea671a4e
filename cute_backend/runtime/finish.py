"""The memory that a kernel writes, and the reductions that are finished from it.

A kernel leaves partials (`memory_ops.partials`); a few aten ops combine them, on the caller's stream. Maxima
and arguments come out the same whatever the tile; sums are added up in the order of the tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cute_backend.memory_ops.partials import partial_shape, partials
from cute_backend.numerics import TORCH_DTYPES
from cute_backend.reduce import reduce
from cute_backend.replay import packed
from cute_backend.runtime.operands import output_like
from cute_backend.spec import Axis, EpilogueSpec, ReduceKind, Reduction, Store
from cute_backend.templates.config import TileConfig


def written(spec: EpilogueSpec, config: TileConfig, like: Tensor, m: int, n: int) -> list[Tensor]:
    """Uninitialised memory for all that a kernel writes, in its arguments' order, on the device of `like`."""
    memory = []
    for store in spec.stores:
        if store.reduce is None:
            memory.append(output_like(store, like, m, n))
        else:
            shape = partial_shape(store, config, m, n)
            memory += [like.new_empty(shape, dtype=TORCH_DTYPES[part.dtype]) for part in partials(store)]
    return memory


def finished(spec: EpilogueSpec, memory: Sequence[Tensor], m: int, n: int) -> list[Tensor]:
    """The spec's outputs, from what a kernel wrote."""
    rest = iter(memory)
    return [
        next(rest) if store.reduce is None else _finished(spec, store, store.reduce, rest, m, n)
        for store in spec.stores
    ]


def _finished(
    spec: EpilogueSpec, store: Store, reduction: Reduction, memory: Iterator[Tensor], m: int, n: int
) -> Tensor:
    parts = [next(memory) for _ in partials(store)]
    whole = reduction.axis is Axis.ALL
    axis = Axis.ALL if whole else Axis.COLUMN  # of the partials, (parts, results)
    if reduction.kind.is_index:
        return _index(parts[0], parts[1], n, whole)
    if reduction.kind is ReduceKind.LOGSUMEXP:
        result = _logsumexp(parts[0], parts[1], axis)
    elif reduction.kind is ReduceKind.MEAN:
        count = {Axis.ROW: n, Axis.COLUMN: m, Axis.ALL: m * n}[reduction.axis]
        result = reduce(parts[0], Reduction(axis, ReduceKind.SUM)) / count
    else:
        result = reduce(parts[0], Reduction(axis, reduction.kind))
    return packed(spec, store, result)


def _index(keys: Tensor, indices: Tensor, n: int, whole: bool) -> Tensor:
    """Where the largest key is; of equal ones, the lowest index."""
    index = indices.long()
    dims = 0
    if whole:
        index = index + torch.arange(keys.shape[1], device=keys.device) * n
        keys, index = keys.reshape(-1), index.reshape(-1)
    none = torch.iinfo(torch.int64).max
    return torch.where(keys == keys.amax(dims, keepdim=True), index, none).amin(dims)


def _logsumexp(tops: Tensor, totals: Tensor, axis: Axis) -> Tensor:
    """From largest values, and sums of exponentials of what is less those, unless those are infinite."""
    top = reduce(tops, Reduction(axis, ReduceKind.MAX))
    shift, shifts = (torch.where(value.isinf(), 0.0, value) for value in (top, tops))
    scaled = totals * (shifts - shift).clamp(max=0.0).exp()
    return reduce(scaled, Reduction(axis, ReduceKind.SUM)).log() + shift
