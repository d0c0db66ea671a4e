"""Copies of several packed parts at once, which become a copy of each part.

SAM views queries, keys and values as (B, S, 3, H, D), moves the axis of three to the front, joins batches
with heads, which copies all three, and takes each by its index. A copy of one of them has the layout of
attention, which a kernel writes (`packed.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from operator import getitem

import torch
from torch import fx

from cute_backend.fx_walk.graph.mutation import root
from cute_backend.fx_walk.graph.new_calls import call
from cute_backend.fx_walk.graph.static import arguments, fake, first_argument, known, target_name, tensor_of
from cute_backend.fx_walk.preparation.broadcast import with_one_open
from cute_backend.fx_walk.values.lower import is_reshape

aten = torch.ops.aten


@dataclass(frozen=True)
class _Copy:
    """A contiguous copy of a view of `product`, of which only parts are read: `parts` has the nodes that take
    a part, and its index along the copy's first axis."""

    node: fx.Node
    product: fx.Node
    parts: tuple[tuple[fx.Node, int], ...]


def copied(graph: fx.Graph) -> set[str]:
    """The names of the nodes of whose parts there are such copies."""
    return {copy.product.name for copy in _copies(graph)}


def separate_copies(graph: fx.Graph, names: Collection[str]) -> None:
    """Copies each part of the nodes of these names by itself."""
    for copy in list(_copies(graph)):
        if copy.product.name in names:
            for part, index in copy.parts:
                with graph.inserting_before(part):
                    new = partial(call, graph, part)
                    whole = new(aten.select.int, first_argument(copy.node), 0, index)
                    whole = new(aten.clone.default, whole, memory_format=torch.contiguous_format)
                    own = new(aten.reshape.default, whole, with_one_open(fake(part).shape))
                part.replace_all_uses_with(own)
    graph.eliminate_dead_code()


def _copies(graph: fx.Graph) -> Iterator[_Copy]:
    for node in graph.nodes:
        if node.op != "call_function" or target_name(node) != "aten.clone.default":
            continue
        source = first_argument(node)
        if tensor_of(source) is None or root(source) is source or not fake(node).is_contiguous():
            continue
        parts = _parts(node, fake(node).shape[0] if fake(node).dim() else None)
        if parts:
            yield _Copy(node, root(source), tuple(parts))


def _parts(copy: fx.Node, count: object) -> list[tuple[fx.Node, int]] | None:
    """The nodes that take a part along the first axis, of `count` elements, with its index. None if something
    reads more than a part."""
    found, stack = list[tuple[fx.Node, int]](), [copy]
    while stack:
        for user in stack.pop().users:
            name = target_name(user) if user.op == "call_function" else ""
            if name == "aten.unbind.int" and not arguments(user)["dim"]:
                if any(item.target is not getitem for item in user.users):
                    return None
                found += [(item, item.args[1]) for item in user.users]  # type: ignore[misc]
            elif name == "aten.select.int" and arguments(user)["dim"] == 0:
                found.append((user, arguments(user)["index"]))
            elif is_reshape(user) and name != "aten.permute.default" and known(fake(user).shape[0] == count):
                stack.append(user)
            else:
                return None
    return found if all(with_one_open(fake(part).shape) is not None for part, _ in found) else None
