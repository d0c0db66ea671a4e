"""The nodes that a graph writes in place, and those that share memory with them.

Post-grad graphs are functional, except for `copy_` into an input, kernels that a user wrote, and collectives.
A region reads its operands at the place of its kernel, so no write may lie between an operand and the kernel.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from operator import attrgetter, getitem

import torch
from torch import fx

from cute_backend.fx_walk.graph.static import arguments, first_argument, tensor_of


@dataclass(frozen=True)
class Mutation:
    """A node that writes in place, its position, and the roots of the memory that it writes."""

    node: fx.Node
    position: int
    roots: frozenset[fx.Node]


class Mutations:
    """Every in-place write of a graph, by its position and by the memory that it writes."""

    def __init__(self, order: dict[fx.Node, int]) -> None:
        self._all: list[Mutation] = []
        self._of: dict[fx.Node, list[Mutation]] = {}
        for node, position in order.items():
            roots = frozenset(root(written) for written in _written(node))
            if roots:
                mutation = Mutation(node, position, roots)
                self._all.append(mutation)
                for written in roots:
                    self._of.setdefault(written, []).append(mutation)

    @property
    def start(self) -> int | None:
        """The position of the first write; None if there is none."""
        return self._all[0].position if self._all else None

    def first(self, after: int, before: int) -> Mutation | None:
        """The first write between two positions."""
        return _first(self._all, after, before)

    def first_of(self, node: fx.Node, after: int, before: int) -> Mutation | None:
        """The first write between two positions to the memory of a value."""
        return _first(self._of.get(root(node), []), after, before)


def _first(found: list[Mutation], after: int, before: int) -> Mutation | None:
    index = bisect_right(found, after, key=attrgetter("position"))
    return found[index] if index < len(found) and found[index].position < before else None


def root(node: fx.Node) -> fx.Node:
    """The node that owns a value's memory, seen through views. A reshape counts as a view."""
    while is_view(node) and isinstance(source := first_argument(node), fx.Node):
        node = source
    return node


def is_view(node: fx.Node) -> bool:
    """Whether a call returns its argument or views of it, by its schema. A reshape counts too."""
    if node.op != "call_function":
        return False
    if node.target is getitem:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and _gives_views(node.target)


@cache
def _gives_views(op: torch._ops.OpOverload) -> bool:
    return any(result.alias_info is not None for result in op._schema.returns)


def writes_in_place(node: fx.Node) -> bool:
    """Whether a call of aten writes to its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _written(node: fx.Node) -> Iterator[fx.Node]:
    if node.op != "call_function":
        return
    if isinstance(node.target, torch._ops.OpOverload):
        for argument in node.target._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = arguments(node)[argument.name]
            for written in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(written, fx.Node):
                    yield written
    elif isinstance(node.target, torch._ops.HigherOrderOperator) and "mutation" in node.target.name():
        yield from (source for source in node.all_input_nodes if tensor_of(source) is not None)
