"""Nodes that have the same value because they are computed in the same way from the same nodes.

Inductor does not remove them from inference graphs: a model that quantises the input of every linear does so
for each of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from cute_backend.fx_walk.graph.axes import is_reduction
from cute_backend.fx_walk.graph.mutation import Mutations, is_view
from cute_backend.fx_walk.graph.static import target_name
from cute_backend.fx_walk.values.lower import filling, is_pointwise, is_reshape

_MOVES = (
    "aten.constant_pad_nd.default",
    "aten.copy.default",
    "aten.slice_scatter.default",
    "aten.select_scatter.default",
)
"""Ops that put elements of their arguments into new memory."""


def first_equals(order: dict[fx.Node, int], mutations: Mutations) -> dict[fx.Node, fx.Node]:
    """For each node the first node that has its value. After the first write in place, that is the node
    itself."""
    end = len(order) if mutations.start is None else mutations.start
    firsts: dict[fx.Node, fx.Node] = {}
    made: dict[Any, fx.Node] = {}
    for node, position in order.items():
        firsts[node] = node
        if position < end and _is_function_of_its_arguments(node):
            args, kwargs = map_arg((node.args, node.kwargs), lambda source: f"%{firsts[source].name}")
            firsts[node] = made.setdefault((node.target, repr(args), repr(kwargs)), node)
    return firsts


def _is_function_of_its_arguments(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if filling(node) is not None or target_name(node) in _MOVES:
        return True
    if not (is_pointwise(node) or is_reshape(node) or is_view(node) or is_reduction(node)):
        return False
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return torch.Tag.nondeterministic_seeded not in tags
