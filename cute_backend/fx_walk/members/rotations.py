"""Rotary embeddings: blocks of columns whose halves (x, y) become (-y, x), as graphs spell it.

A head's D columns are a block. `torch.cat((-x[..., D // 2:], x[..., :D // 2]), -1)` is recognised by the
columns of its pieces, however the program takes them (slices, chunk, split). A column's partner is half a
block away, in the same tile, so the region continues after the rotation. If adjacent columns are partners, a
block has two columns, and `torch.stack((-x[..., 1::2], x[..., ::2]), -1)` rotates them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from cute_backend import config
from cute_backend.fx_walk.graph.axes import is_concatenation
from cute_backend.fx_walk.graph.frame import BlockPart
from cute_backend.fx_walk.graph.pieces import Piece, taken_piece
from cute_backend.fx_walk.graph.static import Size, arguments, fake, known, target_name, tensor_of
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.region.member import Member, Search
from cute_backend.fx_walk.region.value import Plane
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.fx_walk.values.classify import supported_dtype
from cute_backend.fx_walk.values.held import check_blocks, check_places, held_sizes
from cute_backend.fx_walk.values.lower import lower_cast
from cute_backend.kinds.blocks import ROTATE_FIRST, ROTATE_HALF
from cute_backend.spec import Const, DType, Op, Operand


@dataclass(frozen=True)
class Rotation(Member):
    """A `cat` that rotates the halves of blocks of `columns` elements of a value's last axis: to (-y, x) or,
    if it is `inverse`, to (y, -x), as in the derivative. The `cat` divides the axis into blocks, (..., D)
    into (..., D / 2, 2), or leaves it unchanged. `inner` are the nodes on the way, in order, which nothing
    else reads."""

    source: fx.Node
    columns: int
    inverse: bool

    @property
    def splits(self) -> bool:
        """Whether the head has an axis for the columns of a block, and the source has none."""
        return fake(self.head).dim() > fake(self.source).dim()

    def joins(self, draft: Draft) -> bool:
        return self.source in draft.values

    def join(self, search: Search, draft: Draft) -> Plane:
        value = draft.read(self.source, self.head)
        rotated = _rotated_halves(self, draft, value, search.may_share(draft.anchors))
        if why := _cost(search, draft.anchors):
            raise Refused(Reason.ROTATION_COST, why=why)
        return Plane(rotated)

    @property
    def needs_shared_launch(self) -> bool:
        return config.rotary_embeddings == "auto"


@dataclass(frozen=True)
class _Turned(Piece):
    """A piece that may be negated. `apart` says that its elements lie along the axis before the last, and
    that the last axis has one element."""

    negated: bool = False
    apart: bool = False


def find(nodes: Iterable[fx.Node]) -> Iterator[Member]:
    """The rotations of a graph."""
    for node in nodes:
        if is_concatenation(node) and (rotation := _read(node)) is not None:
            yield rotation


def _read(head: fx.Node) -> Rotation | None:
    args, tensor = arguments(head), tensor_of(head)
    columns = None if tensor is None else tensor.shape[-1]
    if not isinstance(columns, int) or columns % 2 or args["dim"] % fake(head).dim() != fake(head).dim() - 1:
        return None
    pieces = [piece for node in args["tensors"] if (piece := _piece(node)) is not None]
    if len(pieces) != 2 or len(args["tensors"]) != 2:
        return None
    first, second = pieces
    sizes = [fake(node).shape[-1] for node in args["tensors"]]
    source = fake(first.source)
    if (
        first.source is not second.source
        or first.negated is second.negated
        or (first.step, first.apart) != (second.step, second.apart)
        or (first.start, second.start) != (columns // 2, 0)
        or not all(known(size == columns // 2) for size in sizes)
        or not _is_whole(first, source.shape[-1], fake(head).shape)
        or source.dtype is not fake(head).dtype
    ):
        return None
    inner = tuple(dict.fromkeys((*first.inner, *second.inner)))
    if any(user is not head and user not in inner for node in inner for user in node.users):
        return None
    return Rotation(head, inner, first.source, columns, second.negated)


def _is_whole(piece: _Turned, size: Size, shape: Sequence[Size]) -> bool:
    """Whether two such pieces, concatenated to `shape`, make up an axis of this size: one block, or pairs."""
    if piece.apart:
        pairs, columns = shape[-2:]
        return piece.step == 2 and columns == 2 and known(size == 2 * pairs)
    return piece.step == 1 and known(size == shape[-1])


def _piece(node: fx.Node) -> _Turned | None:
    """The part of a value's last axis that a tensor of a `cat` has. None if the tensor is not such a part."""
    changes: list[fx.Node] = []
    while _changes_piece(node):
        changes.append(node)
        (node,) = node.all_input_nodes
    taken = taken_piece(node)
    piece = None if taken is None else _Turned(taken.source, taken.start, taken.inner, taken.step)
    for change in reversed(changes):
        piece = None if piece is None else _changed(piece, change)
    return piece


def _changes_piece(node: fx.Node) -> bool:
    names = ("aten.neg.default", "aten.unsqueeze.default")
    return node.op == "call_function" and target_name(node) in names


def _changed(piece: _Turned, node: fx.Node) -> _Turned | None:
    """A piece that is negated, or has one more axis."""
    piece = replace(piece, inner=(*piece.inner, node))
    if target_name(node) == "aten.neg.default":
        return None if piece.negated else replace(piece, negated=True)
    is_last = arguments(node)["dim"] % fake(node).dim() == fake(node).dim() - 1
    if not is_last or piece.apart:
        return None
    # An unsqueeze undoes a select, whose element was an axis of the source.
    return replace(piece, step=1) if piece.step == 0 else replace(piece, apart=True)


def _cost(search: Search, anchors: Sequence[Anchor]) -> str:
    """The reason why `config.rotary_embeddings` bars the region of these anchors from rotating blocks of
    columns; empty if it may rotate them."""
    if config.rotary_embeddings == "never":
        return "config.rotary_embeddings = 'never' leaves it to Inductor"
    return search.unshared(anchors) if config.rotary_embeddings == "auto" else ""


def _rotated_halves(found: Rotation, draft: Draft, value: Operand, may_share: bool) -> Operand:
    """Rotates the halves of `value`, which is the chain's value of `found.source`, and records the frame of
    the result. `may_share` says whether the kernel may compute other products of A, too.

    Raises Refused if the last axis is not a block of columns, if no tile can rotate it, or if other results
    depend on the places of columns.
    """
    frame, chain = draft.frames[found.source], draft.chain
    last = fake(found.source).dim() - 1
    part = frame.part
    single = may_share and known(draft.first.n == found.columns)
    apart = _rotates_apart(chain, found, value, part, single)
    if part is not None and found.columns > 2 and not (part.is_regular or apart):
        raise Refused(Reason.ROTATED_PART, part=part, columns=found.columns)
    if frame.block > 1 or not frame.n_axes or frame.n_axes[-1] != last:
        raise Refused(
            Reason.REARRANGED, target="aten.cat.default", shape=str(found.columns), how="joins rows"
        )
    draft.frames[found.head] = replace(frame, n_axes=(*frame.n_axes, last + 1)) if found.splits else frame
    if apart:
        block = found.columns if part is None else part.columns
        result = chain.step_over_blocks(ROTATE_FIRST, block, value, Const(found.columns))
    else:
        result = chain.step_over_blocks(ROTATE_HALF, found.columns, value)
    check_blocks(chain)
    if any(each.reduction is not None for each in draft.values.values()):
        check_places(chain)
    result = chain.emit("neg", result) if found.inverse else result
    return lower_cast(chain, result, supported_dtype(found.head, fake(found.head).dtype))


def _rotates_apart(
    chain: Chain, found: Rotation, value: Operand, part: BlockPart | None, single: bool
) -> bool:
    """Whether the kernel rotates a head's first columns, or a whole head, in a visit that has all of them,
    because TMA can't order columns so that a thread has both halves, or would have to order those of wide
    parts, after which it can't write results by heads. A `single` head has no axis of heads, without which
    TMA orders no columns beside other products. The target has to rotate halves of others, too."""
    columns = found.columns
    whole_head = part is None or (part.start, part.count) == (0, columns)
    if columns == 2 or not whole_head or ROTATE_FIRST.contradiction(columns, columns):
        return False
    halves = Op("rotated", ROTATE_HALF.name, (value,), DType.F32, block=columns)
    block = columns if part is None else part.columns
    first = Op("rotated", ROTATE_FIRST.name, (value, Const(columns)), DType.F32, block=block)
    regular = part is None or (part.is_regular and columns <= ROTATE_FIRST.narrow_visits[0])
    if chain.is_served(halves):
        return not (regular and not single) and chain.is_served(first)
    return bool(held_sizes(chain, halves)) and chain.is_served(first)
