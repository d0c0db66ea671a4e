"""One whole model, timed in a process of its own: `python -m cute_backend.bench.model_case NAME`.

It prints a `ModelResult` as JSON. Several such processes compile at the same time, and take turns on the GPU:
the process that uses it holds a lock on a file.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any
from unittest import mock

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch.autograd import DeviceType

from cute_backend.backend import cute
from cute_backend.bench.measure import relative_difference
from cute_backend.bench.model_results import KernelKind, KernelTime, ModelResult, ModelTiming
from cute_backend.bench.models import Model, select
from cute_backend.bench.program_timing import Unit, time_units, unit_of
from cute_backend.bench.table import Runner
from cute_backend.planning.naming import FINISH

_DEVICE = "cuda"

_CALLS = {2048: 1, 64: 4, 1: 4}
"""Calls of a unit, by the tokens of a decoder; a unit of any other model is one call. Each call reads all
weights, which don't fit in L2."""

_ROUNDING = 1e-2
"""The difference from eager's result, relative in norm, that is allowed in addition to that of Inductor's:
bf16 has 8 bits, and a fused epilogue rounds less often than both."""

_ZERO = 1e-2
"""The norm of a result, relative to that of all results, below which it counts as zero."""


class Turn:
    """The right to use the GPU, which one process has at a time."""

    def __init__(self, path: Path | None) -> None:
        self._file: IO[str] | None = path.open("w") if path else None

    def take(self) -> None:
        """Waits until this process may use the GPU, unless it already may."""
        if self._file:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def end(self) -> None:
        """Lets other processes use the GPU, once it is idle."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self._file:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.end()


def measure(model: Model, rounds: int, turn: Turn) -> ModelResult:
    """Times a model as eager, Inductor and cute run it, interleaved."""
    with turn, torch.device(_DEVICE):
        module, args = model.build()
        expected = _step(model, module, module, args)()
    steps = {Runner.EAGER: _step(model, module, module, args)}
    moved, differences, notes = dict[Runner, int](), dict[Runner, float](), dict[Runner, str]()
    for runner, compiler in ((Runner.INDUCTOR, compile_fx), (Runner.CUTE, cute)):
        torch._dynamo.reset()
        counters["cute_backend"].clear()
        program = torch.compile(module, backend=_waiting(compiler, turn), dynamic=False)
        steps[runner] = step = _step(model, module, program, args)
        with _bytes_outside() as found:
            result = step()
            differences[runner] = relative_difference(result, expected, _ZERO)
            turn.end()
        moved[runner] = sum(found)
        tally = counters["cute_backend"]
        if tally["replayed"] or tally["builds_failed"]:
            notes[runner] = "no kernel could be built for some regions: aten ops were timed"
    del expected, result
    with turn:
        calls = _CALLS.get(args[0].numel() // args[0].shape[-1], 1)
        units = {runner: unit_of(step, [()] * calls) for runner, step in steps.items()}
        timings = time_units(units, rounds)
        times = {runner: _kernels(units[runner]) for runner in (Runner.INDUCTOR, Runner.CUTE)}
    limit = 1.5 * differences[Runner.INDUCTOR] + _ROUNDING
    return ModelResult(
        model.name,
        tuple(
            ModelTiming(
                runner,
                timings[runner],
                times.get(runner, ()),
                moved.get(runner),
                differences.get(runner),
                "; ".join(filter(None, [notes.get(runner, ""), units[runner].uncaptured])),
            )
            for runner in steps
        ),
        agrees=differences[Runner.CUTE] <= limit,
    )


def _step(
    model: Model, module: nn.Module, program: Callable[..., Any], args: Sequence[Any]
) -> Callable[[], Any]:
    """A call that returns the result or, for a model that trains, the gradients of the input and of all
    weights that it depends on."""
    if not model.trains:

        def infer() -> Any:
            with torch.no_grad():
                return program(*args)

        return infer

    def train() -> Any:
        result = program(*args)
        wanted = [args[0], *module.parameters()]
        return torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True)

    return train


def _waiting(compiler: Callable[..., Any], turn: Turn) -> Callable[..., Any]:
    """A backend whose programs wait for their turn before they run. Compiling uses no GPU, so it doesn't
    wait."""

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with (
            functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
            inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        ):
            compiled = compiler(gm, inputs)

        def call(*args: Any) -> Any:
            turn.take()
            return compiled(*args)

        return call

    return backend


@contextmanager
def _bytes_outside() -> Iterator[list[int]]:
    """Collects the bytes that Inductor's own kernels read and write, for each graph that is compiled in the
    context. Products, attention and our regions are not counted."""
    found: list[int] = []
    update = GraphLowering._update_scheduler

    def updated(graph: GraphLowering) -> None:
        update(graph)
        found.append(
            sum(each.get_read_write_buffers_sizes() for each in graph.scheduler.nodes if _is_own(each))
        )

    with mock.patch.object(GraphLowering, "_update_scheduler", updated):
        yield found


def _is_own(node: BaseSchedulerNode) -> bool:
    return not isinstance(node, (NopKernelSchedulerNode, ExternKernelSchedulerNode))


def _kernels(unit: Unit) -> tuple[KernelTime, ...]:
    """The kernels that a call launches, the longest first, as the profiler sees one run of a unit."""
    launches, taken = Counter[str](), Counter[str]()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        unit.run()
        torch.cuda.synchronize()
    for event in profile.events() or ():
        if event.device_type == DeviceType.CUDA:
            launches[event.name] += 1
            taken[event.name] += event.time_range.elapsed_us()
    return tuple(
        KernelTime(name, kind_of(name), launches[name] / unit.calls, us / unit.calls)
        for name, us in taken.most_common()
    )


_ATTENTION = re.compile("flash|fmha|attention|sdpa|mha_|softmax", re.I)
_PRODUCT = re.compile("nvjet|gemm|xmma|gemv|splitk|cutlass", re.I)


def kind_of(name: str) -> KernelKind:
    """The purpose of a kernel, from the name that a profiler shows."""
    if name.startswith("cute_") and FINISH not in name:
        return KernelKind.PRODUCT
    if name.startswith(("cute_", "triton_")):
        return KernelKind.OTHER
    if _ATTENTION.search(name):
        return KernelKind.ATTENTION
    return KernelKind.PRODUCT if _PRODUCT.search(name) else KernelKind.OTHER


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--turn", type=Path)
    arguments = parser.parse_args(argv)
    (model,) = select([arguments.name])
    found = measure(model, arguments.rounds, Turn(arguments.turn))
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
