"""Views of stored weights, brought in front of their conversion.

torch transposes a linear's weight after it has been converted and scaled, or before, or between. A kernel
that converts the weight itself reads a view of the stored values, so the views come first.
"""

from __future__ import annotations

import torch
from torch import fx

from cute_backend.fx_walk.graph.new_calls import call
from cute_backend.fx_walk.graph.static import arguments, fake, target_name
from cute_backend.fx_walk.products.stored_weights import CONVERSION, StoredWeight, stored_weight

aten = torch.ops.aten

_PRODUCTS = ("aten.mm.default", "aten.addmm.default")


def bring_weights_to_products(graph: fx.Graph) -> None:
    """Exchanges the axes of stored weights and their scales before their steps, where a product reads the
    result with its axes exchanged after some of them."""
    for node in graph.nodes:
        if node.op != "call_function" or target_name(node) not in _PRODUCTS:
            continue
        b = arguments(node)["mat2"]
        found = stored_weight(b)
        if found is None or not any(step.is_swapped for step in found.steps):
            continue
        with graph.inserting_before(node):
            node.replace_input_with(b, _rebuilt(graph, found))
    graph.eliminate_dead_code()


def _rebuilt(graph: fx.Graph, weight: StoredWeight) -> fx.Node:
    """The result of a weight's steps, as the product reads it, with all views in front of them."""
    value = _exchanged(graph, weight.node) if weight.is_swapped else weight.node
    for step in weight.steps:
        if step.operand is None:
            assert target_name(step.node) == CONVERSION
            value = call(graph, step.node, step.node.target, value, arguments(step.node)["dtype"])
            continue
        scale = step.operand
        if step.is_swapped and fake(scale).dim() == 2:
            scale = _exchanged(graph, scale)
        value = call(graph, step.node, step.node.target, value, scale)
    return value


def _exchanged(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return call(graph, node, aten.permute.default, node, [1, 0])
