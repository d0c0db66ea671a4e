"""A region by itself, as Inductor compiles it without our pass: what its kernel has to beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

from cute_backend.fx_walk.region import Region
from cute_backend.fx_walk.static import Size, describe, fake, hint, tensor_of
from cute_backend.runtime.samples import random_tensor

_SETTINGS: dict[str, Any] = {
    # What users set runs on the whole graph, ours included.
    "post_grad_custom_pre_pass": None,
    "post_grad_custom_post_pass": None,
    # Tuned Triton matrix products take longer to find than all of a problem's tuning may, and in fp8 none was
    # seen that beats cuBLAS; what is tuned is the pointwise kernel after it.
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": True,
    "coordinate_descent_tuning": False,
    "triton.cudagraphs": False,
    # The cache bundles what is compiled into the one entry that is being made, of the graph around this one.
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
}


def compile_unfused(region: Region) -> Callable[[], Any]:
    """The region as Inductor's own code, on random inputs: a call computes it once, on the current stream.

    Symbolic sizes take the example that they were made from. Raises what Inductor raises.
    """
    module, inputs = extract(region)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in inputs]
    with (
        tracing(TracingContext(mode)),
        torch.no_grad(),
        inductor_config.patch(_SETTINGS),
        functorch_config.patch(bundled_autograd_cache=False),
    ):
        compiled = compile_fx_inner(module, fakes, cudagraphs=BoxedBool(False), is_inference=True)

    def run() -> Any:
        return compiled(list(inputs))

    run()  # triton kernels are tuned at their first launch
    return run


def extract(region: Region) -> tuple[fx.GraphModule, list[Tensor]]:
    """The region as a graph of its own, and random inputs for it, in which every size is a number.

    Its inputs are what the region loads; work on them that the kernel does is part of it.
    """
    nodes = _computed(region)
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    inputs: list[Tensor] = []
    generator = torch.Generator(region.anchor.device).manual_seed(0)
    for source in dict.fromkeys(source for node in nodes for source in node.all_input_nodes):
        if source in nodes:
            continue
        if tensor_of(source) is None:
            copies[source] = _number(source)
            continue
        tensor = fake(source)
        sizes, strides = _numbers(tensor.shape), _numbers(tensor.stride())
        copies[source] = graph.placeholder(f"input{len(inputs)}")
        inputs.append(random_tensor(sizes, strides, tensor.dtype, generator))
    for node in nodes:
        copies[node] = graph.call_function(
            node.target,  # type: ignore[arg-type]
            map_arg(node.args, copies.__getitem__),
            map_arg(node.kwargs, copies.__getitem__),
        )
    graph.output(tuple(copies[node] for node in region.outputs))
    return fx.GraphModule(torch.nn.Module(), graph), inputs


def _computed(region: Region) -> dict[fx.Node, None]:
    """What is computed between the region's loads and its outputs, in the graph's order."""
    ends = {*region.a_nodes, *region.b_nodes, *region.load_nodes}
    found: set[fx.Node] = set()
    stack = list(region.outputs)
    while stack:
        node = stack.pop()
        if node in found or node in ends or node.op != "call_function" or tensor_of(node) is None:
            continue
        found.add(node)
        stack.extend(node.all_input_nodes)
    return {node: None for node in region.anchor.node.graph.nodes if node in found}


def _number(node: fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{node.name} is a {type(value).__name__}, of which no example is known")
    return _numbers([value])[0]


def _numbers(sizes: Sequence[Size]) -> list[int]:
    numbers = [hint(size) for size in sizes]
    if None in numbers:
        raise ValueError(f"no example is known of the sizes {describe(sizes)}")
    return [number for number in numbers if number is not None]
