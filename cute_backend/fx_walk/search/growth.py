"""Growth of a region from its anchors, node by node in graph order, while every step is legal."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from operator import attrgetter

from torch import fx

from cute_backend.fx_walk.ends.redo import cheaper_to_redo
from cute_backend.fx_walk.graph.static import DTYPES
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.products.capability import target_of
from cute_backend.fx_walk.products.pairs import named, reach
from cute_backend.fx_walk.products.questions import may_join
from cute_backend.fx_walk.refusals.reasons import Refused
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.region.value import STEP, Plane
from cute_backend.fx_walk.search.dependences import cycle, depends
from cute_backend.fx_walk.search.joining import join
from cute_backend.fx_walk.search.walk import Walk
from cute_backend.fx_walk.values.activation import activated
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.fx_walk.values.lower import lower_cast
from cute_backend.fx_walk.values.numbers import number
from cute_backend.fx_walk.values.rounded import as_in_memory
from cute_backend.spec import Operand


def grown(walk: Walk, draft: Draft) -> Draft:
    """A draft, grown as far as possible from the members that it has.

    The kernel repeats work on operands if that reads fewer bytes. The inputs of that work may take fewer
    loads than its results, which leaves room for further members, so the region then grows again from its
    anchors.
    """
    draft = _grow(walk, draft)
    while redone := cheaper_to_redo(draft, walk.owner, walk.after_products) - walk.redone:
        walk.redone |= redone
        draft = _grow(walk, seed(walk, draft.anchors))
    return draft


def seed(walk: Walk, anchors: tuple[Anchor, ...]) -> Draft:
    """A draft of the anchors alone: the accumulators and the work of the anchors' own ops on them."""
    target = target_of(anchors[0].device, walk.capability)
    draft = Draft(anchors, Chain(named(anchors), walk.precision, target))
    draft.values = dict.fromkeys((anchor.node for anchor in anchors), STEP)
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
        draft.values[anchors[0].node] = draft.plane(results)
    else:
        draft.values = {anchor.node: Plane(value) for anchor, value in zip(anchors, results, strict=True)}
    return draft


def _product(draft: Draft, index: int) -> Operand:
    """Lowers the part of an anchor's op that follows the accumulator, such as scales and bias."""
    chain, anchor = draft.chain, draft.anchors[index]

    def role(name: str, of: Callable[[Anchor], object]) -> str:
        shared = all(of(other) in (None, of(anchor)) for other in draft.anchors)
        return name if shared else f"{name}{index}"

    value: Operand = chain.accumulators[index].name
    for name, view in (("scale_a", anchor.scale_a), ("scale_b", anchor.scale_b)):
        if view is not None:
            value = chain.emit("mul", value, chain.load(view, role(name, attrgetter(name))))
    if anchor.alpha != 1:
        value = chain.emit("mul", value, number(anchor.alpha))
    if anchor.addend is not None:
        view = anchor.addend.view
        addend: Operand = chain.load(view, None if view.kind.is_plane else role("bias", attrgetter("addend")))
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
        for reader in node.users:
            if not draft.values[node].admits(reader, reader in walk.heads):
                continue
            for user in _heads(walk, draft, reader):
                if (
                    user not in seen
                    and user not in draft.values
                    and user not in walk.owner
                    and may_join(user)
                ):
                    seen.add(user)
                    heappush(queue, (walk.order[user], user))

    for joined in draft.values:
        push_users(joined)
    while queue:
        _, node = heappop(queue)
        if _comes_too_late(walk, draft, node):
            continue
        mark = draft.chain.mark()
        try:
            with draft.chain.lowering(node):
                value = join(walk, draft, node)
        except Refused as refused:
            draft.rollback(mark)
            draft.frames.pop(node, None)
            walk.rejections.setdefault(node, refused.rejection(node))
            continue
        member = walk.member(draft, node)
        draft.values |= dict.fromkeys(() if member is None else member.inner, STEP)
        draft.values[node] = value
        push_users(node)
    return draft


def _comes_too_late(walk: Walk, draft: Draft, node: fx.Node) -> bool:
    """Whether all values that a node reads are complete only when the kernel has ended, and it neither
    follows one of them nor may join in spite of that."""
    if walk.joins_late(node):
        return False
    values = draft.values_read(node)
    ended = bool(values) and all(value.reduction is not None for value in values)
    return ended and not any(value.is_followed(draft, node) for value in values)


def _heads(walk: Walk, draft: Draft, reader: fx.Node) -> list[fx.Node]:
    """The nodes that may join for a reader of a member: the reader, or the heads of the members that it is an
    inner node of, if the region may have these as a whole."""
    heads = walk.heads.get(reader, [reader])
    is_whole = all(member.is_whole(draft) for member in walk.members.get(heads[0], ()))
    return heads if is_whole else [reader]
