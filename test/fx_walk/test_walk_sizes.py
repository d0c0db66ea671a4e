"""Symbolic sizes: as arguments of nodes, found in the graph, measured or computed, and as axes of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cute_backend.backend import cute
from cute_backend.fx_walk.graph.sizes import SymbolicSizes
from support.fx_walk.synthetic import aten

SHAPES = [(6, 5), (7, 3), (128, 40)]


def graph_of_x() -> tuple[fx.Graph, FakeTensor, fx.Node]:
    """A graph whose input has two symbolic sizes, which nothing else tells."""
    x = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(6, 5), source=ConstantSource("x"))
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = x
    return graph, x, node


def called(graph: fx.Graph, x: Tensor) -> object:
    return fx.GraphModule(torch.nn.Module(), graph)(x)


@pytest.mark.parametrize("members", [False, True], ids=["no tensor's", "the region's own"])
def test_a_size_that_no_tensor_tells_is_computed(members: bool) -> None:
    graph, x, node = graph_of_x()
    inside = []
    if members:
        inside = [graph.call_function(aten.new_empty.default, (node, [0]))]
        inside[0].meta["val"] = x.new_empty(x.shape[0] * 3 // 2 + x.shape[1])
    size = x.shape[0] * 3 // 2 + x.shape[1]
    argument = SymbolicSizes(graph, inside).argument(size)
    graph.output(argument)
    assert isinstance(argument, fx.Node) and argument.meta["val"].node.expr == size.node.expr
    for rows, columns in SHAPES:
        assert called(graph, torch.empty(rows, columns)) == rows * 3 // 2 + columns


def test_a_size_that_a_tensor_has_is_read_off_it_once() -> None:
    graph, x, node = graph_of_x()
    sizes = SymbolicSizes(graph, [])
    first, again = sizes.argument(x.shape[1]), sizes.argument(x.shape[1])
    graph.output(first)
    assert first is again and isinstance(first, fx.Node)
    assert (first.target, first.args) == (aten.sym_size.int, (node, 1))
    assert [called(graph, torch.empty(shape)) for shape in SHAPES] == [5, 3, 40]


def test_a_size_that_is_a_node_already_is_that_node() -> None:
    graph, x, node = graph_of_x()
    measured = graph.call_function(aten.sym_size.int, (node, 0))
    measured.meta["val"] = x.shape[0]
    sizes = SymbolicSizes(graph, [])
    assert sizes.argument(x.shape[0]) is measured
    assert sizes.argument(17) == 17


# Rows that are split by a symbolic number


def relu(x: Tensor, w: Tensor, vector: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w).unflatten(0, (-1, 4)).relu()


def bias(x: Tensor, w: Tensor, vector: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w).relu().unflatten(0, (-1, 3, 4)) * vector


def residual(x: Tensor, w: Tensor, vector: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w).unflatten(0, (4, -1)) + plane.unflatten(0, (4, -1))


def heads(x: Tensor, w: Tensor, vector: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w).view(-1, 4, 2, 64).transpose(1, 2).relu()


def maximum(x: Tensor, w: Tensor, vector: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w).relu().unflatten(0, (-1, 4)).amax(-1)


@pytest.mark.parametrize("program", [relu, bias, residual, heads, maximum])
def test_rows_need_no_proof_where_the_last_axes_are_the_columns(
    program: Callable[..., Tensor], fresh_compiler: None
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((48, 64), (128, 64), (128,), (48, 128))
    args = [torch.randn(size, generator=generator).bfloat16() for size in sizes]
    for dynamic in (args[0], args[3]):
        torch._dynamo.mark_dynamic(dynamic, 0)
    with torch.no_grad():
        result, expected = torch.compile(program, backend=cute)(*args), program(*args)
    torch.testing.assert_close(result, expected, rtol=0.02, atol=0.1)
    assert result.stride() == expected.stride()
    tally = counters["cute_backend"]
    assert tally["regions"] == 1 and not tally["rearranged"] and not tally["plane"]
