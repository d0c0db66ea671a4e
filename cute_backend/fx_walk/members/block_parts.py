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

from cute_backend.fx_walk.graph.frame import BlockPart, Frame
from cute_backend.fx_walk.graph.static import arguments, fake, same_sizes, target_name, tensor_of
from cute_backend.fx_walk.members.rotations import check_rotations, taken_piece
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.fx_walk.values.classify import supported_dtype
from cute_backend.fx_walk.values.lower import lower_cast
from cute_backend.spec import Const, Operand

_MAX_WORK = 64
"""The most nodes that are searched for the slices that a tensor of a `cat` is computed from."""


@dataclass(frozen=True)
class Taken:
    """A node `head` that takes a part of the last axis of `source`. `inner` is the `split` that it is a
    result of, if any."""

    head: fx.Node
    source: fx.Node
    part: BlockPart
    inner: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class BlockParts:
    """The slices of a graph whose parts come together again, and the `cat` nodes that join them, each with
    the ends of its parts."""

    taken: dict[fx.Node, Taken]
    joined: dict[fx.Node, tuple[int, ...]]


def find_block_parts(nodes: Iterable[fx.Node]) -> BlockParts:
    """The parts of blocks in a graph."""
    found = BlockParts({}, {})
    for node in nodes:
        if node.op == "call_function" and target_name(node) == "aten.cat.default":
            _read(node, found)
    heads = list(found.taken.values())
    for each in heads:
        if any(user not in found.taken for call in each.inner for user in call.users):
            del found.taken[each.head]
    return found


def _read(head: fx.Node, found: BlockParts) -> None:
    """Adds a `cat` to `found`, and the slices that its tensors are computed from, if each is a part of the
    same value, at its own place."""
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
            if _has_shape(each.source, tensor.shape):
                of_source.setdefault(each.source, set()).add(each)
        own = {
            source: taken for source, taken in of_source.items() if {each.part for each in taken} == {part}
        }
        of_each.append(own)
    for source in set.intersection(*map(set, of_each)):
        found.taken.update((each.head, each) for own in of_each for each in own[source])
        found.joined[head] = ends


def _has_shape(node: fx.Node, shape: Sequence[int]) -> bool:
    return same_sizes(fake(node).shape, shape)


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
    return Taken(node, piece.source, BlockPart(piece.start, count, columns), piece.inner[:-1])


def inner_of(found: BlockParts) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The `split` nodes behind parts, each with the parts."""
    for taken in found.taken.values():
        for node in taken.inner:
            yield node, taken.head


def part_frame(taken: Taken, frame: Frame | None) -> Frame | None:
    """The frame of a part of a member with `frame`. None if the last axis of the member is not a block of
    columns, or it is a part already."""
    last = fake(taken.source).dim() - 1
    if frame is None or frame.block > 1 or frame.joins or frame.part is not None:
        return None
    return frame.taken(taken.part) if frame.n_axes and frame.n_axes[-1] == last else None


def joins_parts(draft: Draft, node: fx.Node) -> bool:
    """Whether a `cat` joins members that are its parts."""
    tensors = arguments(node)["tensors"]
    frames = [draft.frames.get(each) if each in draft.values else None for each in tensors]
    return all(frame is not None and frame.part is not None for frame in frames)


def lower_joined(draft: Draft, node: fx.Node, ends: Sequence[int]) -> Operand:
    """Returns the value of a `cat` of parts, and records its frame in the draft. Raises Refused if the parts
    do not make up blocks, or if another op of the region needs their columns in another order."""
    chain, tensors = draft.chain, arguments(node)["tensors"]
    frames = [draft.frames[each] for each in tensors]
    parts = [BlockPart(start, end - start, ends[-1]) for start, end in pairwise((0, *ends))]
    whole = frames[0].taken(None)
    last, in_place = fake(node).dim() - 1, all(frame.taken(None) == whole for frame in frames)
    if not in_place or [frame.part for frame in frames] != parts or whole.n_axes[-1] != last:
        raise Refused(Reason.NOT_POINTWISE, target=target_name(node))
    values = [draft.values[each] for each in tensors]
    draft.frames[node] = whole
    result = _selected(chain, [str(value) for value in values], ends)
    check_rotations(chain)
    return lower_cast(chain, result, supported_dtype(node, fake(node).dtype))


def _selected(chain: Chain, values: Sequence[Operand], ends: Sequence[int]) -> Operand:
    """The value that selects one of `values` for each column: `values[i]` for the columns of a block before
    `ends[i]`, from `ends[i - 1]` on."""
    columns = gcd(*ends)
    index, (*_, result) = chain.block_part(ends[-1], columns), values
    for value, end in reversed(list(zip(values[:-1], ends[:-1], strict=True))):
        result = chain.emit("where", chain.emit("lt", index, Const(end // columns)), value, result)
    return result
