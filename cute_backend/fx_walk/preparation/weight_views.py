"""Views of stored weights and their scales, brought in front of their conversion.

torch transposes a linear's weight after it has been converted and scaled, or before, or between. A kernel
that converts the weight itself reads a view of the stored values, so the views come first. It also casts
scales itself, if it reads views of scales that are in memory.
"""

from __future__ import annotations

import torch
from torch import fx

from cute_backend.fx_walk.graph.new_calls import call
from cute_backend.fx_walk.graph.sizes import SymbolicSizes
from cute_backend.fx_walk.graph.static import (
    DTYPES,
    Size,
    arguments,
    fake,
    first_argument,
    known,
    same_sizes,
    target_name,
)
from cute_backend.fx_walk.products.capability import Capability, target_of
from cute_backend.fx_walk.products.packed_weights import packed_values, stored_dtype
from cute_backend.fx_walk.products.questions import is_cast_of_stored
from cute_backend.fx_walk.products.stored_weights import StoredWeight, may_be_few, stored_weight
from cute_backend.fx_walk.products.weight_groups import (
    CONVERSION,
    SCALING,
    Axes,
    GroupedWeight,
    grouped_weight,
)
from cute_backend.fx_walk.refusals.reasons import Refused
from cute_backend.fx_walk.values.lower import is_reshape

aten = torch.ops.aten

_PRODUCTS = ("aten.mm.default", "aten.addmm.default")


def bring_weights_to_products(graph: fx.Graph, capability: Capability) -> None:
    """Exchanges the axes of stored weights and their scales before their steps, where a product reads the
    result with its axes exchanged after some of them. Products that no kernel converts a weight for stay as
    they are."""
    for node in list(graph.nodes):
        if node.op != "call_function" or target_name(node) not in _PRODUCTS:
            continue
        b = arguments(node)["mat2"]
        if (grouped := grouped_weight(b)) is not None:
            able = _may_be_converted(node, grouped.node, capability, in_groups=True)
            if able and _can_be_converted(grouped, b):
                with graph.inserting_before(node):
                    node.replace_input_with(b, _along_k(SymbolicSizes(graph, [node]), grouped))
            continue
        found = stored_weight(b)
        if found is None or not _may_be_converted(node, found.node, capability, in_groups=False):
            continue
        if found.is_swapped or any(step.is_swapped for step in found.steps):
            with graph.inserting_before(node):
                node.replace_input_with(b, _rebuilt(SymbolicSizes(graph, [node]), found))
        _cast_scales_last(graph, node)
    graph.eliminate_dead_code()


def _may_be_converted(product: fx.Node, weight: fx.Node, capability: Capability, *, in_groups: bool) -> bool:
    """Whether a GPU has kernels that convert such a weight for as many rows. A CPU stands for all.

    Values that are joined along K from bytes of two lie along N. If such rows of 16 bits are no multiple of
    16 bytes, no kernel reads the weight that Inductor writes, so it stays along K.
    """
    result = fake(product)
    n = result.shape[1]
    if packed_values(weight) is not None and known(n % 8 != 0) and not known(n == 1):
        return False
    try:
        target = target_of(result.device, capability)
    except Refused:
        return False
    able = target is None or stored_dtype(weight) in target.converts
    return able and may_be_few(result.shape[0], in_groups)


def _can_be_converted(weight: GroupedWeight, b: fx.Node) -> bool:
    """Whether kernels convert a weight in such groups to the dtype of B."""
    try:
        weight.groups(DTYPES[fake(b).dtype])
    except Refused:
        return False
    return True


def _along_k(sizes: SymbolicSizes, weight: GroupedWeight) -> fx.Node:
    """The result of the steps of a weight in groups, as the product reads it, with all views in front of
    them: the stored values are (K, N), and zeros and scales (groups, N)."""
    graph, k, n = sizes.graph, sizes.argument(weight.k), sizes.argument(weight.n)
    values = weight.proven_values
    assert values is not None  # it can be converted
    groups = sizes.argument(weight.k // values)
    like, value = weight.steps[0][0], weight.node
    if weight.axes is not Axes.ALONG_K:
        value = _turned(sizes, value, weight.k, weight.n)
    value = call(graph, like, aten.reshape.default, value, [groups, values, n])
    for node, vector in weight.steps:
        if vector is None:
            value = call(graph, node, node.target, value, arguments(node)["dtype"])
            continue
        given = vector.node
        order = 1 if weight.axes is Axes.ALONG_K else -1
        if not same_sizes(fake(given).shape, (weight.k // values, weight.n)[::order]):
            given = call(graph, node, aten.reshape.default, given, [groups, n][::order])
        if weight.axes is not Axes.ALONG_K:
            given = call(graph, node, aten.permute.default, given, [1, 0])
        if vector.cast is not None:
            given = call(graph, node, torch.ops.prims.convert_element_type.default, given, vector.cast)
        given = call(graph, node, aten.reshape.default, given, [groups, 1, n])
        value = call(graph, node, node.target, value, given)
    return call(graph, like, aten.reshape.default, value, [k, n])


def _turned(sizes: SymbolicSizes, values: fx.Node, k: Size, n: Size) -> fx.Node:
    """Stored values (N, K), in any shape, as (K, N), also if they are taken from bytes of two."""
    graph = sizes.graph
    if (packed := packed_values(values)) is not None and packed.is_along_last:
        return packed.along_k(sizes, k, n)
    if fake(values).shape != (n, k):
        values = call(graph, values, aten.reshape.default, values, [sizes.argument(n), sizes.argument(k)])
    return call(graph, values, aten.permute.default, values, [1, 0])


def _cast_scales_last(graph: fx.Graph, product: fx.Node) -> None:
    """Reshapes the scales behind a product before they are cast. Reshapes may be between."""
    readers = list(product.users)
    for reader in readers:
        if is_reshape(reader):
            readers.extend(reader.users)
            continue
        for view in reader.all_input_nodes if target_name(reader) == SCALING else ():
            cast = first_argument(view)
            if not (is_reshape(view) and isinstance(cast, fx.Node) and is_cast_of_stored(cast)):
                continue
            with graph.inserting_before(reader):
                given = (first_argument(cast), *view.args[1:])
                reshaped = call(graph, view, view.target, *given, **view.kwargs)
                last = call(graph, cast, cast.target, reshaped, *cast.args[1:], **cast.kwargs)
            reader.replace_input_with(view, last)


def _rebuilt(sizes: SymbolicSizes, weight: StoredWeight) -> fx.Node:
    """The result of a weight's steps, as the product reads it, with all views in front of them."""
    graph, value = sizes.graph, weight.node
    if weight.is_swapped:
        value = _turned(sizes, value, *reversed(fake(value).shape))
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
    """A value with its axes exchanged, before it is cast if it is a cast of what is in memory."""
    if is_cast_of_stored(node):
        source = _exchanged(graph, first_argument(node))
        return call(graph, node, node.target, source, *node.args[1:], **node.kwargs)
    return call(graph, node, aten.permute.default, node, [1, 0])
