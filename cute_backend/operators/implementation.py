"""The kernel of an operator: compiles it, and launches it on tensors that the caller has allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from cute_backend.errors import UsageError
from cute_backend.kinds import reductions
from cute_backend.kinds.axes import Extent
from cute_backend.memory_ops.partials import workspace_bytes
from cute_backend.numerics import TORCH_DTYPES
from cute_backend.runtime.arguments.bind import Binding
from cute_backend.runtime.arguments.counters import counters_for
from cute_backend.runtime.arguments.device import Grid, device_at, max_active_clusters
from cute_backend.runtime.arguments.operands import Tensors
from cute_backend.runtime.compiling.build import obtain
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.link import KernelFunction
from cute_backend.signature import WORKSPACE_ALIGN, Argument
from cute_backend.spec import Store

_COMBINE: dict[reductions.ReductionKind, Callable[..., Tensor]] = {
    reductions.SUM: torch.add,
    reductions.MAX: torch.maximum,
    reductions.MIN: torch.minimum,
}
"""The functions that combine a reduction with the contents of its destination, as the contract of epilogue
arguments requires. Reductions that the contract does not know overwrite the destination."""


@dataclass(frozen=True)
class Implementation:
    """A kernel whose results go to given tensors.

    Its workspace holds the partials of reductions, and then their results, before these are combined with the
    contents of the destinations.
    """

    kernel: Kernel

    def compile(self) -> KernelFunction:
        """The kernel, from the cache or compiled. It needs no GPU. Raises BuildError or UnavailableError."""
        outcome = obtain([self.kernel])[self.kernel]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def workspace_bytes(self, m: int, n: int) -> int:
        """The bytes of workspace that a launch on a plane of (m, n) needs."""
        return self._places(m, n)[-1]

    def launch(
        self,
        function: KernelFunction,
        a: Tensor,
        b: Tensor,
        loads: Tensors,
        results: Tensors,
        workspace: Tensor | None,
    ) -> None:
        """Runs the kernel on the current stream. `loads` are canonical views in the order of the spec's
        loads, and `results` are in the order of its stores. `workspace` has at least `workspace_bytes` bytes,
        and may be None if that is 0.

        Raises UsageError on a GPU of another architecture.
        """
        gpu = device_at(a.get_device())
        if gpu.arch is not self.kernel.arch:
            raise UsageError(
                f"the kernel is for {self.kernel.arch.value}, but {gpu.name} is {gpu.arch.value}"
            )
        m, n = a.shape[0], b.shape[1]
        bound = self._binding.bind([a], [b], loads)
        memory = list(results)
        finished: list[tuple[Store, Tensor, Tensor]] = []
        if workspace is not None:
            starts = iter(self._places(m, n))
            for i, store in enumerate(self.kernel.plan.spec.stores):
                if store.form.reduction is not None:
                    length, start, dtype = _elements(store, m, n), next(starts), TORCH_DTYPES[store.dtype]
                    memory[i] = workspace[start : start + length * dtype.itemsize].view(dtype)
                    finished.append((store, results[i], memory[i]))
            memory.append(workspace[: self._partials(m, n)])
        memory = self._binding.written(memory)
        if self.kernel.plan.finishes_rows:
            memory.append(counters_for(self.kernel.plan.counters(m, n), a))
        size = self.kernel.plan.tile.cluster_size
        grid = Grid(max_active_clusters(gpu.index, size), size, gpu.sm_count)
        function(*bound.tensors, *memory, grid.clusters())
        for store, result, whole in finished:
            assert store.form.reduction is not None
            combine, whole = _COMBINE.get(store.form.reduction.kind), whole.view(result.shape)
            if combine is None:
                result.copy_(whole)
            else:
                combine(result, whole, out=result)

    @cached_property
    def _binding(self) -> Binding:
        return Binding(self.kernel.plan.spec)

    def _partials(self, m: int, n: int) -> int:
        return workspace_bytes(self.kernel.plan, m, n)

    def _places(self, m: int, n: int) -> list[int]:
        """The offset of each reduction's result in the workspace, and the end of the last one."""
        places = [self._partials(m, n)]
        for store in (each for each in self.kernel.plan.spec.stores if each.form.reduction is not None):
            size = _elements(store, m, n) * TORCH_DTYPES[store.dtype].itemsize
            places.append(places[-1] + -(-size // WORKSPACE_ALIGN) * WORKSPACE_ALIGN)
        return places


def _elements(store: Store, m: int, n: int) -> int:
    return prod(Argument.of_store(store).shape({Extent.M: m, Extent.N: n}))


@contextmanager
def running_on(stream: Any, device: torch.device) -> Iterator[None]:
    """Makes a GPU current, and a stream on it. The stream may be torch's, the driver's or a handle."""
    handle = stream.cuda_stream if isinstance(stream, torch.cuda.Stream) else int(stream)
    with torch.cuda.device(device):
        if torch.cuda.current_stream().cuda_stream == handle:
            yield
            return
        chosen = torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream()
        with torch.cuda.stream(chosen):
            yield
