"""Planes that are written to rows of a cache of keys or values, with aten: see `spec.Cache`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cute_backend.spec import Cache, EpilogueSpec


def caches_of(spec: EpilogueSpec) -> list[Cache | None]:
    """The cache of each of a spec's results, None for a result that is in none."""
    return [stores[0].cache for stores in spec.results]


def without_caches(spec: EpilogueSpec) -> tuple[EpilogueSpec, list[int]]:
    """The spec whose results are plain (M, N) tensors instead, and the indices of the loads that it has."""
    read = {each for op in spec.ops for each in op.values}
    positions = {cache.at for cache in caches_of(spec) if cache is not None} - read
    kept = [index for index, load in enumerate(spec.loads) if load.name not in positions]
    stores = tuple(replace(store, cache=None) for store in spec.stores)
    return replace(spec, loads=tuple(spec.loads[index] for index in kept), stores=stores), kept


def write_rows(
    spec: EpilogueSpec, cache: Cache, memory: Tensor, plane: Tensor, loads: Sequence[Tensor]
) -> None:
    """Writes the rows of a plane (M, N) to the `memory` of a cache, contiguous, of any shape. `loads` are the
    spec's."""
    row, batch, position = _written(spec, cache, plane.shape[0], loads)
    heads = plane.shape[1] // cache.columns
    rows = plane.contiguous().view(-1, heads, cache.columns).view(torch.uint8)
    _in_bytes(cache, memory, heads)[batch, :, position] = rows[row]


def deliver(
    spec: EpilogueSpec, results: list[Tensor], loads: Sequence[Tensor], given: Sequence[Tensor] | None
) -> list[Tensor]:
    """Copies results that were replayed to those that the caller gave: of a result in a new cache, the rows
    that were written. Returns the results, which are those `given`, if there are any."""
    if given is None:
        return results
    for cache, result, target in zip(caches_of(spec), results, given, strict=True):
        if cache is None:
            target.copy_(result)
        else:
            _copy_rows(spec, cache, result, target, loads)
    return list(given)


def _copy_rows(
    spec: EpilogueSpec, cache: Cache, result: Tensor, target: Tensor, loads: Sequence[Tensor]
) -> None:
    """Copies the rows of a new cache that were written to another one, of any shape."""
    rows, heads = result.shape[0] // cache.length * cache.rows, result.shape[1] // cache.columns
    _, batch, position = _written(spec, cache, rows, loads)
    source = _in_bytes(cache, result, heads)
    _in_bytes(cache, target, heads)[batch, :, position] = source[batch, :, position]


def _in_bytes(cache: Cache, memory: Tensor, heads: int) -> Tensor:
    """The memory of a cache as (B, H, L, bytes of a row): torch does not index every dtype."""
    return memory.view(-1, heads, cache.length, cache.columns).view(torch.uint8)


def _written(
    spec: EpilogueSpec, cache: Cache, rows: int, loads: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of a plane of `rows` rows that are written to a cache, their batches and their positions."""
    row = torch.arange(rows, device=loads[0].device if loads else None)
    position = _positions(spec, cache, row, loads)
    position = torch.where(position < 0, position + cache.length, position)
    row = row[(position >= 0) & (position < cache.length)]
    return row, row // cache.rows, position[row]


def _positions(spec: EpilogueSpec, cache: Cache, row: Tensor, loads: Sequence[Tensor]) -> Tensor:
    """The position of each of the plane's rows, as a program gives it."""
    within = row % cache.rows
    if isinstance(cache.at, int):
        return cache.at + within
    names = [load.name for load in spec.loads]
    load, given = spec.loads[names.index(cache.at)], loads[names.index(cache.at)].long()
    return given.reshape(-1) if load.kind.by_row else given.reshape(1) + within
