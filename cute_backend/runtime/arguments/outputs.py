"""The memory that a kernel writes: the op's results, room for the partials of reductions, and counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import guards

from cute_backend.kinds.axes import Extent
from cute_backend.memory_ops.partials import workspace_bytes
from cute_backend.numerics import TORCH_DTYPES
from cute_backend.planning import Plan
from cute_backend.runtime.arguments.bind import Binding
from cute_backend.runtime.arguments.counters import counters_for
from cute_backend.runtime.arguments.operands import Tensors, check_operands, outputs_like, plane_of
from cute_backend.signature import Argument, Use, of_use
from cute_backend.spec import EpilogueSpec

_MAX_SIZES = 4096
"""The number of sizes whose outputs are remembered."""

_empty_on_current_gpu: Callable[..., Tensor] = guards._empty_strided_cuda  # type: ignore[attr-defined]
"""The function of (sizes, strides, dtype) by which Inductor's code allocates tensors. It takes half the time
of `torch.empty`."""

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Sizes, strides and dtype of a tensor."""


class Outputs:
    """The tensors that a planned kernel writes."""

    def __init__(self, plan: Plan) -> None:
        spec = plan.spec
        binding = Binding(spec)
        written = None if binding.takes_results_as_given else binding.written
        results = [
            (Argument.of_store(stores[0], spec.width_of(stores[0].value)), len(stores))
            for stores in spec.results
        ]
        partial = any(stores[0].form.is_partial for stores in spec.results)
        arguments = [*results, *((each, 1) for each in of_use(plan.arguments, Use.WORKSPACE))]

        @lru_cache(_MAX_SIZES)
        def of_size(m: int, n: int) -> Memory:
            sizes = {Extent.M: m, Extent.N: n, Extent.BYTES: workspace_bytes(plan, m, n)}
            layouts = []
            for argument, parts in arguments:
                shape = argument.shape({**sizes, Extent.N: n * parts * argument.dtype.values})
                layouts.append((shape, argument.packed(shape), TORCH_DTYPES[argument.dtype.part]))
            counters = plan.counters(m, n) if plan.finishes_rows else None
            return Memory(tuple(layouts), len(results), partial, written, counters)

        self.of_size = of_size
        """The memory for a plane of (m, n)."""


def check_call(spec: EpilogueSpec, a: Tensors, b: Tensors, loads: Tensors, results: Tensors | None) -> None:
    """Raises ValueError if operands contradict the spec or one another, or if results that the caller gives
    are not like those that the op would return."""
    check_operands(spec, a, b, loads)
    if results is None:
        return
    expected = outputs_like(spec, torch.empty(0, device="meta"), *plane_of(spec, a, b))
    if len(results) != len(expected):
        raise ValueError(f"gemm_epilogue_into got {len(results)} results; the spec has {len(expected)}")
    for (store, *_), given, like in zip(spec.results, results, expected, strict=True):
        if store.form.is_partial:
            fits = given.numel() == like.numel() and given.is_contiguous()
            wanted = f"contiguous, with {like.numel()} elements"
        else:
            fits = given.shape == like.shape and _same_strides(given, like)
            wanted = f"of shape {tuple(like.shape)} and strides {like.stride()}"
        if given.dtype is not like.dtype or not fits:
            raise ValueError(
                f"gemm_epilogue_into got a result of {given.dtype}, shape {tuple(given.shape)} and strides "
                f"{given.stride()}; expected {like.dtype}, {wanted}"
            )


def deliver(spec: EpilogueSpec, results: list[Tensor], loads: Tensors, given: Tensors | None) -> list[Tensor]:
    """Copies results that were replayed to those that the caller gave. Returns the results, which are those
    `given`, if there are any."""
    if given is None:
        return results
    named = dict(zip((load.name for load in spec.loads), loads, strict=True))
    for (store, *_), result, target in zip(spec.results, results, given, strict=True):
        store.form.copy(result, target, named.get(store.form.positions))
    return list(given)


def _same_strides(given: Tensor, like: Tensor) -> bool:
    """Whether two tensors of one shape have the same strides, but for those that are never used."""
    pairs = zip(given.shape, given.stride(), like.stride(), strict=True)
    return given.stride() == like.stride() or all(size <= 1 or one == other for size, one, other in pairs)


def _allocated(layouts: Sequence[Layout], like: Tensor) -> list[Tensor]:
    """Uninitialised tensors on the device of `like`."""
    if like.is_cuda and like.get_device() == torch._C._cuda_getDevice():
        return [_empty_on_current_gpu(*layout) for layout in layouts]
    return [
        torch.empty_strided(size, stride, dtype=dtype, device=like.device) for size, stride, dtype in layouts
    ]


def _as(layout: Layout, given: Tensor) -> Tensor:
    """A result that the caller gave, in the shape that a kernel takes."""
    size, *_ = layout
    return given if given.shape == size else given.view(size)


class Memory(NamedTuple):
    """The layouts of all tensors that a kernel writes for a plane of some size. The first are `results`, of
    which callers give some in other shapes if they are `partial`. `Binding.written` is kept if it changes
    anything. `counters` is the number of counters that a launch needs, None if the kernel takes none."""

    layouts: tuple[Layout, ...]
    results: int
    partial: bool
    written: Callable[[list[Tensor]], list[Tensor]] | None
    counters: int | None = None

    def allocate(self, like: Tensor, given: Tensors | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Allocates uninitialised memory on the device of `like`. Returns the results, and the arguments that
        a kernel writes: the results, the workspace if there is one, and the counters, which are zeros.

        If the results are `given`, they are written, and not allocated.
        """
        if given is None:
            memory = _allocated(self.layouts, like)
        else:
            memory = [*map(_as, self.layouts, given)] if self.partial else [*given]
            if len(self.layouts) > self.results:
                memory += _allocated(self.layouts[self.results :], like)
        results = memory[: self.results]
        memory = memory if self.written is None else self.written(memory)
        return results, memory if self.counters is None else [*memory, counters_for(self.counters, like)]
