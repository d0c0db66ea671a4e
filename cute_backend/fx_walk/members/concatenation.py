"""Planes of a region that a program concatenates, like the gradients of gate and up for one weight.

`torch.cat((dgate, dup), -1)` is (M, 2 N), and so is a `stack` of them before the columns, which arrives as a
`cat` of (M, 1, N). A kernel writes each plane into its part of the joined one.

Columns may also alternate. A `stack` after the columns arrives as a `cat` of (M, N, 1). A program may assign
planes to `[..., ::2]` and `[..., 1::2]`. The derivative of these two slices is a sum of two planes of zeros,
to each of which a gradient is assigned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import fx

from cute_backend.fx_walk.graph.axes import is_concatenation
from cute_backend.fx_walk.graph.static import (
    arguments,
    collapsed_stride,
    describe,
    fake,
    first_argument,
    known,
    target_name,
)
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.region.member import Member, Search
from cute_backend.fx_walk.region.value import Reading, Value
from cute_backend.fx_walk.values.classify import supported_dtype
from cute_backend.fx_walk.values.lower import CASTS, filling, is_reshape, lower_cast
from cute_backend.spec import Const, Operand


@dataclass(frozen=True)
class Concatenated(Value):
    """The values of a member that concatenates planes of the region, like the gradients of gate and up for
    one weight. The columns of two values may `alternate`: the first has the even ones."""

    values: tuple[str, ...]
    alternate: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        return self.values

    def renamed(self, names: Mapping[Operand, Operand]) -> Concatenated:
        return replace(self, values=tuple(str(names.get(value, value)) for value in self.values))

    def read(self, draft: Draft, reading: Reading) -> Operand:
        shape = describe(fake(reading.member).shape)
        raise Refused(Reason.PLANE, shape=shape, m=draft.first.m, n=draft.first.n)

    def admits(self, reader: fx.Node, is_inner: bool) -> bool:
        return _keeps(reader)  # an op on several planes together is not on the plane

    def is_followed(self, draft: Draft, node: fx.Node) -> bool:
        return _keeps(node)

    def follow(self, draft: Draft, node: fx.Node) -> Concatenated:
        if is_reshape(node):
            return self
        dtype = supported_dtype(node.name, fake(node).dtype)
        values = (str(lower_cast(draft.chain, value, dtype)) for value in self.values)
        return replace(self, values=tuple(values))


@dataclass(frozen=True)
class Concatenation(Member):
    """A `cat` of planes of the region."""

    def joins(self, draft: Draft) -> bool:
        return True

    def join(self, search: Search, draft: Draft) -> Concatenated:
        return _concatenated(draft, self.head)


def find(nodes: Iterable[fx.Node]) -> Iterator[Member]:
    """The concatenations of a graph, and its alternating columns."""
    for node in nodes:
        if node.op == "call_function" and (scattered := _read(node)) is not None:
            yield scattered
        elif is_concatenation(node):
            yield Concatenation(node, ())


def _concatenated(draft: Draft, node: fx.Node) -> Concatenated:
    """The value of a `cat` as a member. Raises Refused unless it joins only planes of the region, along an
    axis that comes after those of M and before those of N, or two planes along an axis after all of these."""
    args, tensor = arguments(node), fake(node)
    axis = args["dim"] % tensor.dim()
    planes = [_plane(draft, each, node) for each in args["tensors"]]
    frames = [draft.frames[each] for each in args["tensors"]]
    if all(row < axis for frame in frames for row in frame.m_axes):
        if all(column >= axis for frame in frames for column in frame.n_axes):
            return Concatenated(tuple(planes))
        apart = axis == tensor.dim() - 1 and all(column < axis for frame in frames for column in frame.n_axes)
        if apart and len(planes) == 2 and known(tensor.shape[axis] == 2):
            return Concatenated(tuple(planes), alternate=True)
    raise Refused(Reason.NOT_POINTWISE, target=target_name(node))


def _keeps(node: fx.Node) -> bool:
    """Whether a call gives concatenated planes another shape, in the same memory, or another dtype."""
    if is_reshape(node):
        source = first_argument(node)
        return known(fake(source).numel() == fake(node).numel()) and all(map(_is_dense, (source, node)))
    return node.op == "call_function" and target_name(node) in CASTS


def _is_dense(node: fx.Node) -> bool:
    tensor = fake(node)
    return known(collapsed_stride(tensor.shape, tensor.stride()) == 1)


def _plane(draft: Draft, member: fx.Node, node: fx.Node) -> str:
    """The value of a member that `node` joins to others of its dtype. Raises Refused if it is no plane."""
    value, frame = draft.values.get(member), draft.frames.get(member)
    in_order = frame is not None and frame.block == 1 and frame.is_in_order
    parts = value.parts if value is not None and value.is_plane else ()
    if not parts or not in_order or fake(member).dtype is not fake(node).dtype:
        raise Refused(Reason.NOT_POINTWISE, target=target_name(node))
    return parts[0]


@dataclass(frozen=True)
class Scattered(Member):
    """A node `head` along whose last axis elements of `even` and `odd` alternate. `inner` are the nodes
    between them and the head, in order, which nothing else reads. They are `added` if each is assigned to
    zeros and the head is the sum, in which no zero is negative."""

    even: fx.Node
    odd: fx.Node
    added: bool

    def joins(self, draft: Draft) -> bool:
        return True

    def join(self, search: Search, draft: Draft) -> Concatenated:
        return _alternating(draft, self)


def _read(head: fx.Node) -> Scattered | None:
    name, inner = target_name(head), tuple[fx.Node, ...]()
    if name == "aten.add.Tensor":
        args = arguments(head)
        inner = tuple(each for each in (args["self"], args["other"]) if isinstance(each, fx.Node))
        if args["alpha"] != 1 or not all(map(_is_assigned_to_zeros, inner)):
            return None
        parts = [_assigned(each) for each in inner]
    elif name == _SCATTER:
        before = arguments(head)["self"]
        inner = (before,)
        parts = [_assigned(before), _assigned(head)]
    else:
        return None
    places = {start: node for part in parts if part is not None for start, node in [part]}
    if len(parts) != 2 or places.keys() != {0, 1} or any(set(each.users) != {head} for each in inner):
        return None
    return Scattered(head, tuple(sorted(inner)), places[0], places[1], name != _SCATTER)


_SCATTER = "aten.slice_scatter.default"


def _assigned(node: fx.Node) -> tuple[int, fx.Node] | None:
    """The tensor that a node assigns to every second element of a last axis of even size, and the first of
    these elements. None for any other node."""
    if node.op != "call_function" or target_name(node) != _SCATTER:
        return None
    args, shape = arguments(node), fake(node).shape
    start = args["start"] or 0
    whole = known(2 * fake(args["src"]).shape[-1] == shape[-1])
    if args["dim"] % len(shape) != len(shape) - 1 or args["step"] != 2 or start not in (0, 1) or not whole:
        return None
    return start, args["src"]


def _is_assigned_to_zeros(node: fx.Node) -> bool:
    return _assigned(node) is not None and filling(arguments(node)["self"]) == 0


def _alternating(draft: Draft, found: Scattered) -> Concatenated:
    """The value of alternating columns as a member. Raises Refused unless both are planes of the region."""
    planes = [_plane(draft, each, found.inner[0]) for each in (found.even, found.odd)]
    for each in (found.even, found.odd):
        columns, last = draft.frames[each].n_axes, fake(each).dim() - 1
        if columns and columns[-1] != last:
            raise Refused(Reason.NOT_POINTWISE, target=target_name(found.inner[0]))
    if found.added:
        planes = [str(draft.chain.emit("add", plane, Const(0.0))) for plane in planes]
    return Concatenated(tuple(planes), alternate=True)
