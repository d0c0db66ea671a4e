"""Gated linear units, `a * sigmoid(b)` of the halves of a tensor, as the ops that they consist of.

Inductor decomposes every activation but `glu`, which it lowers itself. As slices and pointwise ops, a `glu`
of a product's columns makes a gated pair.
"""

from __future__ import annotations

import torch
from torch import fx

from cute_backend.fx_walk.graph.new_calls import call
from cute_backend.fx_walk.graph.static import arguments, fake, target_name

aten, prims = torch.ops.aten, torch.ops.prims


def divide_gated_units(graph: fx.Graph) -> None:
    """Replaces each `glu` along an axis of a known size by the ops that it consists of."""
    for node in graph.nodes:
        if target_name(node) == "aten.glu.default":
            source, axis = arguments(node)["self"], arguments(node)["dim"]
            size = fake(source).shape[axis]
            if isinstance(size, int):
                with graph.inserting_before(node):
                    node.replace_all_uses_with(_divided(graph, node, source, axis, size // 2))
                graph.erase_node(node)


def _divided(graph: fx.Graph, node: fx.Node, source: fx.Node, axis: int, half: int) -> fx.Node:
    """`glu` in steps. Like eager's kernels, they compute in fp32 and round the result alone."""
    dtype = fake(node).dtype
    value, gate = (
        call(graph, node, aten.slice.Tensor, source, axis, start, start + half) for start in (0, half)
    )
    narrow = dtype in (torch.bfloat16, torch.float16)
    if narrow:
        value, gate = (
            call(graph, node, prims.convert_element_type.default, each, torch.float32)
            for each in (value, gate)
        )
    opened = call(graph, node, aten.sigmoid.default, gate)
    result = call(graph, node, aten.mul.Tensor, value, opened)
    return call(graph, node, prims.convert_element_type.default, result, dtype) if narrow else result
