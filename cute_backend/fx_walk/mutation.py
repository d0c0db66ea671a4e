"""What a graph writes in place, and what shares memory with it.

Post-grad graphs are functional but for what is left at their edges: `copy_` into an input, kernels that a
user wrote, collectives. A region reads its operands where its kernel stands, so it must not reach across a
write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from cute_backend.fx_walk.static import arguments, first_argument, tensor_of


@dataclass(frozen=True)
class Mutation:
    """A node that writes in place, where it stands, and the roots of the memory that it writes."""

    node: fx.Node
    position: int
    roots: frozenset[fx.Node]


def mutations(order: dict[fx.Node, int]) -> list[Mutation]:
    """Every in-place write of a graph, in order."""
    found = []
    for node, position in order.items():
        roots = frozenset(root(written) for written in _written(node))
        if roots:
            found.append(Mutation(node, position, roots))
    return found


def root(node: fx.Node) -> fx.Node:
    """The node that owns a value's memory: what views view. A reshape counts as a view."""
    while is_view(node) and isinstance(source := first_argument(node), fx.Node):
        node = source
    return node


def is_view(node: fx.Node) -> bool:
    """Whether a call gives what it is given, or views of it: by its schema, as that of a reshape says too."""
    if node.op != "call_function":
        return False
    if node.target is getitem:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and any(
        result.alias_info is not None for result in node.target._schema.returns
    )


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
