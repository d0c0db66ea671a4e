"""The values, loads and consumers that could cross the boundary of a grown region, with their bytes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from torch import fx

from cute_backend import config
from cute_backend.fx_walk.ends.boundary import ROW_HELD, BoundaryValue, Choices, Limits
from cute_backend.fx_walk.ends.consumers import InductorKernel
from cute_backend.fx_walk.ends.launches import is_finished_apart
from cute_backend.fx_walk.ends.outside import Need, Outside, needed
from cute_backend.fx_walk.graph.axes import is_reduction
from cute_backend.fx_walk.graph.mutation import root
from cute_backend.fx_walk.graph.static import fake, usual
from cute_backend.fx_walk.products.anchors import is_anchor
from cute_backend.fx_walk.products.questions import is_only_read
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.region.value import STEP
from cute_backend.fx_walk.values.lower import is_pointwise, is_reshape
from cute_backend.planning import PLANES, REDUCTIONS, plane_bits_held, planes_written
from cute_backend.spec import Reduction


@dataclass(frozen=True)
class Crossings:
    """The input of `boundary` for a region, the place of each member's value in it, and the room that the
    kernel has.

    Some values stand for several members: for views of one another, and for equal members that are only read.
    All of these take one store.
    """

    choices: Choices
    places: dict[fx.Node, int]
    room: Limits


def crossings(draft: Draft, outside: Outside) -> Crossings:
    """The values, loads and consumers that could cross the boundary of a draft."""
    groups = _groups(draft)
    places = {node: place for place, nodes in enumerate(groups) for node in nodes}
    needs = [needed(draft, nodes, outside) for nodes in groups]
    kernels: dict[InductorKernel, int] = {}
    values, reads = list[BoundaryValue](), dict[int, int]()
    sizes, loads = _Sizes(draft), _Loads(draft, outside)
    apart = _Apart(draft, _last_plane(draft, groups, needs))
    for place, (nodes, need) in enumerate(zip(groups, needs, strict=True)):
        first, value = nodes[0], draft.values[nodes[0]]
        sources = {places[source] for node in nodes for source in node.all_input_nodes if source in places}
        sources.discard(place)
        finishes, is_reduced = bool(value.after), value.reduction is not None
        reduces = not finishes and (is_reduced or (value is STEP and is_reduction(first)))
        home = 0
        if (reduces or need.in_memory) and not is_anchor(first):
            home = kernels.setdefault(outside.rounds.kernel_of(_reducing(draft, first)), len(kernels))
        for reader in need.kernels:
            index = kernels.setdefault(reader, len(kernels))
            reads[index] = reads.get(index, 0) | 1 << place
        values.append(
            BoundaryValue(
                size=sizes.of(first),
                sources=sum(1 << source for source in sources),
                loads=0 if is_anchor(first) else loads.of_members(nodes),
                storable=draft.form(first) is not None,
                planes=len(value.parts),
                bits=0 if is_reduced else sizes.bits(first),
                product=is_anchor(first),
                reduces=reduces,
                finishes=finishes,
                apart=apart.is_true_of(first),
                in_memory=need.in_memory,
                home=home,
                followed=need.followed and not need.kernels,
                again=max((_again(values, source, sizes.m) for source in sources), default=0)
                if reduces
                else 0,
            )
        )
    for place, need in enumerate(needs):
        if need.in_part:
            # A reader of a small part reads few bytes, and may compute the part from an earlier value.
            place = _narrowest(values, place)
            home = kernels.setdefault(outside.rounds.kernel_of(groups[place][0]), len(kernels))
            values[place] = replace(values[place], in_memory=True, home=home)
    consumers = tuple(reads.get(index, 0) for index in range(len(kernels)))
    loaded = tuple(loads.of_kernel(kernel) if reads.get(kernels[kernel]) else 0 for kernel in kernels)
    choices = Choices(tuple(values), loads.sizes(sizes), consumers, loaded, loads.bits)
    return Crossings(choices, places, _room(draft, loads))


@dataclass
class _Apart:
    """Whether a second kernel finishes a reduction of a draft. It depends on the kind of the reduction more
    than on what is reduced, so each kind is asked about once, together with the plane `plane`."""

    draft: Draft
    plane: fx.Node | None
    known: dict[Reduction, bool] = field(default_factory=dict)

    def is_true_of(self, member: fx.Node) -> bool:
        """True of other members, too, which no kernel finishes."""
        reduction = self.draft.values[member].reduction
        if reduction is None:
            return True
        if reduction not in self.known:
            self.known[reduction] = is_finished_apart(self.draft, member, self.plane)
        return self.known[reduction]


def _last_plane(draft: Draft, groups: list[list[fx.Node]], needs: list[Need]) -> fx.Node | None:
    """The last plane that is needed outside and that the kernel can write."""
    for (node, *_), need in zip(reversed(groups), reversed(needs), strict=True):
        is_plane = draft.values[node].reduction is None and draft.form(node) is not None
        if is_plane and (need.in_memory or need.kernels):
            return node
    return None


def _again(values: list[BoundaryValue], source: int, rows: int) -> int:
    """The bytes that an outside kernel reads a second time if it first reduces the value `source` and then
    uses the reduction together with the value. It reads the narrowest value from which `source` can be
    computed without another operand. 0 if the kernel holds the rows."""
    least = values[_narrowest(values, source)].size
    return least if least > rows * ROW_HELD else 0


def _narrowest(values: list[BoundaryValue], place: int) -> int:
    """The place of the narrowest value from which a value can be computed without another operand: the last
    one, if there are several."""
    least, value = place, values[place]
    while value.sources.bit_count() == 1 and not value.loads:
        place = value.sources.bit_length() - 1
        value = values[place]
        if value.size < values[least].size:
            least = place
    return least


def _room(draft: Draft, loads: _Loads) -> Limits:
    """The room of a region's kernel beside the planes that its products' own ops read."""
    own = {anchor.addend.view.node for anchor in draft.anchors if anchor.addend is not None}
    taken = [bits for view, bits in zip(loads.views, loads.bits, strict=True) if view.node in own]
    read, results, held = config.max_exact_loads, config.max_stores, 0
    if read is None:
        # Blocks of B are left out, since there are sizes of them for which no tile is found.
        accumulators = tuple(replace(acc, b_block=0) for acc in draft.chain.accumulators)
        held = max(plane_bits_held(arch, accumulators) for arch in draft.chain.archs) - sum(taken)
    few = (PLANES if read is None else read) - len(taken)
    written = planes_written(draft.chain.visit_columns, *draft.chain.planes_read)
    if results is None:
        return Limits(few, written + REDUCTIONS, REDUCTIONS, held)
    return Limits(few, min(results, written) if written < PLANES else results, bits=held)


def _groups(draft: Draft) -> list[list[fx.Node]]:
    """The members that each value stands for, in order."""
    groups: list[list[fx.Node]] = []
    places: dict[fx.Node, int] = {}
    same: dict[Hashable, int] = {}
    for node, value in draft.values.items():
        place = len(groups)
        if value.parts:
            memory = None if is_only_read(root(node)) else root(node)
            equal = same.setdefault((repr(value), draft.block(node), fake(node).dtype, memory), place)
            others = {places[source] for source in node.all_input_nodes if source in places} - {equal}
            if not others or (max(others) < equal and draft.form(node) is not None):
                place = equal
        if place == len(groups):
            groups.append([])
        groups[place].append(node)
        places[node] = place
    return groups


def _reducing(draft: Draft, member: fx.Node) -> fx.Node:
    """The node that reduces, if a member is the result of a reduction after a cast, a getitem, a step of the
    reduction itself or work on its result."""
    while draft.values[member].reduction is not None and not is_reduction(member):
        member = next(source for source in member.all_input_nodes if source in draft.values)
    return member


_ANY_M = 4096
"""The M that is assumed if the decision must not depend on it."""


class _Sizes:
    """The bytes of members: of an (M, N) plane, or of the result of a reduction."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.m = _ANY_M if config.batch_invariant else usual(draft.first.m)
        self.n = usual(draft.first.n)

    def of(self, member: fx.Node) -> int:
        value = self.draft.values[member]
        if not value.parts:
            return 0
        elements = value.elements(self.m, self.n, self.draft.block(member))
        return elements * fake(member).element_size()

    def bits(self, member: fx.Node) -> int:
        """The bits of one element of all planes of a member."""
        return self.of(member) * 8 // max(self.m * self.n, 1)


_NEAR = 32
"""The number of nodes after a load that are searched for work of one kernel."""


class _Loads:
    """The planes that the members of a draft read, by the places of their views."""

    def __init__(self, draft: Draft, outside: Outside) -> None:
        self.draft = draft
        self.outside = outside
        self.beside = outside.beside(draft)
        self.views = [view for view in draft.chain.views if view.kind.is_plane]
        self.found: dict[fx.Node, int] = {}
        for place, view in enumerate(self.views):
            self.found[view.node] = self.found.get(view.node, 0) | 1 << place
        self.bits = tuple(fake(view.node).element_size() * 8 for view in self.views)

    def sizes(self, sizes: _Sizes) -> tuple[int, ...]:
        return tuple(sizes.m * sizes.n * fake(view.node).element_size() for view in self.views)

    def of_members(self, members: list[fx.Node]) -> int:
        """The mask of the loads that members read."""
        mask = 0
        for member in members:
            for source in member.all_input_nodes:
                if source not in self.draft.values:
                    mask |= self._behind(source)
        return mask

    def _behind(self, operand: fx.Node) -> int:
        """The load that an operand is, or the loads that the kernel computes it from."""
        stack = [operand]
        while stack:
            node = stack[-1]
            sources = node.all_input_nodes if node not in self.found and is_pointwise(node) else []
            if missing := [source for source in sources if source not in self.found]:
                stack += missing
                continue
            mask = self.found.get(node, 0)
            for source in sources:
                mask |= self.found[source]
            self.found[node] = mask
            stack.pop()
        return self.found[operand]

    def of_kernel(self, kernel: InductorKernel) -> int:
        """The mask of the loads that a kernel reads for nearby work outside."""
        mask = 0
        for place, view in enumerate(self.views):
            stack, seen = [view.node], {view.node}
            while stack and len(seen) < _NEAR:
                for user in stack.pop().users:
                    if user in seen or user in self.draft.values or self.outside.has(user):
                        continue
                    if (is_pointwise(user) or is_reduction(user)) and user not in self.beside:
                        mask |= (self.outside.rounds.kernel_of(user) == kernel) << place
                    if is_pointwise(user) or is_reshape(user):
                        stack.append(user)
                    seen.add(user)
        return mask
