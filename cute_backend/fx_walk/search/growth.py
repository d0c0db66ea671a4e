"""Growth of a region from its anchors, node by node in graph order, while every step is legal."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from operator import attrgetter

from torch import fx

from cute_backend.fx_walk.ends.redo import cheaper_to_redo
from cute_backend.fx_walk.graph.static import DTYPES
from cute_backend.fx_walk.members.block_parts import Taken
from cute_backend.fx_walk.members.block_reductions import frame_of_blocks
from cute_backend.fx_walk.members.concatenation import keeps_concatenated
from cute_backend.fx_walk.members.finishing import is_finishing
from cute_backend.fx_walk.members.rotations import Rotation
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.products.capability import target_of
from cute_backend.fx_walk.products.pairs import Concatenated, Slices, named, reach
from cute_backend.fx_walk.products.questions import may_join
from cute_backend.fx_walk.refusals.reasons import Refused
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.region.reductions import Found, Reduced, keeps_reduced
from cute_backend.fx_walk.region.tiled_scales import Tiled, Tiling
from cute_backend.fx_walk.search.dependences import cycle, depends
from cute_backend.fx_walk.search.joining import join
from cute_backend.fx_walk.search.walk import Walk
from cute_backend.fx_walk.values.activation import activated
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.fx_walk.values.lower import is_pointwise, lower_cast
from cute_backend.fx_walk.values.numbers import number
from cute_backend.fx_walk.values.rounded import as_in_memory
from cute_backend.spec import LoadKind, Operand


def grown(walk: Walk, anchors: tuple[Anchor, ...]) -> Draft:
    """The draft of a region, grown as far as possible.

    The kernel repeats work on operands if that reads fewer bytes. The inputs of that work may take fewer
    loads than its results, which leaves room for further members, so the region then grows again.
    """
    draft = _grow(walk, seed(walk, anchors))
    while redone := cheaper_to_redo(draft, walk.owner, walk.after_products) - walk.redone:
        walk.redone |= redone
        draft = _grow(walk, seed(walk, anchors))
    return draft


def seed(walk: Walk, anchors: tuple[Anchor, ...]) -> Draft:
    """A draft of the anchors alone: the accumulators and the work of the anchors' own ops on them."""
    target = target_of(anchors[0].device, walk.capability)
    draft = Draft(anchors, Chain(named(anchors), walk.precision, target))
    draft.values = dict.fromkeys(anchor.node for anchor in anchors)
    draft.expected = {node for anchor in anchors for node in reach(anchor.node, walk.owner)}
    for anchor in anchors:
        draft.frames[anchor.node] = anchor.frame
    for node in (node for anchor in anchors for node in anchor.inputs):
        if depends(walk, draft, node):
            raise cycle(walk, draft, node)
    results = []
    for index, anchor in enumerate(anchors):
        with draft.chain.lowering(anchor.node):
            results.append(_product(draft, index))
    if len(draft.values) < len(anchors):
        draft.values[anchors[0].node] = Slices(tuple(results), whole=True)
    else:
        draft.values = {anchor.node: value for anchor, value in zip(anchors, results, strict=True)}
    return draft


def _product(draft: Draft, index: int) -> Operand:
    """Lowers the part of an anchor's op that follows the accumulator, such as scales and bias."""
    chain, anchor = draft.chain, draft.anchors[index]

    def role(name: str, of: Callable[[Anchor], object]) -> str:
        shared = all(of(other) in (None, of(anchor)) for other in draft.anchors)
        return name if shared else f"{name}{index}"

    value: Operand = chain.accumulators[index].name
    if anchor.scale_a is not None and anchor.scale_b is not None:
        for name, view in (("scale_a", anchor.scale_a), ("scale_b", anchor.scale_b)):
            value = chain.emit("mul", value, chain.load(view, role(name, attrgetter(name))))
    if anchor.alpha != 1:
        value = chain.emit("mul", value, number(anchor.alpha))
    if anchor.addend is not None:
        view = anchor.addend.view
        addend: Operand = chain.load(
            view, None if view.kind is LoadKind.EXACT else role("bias", attrgetter("addend"))
        )
        if anchor.addend.beta != 1:
            addend = chain.emit("mul", addend, number(anchor.addend.beta))
        value = chain.emit("add", value, addend)
    out = DTYPES[anchor.out_dtype]
    if anchor.activation is not None:
        value = activated(chain, value, anchor.activation, out, anchor.device)
    if out.is_fp8:
        return chain.cast(value, out)
    return as_in_memory(anchor.node, chain, lower_cast(chain, value, out))


def _grow(walk: Walk, draft: Draft) -> Draft:
    queue: list[tuple[int, fx.Node]] = []
    seen: set[fx.Node] = set()

    def push_users(node: fx.Node) -> None:
        if isinstance(draft.values[node], Tiled):
            return  # an op on padded scales is not on the plane
        joins = isinstance(draft.values[node], Concatenated)
        reduces = isinstance(draft.values[node], Reduced)
        for reader in node.users:
            if joins and not keeps_concatenated(reader):
                continue  # an op on several planes together is not on the plane
            if reduces and not (keeps_reduced(reader) or _may_finish(walk, reader)):
                continue
            for user in _heads(walk, draft, reader):
                if user not in seen and user not in walk.owner and may_join(user):
                    seen.add(user)
                    heappush(queue, (walk.order[user], user))

    for anchor in draft.anchors:
        push_users(anchor.node)
    while queue:
        _, node = heappop(queue)
        if _reads_reduced_alone(walk, draft, node) and not is_finishing(draft, node):
            continue
        mark = draft.chain.mark()
        try:
            with draft.chain.lowering(node):
                value = join(walk, draft, node)
        except Refused as refused:
            draft.rollback(mark)
            walk.rejections.setdefault(node, refused.rejection(node))
            continue
        draft.values |= dict.fromkeys(_inner(walk, draft, node))
        draft.values[node] = value
        push_users(node)
    return draft


def _may_finish(walk: Walk, reader: fx.Node) -> bool:
    """Whether a reader of a reduction's result may be work on it, and is no step of another reduction."""
    return is_pointwise(reader) and reader not in walk.heads


def _reads_reduced_alone(walk: Walk, draft: Draft, node: fx.Node) -> bool:
    """Whether all members that a node reads are reduced, and it does more than keep the result of one and
    is no part of another reduction."""
    if node in walk.reductions:
        return False
    values = [draft.values[source] for source in node.all_input_nodes if source in draft.values]
    return bool(values) and all(isinstance(value, Reduced) for value in values) and not keeps_reduced(node)


def _inner(walk: Walk, draft: Draft, node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes on the way to a reduction, a rotation, a part of blocks, tiled scales or alternating columns
    of members. For any other node there are none."""
    found: Found | Rotation | Tiling | Taken | None
    found = walk.reductions.get(node) or walk.rotations.get(node) or walk.tilings.get(node)
    found = found or walk.block_parts.taken.get(node)
    if found is None:
        return walk.scattered[node].inner if node in walk.scattered else ()
    return found.inner if found.source in draft.values else ()


def _heads(walk: Walk, draft: Draft, reader: fx.Node) -> list[fx.Node]:
    """The nodes that may join for a reader of a member: the reader, or the reductions that it is a part
    of."""
    heads = walk.heads.get(reader, [reader])
    found = walk.reductions.get(heads[0])
    if found is None or not found.is_of_blocks_alone:
        return heads
    frame = draft.frames.get(found.source)
    of_blocks = frame is not None and frame_of_blocks(found, frame, draft.chain) is not None
    return heads if of_blocks else [reader]
