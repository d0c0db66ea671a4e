"""Cuts a grown region back to the members with which the fewest bytes cross its boundary."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from cute_backend.fx_walk.ends.boundary import Boundary, Limits, cheapest_stores, computed_for, members
from cute_backend.fx_walk.ends.crossings import Crossings, crossings
from cute_backend.fx_walk.ends.outside import Outside
from cute_backend.fx_walk.graph.mutation import is_view
from cute_backend.fx_walk.graph.static import describe, fake, target_name, tensor_of
from cute_backend.fx_walk.products.anchors import is_anchor
from cute_backend.fx_walk.products.questions import base
from cute_backend.fx_walk.refusals.reasons import Reason, Refused, Rejection, program_name
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.region.region import is_by_heads
from cute_backend.fx_walk.region.value import STEP
from cute_backend.fx_walk.values.lower import is_reshape


@dataclass(frozen=True)
class Settled:
    """The members that stay, in order, and those that are stored. `outside` has the values that are computed
    outside because that is cheaper than storing them: members that leave the region, and members that are
    computed on both sides."""

    members: list[fx.Node]
    stored: list[fx.Node]
    outside: set[fx.Node]

    @property
    def kept(self) -> list[fx.Node]:
        """The members that are computed only in the kernel."""
        return [node for node in self.members if node not in self.outside]


def settle(draft: Draft, outside: Outside, rejections: dict[fx.Node, Rejection]) -> Settled:
    """Returns the members of a draft that stay, and records why the others do not.

    Raises Refused if no value can be stored from which all others follow.
    """
    found = crossings(draft, outside)
    boundary = cheapest_stores(found.choices, found.room)
    if boundary is None:
        raise _nothing_to_store(draft, found.room)
    settled = _sides(draft, found, boundary, outside)
    if settled.outside:
        _explain(draft, found, boundary, settled, rejections)
    return settled


def _unlimited(found: Crossings, boundary: Boundary) -> int:
    """The values that the kernel would store if it could read and write any number of planes."""
    choices = found.choices
    if not found.room.is_tight(choices, boundary.stores):
        return boundary.stores
    free = cheapest_stores(
        choices, Limits(len(choices.loads), choices.planes((1 << len(choices.values)) - 1))
    )
    return boundary.stores if free is None else free.stores


def _sides(draft: Draft, found: Crossings, boundary: Boundary, others: Outside) -> Settled:
    """Decides where each member is computed, from the last to the first: in the kernel, outside, or on both
    sides.

    A view that splits columns or moves axes only for nodes outside is made outside, from the stored value.
    """
    inside, stored, outside = set[fx.Node](), [], set[fx.Node]()
    for node in reversed(draft.values):
        wanted = node in others.reads or any(
            (user not in draft.values or user in outside) and not others.has(user) for user in node.users
        )
        is_used = not inside.isdisjoint(node.users)
        is_written = boundary.stores >> found.places[node] & 1 and draft.form(node) is not None
        if wanted and is_written and (is_used or not draft.only_moves_axes(node)):
            stored.append(node)
            inside.add(node)
        elif wanted:
            outside.add(node)
        if is_used:
            inside.add(node)
    members = [node for node in draft.values if node in inside or is_anchor(node)]
    return Settled(members, stored[::-1], outside)


def _explain(
    draft: Draft,
    found: Crossings,
    boundary: Boundary,
    settled: Settled,
    rejections: dict[fx.Node, Rejection],
) -> None:
    """Records why each member that the kernel could compute is computed outside."""
    inside, kept = set(settled.members), set(settled.kept)
    unlimited = _unlimited(found, boundary)
    wanted = computed_for(found.choices.values, unlimited)
    for node in settled.outside:
        if is_reshape(node) or is_view(node) or tensor_of(node) is None:
            continue
        is_unwritten = draft.values[node] is not STEP and draft.form(node) is None
        is_next = not inside.isdisjoint(map(base, node.all_input_nodes))
        # Of all that comes before heads, nothing is stored either if a `cat` joins its parts.
        is_last = draft.values.keys().isdisjoint(node.users) and is_by_heads(node, draft.frames.get(node))
        if not is_next and not (is_unwritten and is_last):
            continue
        if is_unwritten:
            refused = _odd_layout(draft, node)
        elif not boundary.is_best:
            refused = Refused(Reason.UNSEARCHED, count=len(found.choices.values))
        elif wanted >> found.places[node] & 1 and node not in inside:
            refused = _does_not_fit(found, boundary, unlimited)
        else:
            users = ", ".join(_reader(user) for user in node.users if user not in kept)
            refused = Refused(Reason.LEFT_TO_USERS, users=users)
        rejections.setdefault(node, refused.rejection(node))


def _reader(user: fx.Node) -> str:
    return "the caller" if user.op == "output" else program_name(user)


def _does_not_fit(found: Crossings, boundary: Boundary, unlimited: int) -> Refused:
    """Says that a kernel has no room for all planes of the `unlimited` choice."""
    choices, room = found.choices, found.room
    left = [choices.values[place].size for place in members(unlimited & ~boundary.stores)]
    loads, results = choices.loads_of(unlimited), choices.planes(unlimited)
    what = {"bytes": sum(left), "bits": choices.bits(unlimited, loads), "held": room.bits}
    if room.holds(choices, unlimited, 0):
        return Refused(Reason.TOO_MANY_LOADS, count=loads.bit_count(), limit=room.loads, **what)
    return Refused(Reason.TOO_MANY_STORES, count=results, **_results(room), bytes=what["bytes"])


def _nothing_to_store(draft: Draft, room: Limits) -> Refused:
    if any(value.is_split for value in draft.values.values()):
        return Refused(Reason.UNPAIRED, target=target_name(draft.first.node))
    for anchor in draft.anchors:
        if draft.form(anchor.node) is None:
            return _odd_layout(draft, anchor.node)
    return Refused(Reason.TOO_MANY_STORES, count=room.results + 1, **_results(room), bytes=0)


def _results(room: Limits) -> dict[str, int]:
    return {"limit": room.results, "planes": room.results - room.reductions}


def _odd_layout(draft: Draft, node: fx.Node) -> Refused:
    if draft.values[node].alternate:
        return Refused(Reason.UNPAIRED, target=target_name(node))
    return Refused(Reason.OUTPUT_LAYOUT, strides=describe(fake(node).stride()))
