"""Post-grad graphs made by hand. Every node has the fake value that AOTAutograd would have given it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.node import map_arg

from cute_backend.fx_walk.refusals.reasons import Rejection
from cute_backend.fx_walk.region.region import Region
from cute_backend.fx_walk.replacement.rewrite import rewrite
from cute_backend.fx_walk.search.regions import find_regions
from cute_backend.spec import Precision

aten = torch.ops.aten
prims = torch.ops.prims
BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
OP = torch.ops.cute_backend.gemm_epilogue.default


class Graph:
    """A graph under construction: `input` and `call` return nodes, and `output` ends it.

    `results` is for a function that makes a part of a graph and returns more than one node.
    """

    def __init__(self) -> None:
        self.shape_env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shape_env, allow_non_fake_inputs=True)
        self.graph = fx.Graph()
        self.results: list[fx.Node] = []

    def input(
        self,
        name: str,
        shape: Sequence[Any],
        dtype: torch.dtype = BF16,
        strides: Sequence[Any] | None = None,
        device: str = "cpu",
    ) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            value = torch.empty(shape, dtype=dtype, device=device)
            if strides is not None:
                value = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        node.meta["val"] = value
        return node

    def size(self, name: str, hint: int) -> torch.SymInt:
        """A symbolic size, known only at run time, with a placeholder for it."""
        from torch._dynamo.source import ConstantSource

        source = ConstantSource(name)
        symbol = self.shape_env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        value = self.shape_env.create_symintnode(symbol, hint=hint, source=source)
        self.graph.placeholder(name).meta["val"] = value
        return value

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            node.meta["val"] = target(
                *map_arg(args, lambda source: source.meta["val"]),
                **map_arg(kwargs, lambda source: source.meta["val"]),
            )
        return node

    def output(self, *nodes: fx.Node) -> fx.Graph:
        self.graph.output(nodes)
        return self.graph

    # The products that tests grow regions from

    def mm(self, m: Any = 64, n: Any = 48, k: Any = 32, name: str = "", device: str = "cpu") -> fx.Node:
        a = self.input(f"a{name}", (m, k), device=device)
        b = self.input(f"b{name}", (k, n), strides=(1, k), device=device)
        return self.call(aten.mm.default, a, b)

    def scaled_mm(
        self,
        m: Any = 64,
        n: Any = 48,
        k: Any = 32,
        scales: Sequence[Sequence[Any]] | None = None,
        scale_dtype: torch.dtype = F32,
        dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
        out_dtype: torch.dtype = BF16,
        bias: fx.Node | None = None,
    ) -> fx.Node:
        a = self.input("a", (m, k), dtypes[0])
        b = self.input("b", (k, n), dtypes[1], (1, k))
        shape_a, shape_b = scales or ((m, 1), (1, n))
        scale_a = self.input("scale_a", shape_a, scale_dtype)
        scale_b = self.input("scale_b", shape_b, scale_dtype)
        node = self.graph.call_function(
            aten._scaled_mm.default, (a, b, scale_a, scale_b, bias, None, out_dtype)
        )
        with self.mode:
            node.meta["val"] = torch.empty(m, n, dtype=out_dtype)
        return node


def walk(
    graph: fx.Graph, precision: Precision = Precision.FUSED, capability: tuple[int, int] = (9, 0)
) -> tuple[list[Region], list[Rejection]]:
    return find_regions(graph, precision, lambda device: capability)


def rewritten(graph: fx.Graph, precision: Precision = Precision.FUSED) -> fx.Graph:
    """The graph after the pass; it is changed in place."""
    regions, _ = walk(graph, precision)
    rewrite(graph, regions)
    return graph


def called(graph: fx.Graph) -> list[str]:
    """The targets that a graph calls, except views and getitem."""
    views = (getitem, aten.reshape.default, aten.select.int, aten.slice.Tensor, aten.permute.default)
    asked = (*views, aten.expand.default, aten.sym_size.int)
    return [
        str(node.target) for node in graph.nodes if node.op == "call_function" and node.target not in asked
    ]


def run(graph: fx.Graph, *inputs: Any) -> Any:
    return fx.GraphModule(torch.nn.Module(), graph)(*inputs)
