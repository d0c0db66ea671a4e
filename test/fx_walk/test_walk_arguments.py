"""Arguments are read by name: whether a graph gives them by position, by keyword, or with their defaults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx

from cute_backend.fx_walk.graph.static import arguments, fake
from cute_backend.fx_walk.preparation.padding import take_padding_back
from cute_backend.fx_walk.products.anchors import is_anchor
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.fx_walk.search.regions import find_regions
from cute_backend.spec import Precision
from support.fx_walk.recorded import GRAPHS, read
from support.fx_walk.synthetic import BF16, F32, Graph, walk

aten = torch.ops.aten


def by_keyword(node: fx.Node) -> None:
    node.kwargs = {name: value for name, value in arguments(node).items() if _is_given(node, name)}
    node.args = ()


def with_defaults(node: fx.Node) -> None:
    positional = [each.name for each in node.target._schema.arguments if not each.kwarg_only]  # type: ignore[union-attr]
    values = arguments(node)
    node.args = tuple(values[name] for name in positional)
    node.kwargs = {name: value for name, value in values.items() if name not in positional}


def _is_given(node: fx.Node, name: str) -> bool:
    names = [each.name for each in node.target._schema.arguments]  # type: ignore[union-attr]
    return name in node.kwargs or name in names[: len(node.args)]


def found(graph: fx.Graph, precision: Precision) -> list[str]:
    regions, rejections = find_regions(graph, precision, lambda device: (9, 0))
    return [region.spec.to_json() for region in regions] + [str(each) for each in rejections]


@pytest.mark.parametrize("respell", [by_keyword, with_defaults])
@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_graph_means_the_same_however_it_is_spelled(path: Path, respell: type) -> None:
    graph, precision = read(path)
    wanted = found(graph, precision)
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            respell(node)
    assert found(graph, precision) == wanted


@pytest.mark.parametrize("dims", [(), (None,), ([],), (None, True), ([1],)])
def test_a_sum_may_have_no_dims(dims: tuple[object, ...]) -> None:
    made = Graph()
    product = made.mm()
    total = made.call(aten.sum.dim_IntList, product, *(dims or (None,)))
    total.args = (product, *dims)
    graph = made.output(total)
    assert not is_anchor(total)
    (region,), _ = walk(graph)
    assert list(region.outputs) == [total]


@pytest.mark.parametrize("dims", [(), ([],), ([-1], True)])
def test_steps_of_a_logsumexp_may_have_no_dims(dims: tuple[object, ...]) -> None:
    """Steps that are no logsumexp of rows stay the steps that they are."""
    made = Graph()
    x = made.call(torch.ops.prims.convert_element_type.default, made.mm(), F32)
    largest = made.call(aten.amax.default, x, *dims)
    infinite = made.call(aten.eq.Scalar, made.call(aten.abs.default, largest), float("inf"))
    zero = made.call(aten.full.default, [], 0.0)
    shift = made.call(aten.where.self, infinite, zero, largest)
    steps = made.call(aten.exp.default, made.call(aten.sub.Tensor, x, shift))
    total = made.call(aten.log.default, made.call(aten.sum.dim_IntList, steps, *(dims or (None,))))
    total.args[0].args = (steps, *dims)  # type: ignore[union-attr]
    results = made.call(aten.add.Tensor, total, shift), made.call(aten.add.Tensor, total, 1.0)
    regions, rejections = walk(made.output(*results))
    assert not regions and any(each.reason is Reason.FEEDBACK for each in rejections)


# Padding that a program itself does


def test_padding_of_columns_alone_is_read() -> None:
    made = Graph()
    x, weight = made.input("x", (16, 32)), made.input("weight", (24, 32))
    padded = made.call(aten.constant_pad_nd.default, x, [0, 8])
    wide = made.call(aten.permute.default, made.call(aten.constant_pad_nd.default, weight, [0, 8]), [1, 0])
    product = made.call(aten.mm.default, padded, wide)
    graph = made.output(made.call(aten.relu.default, made.call(aten.slice.Tensor, product, 0, 0, 16)))
    take_padding_back(graph)
    assert len(walk(graph)[0]) == 1


def test_what_k_is_padded_with_stays() -> None:
    made = Graph()
    x, weight = made.input("x", (14, 30)), made.input("weight", (32, 24))
    padded = made.call(aten.constant_pad_nd.default, x, [0, 2, 0, 2], 1.0)
    product = made.call(aten.mm.default, padded, weight)
    graph = made.output(made.call(aten.relu.default, made.call(aten.slice.Tensor, product, 0, 0, 14)))
    take_padding_back(graph)
    (again,) = graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    assert arguments(again) == {"self": x, "pad": [0, 2, 0, 0], "value": 1.0} and fake(again).shape == (
        14,
        32,
    )


def test_an_addend_that_starts_with_a_column_is_no_column() -> None:
    made = Graph()
    x, weight = made.input("x", (16, 32)), made.input("weight", (32, 24))
    wide = made.call(aten.constant_pad_nd.default, weight, [0, 8])
    wide.meta["val"] = fake(wide).t().contiguous().t()
    parts = made.input("column", (16, 1), BF16), made.input("rest", (16, 31), BF16)
    addend = made.call(aten.cat.default, list(parts), 1)
    product = made.call(aten.addmm.default, addend, x, wide)
    cut = made.call(aten.slice.Tensor, product, 1, 0, 24)
    graph = made.output(made.call(aten.relu.default, cut))
    take_padding_back(graph)
    assert cut in graph.nodes and product.args[0] is addend
