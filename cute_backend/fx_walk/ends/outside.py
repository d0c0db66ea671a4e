"""The surroundings of a region, and their uses of its values: kernels read these as they run, or something
needs them in memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import fx

from cute_backend.fx_walk.ends.consumers import InductorKernel, Rounds, picks_elements, reads_in_place
from cute_backend.fx_walk.graph.axes import is_concatenation, is_reduction
from cute_backend.fx_walk.graph.mutation import is_view, writes_in_place
from cute_backend.fx_walk.graph.static import fake, known, target_name, tensor_of, usual
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.values.lower import is_pointwise, is_reshape


@dataclass(frozen=True)
class Outside:
    """The surroundings of a region: for each other region its members, the values that it reads and the steps
    that it repeats, and the order in which nodes outside of all regions run."""

    owner: dict[fx.Node, Draft]
    reads: set[fx.Node]
    redone: set[fx.Node]
    rounds: Rounds
    of_one_a: dict[fx.Node, list[Anchor]]

    def has(self, node: fx.Node) -> bool:
        """Whether the graph no longer computes a node once the regions are made: it is a member of one, or
        only regions that repeat it need it."""
        stack, seen = [node], {node}
        while stack:
            current = stack.pop()
            if current in self.owner:
                continue
            if current not in self.redone or current in self.reads:
                return False
            stack += (user for user in current.users if user not in seen)
            seen.update(current.users)
        return True

    def beside(self, draft: Draft) -> set[fx.Node]:
        """The work after other products of the draft's A that no region has yet: no kernel that reads the
        results of the draft does it."""
        found = set[fx.Node]()
        stack = [
            other.node
            for other in self.of_one_a[draft.first.a]
            if other.node not in self.owner and other.node not in draft.values
        ]
        while stack:
            for user in stack.pop().users:
                moves = is_pointwise(user) or is_reshape(user) or is_view(user) or is_concatenation(user)
                if moves and user not in found and user not in self.owner and user not in draft.values:
                    found.add(user)
                    stack.append(user)
        return found


@dataclass
class Need:
    """The uses of a value outside of its region: in memory, by the steps that compute it, and by kernels that
    read it as they run, all of it or a small part. `BoundaryValue` describes `followed`."""

    in_memory: bool = False
    followed: bool = False
    kernels: set[InductorKernel] = field(default_factory=set)
    in_part: bool = False


@dataclass(frozen=True)
class _Use:
    """A node that is a value for those that read it: one of its members, a reshape of it, a `part` of it, or
    work on it alone if it is `followed`."""

    node: fx.Node
    followed: bool = False
    part: fx.Node | None = None

    def taking(self, node: fx.Node) -> _Use:
        """The use of a view of this one, which may be a part of it. A `split` has parts, and is none."""
        is_part = self.part is not None and tensor_of(self.part) is not None
        return replace(self, node=node, part=self.part if is_part else node)


def needed(draft: Draft, nodes: list[fx.Node], outside: Outside) -> Need:
    """The uses of a value of a draft, which several nodes may have."""
    need, of_parts, kernel_of = Need(), Need(), outside.rounds.kernel_of
    is_reduced = draft.values[nodes[0]].reduction is not None
    uses, parts = list[_Use](), set[fx.Node]()

    def of(use: _Use) -> Need:
        if use.part is None:
            return need
        parts.add(use.part)
        return of_parts

    for node in nodes:
        if not _is_copied(draft, node):
            uses.append(_Use(node))
        elif node in outside.reads or any(user not in draft.values for user in node.users):
            need.kernels.add(kernel_of(node))
    while uses:
        use = uses.pop()
        if use.node in outside.reads:
            of(use).in_memory = True
        for user in use.node.users:
            if user in draft.values or outside.has(user):
                continue
            if is_reshape(user):
                uses.append(replace(use, node=user))
            elif is_reduced and _joins(user):
                # Inductor's kernel would write the reduction into its place; ours leaves a copy to it.
                need.in_memory = need.followed = True
            elif is_reduced and _is_as_small(user, use.node):
                uses.append(replace(use, node=user, followed=True))
            elif (is_pointwise(user) or is_reduction(user)) and not writes_in_place(user):
                of(use).kernels.add(kernel_of(user))
            elif is_reduced or not reads_in_place(user):
                # A result that is a view has the memory of the whole value.
                to = need if user.op == "output" else of(use)
                to.in_memory = True
                to.followed |= use.followed
            elif is_view(user):
                uses.append(use.taking(user))
            elif picks_elements(user, use.node):
                of(use.taking(user)).kernels.add(kernel_of(user))
            else:
                of(use).kernels.add(kernel_of(user))
    if 2 * sum(usual(fake(part).numel()) for part in parts) < usual(draft.first.m * draft.first.n):
        need.in_part = bool(parts)
    else:
        need.in_memory |= of_parts.in_memory
        need.kernels |= of_parts.kernels
    return need


def _is_copied(draft: Draft, node: fx.Node) -> bool:
    """Whether a member is a copy in an order that our kernels do not write. Another kernel then makes it."""
    return target_name(node) == "aten.clone.default" and draft.form(node) is None


_JOINS = ("aten.constant_pad_nd.default", "aten.slice_scatter.default")


def _joins(node: fx.Node) -> bool:
    """Whether Inductor computes what a call reads right into the call's larger result."""
    return is_concatenation(node) or target_name(node) in _JOINS


def _is_as_small(user: fx.Node, node: fx.Node) -> bool:
    """Whether a reader of a reduction's result has a result of that size itself, and no plane."""
    result = tensor_of(user) if is_pointwise(user) and not writes_in_place(user) else None
    return result is not None and known(result.numel() == fake(node).numel())
