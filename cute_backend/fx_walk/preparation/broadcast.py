"""Batched products that are one product: all batches have the same matrix, and their rows have one stride.

If torch does not merge the leading axes of a linear's input, as for the last token of each text, `x[:, -1:]`,
it lowers the linear to a `bmm` with a weight that is expanded to every batch. If the axes still have one
stride, the product is an `mm` of all rows, which reads the weight once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import fx

from cute_backend.fx_walk.graph.new_calls import call
from cute_backend.fx_walk.graph.static import (
    Size,
    arguments,
    collapsed_stride,
    fake,
    known,
    product,
    target_name,
)

aten = torch.ops.aten


def join_batches(graph: fx.Graph) -> None:
    """Replaces each `bmm` whose second operand is one matrix for all batches, and whose first operand is a
    view of rows, by an `mm` between reshapes."""
    for node in graph.nodes:
        if target_name(node) == "aten.bmm.default" and _is_one_product(node):
            with graph.inserting_before(node):
                joined = _joined(graph, node)
            node.replace_all_uses_with(joined)
            graph.erase_node(node)


def _is_one_product(node: fx.Node) -> bool:
    args = arguments(node)
    a, b = fake(args["self"]), fake(args["mat2"])
    return (
        not any(known(size == 0) for size in (*a.shape, *b.shape))
        and known(b.stride(0) == 0)
        and not known(b.shape[0] == 1)
        and collapsed_stride(a.shape[:2], a.stride()[:2]) is not None
        and isinstance(a.shape[2], int)
        and with_one_open(fake(node).shape) is not None
    )


def with_one_open(shape: Sequence[Size]) -> list[int] | None:
    """A shape as a reshape takes it, with -1 for a symbolic size. None if several sizes are symbolic."""
    symbolic = sum(not isinstance(size, int) for size in shape)
    return [size if isinstance(size, int) else -1 for size in shape] if symbolic < 2 else None


def _joined(graph: fx.Graph, node: fx.Node) -> fx.Node:
    args = arguments(node)
    a, b, shape = args["self"], args["mat2"], fake(node).shape

    new = partial(call, graph, node)
    rows = new(aten.reshape.default, a, [-1, fake(a).shape[2]])
    result = new(aten.mm.default, rows, new(aten.select.int, b, 0, 0))
    assert known(fake(result).shape[0] == product(shape[:2]))
    return new(aten.reshape.default, result, with_one_open(shape))
