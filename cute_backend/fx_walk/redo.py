"""Work after another product that a region does again: cheaper than to have each of its results in memory.

Under activation checkpointing the backward pass computes gate and up again, and of them silu, its sigmoid and
more, all of which the gradient's epilogue reads. It had better read gate and up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from torch import fx

from cute_backend.fx_walk.anchors import is_anchor
from cute_backend.fx_walk.draft import Draft
from cute_backend.fx_walk.lower import is_pointwise
from cute_backend.fx_walk.questions import base, is_stored
from cute_backend.fx_walk.static import fake, known, tensor_of
from cute_backend.spec import LoadKind


def cheaper_to_redo(
    draft: Draft, owner: Collection[fx.Node], after_products: Collection[fx.Node]
) -> set[fx.Node]:
    """The nodes between several loads and the fewer bytes that they follow from; empty where there are none.

    The loads are planes that follow from other products, which no region has yet. The nearest nodes come
    first, and nothing more is looked at once the sources have too many bytes, for a residual stream follows
    from every layer before it.
    """
    planes = {view.node for view in draft.chain.views if view.kind is LoadKind.EXACT}
    loads = {node for node in planes if _is_work(node, owner) and node in after_products}
    if len(loads) < 2:
        return set()
    loaded, most, count = set(map(base, planes)), _bytes(loads), 0
    between, sources = set[fx.Node](), set[fx.Node]()
    queue = deque(loads)
    while queue:
        node = queue.popleft()
        if _is_work(node, owner):
            if node not in between:
                between.add(node)
                queue += [source for source in node.all_input_nodes if _same_plane(source, node)]
            continue
        source = base(node)
        if not (is_anchor(source) or is_stored(source) or source in owner):
            return set()
        if source not in sources and source not in loaded:
            count += fake(source).element_size()
            if count >= most:
                return set()
        sources.add(source)
    return between


def _is_work(node: fx.Node, owner: Collection[fx.Node]) -> bool:
    return node not in owner and tensor_of(node) is not None and is_pointwise(node)


def _same_plane(source: fx.Node, node: fx.Node) -> bool:
    tensor = tensor_of(source)
    return tensor is not None and known(tensor.numel() == fake(node).numel())


def _bytes(nodes: Iterable[fx.Node]) -> int:
    """Of an element of each."""
    return sum(fake(node).element_size() for node in nodes)
