"""Work after another product that a region does again: cheaper than to have each of its results in memory.

Under activation checkpointing the backward pass computes gate and up again, and of them silu, its sigmoid and
more, all of which the gradient's epilogue reads. It had better read gate and up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import fx

from cute_backend.fx_walk.anchors import is_anchor
from cute_backend.fx_walk.draft import Draft
from cute_backend.fx_walk.lower import is_pointwise
from cute_backend.fx_walk.questions import base, follows_a_product, is_stored
from cute_backend.fx_walk.static import fake, known, tensor_of
from cute_backend.spec import LoadKind


def cheaper_to_redo(draft: Draft, owner: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes between several loads and the fewer bytes that they follow from; empty where there are none.

    The loads are planes that follow from other products, which no region has yet.
    """
    planes = {view.node for view in draft.chain.views if view.kind is LoadKind.EXACT}
    loads = {node for node in planes if _is_work(node, owner) and follows_a_product(node)}
    between, sources = set[fx.Node](), set[fx.Node]()
    stack = list(loads)
    while stack:
        node = stack.pop()
        if not _is_work(node, owner):
            sources.add(base(node))
        elif node not in between:
            between.add(node)
            stack += [source for source in node.all_input_nodes if _same_plane(source, node)]
    if not all(is_anchor(node) or is_stored(node) or node in owner for node in sources):
        return set()
    return between if len(loads) > 1 and _bytes(sources - set(map(base, planes))) < _bytes(loads) else set()


def _is_work(node: fx.Node, owner: Collection[fx.Node]) -> bool:
    return node not in owner and tensor_of(node) is not None and is_pointwise(node)


def _same_plane(source: fx.Node, node: fx.Node) -> bool:
    tensor = tensor_of(source)
    return tensor is not None and known(tensor.numel() == fake(node).numel())


def _bytes(nodes: Iterable[fx.Node]) -> int:
    """Of an element of each."""
    return sum(fake(node).element_size() for node in nodes)
