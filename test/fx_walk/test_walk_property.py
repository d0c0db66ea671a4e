"""Random graphs: products, pointwise work, reductions, reshapes and writes between them, many outputs.

All values are integers that fp32 holds exactly, so a graph gives the same bits before and after the pass,
whatever was fused. A product that is not has a reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from cute_backend.fx_walk.replacement.rewrite import rewrite
from support.fx_walk.synthetic import F32, OP, Graph, aten, prims, run, walk

M, N, K = 8, 6, 8
LOADS = {"row": (N,), "one_row": (1, N), "column": (M, 1), "scalar": (), "plane": (M, N)}


class Program:
    """A graph that grows by drawn steps. `planes` are its (M, N) values, `loads` what broadcasts to them."""

    def __init__(self) -> None:
        self.made = Graph()
        self.planes: list[fx.Node] = []
        self.loads = [self.made.input(name, shape, F32) for name, shape in LOADS.items()]
        self.results: list[fx.Node] = []
        self.operands: list[fx.Node] = []
        self.products = 0

    def call(self, target: object, *args: object) -> fx.Node:
        return self.made.call(target, *args)

    def product(self, draw: st.DrawFn) -> None:
        """Of an A of its own, or of one that is multiplied already."""
        self.products += 1
        a = draw(st.sampled_from([None, *self.operands]))
        if a is None:
            a = self.made.input(f"a{self.products}", (M, K))
            self.operands.append(a)
        self.planes.append(self.call(prims.convert_element_type.default, self.times(a, N), F32))

    def times(self, a: fx.Node, columns: int) -> fx.Node:
        strides = (1, K)
        return self.call(
            aten.mm.default, a, self.made.input(f"b{self.products}", (K, columns), strides=strides)
        )

    def parts(self, draw: st.DrawFn) -> None:
        """Parts of a wider product, or of work on it; which may be pairs, or read as a whole elsewhere."""
        self.products += 1
        a = self.made.input(f"a{self.products}", (M, K))
        wide = self.call(prims.convert_element_type.default, self.times(a, 2 * N), F32)
        if draw(st.booleans()):
            wide = self.call(aten.add.Tensor, wide, self.made.input(f"wide{self.products}", (2 * N,), F32))
        if draw(st.integers(0, 4)) == 0:
            self.results.append(wide)
        spelling = draw(st.sampled_from(["split", "slices", "even", "view", "odd ones"]))
        if spelling == "split":
            both = self.call(aten.split.Tensor, wide, N, 1)
            found = [self.call(getitem, both, index) for index in (0, 1)]
        elif spelling == "view":
            apart = self.call(aten.reshape.default, wide, [M, N, 2])
            found = [self.call(aten.select.int, apart, 2, index) for index in (0, 1)]
        else:
            bounds = {
                "slices": [(0, N, 1), (N, 2 * N, 1)],
                "even": [(0, 2 * N, 2), (1, 2 * N, 2)],
                "odd ones": [(1, 1 + N, 1), (0, N, 1)],
            }[spelling]
            found = [self.call(aten.slice.Tensor, wide, 1, *each) for each in bounds]
        self.planes += found
        if draw(st.booleans()):
            self.planes.append(self.call(aten.sub.Tensor, *found))

    def unary(self, draw: st.DrawFn) -> None:
        ops: list[Callable[[fx.Node], fx.Node]] = [
            lambda x: self.call(aten.neg.default, x),
            lambda x: self.call(aten.abs.default, x),
            lambda x: self.call(aten.relu.default, x),
            lambda x: self.call(aten.mul.Tensor, x, 2),
            lambda x: self.call(aten.clamp_min.default, x, -3),
            lambda x: self.call(aten.clone.default, x),
        ]
        self.planes.append(draw(st.sampled_from(ops))(self.plane(draw)))

    def binary(self, draw: st.DrawFn) -> None:
        ops = [aten.add.Tensor, aten.sub.Tensor, aten.maximum.default, aten.minimum.default]
        pair = [self.plane(draw), draw(st.sampled_from(self.planes + self.loads))]
        if draw(st.booleans()):
            pair.reverse()
        self.planes.append(self.call(draw(st.sampled_from(ops)), *pair))

    def choice(self, draw: st.DrawFn) -> None:
        condition = self.call(
            aten.gt.Tensor, self.plane(draw), draw(st.sampled_from(self.planes + self.loads))
        )
        self.planes.append(self.call(aten.where.self, condition, self.plane(draw), self.plane(draw)))

    def there_and_back(self, draw: st.DrawFn) -> None:
        wide = self.call(aten.reshape.default, self.plane(draw), [2, M // 2, N])
        changed = self.call(aten.add.Tensor, wide, 1)
        self.planes.append(self.call(aten.reshape.default, changed, [M, N]))

    def gathered(self, draw: st.DrawFn) -> None:
        """Rows of an input, which may be written, or of a plane; which rows may depend on a region too."""
        table = draw(st.sampled_from([self.loads[list(LOADS).index("plane")], *self.planes]))
        rows = self.made.input(f"rows{len(self.loads)}", (M,), torch.int64)
        if draw(st.integers(0, 3)) == 0:
            rows = self.call(aten.argmax.default, self.plane(draw), 1)
        self.loads.append(self.call(aten.index.Tensor, table, [rows]))

    def reduction(self, draw: st.DrawFn) -> None:
        axis = draw(st.sampled_from([0, 1]))
        self.loads.append(self.call(aten.amax.default, self.plane(draw), [axis], True))

    def result(self, draw: st.DrawFn) -> None:
        """A reduction that nothing in the graph reads, of those whose results stay exact."""
        plane, axis = self.plane(draw), draw(st.sampled_from([0, 1, -1]))
        keepdim = draw(st.booleans())
        spelling = draw(st.sampled_from(["sum", "amin", "argmax", "max", "all"]))
        if spelling == "sum":
            self.results.append(self.call(aten.sum.dim_IntList, plane, [axis], keepdim))
        elif spelling == "amin":
            self.results.append(self.call(aten.amin.default, plane, [axis], keepdim))
        elif spelling == "argmax":
            self.results.append(self.call(aten.argmax.default, plane, axis, keepdim))
        elif spelling == "all":
            self.results.append(self.call(aten.max.default, plane))
        else:
            pair = self.call(aten.max.dim, plane, axis, keepdim)
            self.results += [
                self.call(getitem, pair, index) for index in draw(st.sampled_from([[0], [1], [0, 1]]))
            ]

    def write(self, draw: st.DrawFn) -> None:
        """Into an input that regions may read; what is written may be a region's."""
        self.call(aten.copy_.default, self.loads[list(LOADS).index("plane")], self.plane(draw))

    def plane(self, draw: st.DrawFn) -> fx.Node:
        return draw(st.sampled_from(self.planes))


STEPS = [
    Program.product,
    Program.product,
    Program.parts,
    Program.unary,
    Program.unary,
    Program.binary,
    Program.binary,
    Program.binary,
    Program.choice,
    Program.there_and_back,
    Program.gathered,
    Program.reduction,
    Program.result,
    Program.result,
    Program.write,
]


@st.composite
def graphs(draw: st.DrawFn) -> fx.Graph:
    program = Program()
    program.product(draw)
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=2, max_size=14)):
        step(program, draw)
    outputs = draw(st.lists(st.sampled_from(program.planes), min_size=1, max_size=4, unique=True))
    graph = program.made.output(*outputs, *program.results)
    graph.eliminate_dead_code()
    return graph


def inputs_of(graph: fx.Graph) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    return [torch.randint(-2, 3, fake.shape, generator=generator).to(fake.dtype) for fake in shapes]


def same_bits_after_the_pass(graph: fx.Graph) -> None:
    inputs = inputs_of(graph)
    written = [value.clone() for value in inputs]
    wanted = run(copy.deepcopy(graph), *written)
    products = {node.name for node in graph.find_nodes(op="call_function", target=aten.mm.default)}
    regions, rejections = walk(graph)
    rewrite(graph, regions)
    assert len(graph.find_nodes(op="call_function", target=OP)) == len(regions)
    fused = {node.name for region in regions for node in region.products}
    assert products - fused == products & {rejection.node for rejection in rejections}
    results = run(graph, *inputs)
    for result, expected in zip(results, wanted, strict=True):
        assert torch.equal(result, expected)
    for value, expected in zip(inputs, written, strict=True):
        assert torch.equal(value, expected)


HOW: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@settings(max_examples=30, **HOW)
@given(graphs())
def test_a_graph_gives_the_same_bits_after_the_pass(graph: fx.Graph) -> None:
    same_bits_after_the_pass(graph)


@pytest.mark.exhaustive
@settings(max_examples=300, **HOW)
@given(graphs())
def test_many_graphs_give_the_same_bits_after_the_pass(graph: fx.Graph) -> None:
    same_bits_after_the_pass(graph)
