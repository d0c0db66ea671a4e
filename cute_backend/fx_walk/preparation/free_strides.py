"""Strides that no reader needs: planes that have the strides of an addend, but may be row-major instead.

The result of a convolution, viewed as (batch, S, C), has strides (C * S, 1, S), and values that are computed
from it keep them. So a residual stream that starts there has them to its end, though each layer adds a
row-major plane to it. Our kernels can't write such a plane, nor read it efficiently. If all readers of a
value accept any layout, its fake tensor gets row-major strides. Then a region writes it row-major, and so
does Inductor, because the op takes its operands with exactly the strides of their fakes.

The same is done for an input of linears before the first such sum, as a norm's result: torch does not merge
its leading axes, and lowers the linears to a `bmm` of one weight for all batches (`broadcast`).
"""

from __future__ import annotations

import torch
from torch import fx

from cute_backend.fx_walk.graph.axes import is_reduction
from cute_backend.fx_walk.graph.mutation import writes_in_place
from cute_backend.fx_walk.graph.new_calls import evaluate
from cute_backend.fx_walk.graph.static import (
    arguments,
    fake,
    first_argument,
    known,
    same_sizes,
    target_name,
    tensor_of,
)
from cute_backend.fx_walk.products.questions import after_products
from cute_backend.fx_walk.values.lower import is_pointwise, is_reshape

_ANY_LAYOUT = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")
"""The products whose operands may have any strides."""


def lay_in_rows(graph: fx.Graph) -> None:
    """Gives row-major strides to pointwise results that are combined with a product or multiplied by one
    matrix for all batches, have other strides, and whose readers accept any layout, and to their views. It
    changes only metas of the graph's nodes."""
    after = after_products(graph.nodes)
    for node in graph.nodes:
        if not is_pointwise(node) or writes_in_place(node) or _is_in_rows(node):
            continue
        meets_rows = node in after and any(
            source in after and same_sizes(fake(source).shape, fake(node).shape) and _is_in_rows(source)
            for source in node.all_input_nodes
            if tensor_of(source) is not None
        )
        views = _views(node)
        if views is None or not (meets_rows or any(map(_has_one_matrix, {node, *views}))):
            continue
        with fake(node).fake_mode:  # type: ignore[attr-defined]
            node.meta["val"] = fake(node).new_empty(fake(node).shape)
        for view in views:
            evaluate(view, fake(node))


def _is_in_rows(node: fx.Node) -> bool:
    """Whether a node's plane is proven to be dense and contiguous along its last axis, or it has no plane."""
    tensor = tensor_of(node)
    if tensor is None or tensor.layout is not torch.strided:
        return True
    wanted = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not (known(size == 1) or known(stride == wanted)):
            return False
        wanted *= size
    return True


def _views(node: fx.Node) -> list[fx.Node] | None:
    """The views of a value, in an order in which they can be computed, if all readers accept any strides."""
    found = [node]
    for each in found:
        for user in each.users:
            if is_reshape(user):
                found.append(user)
            elif writes_in_place(user) or not _takes_any_strides(user):
                return None
    return found[1:]


def _has_one_matrix(rows: fx.Node) -> bool:
    """Whether a value is multiplied by one matrix for all batches."""
    return any(
        target_name(user) == "aten.bmm.default"
        and first_argument(user) is rows
        and known(fake(arguments(user)["mat2"]).stride(0) == 0)
        and not known(fake(rows).shape[0] == 1)
        for user in rows.users
        if user.op == "call_function"
    )


def _takes_any_strides(user: fx.Node) -> bool:
    return is_pointwise(user) or is_reduction(user) or target_name(user) in _ANY_LAYOUT
