"""Work on operands that a region repeats, because that is cheaper than reading its results.

Under activation checkpointing the backward pass computes gate and up again, and from them silu, its sigmoid
and more, and the gradient's epilogue reads all of these. Reading only gate and up costs fewer bytes. The same
is true if gate and up are in memory in bf16 and other kernels need values in fp32 that are computed from
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from torch import fx

from cute_backend.fx_walk.graph.static import fake, known, tensor_of
from cute_backend.fx_walk.products.anchors import is_anchor
from cute_backend.fx_walk.products.questions import base, is_stored
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.values.lower import is_pointwise

_MAX_WORK = 16
"""The most ops between a load and values in memory that a kernel repeats for the load."""


def cheaper_to_redo(
    draft: Draft, owner: Collection[fx.Node], after_products: Collection[fx.Node]
) -> set[fx.Node]:
    """The nodes between loads and sources of fewer bytes, which a kernel can repeat; empty if there are
    none."""
    planes = [view.node for view in draft.chain.views if view.kind.is_plane]
    return _after_other_products(planes, owner, after_products) | _on_what_is_stored(planes, owner)


def _on_what_is_stored(planes: list[fx.Node], owner: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes between loads and sources of fewer bytes that are in memory in any case: for all loads
    together, or for each load that has such sources by itself."""
    work = {node: found for node in planes if (found := _work_on_stored(node, owner)) is not None}

    def pays(loads: Collection[fx.Node]) -> bool:
        kept = {base(node) for node in planes if node not in loads}
        sources = {source for node in loads for source in work[node].sources} - kept
        return _bytes(sources) < _bytes(loads)

    loads = list(work) if pays(work) else [node for node in work if pays([node])]
    return {node for load in loads for node in work[load].between}


@dataclass
class _Work:
    """Pointwise nodes, and the planes from which they are computed."""

    between: set[fx.Node] = field(default_factory=set)
    sources: set[fx.Node] = field(default_factory=set)


def _work_on_stored(load: fx.Node, owner: Collection[fx.Node]) -> _Work | None:
    """The work that computes a load. None if there is no work, or too much, or if one of its inputs is not in
    memory in any case."""
    found, stack = _Work(), [load]
    while stack:
        node = stack.pop()
        if _is_work(node, owner):
            if node in found.between:
                continue
            found.between.add(node)
            if len(found.between) > _MAX_WORK:
                return None
            stack += [source for source in node.all_input_nodes if _same_plane(source, node)]
        elif is_stored(node):
            found.sources.add(base(node))
        else:
            return None
    return found if found.between else None


def _after_other_products(
    planes: list[fx.Node], owner: Collection[fx.Node], after_products: Collection[fx.Node]
) -> set[fx.Node]:
    """The nodes between several loads and their common sources of fewer bytes; empty if there are none.

    The loads are planes that depend on other products, which no region has yet. The nearest nodes are
    searched first, and the search ends once the sources have too many bytes, because a residual stream
    depends on every layer before it.
    """
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
    """The bytes of one element of each node together."""
    return sum(fake(node).element_size() for node in nodes)
