"""Questions about one node, independent of the region that it may join."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from cute_backend.fx_walk.graph.axes import is_reduction
from cute_backend.fx_walk.graph.mutation import is_view, root
from cute_backend.fx_walk.graph.static import DTYPES, first_argument, target_name, tensor_of
from cute_backend.fx_walk.products.anchors import is_anchor
from cute_backend.fx_walk.values.lower import CASTS, is_pointwise, is_reshape


def may_join(node: fx.Node) -> bool:
    """Whether a user of a region could have been fused. A product, a write or an output could not."""
    if node.op != "call_function" or is_anchor(node):
        return False
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        return False
    return not isinstance(
        node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
    )


def is_free_cast(node: fx.Node) -> bool:
    """Whether an operand is a cast to a wider dtype, which costs nothing if the kernel does it on loading."""
    if node.op != "call_function" or target_name(node) not in CASTS:
        return False
    source = tensor_of(first_argument(node))
    result = tensor_of(node)
    if source is None or result is None or source.dtype not in DTYPES or source.device != result.device:
        return False
    return source.element_size() <= result.element_size()


def is_cast_of_stored(node: fx.Node) -> bool:
    """Whether an operand is a cast from one float to another of a value that is in memory in any case."""
    if node.op != "call_function" or target_name(node) not in CASTS:
        return False
    source, result = tensor_of(first_argument(node)), tensor_of(node)
    if source is None or result is None or source.device != result.device:
        return False
    return {source.dtype, result.dtype} <= _FLOATS and is_stored(first_argument(node))


def is_work_on_stored(node: fx.Node) -> bool:
    """Whether an operand is an op of numbers and a value that is in memory in any case, or a float cast of
    such a value, as `1 + w` of the weights of a norm is."""
    if node.op != "call_function" or not is_pointwise(node) or is_reshape(node):
        return False
    result, sources = tensor_of(node), node.all_input_nodes
    if result is None or result.dtype not in _FLOATS or len(sources) != 1:
        return False
    (source,) = sources
    of = tensor_of(source)
    if of is None or of.device != result.device or of.shape != result.shape:
        return False
    return is_cast_of_stored(source) or (of.dtype in _FLOATS and is_stored(source))


_FLOATS = {torch.float32, torch.bfloat16, torch.float16}


def is_epilogue_work(node: fx.Node) -> bool:
    """Whether a node is of a kind that regions have after their products."""
    return is_pointwise(node) or is_view(node) or is_reshape(node) or is_reduction(node)


def is_stored(node: fx.Node) -> bool:
    """Whether a value is in memory in any case: an input of the graph, or a view of one."""
    return root(node).op in ("placeholder", "get_attr")


def is_only_read(node: fx.Node) -> bool:
    """Whether no user of a value, or of a view of it, returns it or could be made to write to its memory.

    Inductor makes some functional ops, such as `index_put`, write in place if nothing else needs their
    operand, which it decides by the memory of views. So only ops are accepted that it never treats in this
    way.
    """
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if is_view(user) or is_reshape(user):
                stack.append(user)
            elif not (is_pointwise(user) or is_reduction(user) or is_anchor(user)):
                return False
    return True


def base(node: fx.Node) -> fx.Node:
    """The value before reshapes."""
    while is_reshape(node) and isinstance(source := first_argument(node), fx.Node):
        node = source
    return node


def after_products(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The products of a graph and the pointwise work after them, in the graph's order. Their own regions do
    this work, so it is not repeated as an operand of others."""
    found: set[fx.Node] = set()
    for node in nodes:
        follows = is_anchor(node)
        if not follows and (is_pointwise(node) or is_reshape(node)):
            follows = not found.isdisjoint(node.all_input_nodes)
        if follows:
            found.add(node)
    return found
