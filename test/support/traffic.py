"""The launches of a program and the bytes that it moves, as Inductor schedules it for a GPU, with its rules
for Triton, on CPU tensors; nothing is compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import NopKernelSchedulerNode

from cute_backend import config
from cute_backend.fx_walk.epilogue_pass import EpiloguePass
from cute_backend.fx_walk.reasons import Rejection
from cute_backend.fx_walk.region import Region


@dataclass(frozen=True)
class Traffic:
    """The kernels of a program, forward and backward, and the bytes that they read and write in all.

    A region with reductions counts a kernel more, which finishes them. `regions` and `rejections` are empty
    for Inductor alone.
    """

    kernels: int
    bytes: int
    regions: tuple[Region, ...] = ()
    rejections: tuple[Rejection, ...] = ()


class _Recorder(EpiloguePass):
    def __init__(self) -> None:
        super().__init__()
        self.regions: list[Region] = []
        self.rejections: list[Rejection] = []

    def analyse(self, graph: Any) -> Any:
        found, refused = super().analyse(graph)
        self.regions += found
        self.rejections += refused
        return found, refused


def alone(fn: Callable[..., Any], args: tuple[Any, ...]) -> Traffic:
    """The traffic of a call of `fn` without the pass."""
    return Traffic(*_scheduled(fn, args, None))


def fused(fn: Callable[..., Any], args: tuple[Any, ...]) -> Traffic:
    """The traffic of a call of `fn` with the pass."""
    recorder = _Recorder()
    kernels, moved = _scheduled(fn, args, recorder)
    finishing = sum(bool(region.spec.reductions) for region in recorder.regions)
    return Traffic(kernels + finishing, moved, tuple(recorder.regions), tuple(recorder.rejections))


def _scheduled(fn: Callable[..., Any], args: tuple[Any, ...], graph_pass: Any) -> tuple[int, int]:
    moved: list[int] = []

    def scheduled(graph: GraphLowering) -> Any:
        graph.init_wrapper_code()
        graph._update_scheduler()
        moved.extend(node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes if _launched(node))
        return SimpleNamespace(call=None, runner=None, key="", __file__="", source_code="", value="")

    def inner(gm: torch.fx.GraphModule, inputs: Any, **how: Any) -> Callable[..., Any]:
        with mock.patch.object(GraphLowering, "compile_to_module", scheduled):
            compile_fx_inner(copy.deepcopy(gm), inputs, **how)
        return gm.forward

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return compile_fx(gm, inputs, inner_compile=inner)

    torch._dynamo.reset()
    with (
        config.patch(raise_errors=True),
        inductor_config.patch(
            post_grad_custom_pre_pass=graph_pass, force_disable_caches=True, cpu_backend="triton"
        ),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
    ):
        torch.compile(fn, backend=backend, dynamic=False)(*args)
    return len(moved), sum(moved)


def _launched(node: Any) -> bool:
    """Whether a node of the schedule is a kernel: neither memory alone nor an item of a tuple."""
    return not isinstance(node, NopKernelSchedulerNode) and not isinstance(node.node, ir.MultiOutput)
