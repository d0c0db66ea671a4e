"""The facts of one graph that the search for regions needs, and the regions found so far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import fx

from cute_backend import config
from cute_backend.fx_walk.ends.consumers import Rounds
from cute_backend.fx_walk.ends.outside import Outside
from cute_backend.fx_walk.graph.mutation import Mutations
from cute_backend.fx_walk.members.kinds import find_members
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.products.anchors import is_anchor, read_anchor
from cute_backend.fx_walk.products.capability import Capability
from cute_backend.fx_walk.products.equal import first_equals
from cute_backend.fx_walk.products.questions import after_products
from cute_backend.fx_walk.refusals.reasons import Refused, Rejection
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.region.member import Member
from cute_backend.fx_walk.search.exposed_gathers import products_apart
from cute_backend.fx_walk.search.stretches import Stretches
from cute_backend.spec import Precision


@dataclass(frozen=True)
class State:
    """A copy of what changes in a walk as regions are found."""

    owner: dict[fx.Node, Draft]
    reads: set[fx.Node]
    redone: set[fx.Node]
    taken_back: dict[fx.Node, Refused]
    rejections: dict[fx.Node, Rejection]
    stretches: Stretches


class Walk:
    """The attributes before `alone` are facts of the graph; the others change as regions are found."""

    def __init__(
        self,
        graph: fx.Graph,
        precision: Precision,
        capability: Capability,
    ) -> None:
        self.precision = precision
        self.capability = capability
        self.order = {node: position for position, node in enumerate(graph.nodes)}
        self.members = find_members(self.order)
        """The members that join as a whole, by their heads. A node may head several, such as a `cat`; the
        first that the region has the operands of joins."""
        self.heads = self._heads()
        """The heads of the members that a node is an inner node of."""
        self.mutations = Mutations(self.order)
        self.firsts = first_equals(self.order, self.mutations)
        """The first node that has the value of a node, for nodes after it."""
        self.anchors = {node: _read(node, self.firsts) for node in self.order if is_anchor(node)}
        self.of_one_a = self._of_one_a()
        """The anchors that multiply one A, in graph order, by that A."""
        self.apart = products_apart(self.order, self.anchors, self.of_one_a, capability)
        """The A of products that no kernel computes together, each with the reason."""
        self.after_products = after_products(self.order)

        self.alone: dict[fx.Node, str] = {}
        """Products that share no launch although members of their regions need a shared one, each with the
        reason. They are still known after `restore`."""
        self.unpaired: dict[frozenset[fx.Node], str] = {}
        """Two products that an op combines, or one whose halves it combines, that are no pair, each with the
        reason. They are still known after `restore`."""
        self.owner: dict[fx.Node, Draft] = {}
        """The region that computes each node."""
        self.reads: set[fx.Node] = set()
        """The nodes that regions read."""
        self.redone: set[fx.Node] = set()
        """Work on operands that regions repeat, some of it after other products."""
        self.taken_back: dict[fx.Node, Refused] = {}
        """Members that regions can't keep, each with the reason."""
        self.outside = Outside(self.owner, self.reads, self.redone, Rounds(self.order), self.of_one_a)
        self.rejections: dict[fx.Node, Rejection] = {}
        """The rejections of nodes that are in no region."""
        self.stretches = Stretches()
        """The stretches that the regions found so far span."""

    def span(self, members: Iterable[fx.Node], inputs: Iterable[fx.Node]) -> None:
        """Notes that one kernel has these members and needs these inputs."""
        first = min(map(self.order.__getitem__, members))
        self.stretches.add(first, max(map(self.order.__getitem__, inputs)))

    def state(self) -> State:
        """A copy of what has been found so far."""
        return State(
            dict(self.owner),
            set(self.reads),
            set(self.redone),
            dict(self.taken_back),
            dict(self.rejections),
            self.stretches.copy(),
        )

    def restore(self, state: State) -> None:
        """Forgets what has been found since `state`. The containers stay, for `outside` has them, too."""
        self.owner.clear()
        self.owner.update(state.owner)
        self.reads.intersection_update(state.reads)
        self.redone.intersection_update(state.redone)
        self.taken_back = dict(state.taken_back)
        self.rejections = dict(state.rejections)
        self.stretches = state.stretches.copy()

    @contextmanager
    def trial(self) -> Iterator[None]:
        """A context that a refusal ends without a trace: the walk is then as it was before."""
        state = self.state()
        try:
            yield
        except Refused:
            self.restore(state)

    def unshared(self, anchors: Sequence[Anchor]) -> str:
        """The reason why the region of these anchors shares no launch; empty if it may."""
        if not self.may_share(anchors):
            return "its product shares no launch"
        return self.alone.get(anchors[0].node, "")

    def may_share(self, anchors: Sequence[Anchor]) -> bool:
        """Whether the region of these anchors may share a launch with products of the same A."""
        return config.shared_launches and len(anchors) == 1 and len(self.of_one_a[anchors[0].a]) > 1

    def member(self, draft: Draft, node: fx.Node) -> Member | None:
        """The member that a node joins a region as, if it joins with inner nodes or in a way of its own."""
        for member in self.members.get(node, ()):
            if member.joins(draft):
                return member
        return None

    def joins_late(self, node: fx.Node) -> bool:
        """Whether a node may join as a member after values that are complete only when the kernel has
        ended."""
        return any(member.joins_late for member in self.members.get(node, ()))

    def _heads(self) -> dict[fx.Node, list[fx.Node]]:
        heads: dict[fx.Node, list[fx.Node]] = {}
        for members in self.members.values():
            for member in members:
                for inner in member.inner:
                    heads.setdefault(inner, []).append(member.head)
        return heads

    def _of_one_a(self) -> dict[fx.Node, list[Anchor]]:
        of_one_a: dict[fx.Node, list[Anchor]] = {}
        for anchor in self.anchors.values():
            if isinstance(anchor, Anchor):
                of_one_a.setdefault(anchor.a, []).append(anchor)
        return of_one_a


def _read(node: fx.Node, firsts: dict[fx.Node, fx.Node]) -> Anchor | Refused:
    """The anchor of a node, or the reason why it has none. A is replaced by the first node with the same
    value, so that products share it."""
    try:
        return read_anchor(node).with_a(firsts)
    except Refused as refused:
        return refused
