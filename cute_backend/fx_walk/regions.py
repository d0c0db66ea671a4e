"""Regions: an anchor and the pointwise work after it that one kernel can do.

A region grows from its anchor, node by node in graph order, while every step is legal. A step may be a
pointwise op on the (M, N) plane, or a view that splits the plane's rows or columns or moves their axes; the
epilogue must be able to load the step's other operands, and none of them may depend on the region itself. A
step may also be a reduction of the plane, and then the region ends there. Anchors are visited from the last
to the first, and the larger of two that meet before the smaller (`visits.py`). So a node that two anchors
feed belongs to the one that is visited first, and the other one's result is an exact load there. If both
multiply one A, or two slices of one product meet, the region grows from a pair instead. A value that is
needed outside becomes a further store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from cute_backend import config
from cute_backend.fx_walk.activation import activated
from cute_backend.fx_walk.anchors import Anchor, is_anchor, read_anchor
from cute_backend.fx_walk.block_reductions import check_blocks, frame_of_blocks, lower_blocks
from cute_backend.fx_walk.chain import Chain
from cute_backend.fx_walk.classify import ColumnSlice, classify, supported_dtype
from cute_backend.fx_walk.consumers import Waves
from cute_backend.fx_walk.crossings import Outside
from cute_backend.fx_walk.device import Capability, check_operands, target_of
from cute_backend.fx_walk.draft import Draft
from cute_backend.fx_walk.equal import first_equals
from cute_backend.fx_walk.frame import Frame
from cute_backend.fx_walk.group_rows import group_vectors
from cute_backend.fx_walk.lower import (
    constant,
    is_pointwise,
    is_reshape,
    lower,
    lower_cast,
    number,
)
from cute_backend.fx_walk.mutation import Mutations, is_view
from cute_backend.fx_walk.pairs import (
    Slices,
    column_slice,
    meet,
    named,
    reach,
    same_slice,
    slices_of,
    split,
    unlike,
)
from cute_backend.fx_walk.questions import (
    after_products,
    is_epilogue_work,
    is_free_cast,
    is_reduction,
    is_stored,
    may_join,
)
from cute_backend.fx_walk.reasons import Reason, Refused, Rejection, program_name, user_label
from cute_backend.fx_walk.redo import cheaper_to_redo
from cute_backend.fx_walk.reductions import (
    Found,
    Reduced,
    find_reductions,
    keeps_reduced,
    reduced,
    refuse_rounds,
    refuse_unknown,
)
from cute_backend.fx_walk.region import Region, stores_of
from cute_backend.fx_walk.rotations import (
    check_rotations,
    find_rotations,
    inner_of,
    lower_rotation,
    refuse_rotated,
)
from cute_backend.fx_walk.settle import Settled, settle
from cute_backend.fx_walk.static import (
    DTYPES,
    Size,
    describe,
    fake,
    first_argument,
    known,
    target_name,
    tensor_of,
)
from cute_backend.fx_walk.views import not_pointwise, rearranged
from cute_backend.fx_walk.visits import visits
from cute_backend.planning import Target
from cute_backend.spec import LoadKind, Operand, Precision


def find_regions(
    graph: fx.Graph, precision: Precision, capability: Capability
) -> tuple[list[Region], list[Rejection]]:
    """Every region of a post-grad graph, in the order of their anchors, and why the rest was not fused.

    Every node needs a fake tensor in `meta["val"]`. The graph is read, not changed, and no guard is added.
    """
    return _Search(graph, precision, capability).run()


_MAX_OPERAND_WORK = 16
"""Ops in a row on operands alone that a region takes in. The value before them is a load."""


class _Search:
    def __init__(self, graph: fx.Graph, precision: Precision, capability: Capability) -> None:
        self.precision = precision
        self.capability = capability
        self.target: Target | None = None
        self.order = {node: position for position, node in enumerate(graph.nodes)}
        self.reductions = find_reductions(self.order)
        self.heads: dict[fx.Node, list[fx.Node]] = {}
        """The reductions or rotations that a node is an inner part of."""
        for found in self.reductions.values():
            for inner in found.inner:
                self.heads.setdefault(inner, []).append(found.head)
        self.rotations = find_rotations(self.order)
        for inner, head in inner_of(self.rotations):
            self.heads.setdefault(inner, []).append(head)
        self.mutations = Mutations(self.order)
        firsts = first_equals(self.order, self.mutations)
        self.anchors = {node: _read(node, firsts) for node in self.order if is_anchor(node)}
        self.of_one_a: dict[fx.Node, list[Anchor]] = {}
        for anchor in self.anchors.values():
            if isinstance(anchor, Anchor):
                self.of_one_a.setdefault(anchor.a, []).append(anchor)
        self.after_products = after_products(self.order)
        self.owner: dict[fx.Node, Draft] = {}
        self.reads: set[fx.Node] = set()
        self.redone: set[fx.Node] = set()
        """Work on operands that regions do again, some of it after other products."""
        self.outside = Outside(self.owner, self.reads, self.redone, Waves(self.order))
        self.rejections: dict[fx.Node, Rejection] = {}
        self.earliest = len(self.order)
        """The position of the first anchor of any region so far."""

    def run(self) -> tuple[list[Region], list[Rejection]]:
        regions = []
        for node in visits(self.anchors):
            if node in self.owner:
                continue
            try:
                regions.append(self._region(node))
            except Refused as refused:
                self.rejections[node] = refused.rejection(node)
        rejections = [
            self.rejections[node] for node in self.order if node in self.rejections and node not in self.owner
        ]
        return sorted(regions, key=lambda region: self.order[region.products[-1]]), rejections

    def _region(self, node: fx.Node) -> Region:
        self.target = target_of(fake(node).device, self.capability)
        anchor = self.anchors[node]
        if isinstance(anchor, Refused):
            raise anchor
        check_operands(anchor, self.target)
        for anchors in self._pairs(anchor):
            region = self._of_pair(anchors)
            if region is not None:
                return region
        draft = self._grown((anchor,))
        settled = settle(draft, self.outside, self.rejections)
        fuses = anchor.stands_alone or any(
            is_pointwise(member) or isinstance(draft.values[member], Reduced) for member in settled.members
        )
        if not fuses or not settled.stored:
            raise self._left_out(anchor)
        return self._settled((anchor,), settled)

    def _pairs(self, anchor: Anchor) -> Iterator[tuple[Anchor, ...]]:
        """The pairs that a region could have in place of one anchor, the likeliest first."""
        slices = slices_of(anchor, self.owner)
        if slices is not None:
            yield split(anchor, slices)
        for other in reversed(self.of_one_a[anchor.a]):
            if (
                self.order[other.node] < self.order[anchor.node]
                and other.node not in self.owner
                and unlike(other, anchor) is None
                and meet(other.node, anchor.node, self.owner)
            ):
                yield other, anchor

    def _left_out(self, anchor: Anchor) -> Refused:
        """Why a product has no region: nothing follows it, or a later one or a refusal has all that does."""
        for user in anchor.node.users:
            region = self.owner.get(user)
            why = None if region is None else unlike(anchor, region.anchors[-1])
            if region is not None and why is not None:
                return Refused(Reason.APART, other=region.anchors[-1].node.name, why=why)
        near = [anchor.node, *reach(anchor.node, self.owner)]
        refused = {user for node in near for user in node.users if user in self.rejections}
        names = ", ".join(node.name for node in sorted(refused, key=self.order.__getitem__))
        return Refused(Reason.NOTHING_TO_FUSE, refused=f"; refused: {names}" if names else "")

    def _of_pair(self, anchors: tuple[Anchor, ...]) -> Region | None:
        """The region of two accumulators that meet in an op of the region; None where they form none."""
        rejections = dict(self.rejections)
        try:
            draft = self._grown(anchors)
            settled = settle(draft, self.outside, self.rejections)
            if not any(map(draft.reads_both, settled.members)):
                raise Refused(Reason.NOTHING_TO_FUSE, refused="")
            return self._settled(anchors, settled)
        except Refused:
            self.rejections = rejections
            return None

    # Growth

    def _seed(self, anchors: tuple[Anchor, ...]) -> Draft:
        """A draft that holds the anchors alone: what the ops themselves do to the accumulators."""
        draft = Draft(anchors, Chain(named(anchors), self.precision, self.target))
        draft.values = dict.fromkeys(anchor.node for anchor in anchors)
        draft.expected = {node for anchor in anchors for node in reach(anchor.node, self.owner)}
        for anchor in anchors:
            frame = Frame.of(fake(anchor.node).shape, anchor.m, fake(anchor.b).shape[-1])
            assert frame is not None
            draft.frames[anchor.node] = frame
        for node in (node for anchor in anchors for node in anchor.inputs):
            if self._depends(draft, node):
                raise self._cycle(draft, node)
        results = [self._product(draft, index) for index in range(len(anchors))]
        if len(draft.values) < len(anchors):
            draft.values[anchors[0].node] = Slices(tuple(results), whole=True)
        else:
            draft.values = {anchor.node: value for anchor, value in zip(anchors, results, strict=True)}
        return draft

    def _product(self, draft: Draft, index: int) -> Operand:
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
        return chain.cast(value, out) if out.is_fp8 else lower_cast(chain, value, out)

    def _grown(self, anchors: tuple[Anchor, ...]) -> Draft:
        """The draft of a region with all that can join it, some work on operands done again. The inputs of
        that work may take fewer loads, and so leave room for members that read more of them."""
        draft = self._grow(self._seed(anchors))
        while redone := cheaper_to_redo(draft, self.owner, self.after_products) - self.redone:
            self.redone |= redone
            draft = self._grow(self._seed(anchors))
        return draft

    def _grow(self, draft: Draft) -> Draft:
        queue: list[tuple[int, fx.Node]] = []
        seen: set[fx.Node] = set()

        def push_users(node: fx.Node) -> None:
            reduces = isinstance(draft.values[node], Reduced)
            for reader in node.users:
                if reduces and not keeps_reduced(reader):
                    continue
                for user in self._heads(draft, reader):
                    if user not in seen and user not in self.owner and may_join(user):
                        seen.add(user)
                        heappush(queue, (self.order[user], user))

        for anchor in draft.anchors:
            push_users(anchor.node)
        while queue:
            _, node = heappop(queue)
            mark = draft.chain.mark()
            try:
                value = self._join(draft, node)
            except Refused as refused:
                draft.rollback(mark)
                self.rejections.setdefault(node, refused.rejection(node))
                continue
            draft.values |= dict.fromkeys(self._inner(draft, node))
            draft.values[node] = value
            push_users(node)
        return draft

    def _inner(self, draft: Draft, node: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes on the way to a reduction or a rotation of a member; none to another node."""
        found = self.reductions.get(node) or self.rotations.get(node)
        return found.inner if found is not None and found.source in draft.values else ()

    def _heads(self, draft: Draft, reader: fx.Node) -> list[fx.Node]:
        """The nodes that may join for a reader of a member: itself, or what it is a part of."""
        heads = self.heads.get(reader, [reader])
        found = self.reductions.get(heads[0])
        if found is None or not found.is_of_blocks_alone:
            return heads
        frame = draft.frames.get(found.source)
        of_blocks = frame is not None and frame_of_blocks(found, frame, draft.chain) is not None
        return heads if of_blocks else [reader]

    def _join(self, draft: Draft, node: fx.Node) -> Operand | Slices | Reduced:
        """The value of `node` as a member of the region. Raises Refused where it can't be one."""
        anchor = draft.first
        if draft.split(node):
            value = self._join_split(draft, node)
            self._frame_slice(draft, node, whole=isinstance(value, Slices))
            return value
        if node in self.reductions and self.reductions[node].source in draft.values:
            return self._join_reduction(draft, self.reductions[node])
        if node in self.rotations and self.rotations[node].source in draft.values:
            rotated = lower_rotation(
                self.rotations[node], draft, self._resolve(draft, self.rotations[node].source, node)
            )
            self._check_mutations(draft, node)
            return rotated
        reduced_before = draft.values.get(first_argument(node))
        if isinstance(reduced_before, Reduced) and keeps_reduced(node):
            return reduced_before
        if is_reshape(node):
            source = draft.frames.get(first_argument(node))
            frame = None if source is None else source.reshaped(node, anchor.m, anchor.n)
            if frame is None:
                raise rearranged(node, source)
            draft.frames[node] = frame
            return self._resolve(draft, first_argument(node), node)
        if is_reduction(node):
            refuse_unknown(node, anchor.m, anchor.n)
        if not is_pointwise(node):
            result = tensor_of(node)
            if result is not None and result.is_complex():
                raise Refused(Reason.UNSUPPORTED_DTYPE, operand=node.name, dtype=result.dtype)
            raise not_pointwise(node)
        return self._join_pointwise(draft, node, anchor.n, (None,))[0]

    def _join_pointwise(
        self, draft: Draft, node: fx.Node, n: Size, sides: Sequence[int | None]
    ) -> list[Operand]:
        """The value of pointwise work on a plane of `n` columns: for the slice of each anchor, or all."""
        anchor, target, result = draft.first, target_name(node), tensor_of(node)
        if result is None:
            raise Refused(Reason.UNSUPPORTED_OP, target=target, why="gives more than one tensor")
        if result.device != anchor.device:
            raise Refused(Reason.LOAD_DEVICE, operand=node.name, device=result.device, anchor=anchor.device)
        frame = self._frame(draft, node, n)
        if not (frame.is_plain or None in sides):
            raise Refused(Reason.UNPAIRED, target=target)
        draft.frames[node] = frame
        values = []
        for side in sides:
            resolve = partial(self._resolve, draft, reader=node, side=side)
            values.append(lower(node, draft.chain, resolve))
        self._check_mutations(draft, node)
        _check_loads(draft.chain)
        return values

    def _frame_slice(self, draft: Draft, node: fx.Node, whole: bool) -> None:
        """How a view of a product in two slices lies on the plane of all columns, or of one slice's."""
        tensor, anchor = tensor_of(node), draft.first
        if tensor is not None and node not in draft.frames:
            frame = Frame.of(tensor.shape, anchor.m, fake(anchor.b).shape[-1] if whole else anchor.n)
            if frame is not None:
                draft.frames[node] = frame

    def _frame(self, draft: Draft, node: fx.Node, n: Size) -> Frame:
        """How the result of pointwise work lies on a plane of `n` columns: as what it reads of the region."""
        anchor, shape = draft.first, fake(node).shape
        sources = [source for source in node.all_input_nodes if source in draft.frames]
        frames = [draft.frames[source].behind(len(shape) - fake(source).dim()) for source in sources]
        frame = Frame.meeting(frames, shape) if frames else Frame.of(shape, anchor.m, n)
        if frame is None and frames:
            how = "meets it with its axes in another order"
            raise Refused(Reason.REARRANGED, target=target_name(node), shape=describe(shape), how=how)
        if frame is None or not frame.covers(shape, anchor.m, n):
            raise Refused(Reason.PLANE, shape=describe(shape), m=anchor.m, n=n)
        return frame

    def _join_split(self, draft: Draft, node: fx.Node) -> Operand | Slices:
        """A member that reads the whole plane of a product of which the region has two slices."""
        slices = [anchor.columns for anchor in draft.anchors]
        n = fake(draft.first.b).shape[-1]
        if is_view(node):
            source = draft.values.get(first_argument(node))
            if not isinstance(source, Slices):
                raise Refused(Reason.UNPAIRED, target=target_name(node))
            taken = column_slice(node, draft.first.m)
            if taken is None:
                return Slices(source.values, whole=False)
            for value, columns in zip(source.values, slices, strict=True):
                if columns is not None and same_slice(taken, columns):
                    return value
            return Slices(source.values, whole=same_slice(taken, ColumnSlice(0, 1, n)))
        if not is_pointwise(node):
            raise Refused(Reason.NOT_POINTWISE, target=target_name(node))
        return Slices(tuple(self._join_pointwise(draft, node, n, range(len(slices)))), whole=True)

    def _join_reduction(self, draft: Draft, found: Found) -> Operand | Reduced:
        anchor, source = draft.first, draft.frames[found.source]
        frame = frame_of_blocks(found, source, draft.chain)
        if frame is None:
            if found.is_of_blocks_alone:
                refuse_unknown(found.head, anchor.m, anchor.n)
            refuse_rounds(found, anchor.m, anchor.n)
        value = self._resolve(draft, found.source, found.head)
        result: Operand | Reduced
        if frame is None:
            refuse_rotated(draft.chain)
            result = reduced(found, draft.chain, value, source)
        else:
            result = lower_blocks(found, draft.chain, value, frame.block)
            draft.frames[found.head] = frame
        self._check_mutations(draft, found.head)
        return result

    def _resolve(
        self,
        draft: Draft,
        argument: Any,
        reader: fx.Node,
        side: int | None = None,
        depth: int = 0,
        member: fx.Node | None = None,
    ) -> Operand:
        """An argument of `reader` as a value of the chain: a number, a member's value, or a load.

        With a `side` the reader has the whole plane of a product, and the result is its value on the slice of
        that anchor of the pair. The kernel does work on operands alone where that costs no memory traffic: a
        cast to a wider dtype, and ops of the plane's own shape that nobody else reads, `depth` of them in a
        row so far. If the reader is such work itself, it works for `member`, and its operands are broadcast
        to that member's plane.
        """
        member = member or reader
        frame = draft.frames.get(member)
        if not isinstance(argument, fx.Node):
            return number(argument)
        if argument in draft.values:
            value = draft.values[argument]
            if value is None or isinstance(value, Reduced):
                raise Refused(Reason.FEEDBACK, reduction=argument.name, into=reader.name)
            if isinstance(value, Slices) is (side is None) or (isinstance(value, Slices) and not value.whole):
                raise Refused(Reason.UNPAIRED, target=target_name(reader))
            if isinstance(value, Slices):
                return value.values[side]  # type: ignore[index]
            return value
        if (argument, side, frame) in draft.work:
            return draft.work[argument, side, frame]
        if tensor_of(argument) is None:
            raise Refused(Reason.SYMBOLIC_SCALAR, value=argument.name)
        filled = constant(argument)
        if filled is not None:
            return filled
        if depth < _MAX_OPERAND_WORK and is_free_cast(argument):
            source = self._resolve(draft, first_argument(argument), reader, side, depth + 1, member)
            return lower_cast(
                draft.chain, source, supported_dtype(user_label(argument), fake(argument).dtype)
            )
        if self._depends(draft, argument):
            reduction = self._reduction_before(draft, argument)
            if reduction is not None:
                raise Refused(Reason.FEEDBACK, reduction=reduction.name, into=reader.name)
            raise self._cycle(draft, argument)
        shape, device = fake(member).shape, draft.first.device
        view = group_vectors(argument, shape, frame, draft.first)
        view = view or classify(argument, shape, device, frame)
        columns = None if side is None else draft.anchors[side].columns
        view = view if columns is None else view.of_slice(columns)
        is_work = depth < _MAX_OPERAND_WORK and view not in draft.chain.views
        if is_work and (argument in self.redone or self._is_for_the_region_alone(draft, argument, reader)):
            mark = draft.chain.mark()
            try:
                draft.work[argument, side, frame] = lower(
                    argument,
                    draft.chain,
                    lambda inner: self._resolve(draft, inner, argument, side, depth + 1, member),
                )
                return draft.work[argument, side, frame]
            except Refused:
                draft.rollback(mark)
        return draft.chain.load(view)

    def _is_for_the_region_alone(self, draft: Draft, node: fx.Node, reader: fx.Node) -> bool:
        """Whether an operand is work of the reader's own shape, of which nothing outside needs the result.

        Its other readers are members, or are likely to become some, or are such work themselves: what a
        derivative reads several times is computed here, not written once for each way of reading it.
        """
        plane = fake(reader).shape
        if not self._is_operand_work(node, plane):
            return False
        stack, seen = [node], {node, reader}
        while stack:
            for user in stack.pop().users:
                if user in seen or user in draft.values:
                    continue
                if user in draft.expected and user not in self.owner:
                    continue
                if not self._is_operand_work(user, plane):
                    return False
                seen.add(user)
                stack.append(user)
        return True

    def _is_operand_work(self, node: fx.Node, plane: torch.Size) -> bool:
        """Whether a node is pointwise work of this shape on values in memory, or on such work.

        Work that follows from another product is left to that product's region, and work on values that
        Inductor computes where they are read, such as random numbers, to Inductor.
        """
        if node.op != "call_function" or not is_pointwise(node) or node in self.owner:
            return False
        result = tensor_of(node)
        if result is None or node in self.after_products or len(result.shape) != len(plane):
            return False
        if not all(is_pointwise(source) or is_stored(source) for source in node.all_input_nodes):
            return False
        return all(known(a == b) for a, b in zip(result.shape, plane, strict=True))

    def _depends(self, draft: Draft, node: fx.Node) -> bool:
        """Whether a node outside needs a value of the region, every region found so far counting as one node.

        No node before the anchor can, nor one before the anchors of the regions found so far.
        """
        start = min(self.order[draft.first.node], self.earliest)
        stack, visited = [node], set()
        while stack:
            current = stack.pop()
            if current in draft.values:
                return True
            if current in visited or current in draft.independent or self.order[current] < start:
                continue
            visited.add(current)
            owner = self.owner.get(current)
            stack.extend(current.all_input_nodes if owner is None else owner.inputs)
        draft.independent |= visited
        return False

    def _cycle(self, draft: Draft, node: fx.Node) -> Refused:
        """Why a node that depends on the region can't be an operand: the nearest node between them, or the
        nearest product if there is one."""
        current = between = node
        while current not in draft.values:
            owner = self.owner.get(current)
            if owner is not None:
                between = owner.first.node
            elif current in self.anchors or not (is_epilogue_work(current) or between in self.anchors):
                between = current
            sources = current.all_input_nodes if owner is None else owner.inputs
            current = next(source for source in sources if self._depends(draft, source))
        return Refused(Reason.CYCLE, operand=program_name(node), between=between.name)

    def _reduction_before(self, draft: Draft, node: fx.Node) -> fx.Node | None:
        """A reduction of the region's own values from which a node outside follows, as a norm does."""
        return next(
            (
                current
                for current in self._before(draft, node)
                if is_reduction(current) and not draft.values.keys().isdisjoint(self._before(draft, current))
            ),
            None,
        )

    def _before(self, draft: Draft, node: fx.Node) -> Iterator[fx.Node]:
        """The node and the nodes that it needs, back to the next kernel or to the first anchor."""
        stack, visited = [node], set()
        while stack:
            current = stack.pop()
            if current not in visited and self.order[current] >= self.order[draft.first.node]:
                visited.add(current)
                if is_epilogue_work(current) and current not in self.owner:
                    stack.extend(current.all_input_nodes)
                yield current

    def _check_mutations(self, draft: Draft, node: fx.Node) -> None:
        """Refuses if a write in place lies between an operand and the kernel, or between the kernel and a
        node that has to move behind it.

        The kernel takes the place of the last member, so nodes that used a value of the region before it have
        to move behind it. A node moves only if no write lies on its way.
        """
        here = self.order[node]
        for operand in draft.inputs:
            mutation = self.mutations.first_of(operand, self.order[operand], here)
            if mutation is not None:
                raise Refused(Reason.MUTATED_LOAD, operand=user_label(operand), mutation=mutation.node.name)
        between = self.mutations.first(self.order[draft.first.node], here)
        if between is not None and any(self.order[user] < here for user in self._outside_users(draft, node)):
            raise Refused(Reason.MUTATION, mutation=between.node.name)

    def _outside_users(self, draft: Draft, joining: fx.Node) -> Iterator[fx.Node]:
        for member in draft.values:
            yield from (user for user in member.users if user not in draft.values and user is not joining)

    # The settled region

    def _settled(self, anchors: tuple[Anchor, ...], settled: Settled) -> Region:
        """The region of the members that stay, lowered afresh so that its names have no gaps."""
        draft, members = self._seed(anchors), settled.members
        found = (each[node] for each in (self.reductions, self.rotations) for node in members if node in each)
        inner = {inner for each in found for inner in each.inner}
        for node in members[len(draft.values) :]:
            draft.values[node] = None if node in inner else self._join(draft, node)
        self.owner.update(dict.fromkeys(settled.kept, draft))
        self.earliest = min(self.earliest, self.order[draft.first.node])
        self.reads.update(draft.inputs)
        stores, outputs = stores_of(draft.first, settled.stored, draft.values, draft.frames)
        frames = {node: draft.frames[node] for node in outputs if node in draft.frames}
        spec, views = draft.chain.build(stores), tuple(draft.chain.views)
        return Region(anchors, tuple(settled.kept), spec, views, outputs, frames)


def _read(node: fx.Node, firsts: dict[fx.Node, fx.Node]) -> Anchor | Refused:
    """The anchor behind a node, its A the first with that value, so that products share it; or why there is
    none."""
    try:
        return read_anchor(node).with_a(firsts)
    except Refused as refused:
        return refused


def _check_loads(chain: Chain) -> None:
    check_blocks(chain)
    check_rotations(chain)
    exact = chain.count(LoadKind.EXACT)
    if exact > config.max_exact_loads:
        raise Refused(Reason.TOO_MANY_LOADS, count=exact, kind="(M, N)", limit=config.max_exact_loads)
    if len(chain.views) > config.max_loads:
        raise Refused(Reason.TOO_MANY_LOADS, count=len(chain.views), kind="epilogue", limit=config.max_loads)
