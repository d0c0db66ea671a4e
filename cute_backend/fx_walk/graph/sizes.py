"""Symbolic sizes as arguments of calls that are added to a graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from cute_backend.fx_walk.graph.static import Size, known, tensor_of

aten = torch.ops.aten


class SymbolicSizes:
    """Symbolic sizes as arguments. A size is the first node of the graph that has its value, or is read from
    the first tensor that has it. If there is neither, nodes that compute it are added.

    Sizes are not read from a region's results, nor from nodes after it: the region's outputs would depend on
    themselves.
    """

    def __init__(self, graph: fx.Graph, members: Sequence[fx.Node]) -> None:
        self.graph = graph
        after = set(members)
        self.before = []
        self.numbers: dict[Any, fx.Node] = {}
        for node in graph.nodes:
            if node in after or not after.isdisjoint(node.all_input_nodes):
                after.add(node)
                continue
            self.before.append(node)
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                self.numbers.setdefault(value.node.expr, node)

    def argument(self, size: Size) -> int | fx.Node:
        """`size` as a node or a number."""
        if not isinstance(size, torch.SymInt):
            return size
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        if expression not in self.numbers:
            self.numbers[expression] = self._measure(size) or self._compute(expression)
        return self.numbers[expression]

    def _measure(self, size: torch.SymInt) -> fx.Node | None:
        for node in self.before:
            tensor = tensor_of(node)
            for axis, extent in enumerate(tensor.shape if tensor is not None else ()):
                if known(extent == size):
                    with self.graph.inserting_after(node):
                        measured = self.graph.call_function(aten.sym_size.int, (node, axis))
                    measured.meta["val"] = size
                    return measured
        return None

    def _compute(self, expression: Any) -> fx.Node:
        """The value of an expression, from its symbols."""
        symbols = {symbol: fx.Proxy(self._symbol(symbol)) for symbol in expression.free_symbols}
        before = set(self.graph.nodes)
        result: fx.Node = sympy_interp(PythonReferenceAnalysis, symbols, expression).node
        for node in self.graph.nodes:
            if node not in before:
                operands = map_arg(node.args, lambda source: source.meta["val"])
                node.meta["val"] = node.target(*operands)
        return result

    def _symbol(self, symbol: Any) -> fx.Node:
        if symbol not in self.numbers:
            tensors = (tensor for node in self.before if (tensor := tensor_of(node)) is not None)
            sizes: Iterator[Any] = (size for tensor in tensors for size in tensor.shape)
            symbolic = (size for size in sizes if isinstance(size, torch.SymInt))
            found = next((size for size in symbolic if size.node.expr == symbol), None)
            measured = None if found is None else self._measure(found)
            assert measured is not None, f"no tensor of the graph has the size {symbol}"
            self.numbers[symbol] = measured
        return self.numbers[symbol]
