"""The memory that a kernel writes: the op's results, and room for the partials of reductions."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import guards

from cute_backend.memory_ops.partials import workspace_bytes
from cute_backend.numerics import TORCH_DTYPES
from cute_backend.planning import TileConfig
from cute_backend.runtime.operands import REDUCED_SHAPES, Size
from cute_backend.spec import Axis, DType, EpilogueSpec, Order, Store

_MAX_SIZES = 4096
"""Sizes for which it is remembered what is made."""

_empty_on_current_gpu: Callable[..., Tensor] = guards._empty_strided_cuda  # type: ignore[attr-defined]
"""(sizes, strides, dtype): what Inductor's code allocates with, in half the time of `torch.empty`."""

Layout = tuple[tuple[Size, ...], tuple[int, ...], torch.dtype]
"""Sizes, strides and dtype of a tensor."""


class Outputs:
    """What kernels of one spec and tile configuration write."""

    def __init__(self, spec: EpilogueSpec, config: TileConfig) -> None:
        views = tuple((i, view) for i, store in enumerate(spec.stores) for view in _views(store))

        @lru_cache(_MAX_SIZES)
        def of_size(m: int, n: int) -> Memory:
            layouts = [_layout(store, m, n) for store in spec.stores]
            if spec.reductions:
                layouts.append(((workspace_bytes(spec, config, m, n),), (1,), torch.uint8))
            return Memory(tuple(layouts), len(spec.stores), views)

        self.of_size = of_size
        """The memory for a plane of (m, n)."""


class Memory(NamedTuple):
    """The layouts of all that a kernel writes for a plane of some size, so many results first, and as what
    views it takes some of them."""

    layouts: tuple[Layout, ...]
    results: int
    views: tuple[tuple[int, Callable[[Tensor], Tensor]], ...]

    def allocate(self, like: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Uninitialised results, and all that a kernel writes in its arguments' order: those as it takes
        them, and a buffer for partials where some reduce. On the device of `like`."""
        if like.is_cuda and like.get_device() == torch._C._cuda_getDevice():
            memory = [_empty_on_current_gpu(*layout) for layout in self.layouts]
        else:
            memory = [
                torch.empty_strided(size, stride, dtype=dtype, device=like.device)
                for size, stride, dtype in self.layouts
            ]
        results = memory[: self.results]
        for i, view in self.views:
            memory[i] = view(memory[i])
        return results, memory


def _layout(store: Store, m: int, n: int) -> Layout:
    dtype = TORCH_DTYPES[store.dtype]
    if store.reduce is not None:
        shape = REDUCED_SHAPES[store.reduce.axis](m, n)
        return shape, (1,) * len(shape), dtype
    return (m, n), (n, 1) if store.order is Order.ROW else (1, m), dtype


def _views(store: Store) -> list[Callable[[Tensor], Tensor]]:
    """How a kernel takes a result: truth values as bytes, one element as a vector."""
    views: list[Callable[[Tensor], Tensor]] = []
    if store.dtype is DType.BOOL:
        views.append(lambda tensor: tensor.view(torch.uint8))
    if store.reduce is not None and store.reduce.axis is Axis.ALL:
        views.append(lambda tensor: tensor.view(1))
    return views
