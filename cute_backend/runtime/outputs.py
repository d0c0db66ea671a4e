"""The memory that a kernel writes: the op's results, and room for the partials of reductions."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from cute_backend.memory_ops.partials import workspace_bytes
from cute_backend.numerics import TORCH_DTYPES
from cute_backend.runtime.operands import REDUCED_SHAPES
from cute_backend.spec import Axis, DType, EpilogueSpec, Order, Store
from cute_backend.templates.config import TileConfig

_MAX_SIZES = 4096
"""Sizes whose need of room is remembered."""

Make = Callable[[int, int, torch.device], Tensor]


class Outputs:
    """What kernels of one spec and tile configuration write."""

    def __init__(self, spec: EpilogueSpec, config: TileConfig) -> None:
        self._makers = [_maker(store) for store in spec.stores]
        self._views = [(i, view) for i, store in enumerate(spec.stores) for view in _views(store)]
        self._reduces = bool(spec.reductions)

        @lru_cache(_MAX_SIZES)
        def room(m: int, n: int) -> int:
            return workspace_bytes(spec, config, m, n)

        self._room = room

    def allocate(self, m: int, n: int, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """Uninitialised results for a plane of (m, n), and all that a kernel writes in its arguments' order:
        those as it takes them, and a buffer for partials where some reduce."""
        results = [make(m, n, device) for make in self._makers]
        if not self._views and not self._reduces:
            return results, results
        memory = list(results)
        for i, view in self._views:
            memory[i] = view(memory[i])
        if self._reduces:
            memory.append(torch.empty(self._room(m, n), dtype=torch.uint8, device=device))
        return results, memory


def _maker(store: Store) -> Make:
    dtype = TORCH_DTYPES[store.dtype]
    if store.reduce is not None:
        shape = REDUCED_SHAPES[store.reduce.axis]
        return lambda m, n, device: torch.empty(shape(m, n), dtype=dtype, device=device)
    if store.order is Order.ROW:
        return lambda m, n, device: torch.empty(m, n, dtype=dtype, device=device)
    return lambda m, n, device: torch.empty(n, m, dtype=dtype, device=device).t()


def _views(store: Store) -> list[Callable[[Tensor], Tensor]]:
    """How a kernel takes a result: truth values as bytes, one element as a vector."""
    views: list[Callable[[Tensor], Tensor]] = []
    if store.dtype is DType.BOOL:
        views.append(lambda tensor: tensor.view(torch.uint8))
    if store.reduce is not None and store.reduce.axis is Axis.ALL:
        views.append(lambda tensor: tensor.view(1))
    return views
