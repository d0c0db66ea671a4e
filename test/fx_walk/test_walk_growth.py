"""The search's work grows with the graph and not faster: counted in calls, for time varies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from torch import fx

import cute_backend
from support.fx_walk.synthetic import BF16, F32, Graph, aten, prims, walk

PACKAGE = str(Path(cute_backend.__file__).parent)
N = 64


def residual(made: Graph, x: fx.Node, index: int) -> fx.Node:
    """gelu-like work on a product, and a stream that every layer adds to."""
    y = made.call(aten.mm.default, x, made.input(f"w{index}", (N, N)))
    wide = made.call(prims.convert_element_type.default, y, F32)
    bent = made.call(aten.mul.Tensor, made.call(aten.erf.default, wide), wide)
    return made.call(aten.add.Tensor, made.call(prims.convert_element_type.default, bent, BF16), x)


def refused(made: Graph, x: fx.Node, index: int) -> fx.Node:
    """The node after the product can't be fused; the stream goes on beside it."""
    y = made.call(aten.cumsum.default, made.call(aten.mm.default, x, made.input(f"w{index}", (N, N))), 1)
    return made.call(aten.add.Tensor, y, x)


def gated(made: Graph, x: fx.Node, index: int) -> fx.Node:
    gate, up = (made.call(aten.mm.default, x, made.input(f"{name}{index}", (N, N))) for name in "gu")
    return made.call(aten.add.Tensor, made.call(aten.mul.Tensor, made.call(aten.relu.default, gate), up), x)


def adapted(made: Graph, x: fx.Node, index: int) -> fx.Node:
    """A product of a large K and, as LoRA adds it, one of a small K."""
    w, a, b = (
        made.input(f"{name}{index}", shape) for name, shape in (("w", (N, N)), ("a", (N, 8)), ("b", (8, N)))
    )
    y = made.call(aten.mm.default, x, w)
    small = made.call(aten.mm.default, made.call(aten.mm.default, x, a), b)
    return made.call(aten.add.Tensor, made.call(aten.add.Tensor, y, made.call(aten.mul.Tensor, small, 2)), x)


def written(made: Graph, x: fx.Node, index: int) -> fx.Node:
    """Each layer keeps something in a buffer, written in place."""
    y = residual(made, x, index)
    made.call(aten.copy_.default, made.input(f"buffer{index}", (N, N)), y)
    return y


def pointwise(made: Graph, x: fx.Node, index: int) -> fx.Node:
    """Two more steps of one region."""
    y = made.call(aten.mm.default, x, made.input("w", (N, N))) if index == 0 else x
    return made.call(aten.add.Tensor, made.call(aten.mul.Tensor, y, 1 + index / 4096), index / 8192)


def calls_of_a_layer(layer: Callable[[Graph, fx.Node, int], fx.Node], layers: int) -> float:
    made = Graph()
    x = made.input("x", (N, N))
    for index in range(layers):
        x = layer(made, x, index)
    graph = made.output(x)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(count)
    try:
        walk(graph)
    finally:
        sys.setprofile(None)
    return calls / layers


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "layer", [residual, refused, gated, adapted, written, pointwise], ids=lambda layer: layer.__name__
)
def test_a_layer_of_a_long_chain_is_no_more_work(layer: Callable[[Graph, fx.Node, int], fx.Node]) -> None:
    calls_of_a_layer(layer, 2)  # what is looked up once
    assert calls_of_a_layer(layer, 64) < 1.1 * calls_of_a_layer(layer, 16)
