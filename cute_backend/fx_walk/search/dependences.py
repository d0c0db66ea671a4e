"""The dependences between a growing region and the nodes outside of it.

An operand must not depend on the region; every region found so far counts as one node. No write in place may
lie between an operand and the kernel, or between the kernel and a node that has to move after it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from cute_backend.fx_walk.graph.axes import is_reduction
from cute_backend.fx_walk.graph.static import target_name
from cute_backend.fx_walk.products.questions import is_epilogue_work
from cute_backend.fx_walk.refusals.reasons import Reason, Refused, user_label
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.search.walk import Walk


def depends(walk: Walk, draft: Draft, node: fx.Node) -> bool:
    """Whether a node outside needs a value of the region. Every region found so far counts as one node."""
    start = walk.stretches.bound(walk.order[draft.first.node])
    stack, visited = [node], set()
    while stack:
        current = stack.pop()
        if current in draft.values:
            return True
        if current in visited or current in draft.independent or walk.order[current] < start:
            continue
        visited.add(current)
        owner = walk.owner.get(current)
        stack.extend(current.all_input_nodes if owner is None else owner.inputs)
    draft.independent |= visited
    return False


def cycle(walk: Walk, draft: Draft, node: fx.Node) -> Refused:
    """The refusal of an operand that depends on the region. It names the nearest product between them, or
    else the nearest node."""
    current = between = node
    while current not in draft.values:
        owner = walk.owner.get(current)
        if owner is not None:
            between = owner.first.node
        elif current in walk.anchors or not (is_epilogue_work(current) or between in walk.anchors):
            between = current
        sources = current.all_input_nodes if owner is None else owner.inputs
        current = next(source for source in sources if depends(walk, draft, source))
    own = between is node
    return Refused(Reason.CYCLE, operand=node, between=target_name(node) if own else between)


def reduction_before(walk: Walk, draft: Draft, node: fx.Node) -> fx.Node | None:
    """A reduction of the region's own values that a node outside depends on, as a norm does."""
    return next(
        (
            current
            for current in _ancestors(walk, draft, node)
            if is_reduction(current) and not draft.values.keys().isdisjoint(_ancestors(walk, draft, current))
        ),
        None,
    )


def _ancestors(walk: Walk, draft: Draft, node: fx.Node) -> Iterator[fx.Node]:
    """The node and its ancestors that are in no region yet, back to the first anchor of the draft, and the
    first ones that are in a region or are no epilogue work."""
    stack, visited = [node], set()
    while stack:
        current = stack.pop()
        if current not in visited and walk.order[current] >= walk.order[draft.first.node]:
            visited.add(current)
            if is_epilogue_work(current) and current not in walk.owner:
                stack.extend(current.all_input_nodes)
            yield current


def check_mutations(walk: Walk, draft: Draft, node: fx.Node) -> None:
    """Refuses if a write in place lies between an operand and the kernel, or between the kernel and a node
    that has to move after it.

    The kernel takes the place of the last member, so earlier nodes that use a value of the region have to
    move after it. A node moves only if no write lies on its way.
    """
    here = walk.order[node]
    for operand in draft.inputs:
        mutation = walk.mutations.first_of(operand, walk.order[operand], here)
        if mutation is not None:
            raise Refused(Reason.MUTATED_LOAD, operand=user_label(operand), mutation=mutation.node)
    between = walk.mutations.first(walk.order[draft.first.node], here)
    if between is not None and any(walk.order[user] < here for user in _outside_users(draft, node)):
        raise Refused(Reason.MUTATION, mutation=between.node)


def _outside_users(draft: Draft, joining: fx.Node) -> Iterator[fx.Node]:
    for member in draft.values:
        yield from (user for user in member.users if user not in draft.values and user is not joining)
