"""Times kernels on a GPU, alternating between them."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cute_backend.memory_ops.partials import workspace_bytes
from cute_backend.planning import Plan
from cute_backend.runtime.arguments.bind import Binding
from cute_backend.runtime.arguments.counters import counters_for
from cute_backend.runtime.arguments.device import Device, max_active_clusters
from cute_backend.runtime.arguments.outputs import Outputs
from cute_backend.runtime.arguments.random_operands import random_operands, skewed_split
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.link import KernelFunction
from cute_backend.signature import Use, signature
from cute_backend.spec import EpilogueSpec

log = logging.getLogger(__name__)

Run = Callable[[], Any]
"""Work that is put on the current stream."""


@dataclass(frozen=True)
class Timings:
    """Medians in microseconds. Programs that failed to run are missing."""

    kernels: dict[Kernel, float]
    unfused: float | None = None
    products: float | None = None


class Timer(Protocol):
    """Times kernels of one spec for (M, N, K) and, interleaved with them, code that computes the same without
    them, if there is any, and with `products` torch's product of the operands with nothing behind it, if
    torch has one."""

    def __call__(
        self,
        sizes: tuple[int, int, int],
        functions: Mapping[Kernel, KernelFunction],
        unfused: Run | None,
        groups: int | None,
        products: bool = False,
    ) -> Timings: ...

    def free_bytes(self) -> int:
        """The bytes of the GPU's memory that operands can have."""


_SECONDS = 1.5
"""The seconds that the timing of one problem may take."""

_ROUNDS = (12, 60)
"""The fewest and the most timings of each candidate."""

_SWEPT = 4
"""The size of the buffer that is read between two runs, in multiples of L2."""

_HOST_CYCLES = 200_000
"""The GPU cycles (about 100 us) for which a call may keep the host busy without the GPU having to wait."""


@dataclass(frozen=True)
class GpuTimer:
    """Times on a real GPU, on random operands: one run of each candidate in a round, each from a cold L2.

    For a product of rows in groups, a time is the mean of two: with groups of one size, and with half of the
    rows in one group.
    """

    gpu: Device

    def __call__(
        self,
        sizes: tuple[int, int, int],
        functions: Mapping[Kernel, KernelFunction],
        unfused: Run | None,
        groups: int | None = None,
        products: bool = False,
    ) -> Timings:
        """Times kernels, and `unfused` if there is such a run, at one (M, N, K). Raises
        torch.OutOfMemoryError if the operands don't fit into the free memory of the GPU."""
        with torch.no_grad(), torch.cuda.device(self.gpu.index):
            try:
                return self._time(sizes, functions, unfused, groups, products)
            finally:
                torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """The bytes that are free on the GPU, or that torch holds and doesn't use."""
        index = self.gpu.index
        unused = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
        return torch.cuda.mem_get_info(index)[0] + unused

    def _time(
        self,
        sizes: tuple[int, int, int],
        functions: Mapping[Kernel, KernelFunction],
        unfused: Run | None,
        groups: int | None,
        products: bool = False,
    ) -> Timings:
        device = torch.device("cuda", self.gpu.index)
        plans, generator = [kernel.plan for kernel in functions], torch.Generator(device).manual_seed(0)
        memory = arguments_of(plans, *sizes, generator, groups or 1)
        runs: dict[Kernel | str, Run] = {
            kernel: _call(
                function,
                taken_by(kernel.plan, memory),
                max_active_clusters(self.gpu.index, kernel.plan.tile.cluster_size),
            )
            for kernel, function in functions.items()
        }
        if unfused is not None:
            runs["unfused"] = unfused
        if products and (torchs := torchs_products(plans[0].spec, memory)) is not None:
            runs["products"] = torchs
        runs = {name: run for name, run in runs.items() if _works(run)}
        medians = dict(zip(runs, _medians(list(runs.values()), device), strict=True))
        if groups is not None:
            place = next(i for i, each in enumerate(plans[0].arguments) if each.use is Use.OFFSETS)
            memory[place].copy_(skewed_split(sizes[0], groups))
            skewed = _medians(list(runs.values()), device)
            medians = {
                name: (us + more) / 2 for (name, us), more in zip(medians.items(), skewed, strict=True)
            }
        others = medians.pop("unfused", None), medians.pop("products", None)
        return Timings({kernel: us for kernel, us in medians.items() if isinstance(kernel, Kernel)}, *others)


def arguments_of(
    plans: Sequence[Plan], m: int, n: int, k: int, generator: torch.Generator, groups: int = 1
) -> list[Tensor]:
    """Random arguments of kernels of one spec, in order: operands, loads and what they write.

    Each kernel takes those that `taken_by` returns: if one leaves sums in memory, others have no workspace,
    and not all count tiles.
    """
    spec = plans[0].spec
    bound = Binding(spec).bind(*random_operands(spec, m, n, k, generator, groups))
    roomiest = max(plans, key=lambda plan: workspace_bytes(plan, m, n))
    _, memory = Outputs(roomiest).of_size(m, n)._replace(counters=None).allocate(bound.tensors[0])
    if any(plan.finishes_rows for plan in plans):
        memory.append(counters_for(max(m, n), bound.tensors[0]))
    return bound.tensors + memory


def torchs_products(spec: EpilogueSpec, memory: Sequence[Tensor]) -> Run | None:
    """A run of torch's product of the operands among these arguments, or None if torch has none that takes
    them as they are.

    Several B are one with the columns of all: they may be parts of one weight, of which Inductor's code makes
    one product, and that takes less time than one of each.
    """
    tensors = [(argument.use, tensor) for argument, tensor in zip(signature(spec), memory, strict=False)]
    (a, *others), b = ([tensor for use, tensor in tensors if use is side] for side in (Use.A, Use.B))
    if others or any(each.dtype != a.dtype or each.shape[:-1] != (*a.shape[:-2], a.shape[-1]) for each in b):
        return None
    all_columns = b[0] if len(b) == 1 else _side_by_side(b)
    return lambda: torch.matmul(a, all_columns)


def _side_by_side(b: Sequence[Tensor]) -> Tensor:
    """The columns of several B (..., K, N) in one, contiguous along the axis along which the first one is."""
    if b[0].stride(-2) == 1:
        return torch.cat([each.mT for each in b], -2).mT
    return torch.cat(list(b), -1)


def taken_by(plan: Plan, arguments: list[Tensor]) -> list[Tensor]:
    """The arguments of a kernel among those of all kernels of its spec. It may lack the workspace or the
    counters."""
    return arguments[: len(plan.arguments)]


def _call(function: KernelFunction, memory: list[Tensor], clusters: int) -> Run:
    return lambda: function(*memory, clusters)


def _works(run: Run) -> bool:
    """Whether two runs succeed. A kernel that the driver refuses to launch is not a candidate."""
    try:
        for _ in range(2):
            run()
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError):
        return False
    return True


def _captured(run: Run) -> Run:
    """A run as a CUDA graph, or as it is if it can't be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            # Work of other threads, which is not captured, goes on.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
    except RuntimeError as error:
        log.info("a run is timed without a CUDA graph: %s", error)
        return run
    return graph.replay


def _medians(runs: Sequence[Run], device: torch.device) -> list[float]:
    """Microseconds between the start and the end of each run.

    Between two runs a buffer larger than L2 is read, which leaves nothing there that a run could use, and
    nothing that it would have to write back. The host is ahead by a whole round. Runs are CUDA graphs: the
    few microseconds of a kernel count where no host's work hides them, and launches to a stream leave larger
    gaps. For 1060 x 448 x 4400 in bf16 with bias, relu and residual, one kernel took 18.8 on a stream and
    16.0 in a graph, and Inductor's kernels 19.3 and 14.1 (H200).
    """
    if not runs:
        return []
    torch.cuda.synchronize(device)
    runs = [_captured(run) for run in runs]
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    swept = torch.zeros(_SWEPT * l2_bytes // 4, device=device)
    rounds: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []
    fewest, most = _ROUNDS
    until = time.monotonic() + _SECONDS
    while len(rounds) < fewest or (len(rounds) < most and time.monotonic() < until):
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in runs]
        torch.cuda._sleep(_HOST_CYCLES * len(runs))
        for run, (start, end) in zip(runs, pairs, strict=True):
            swept.sum()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        rounds.append(pairs)
    times = [[start.elapsed_time(end) * 1e3 for start, end in pairs] for pairs in rounds[2:]]
    return [statistics.median(column) for column in zip(*times, strict=True)]
