"""A region by itself, as Inductor compiles it without our pass: the baseline that its kernel has to beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.utils import BoxedBool
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg

from cute_backend.fx_walk.graph.static import Size, arguments, describe, fake, hint
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.region.region import Region
from cute_backend.runtime.arguments.random_operands import random_tensor

_SETTINGS: dict[str, Any] = {
    # A pass that the user set runs on the whole graph, ours included.
    "post_grad_custom_pre_pass": None,
    "post_grad_custom_post_pass": None,
    # The search for tuned Triton products takes longer than all tuning of a problem may, and in fp8 none was
    # seen that beats cuBLAS. So at most the pointwise kernel after the product is tuned.
    "max_autotune": False,
    "max_autotune_gemm": False,
    "coordinate_descent_tuning": False,
    "triton.cudagraphs": False,
    # The cache would bundle this code into its current entry, which is that of the graph around this one.
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
}


def unfused(region: Region, tuned: bool) -> Callable[[], Callable[[], Any]]:
    """A function that compiles the region, as it is in its graph now, as Inductor's own code on random
    inputs. The result computes that once in a call, on the current stream. If `tuned`, Inductor tunes the
    pointwise kernels behind the product.

    Symbolic sizes have the values of their examples. The inputs are made by the first call. The function
    raises Inductor's exceptions.
    """
    return partial(_compile, extract(region), tuned)


def _compile(alone: Alone, tuned: bool) -> Callable[[], Any]:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        fakes = [layout.empty() for layout in alone.layouts]
    with (
        tracing(TracingContext(mode)),
        torch.no_grad(),
        inductor_config.patch({**_SETTINGS, "max_autotune_pointwise": tuned}),
        functorch_config.patch(bundled_autograd_cache=False),
    ):
        compiled = compile_fx_inner(alone.module, fakes, cudagraphs=BoxedBool(False), is_inference=True)
    inputs: list[Tensor] = []

    def run() -> Any:
        if not inputs:
            inputs.extend(alone.inputs())
        return compiled(list(inputs))

    return run


@dataclass(frozen=True)
class Layout:
    """A tensor without its values."""

    sizes: list[int]
    strides: list[int]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """An uninitialised tensor."""
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Alone:
    """A region as a graph of its own, in which every size is a number, and its inputs' layouts."""

    module: fx.GraphModule
    layouts: tuple[Layout, ...]

    def inputs(self) -> list[Tensor]:
        """Random inputs, the same at every call."""
        generator = torch.Generator(self.layouts[0].device).manual_seed(0)
        return [random_tensor(each.sizes, each.strides, each.dtype, generator) for each in self.layouts]


def extract(region: Region) -> Alone:
    """The region as a graph. Its inputs are the kernel's loads, and the kernel's work on them is part of
    it."""
    nodes = _computed(region)
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    layouts: list[Layout] = []
    for source in dict.fromkeys(source for node in nodes for source in node.all_input_nodes):
        if source in nodes:
            continue
        if _is_number(source):
            copies[source] = _numbers([source.meta["val"]])[0]
            continue
        tensor = fake(source)
        copies[source] = graph.placeholder(f"input{len(layouts)}")
        sizes, strides = _numbers(tensor.shape), _numbers(tensor.stride())
        layouts.append(Layout(sizes, strides, tensor.dtype, tensor.device))
    for node in nodes:
        copies[node] = graph.call_function(
            node.target,  # type: ignore[arg-type]
            map_arg(node.args, copies.__getitem__),
            map_arg(node.kwargs, copies.__getitem__),
        )
    graph.output(tuple(copies[node] for node in region.outputs))
    return Alone(fx.GraphModule(torch.nn.Module(), graph), tuple(layouts))


def _computed(region: Region) -> dict[fx.Node, None]:
    """The nodes between the region's loads and its outputs, in the graph's order."""
    ends = {*chain.from_iterable(map(_read_by, region.anchors)), *region.load_nodes}
    found: set[fx.Node] = set()
    stack = list(region.outputs)
    while stack:
        node = stack.pop()
        if node in found or node in ends or node.op != "call_function" or _is_number(node):
            continue
        found.add(node)
        stack.extend(node.all_input_nodes)
    return {node: None for node in region.first.node.graph.nodes if node in found}


def _read_by(anchor: Anchor) -> list[fx.Node]:
    """The nodes that a product reads. One that converts its weight reads the stored values, so the steps from
    these to B are work of the region."""
    read = anchor.node.all_input_nodes
    if not anchor.accumulator.is_converted:
        return read
    steps = arguments(anchor.node)["mat2"]
    beside = (vector.node for vector in anchor.b_vectors)
    return [*(node for node in read if node is not steps), anchor.b, *beside]


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _numbers(sizes: Sequence[Size]) -> list[int]:
    numbers = [hint(size) for size in sizes]
    if None in numbers:
        raise ValueError(f"no example is known of the sizes {describe(sizes)}")
    return [number for number in numbers if number is not None]
