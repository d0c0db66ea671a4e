"""Work on a part of each block of columns: slices of heads that a `cat` puts together again.

GPT-NeoX, Phi and GLM rotate the first columns of each head: a program takes `x[..., :r]` and `x[..., r:]`,
works on the first, and concatenates both. A kernel computes the work for all columns, and selects its result
where it belongs. So only slices whose parts come together in a `cat` are members of a region.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd

from torch import fx

from cute_backend.fx_walk.graph.axes import is_concatenation
from cute_backend.fx_walk.graph.frame import BlockPart, Frame
from cute_backend.fx_walk.graph.pieces import taken_piece
from cute_backend.fx_walk.graph.static import arguments, fake, same_sizes, target_name, tensor_of
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.region.member import Member, Search
from cute_backend.fx_walk.region.value import Plane
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.fx_walk.values.classify import supported_dtype
from cute_backend.fx_walk.values.held import check_blocks
from cute_backend.fx_walk.values.lower import lower_cast
from cute_backend.kinds.blocks import PART
from cute_backend.spec import Const, Operand

_MAX_WORK = 64
"""The most nodes that are searched for the slices that a tensor of a `cat` is computed from."""


@dataclass(frozen=True)
class Taken(Member):
    """A node `head` that takes a part of the last axis of `source`. `inner` is the `split` that it is a
    result of, if any."""

    source: fx.Node
    part: BlockPart

    def joins(self, draft: Draft) -> bool:
        return self.source in draft.values and self._frame(draft) is not None

    def join(self, search: Search, draft: Draft) -> Plane:
        frame = self._frame(draft)
        assert frame is not None
        value = draft.read(self.source, self.head)
        draft.frames[self.head] = frame
        return Plane(value)

    def _frame(self, draft: Draft) -> Frame | None:
        """The frame of the part. None if the last axis of the source is not a block of columns, or the source
        is a part already."""
        last, frame = fake(self.source).dim() - 1, draft.frames.get(self.source)
        if frame is None or frame.block > 1 or frame.joins or frame.part is not None:
            return None
        return frame.taken(self.part) if frame.n_axes and frame.n_axes[-1] == last else None


@dataclass(frozen=True)
class Joined(Member):
    """A `cat` that joins parts again, each of which has an end in `ends`."""

    ends: tuple[int, ...]

    def joins(self, draft: Draft) -> bool:
        tensors = arguments(self.head)["tensors"]
        frames = [draft.frames.get(each) if each in draft.values else None for each in tensors]
        return all(frame is not None and frame.part is not None for frame in frames)

    def join(self, search: Search, draft: Draft) -> Plane:
        return Plane(_lower_joined(draft, self.head, self.ends))


def find(nodes: Iterable[fx.Node]) -> Iterator[Member]:
    """The slices of a graph whose parts come together again, and the `cat` nodes that join them."""
    taken, joined = dict[fx.Node, Taken](), list[Joined]()
    for node in nodes:
        if is_concatenation(node):
            _read(node, taken, joined)
    for each in list(taken.values()):
        if any(user not in taken for call in each.inner for user in call.users):
            del taken[each.head]
    yield from taken.values()
    yield from joined


def _read(head: fx.Node, found: dict[fx.Node, Taken], joined: list[Joined]) -> None:
    """Adds a `cat` to `joined`, and the slices that its tensors are computed from to `found`, if each is a
    part of the same value, at its own place."""
    args, tensor = arguments(head), tensor_of(head)
    if tensor is None or args["dim"] % tensor.dim() != tensor.dim() - 1 or len(args["tensors"]) < 2:
        return
    sizes = [fake(node).shape[-1] for node in args["tensors"]]
    if not all(isinstance(size, int) and size for size in sizes):
        return
    ends = tuple(accumulate(sizes))
    of_each = []
    for node, (start, end) in zip(args["tensors"], pairwise((0, *ends)), strict=True):
        part, of_source = BlockPart(start, end - start, ends[-1]), dict[fx.Node, set[Taken]]()
        for each in _slices_behind(node):
            if same_sizes(fake(each.source).shape, tensor.shape):
                of_source.setdefault(each.source, set()).add(each)
        own = {
            source: taken for source, taken in of_source.items() if {each.part for each in taken} == {part}
        }
        of_each.append(own)
    sources = set.intersection(*map(set, of_each))
    for source in sources:
        found.update((each.head, each) for own in of_each for each in own[source])
    if sources:
        joined.append(Joined(head, (), ends))


def _slices_behind(node: fx.Node) -> Iterator[Taken]:
    """The slices of last axes that a node is computed from."""
    stack, seen = [node], {node}
    while stack and len(seen) < _MAX_WORK:
        node = stack.pop()
        if (taken := _taken(node)) is not None:
            yield taken
        stack += [each for each in node.all_input_nodes if each not in seen and each.op == "call_function"]
        seen.update(node.all_input_nodes)


def _taken(node: fx.Node) -> Taken | None:
    """The part of a last axis that a slice takes, or one result of a `split`."""
    piece = taken_piece(node)
    if piece is None or piece.step != 1:
        return None
    count, columns = fake(node).shape[-1], fake(piece.source).shape[-1]
    if not isinstance(count, int) or not isinstance(columns, int) or not 0 < count < columns:
        return None
    return Taken(node, piece.inner[:-1], piece.source, BlockPart(piece.start, count, columns))


def _lower_joined(draft: Draft, node: fx.Node, ends: Sequence[int]) -> Operand:
    """Returns the value of a `cat` of parts, and records its frame in the draft. Raises Refused if the parts
    do not make up blocks, or if another op of the region needs their columns in another order."""
    chain, tensors = draft.chain, arguments(node)["tensors"]
    frames = [draft.frames[each] for each in tensors]
    parts = [BlockPart(start, end - start, ends[-1]) for start, end in pairwise((0, *ends))]
    whole = frames[0].taken(None)
    last, in_place = fake(node).dim() - 1, all(frame.taken(None) == whole for frame in frames)
    if not in_place or [frame.part for frame in frames] != parts or whole.n_axes[-1] != last:
        raise Refused(Reason.NOT_POINTWISE, target=target_name(node))
    values = [draft.read(each, node) for each in tensors]
    draft.frames[node] = whole
    result = _selected(chain, values, ends)
    check_blocks(chain)
    return lower_cast(chain, result, supported_dtype(node, fake(node).dtype))


def _selected(chain: Chain, values: Sequence[Operand], ends: Sequence[int]) -> Operand:
    """The value that selects one of `values` for each column: `values[i]` for the columns of a block before
    `ends[i]`, from `ends[i - 1]` on."""
    columns = gcd(*ends)
    index, (*_, result) = chain.step_over_blocks(PART, ends[-1], Const(columns)), values
    for value, end in reversed(list(zip(values[:-1], ends[:-1], strict=True))):
        result = chain.emit("where", chain.emit("lt", index, Const(end // columns)), value, result)
    return result
