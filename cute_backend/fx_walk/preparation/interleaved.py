"""Values that a program assigns to every other place of a tensor: `w[..., ::2] = low; w[..., 1::2] = high`.

They reach the pass as two `slice_scatter` into memory that is not read otherwise. Where both are made from
one tensor of bytes, as those of a weight of two values in a byte are, they are joined by a `cat`, as
`torch.stack` joins them, so that one reader of such weights (`packed_weights.py`) knows both spellings.
"""

from __future__ import annotations

import torch
from torch import fx

from cute_backend.fx_walk.graph.new_calls import call
from cute_backend.fx_walk.graph.static import arguments, fake, target_name
from cute_backend.fx_walk.products.packed_weights import are_of_one_byte

aten = torch.ops.aten

_SCATTER, _COPY = "aten.slice_scatter.default", "aten.copy.default"


def join_interleaved(graph: fx.Graph) -> None:
    """Replaces two writes of every other place of the last axis by a join of what they write."""
    for node in list(graph.nodes):
        if (halves := _halves(node)) is None:
            continue
        shape = list(fake(node).shape)
        with graph.inserting_before(node):
            apart = [call(graph, node, aten.unsqueeze.default, half, len(shape)) for half in halves]
            joined = call(graph, node, aten.cat.default, apart, len(shape))
            whole = call(graph, node, aten.reshape.default, joined, shape)
        node.replace_all_uses_with(whole)
    graph.eliminate_dead_code()


def _halves(node: fx.Node) -> list[fx.Node] | None:
    """The values at the even and at the odd places of a tensor of known sizes, which a node writes and the
    one to whose result it writes. None if something else reads that, or if the two are not made from one
    tensor of bytes."""
    for start in range(2):
        if (last := _written(node, start)) is None:
            continue
        base = arguments(node)["self"]
        first = _written(base, 1 - start)
        is_known = not any(isinstance(size, torch.SymInt) for size in fake(node).shape)
        # Beside the second write, the place that it writes is a view of the first one's result.
        is_alone = all(user is node or _is_place(user, node) for user in base.users)
        if first is not None and is_known and is_alone and are_of_one_byte([first, last]):
            return [last, first] if start == 0 else [first, last]
    return None


def _written(node: object, start: int) -> fx.Node | None:
    """The values that a node writes to every other place of the last axis, from `start` on, to the end."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or target_name(node) != _SCATTER:
        return None
    given, shape = arguments(node), fake(node).shape
    last, end = shape[-1], given["end"]
    is_last = given["dim"] % len(shape) == len(shape) - 1
    is_whole = isinstance(last, int) and last % 2 == 0 and (end is None or end >= last)
    if not is_last or not is_whole or (given["start"] or 0) != start or given["step"] != 2:
        return None
    source = given["src"]
    if target_name(source) == _COPY and len(source.users) == 1:
        source = arguments(source)["src"]
    of, into = fake(source), fake(given["src"])
    is_alike = isinstance(source, fx.Node) and of.shape == into.shape and of.dtype is into.dtype
    return source if is_alike else None


def _is_place(user: fx.Node, scatter: fx.Node) -> bool:
    """Whether a node is the slice that a copy in front of a write takes its shape from."""
    source = arguments(scatter)["src"]
    return target_name(source) == _COPY and arguments(source)["self"] is user
