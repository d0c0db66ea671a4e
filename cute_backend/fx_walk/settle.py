"""What of a grown region stays: all that is needed outside of it, as far as a kernel can write it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from cute_backend import config
from cute_backend.fx_walk.anchors import is_anchor
from cute_backend.fx_walk.draft import Draft
from cute_backend.fx_walk.lower import is_pointwise, is_reshape
from cute_backend.fx_walk.pairs import Parts
from cute_backend.fx_walk.questions import base, is_free_cast, is_reduction
from cute_backend.fx_walk.reasons import Reason, Refused, Rejection
from cute_backend.fx_walk.reductions import Reduced
from cute_backend.fx_walk.region import stores_of
from cute_backend.fx_walk.static import describe, fake
from cute_backend.spec import Store


@dataclass(frozen=True)
class Outside:
    """What other regions have: the members of each, what they read, and what they do again."""

    owner: dict[fx.Node, Draft]
    reads: set[fx.Node]
    redone: set[fx.Node]

    def has(self, node: fx.Node) -> bool:
        """Whether nothing of a node is left when the regions stand: a member, or only done again by some."""
        return node in self.owner or (
            node in self.redone and node not in self.reads and all(map(self.has, node.users))
        )


def settle(
    draft: Draft, outside: Outside, rejections: dict[fx.Node, Rejection]
) -> tuple[list[fx.Node], set[fx.Node]]:
    """The members that stay: all that are needed, cut back until every result can be written.

    Of these, the second result are computed outside as well, because that is cheaper than to write them.
    """
    members, copied = list(draft.values), set[fx.Node]()
    while True:
        members = _needed(_without_last_views(draft, members), copied, outside)
        escaping = escapes(members, copied, outside)
        if any(isinstance(draft.values[node], Parts) for node in escaping):
            raise Refused(Reason.UNPAIRED, target=draft.first.node.name)
        odd = next((node for node in escaping if draft.order(node) is None), None)
        if odd is not None:
            members = _cut(draft, members, odd, _odd_layout(odd), rejections)
        elif (count := len(_stores(draft, escaping))) > config.max_stores:
            limit = Refused(Reason.TOO_MANY_STORES, count=count, limit=config.max_stores)
            members = _cut(draft, members, escaping[-1], limit, rejections)
        elif (costly := _left_to_users(draft, members, escaping, copied, outside)) is not None:
            users = [user for user in costly.users if user not in members]
            refused = Refused(Reason.LEFT_TO_USERS, users=", ".join(user.name for user in users))
            if len(users) == len(costly.users):
                members = _cut(draft, members, costly, refused, rejections)
            else:
                rejections.setdefault(costly, refused.rejection(costly))
                copied.add(costly)
        else:
            return members, copied.intersection(members)


def _stores(draft: Draft, escaping: list[fx.Node]) -> list[Store]:
    return stores_of(draft.first, escaping, draft.values, draft.frames)[0]


def _without_last_views(draft: Draft, members: list[fx.Node]) -> list[fx.Node]:
    """The members without views that split columns or move axes for what is outside alone: it may as well
    see what is written so."""
    kept = dict.fromkeys(members)
    for node in reversed(members):
        if draft.is_view(node) and not any(user in kept for user in node.users):
            del kept[node]
    return list(kept)


def _left_to_users(
    draft: Draft, members: list[fx.Node], escaping: list[fx.Node], copied: set[fx.Node], outside: Outside
) -> fx.Node | None:
    """A step whose result costs more to write than what it is made of, and that Inductor can redo.

    Its users outside are pointwise ops and reductions, into which Inductor fuses what they read: the
    `abs` before an `amax`, or a cast to fp32, of a value that is written anyway. It may have users inside
    if it is made of members alone, so that the copy can stand anywhere behind the kernel. A copy costs what
    it is made of.
    """
    written = {base(node) for node in escaping}
    inside = set(members)
    for node in escaping:
        if is_anchor(node) or node in outside.reads or is_reshape(node):
            continue
        if isinstance(draft.values[node], Reduced):
            continue
        users = [user for user in node.users if user not in inside]
        readers = [reader for user in users for reader in _behind_reshapes(user)]
        if not all(is_pointwise(reader) or is_reduction(reader) for reader in readers):
            continue
        if len(users) < len(node.users) and not inside.issuperset(node.all_input_nodes):
            continue
        sources = set(_read_for(node, inside, copied)) - written
        if sum(fake(source).element_size() for source in sources) < fake(node).element_size():
            return node
    return None


def _behind_reshapes(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a value by way of `node`: itself, or of a reshape, which is free, its own readers."""
    if not is_reshape(node):
        yield node
    for user in node.users if is_reshape(node) else ():
        yield from _behind_reshapes(user)


def _read_for(node: fx.Node, inside: set[fx.Node], copied: set[fx.Node]) -> Iterator[fx.Node]:
    """The members that have to be in memory where a member is computed outside."""
    for source in {base(source) for source in node.all_input_nodes if source in inside}:
        if source in copied or is_free_cast(source):
            yield from _read_for(source, inside, copied)
        else:
            yield source


def _needed(members: list[fx.Node], copied: set[fx.Node], outside: Outside) -> list[fx.Node]:
    """Members whose value reaches something outside."""
    needed = set(escapes(members, copied, outside))
    for node in reversed(members):
        if any(user in needed for user in node.users):
            needed.add(node)
    return [node for node in members if node in needed or is_anchor(node)]


def escapes(members: list[fx.Node], copied: set[fx.Node], outside: Outside) -> list[fx.Node]:
    """Members that are read outside: by another region, which may pass over a cast, or by a node.

    Copies of members are outside, and what reads a member there reads its copy.
    """
    inside = set(members) - copied
    return [
        node
        for node in members
        if node not in copied
        and (
            node in outside.reads or any(user not in inside and not outside.has(user) for user in node.users)
        )
    ]


def _cut(
    draft: Draft,
    members: list[fx.Node],
    first: fx.Node,
    refused: Refused,
    rejections: dict[fx.Node, Rejection],
) -> list[fx.Node]:
    """The members without `first`, all that needs it, and all that is nothing without what goes."""
    rejections.setdefault(first, refused.rejection(first))
    cut = {first}
    while True:
        more = {
            node
            for node in members
            if not cut.isdisjoint(node.all_input_nodes)
            or (draft.values[node] is None and not cut.isdisjoint(node.users))
        }
        if more <= cut:
            return [node for node in members if node not in cut]
        cut |= more


def _odd_layout(node: fx.Node) -> Refused:
    return Refused(Reason.OUTPUT_LAYOUT, strides=describe(fake(node).stride()))
