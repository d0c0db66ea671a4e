"""Regions: an anchor and the pointwise work after it that one kernel can do.

A region grows from its anchor, node by node in graph order, while every step is legal. A step may be a
pointwise op on the (M, N) plane, or a view that splits the plane's rows or columns or moves their axes. The
epilogue must be able to load the step's other operands, and none of them may depend on the region itself. A
step may also be a reduction of the plane, which ends the region.

Anchors are visited from the last to the first, but if one op reads two of them, the larger one is visited
first (`visits.py`). So a node that depends on two anchors belongs to the one that is visited first, and the
result of the other one is an exact load. If both multiply one A, or are two slices of one product, the region
grows from a pair instead. A value that is needed outside becomes a further store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial

from torch import fx

from cute_backend.fx_walk.ends.settle import Settled, settle
from cute_backend.fx_walk.graph.static import fake, tensor_of
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.products.capability import Capability, check_operands, of_target, target_of
from cute_backend.fx_walk.products.opaque_products import decomposed_product
from cute_backend.fx_walk.products.pairs import meet, of_slices, reach, slices_of, unlike
from cute_backend.fx_walk.products.stored_weights import is_worth_converting, may_convert
from cute_backend.fx_walk.refusals.reasons import Reason, Refused, Rejection
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.region.region import Region, stores_of
from cute_backend.fx_walk.search.converted_pairs import loss_together
from cute_backend.fx_walk.search.exposed_gathers import exposed_gather
from cute_backend.fx_walk.search.growth import grown, seed
from cute_backend.fx_walk.search.shared_launch import sharing
from cute_backend.fx_walk.search.visits import visits
from cute_backend.fx_walk.search.walk import State, Walk
from cute_backend.fx_walk.values.lower import is_pointwise
from cute_backend.planning import Target
from cute_backend.planning.transposing import can_transpose
from cute_backend.spec import Precision


def find_regions(
    graph: fx.Graph, precision: Precision, capability: Capability
) -> tuple[list[Region], list[Rejection]]:
    """Every region of a post-grad graph, in the order of their anchors, and rejections of the rest.

    Every node needs a fake tensor in `meta["val"]`. The graph is read, not changed, and no guard is added.

    Some members, by default rotary embeddings, stay in a kernel only if it shares a launch, which is asked
    once all products of an A have been visited (`_visited`). The search is repeated only if a region of an
    earlier product has come between the products of a launch since.
    """
    walk = Walk(graph, precision, capability)
    beginning, bare = walk.state(), partial(_bare, walk)
    while alone := _unshared(regions := sharing(walk, _visited(walk), bare)):
        walk.alone |= alone
        walk.restore(beginning)
    for node in walk.order:
        if (product := decomposed_product(node)) is not None:
            walk.rejections.setdefault(node, Refused(Reason.MATRIX_VECTOR, target=product).rejection(node))
    rejections = [
        walk.rejections[node] for node in walk.order if node in walk.rejections and node not in walk.owner
    ]
    return sorted(regions, key=lambda region: walk.order[region.products[-1]]), rejections


def _unshared(regions: Sequence[Region]) -> dict[fx.Node, str]:
    """The products that have launches of their own although their regions need shared ones, each with the
    reason why it shares none."""
    return {
        region.first.node: f"its product {region.unshared or 'shares no launch'}"
        for region in regions
        if region.needs_shared_launch and not region.is_shared
    }


def _visited(walk: Walk) -> list[Region]:
    """The regions of the products, in the order of visits.

    Once the last product of an A has been visited, it is asked which of them would share a launch. If one
    needs a shared launch and would have none, the visits go back to the first of them, and what has been
    found since is forgotten.
    """
    regions: list[Region] = []
    order = list(visits(walk.anchors))
    groups = [_sharing_a(walk, node) for node in order]
    first = {a: place for place, a in reversed([*enumerate(groups)])}
    last = {a: place for place, a in enumerate(groups)}
    begun: dict[fx.Node, tuple[State, int]] = {}
    place = 0
    while place < len(order):
        node, a = order[place], groups[place]
        if a is not None and place == first[a]:
            begun[a] = walk.state(), len(regions)
        if node not in walk.owner:
            try:
                regions.append(_region(walk, node))
            except Refused as refused:
                walk.rejections[node] = refused.rejection(node)
        place += 1
        if a in begun and place > last[a]:
            state, count = begun.pop(a)
            if alone := _alone_of(walk, a, regions[count:]):
                walk.alone |= alone
                walk.restore(state)
                del regions[count:]
                place = first[a]
    return regions


def _sharing_a(walk: Walk, node: fx.Node) -> fx.Node | None:
    """The A of a product whose region may share a launch with others of that A."""
    anchor = walk.anchors[node]
    return None if isinstance(anchor, Refused) or not walk.may_share((anchor,)) else anchor.a


def _alone_of(walk: Walk, a: fx.Node, regions: Sequence[Region]) -> dict[fx.Node, str]:
    """The products of an A that need a shared launch and would have none, as far as regions are known."""
    found = [region for region in regions if region.first.a is a]
    if not _unshared(found):
        return {}
    state = walk.state()
    alone = _unshared(sharing(walk, found, partial(_bare, walk), a))
    walk.restore(state)
    return alone


def _region(walk: Walk, node: fx.Node) -> Region:
    anchor = walk.anchors[node]
    if tensor_of(node) is None and isinstance(anchor, Refused):
        raise anchor  # a library's product may have several results
    target = target_of(fake(node).device, walk.capability)
    if isinstance(anchor, Refused):
        raise of_target(anchor, target)
    check_operands(anchor, target)
    if (found := _of_stored(walk, anchor, target)) is not None:
        return found
    if (found := _first_pair(walk, anchor, lambda other: other)) is not None:
        return found
    draft, settled = _grown(walk, (anchor,))
    fuses = anchor.stands_alone or any(
        is_pointwise(member) or draft.values[member].reduction is not None for member in settled.members
    )
    if not fuses or not settled.stored:
        raise _left_out(walk, anchor)
    return _owned(walk, draft, settled)


def _of_stored(walk: Walk, anchor: Anchor, target: Target | None) -> Region | None:
    """The region of a product whose kernel converts its weight, or of a pair of such products. None if there
    is no such weight, no such kernel, or if the kernel that writes the weight in 16 bits first is expected to
    be worth its time."""
    if isinstance(anchor.stored, Refused):
        if may_convert(anchor, target):
            walk.rejections[anchor.b] = anchor.stored.rejection(anchor.b)
        return None

    def converting(of: Anchor) -> Anchor | None:
        if isinstance(of.stored, Anchor) and is_worth_converting(of.stored, target, walk.precision):
            return of.stored
        return None

    stored = converting(anchor)
    if stored is None:
        return None
    if (found := _first_pair(walk, stored, converting)) is not None:
        return found
    with walk.trial():
        draft, settled = _grown(walk, (stored,))
        if not settled.stored:
            raise Refused(Reason.NOTHING_TO_FUSE, refused="")
        region = _owned(walk, draft, settled)
        if not can_transpose(region.spec):
            raise Refused(Reason.NOTHING_TO_FUSE, refused="")
        return region
    return None


def _bare(walk: Walk, node: fx.Node) -> Region | None:
    """The region of a product without other work, which is useful only together with other regions. None if
    the product can't be written."""
    anchor = walk.anchors[node]
    assert isinstance(anchor, Anchor)
    with walk.trial():
        return _owned(walk, *_settled(walk, seed(walk, (anchor,))))
    return None


def _first_pair(walk: Walk, anchor: Anchor, of: Callable[[Anchor], Anchor | None]) -> Region | None:
    """The region of the first pair that is one, of those with an anchor. `of` returns the form of another
    product in which it may be in them, if it has one."""
    found = (_of_pair(walk, anchors) for anchors in _pairs(walk, anchor, of))
    return next((region for region in found if region is not None), None)


def _pairs(walk: Walk, anchor: Anchor, of: Callable[[Anchor], Anchor | None]) -> Iterator[tuple[Anchor, ...]]:
    """The pairs that a region could have instead of one anchor, the likeliest first."""
    slices = slices_of(anchor, walk.owner)
    if slices is not None:
        yield of_slices(anchor, slices)
    for found in reversed(walk.of_one_a[anchor.a]):
        if (
            walk.order[found.node] >= walk.order[anchor.node]
            or found.node in walk.owner
            or not meet(found.node, anchor.node, walk.owner)
        ):
            continue
        other = of(found) or found  # unlike the anchor, if it has no form that is asked for
        why = unlike(other, anchor) or exposed_gather(walk, (other, anchor))
        if why is None:
            yield other, anchor
        else:
            walk.unpaired[_nodes((other, anchor))] = why


def _left_out(walk: Walk, anchor: Anchor) -> Refused:
    """The reason why a product has no region: no work follows it, or all of it belongs to a later product or
    was refused."""
    for user in anchor.node.users:
        region = walk.owner.get(user)
        if region is None or user in walk.anchors:
            continue
        other = region.anchors[-1]
        why = unlike(anchor, other) or exposed_gather(walk, (anchor, other))
        if why is not None:
            return Refused(Reason.APART, reader=user, other=other.node, why=why)
    near = [anchor.node, *reach(anchor.node, walk.owner)]
    refused = {user for node in near for user in node.users if user in walk.rejections}
    names = ", ".join(node.name for node in sorted(refused, key=walk.order.__getitem__))
    return Refused(Reason.NOTHING_TO_FUSE, refused=f"; refused: {names}" if names else "")


def _of_pair(walk: Walk, anchors: tuple[Anchor, ...]) -> Region | None:
    """The region of two accumulators that an op of the region combines. None if they form no region."""
    with walk.trial():
        draft, settled = _grown(walk, anchors)
        if not any(map(draft.reads_both, settled.members)):
            raise Refused(Reason.NOTHING_TO_FUSE, refused="")
        region = _owned(walk, draft, settled)
        if region.spec.product.is_converted and (why := loss_together(walk, region)) is not None:
            walk.unpaired[_nodes(anchors)] = why
            raise Refused(Reason.NOTHING_TO_FUSE, refused="")
        return region
    return None


def _nodes(anchors: Sequence[Anchor]) -> frozenset[fx.Node]:
    return frozenset(anchor.node for anchor in anchors)


def _grown(walk: Walk, anchors: tuple[Anchor, ...]) -> tuple[Draft, Settled]:
    """The draft of a region, as far as it grows and its members stay.

    Whether a kernel can have a member, or should, may depend on what is stored: blocks are reduced in narrow
    visits, or only in others. If there are members that are unfit, the region shrinks to what does not follow
    from them, and grows on from there.
    """
    draft = grown(walk, seed(walk, anchors))
    while True:
        cut, settled = _settled(walk, draft)
        parts = (part for node in settled.stored for part in cut.values[node].parts)
        cut.chain.stored = frozenset(parts)
        unfit = _unfit(walk, cut)
        if not unfit:
            return cut, settled
        walk.taken_back |= unfit
        draft = grown(walk, _without(walk, draft, unfit.keys()))


def _unfit(walk: Walk, draft: Draft) -> dict[fx.Node, Refused]:
    """The members that a draft can't keep and that have not been taken back before, each with the reason."""
    members = {node: walk.member(draft, node) for node in draft.values if node not in walk.taken_back}
    refused = {node: member.unfit(draft) for node, member in members.items() if member is not None}
    return {node: why for node, why in refused.items() if why is not None}


def _without(walk: Walk, draft: Draft, heads: Set[fx.Node]) -> Draft:
    """The draft of the members that do not follow from those with these heads, and are no part of them."""
    left = set(heads).union(*(member.inner for node in heads for member in walk.members[node]))
    for node in draft.values:
        if not left.isdisjoint(node.all_input_nodes):
            left.add(node)
    return draft.cut([node for node in draft.values if node not in left])


def _settled(walk: Walk, draft: Draft) -> tuple[Draft, Settled]:
    """Cuts a draft back to the members that stay.

    Some layouts of results, such as heads of 16 columns, are possible only beside a reduction of the same
    blocks. If it leaves, the choice is repeated among the members that stayed.
    """
    while True:
        settled = settle(draft, walk.outside, walk.rejections)
        draft = draft.cut(settled.members)
        if all(draft.form(node) is not None for node in settled.stored):
            return draft, settled


def _owned(walk: Walk, draft: Draft, settled: Settled) -> Region:
    """The region of the members that stay, which no other region can have from now on."""
    walk.owner.update(dict.fromkeys(settled.kept, draft))
    walk.span(settled.kept, draft.inputs)
    walk.reads.update(draft.inputs)
    stores, outputs = stores_of(draft.first, draft.chain, settled.stored, draft.values, draft.frames)
    frames = {node: draft.frames[node] for node in outputs if node in draft.frames}
    members = (walk.member(draft, node) for node in settled.members)
    return Region(
        draft.anchors,
        tuple(settled.kept),
        draft.chain.build(stores),
        tuple(draft.chain.views),
        outputs,
        frames,
        draft.chain.origins,
        any(member is not None and member.needs_shared_launch for member in members),
    )
