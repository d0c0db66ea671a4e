"""One step of a region's growth: a node joins, or is refused.

A member may be a pointwise op on the (M, N) plane, a view that splits the plane's rows or columns or moves
their axes, or several nodes that join as a whole, such as a reduction (`members/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import fx

from cute_backend import config
from cute_backend.fx_walk.graph.axes import is_reduction
from cute_backend.fx_walk.graph.frame import Frame
from cute_backend.fx_walk.graph.static import (
    Size,
    describe,
    fake,
    first_argument,
    same_sizes,
    target_name,
    tensor_of,
)
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.region.value import E8M0, Plane, Value
from cute_backend.fx_walk.search.dependences import check_mutations, cycle, depends
from cute_backend.fx_walk.search.resolve import Reader, resolve
from cute_backend.fx_walk.search.views import not_pointwise, rearranged
from cute_backend.fx_walk.search.walk import Walk
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.fx_walk.values.held import check_blocks
from cute_backend.fx_walk.values.lower import is_pointwise, is_reshape, lower
from cute_backend.fx_walk.values.rounded import as_in_memory


def join(walk: Walk, draft: Draft, node: fx.Node) -> Value:
    """The value of `node` as a member of the region. Raises Refused if it can't be one."""
    anchor = draft.first
    if draft.split(node):
        return _join_split(walk, draft, node)
    member = walk.member(draft, node)
    if member is not None:
        for operand in member.operands:
            if depends(walk, draft, operand):
                raise cycle(walk, draft, operand)
        value = member.join(walk, draft)
        check_mutations(walk, draft, node)
        return value
    followed = _followed(draft, node)
    if followed is not None:
        check_mutations(walk, draft, node)
        return followed
    if is_reshape(node):
        source = draft.frames.get(first_argument(node))
        frame = None if source is None else source.reshaped(node, anchor.m, anchor.n)
        if frame is None:
            raise rearranged(node, source)
        draft.frames[node] = frame
        return Plane(resolve(walk, draft, first_argument(node), Reader(node, node)))
    if not is_pointwise(node):
        result = tensor_of(node)
        if result is not None and result.is_complex():
            raise Refused(Reason.UNSUPPORTED_DTYPE, operand=node, dtype=result.dtype)
        raise not_pointwise(walk, node, draft.frames.get(first_argument(node)))
    return _join_pointwise(walk, draft, node, anchor.n, (None,))


def _followed(draft: Draft, node: fx.Node) -> Value | None:
    """The value of a node that does no more than follow one that it reads."""
    for before in draft.values_read(node):
        if before.is_followed(draft, node):
            return before.follow(draft, node)
    return None


def _join_pointwise(walk: Walk, draft: Draft, node: fx.Node, n: Size, sides: Sequence[int | None]) -> Value:
    """The value of pointwise work on a plane of `n` columns, for each anchor's slice or for all columns."""
    anchor, target, result = draft.first, target_name(node), fake(node)
    if result.device != anchor.device:
        raise Refused(Reason.LOAD_DEVICE, operand=node, device=result.device, anchor=anchor.device)
    frame = _frame(draft, node, n)
    if not (frame.is_plain or None in sides or len(node.all_input_nodes) == 1):
        raise Refused(Reason.UNPAIRED, target=target)
    if result.dtype is E8M0 and frame.block == 1:
        raise Refused(Reason.UNSUPPORTED_DTYPE, operand=node, dtype=result.dtype)
    draft.frames[node] = frame
    values = []
    for side in sides:
        argument = partial(resolve, walk, draft, reader=Reader(node, node, side))
        values.append(as_in_memory(node, draft.chain, lower(node, draft.chain, argument)))
    check_mutations(walk, draft, node)
    _check_loads(draft.chain)
    return draft.plane(values)


def _frame(draft: Draft, node: fx.Node, n: Size) -> Frame:
    """The frame of pointwise work on a plane of `n` columns: that of the members that it reads."""
    anchor, shape = draft.first, fake(node).shape
    sources = [source for source in node.all_input_nodes if source in draft.frames]
    frames = [draft.frames[source].behind(len(shape) - fake(source).dim()) for source in sources]
    frame = Frame.meeting(frames, shape) if frames else Frame.of(shape, anchor.m, n)
    if frame is None and frames:
        how = "has its axes in another order than an operand"
        raise Refused(Reason.REARRANGED, target=target_name(node), shape=describe(shape), how=how)
    if frame is None or not (_is_of(draft, sources, shape, frame) or frame.covers(shape, anchor.m, n)):
        raise Refused(Reason.PLANE, shape=describe(shape), m=anchor.m, n=n)
    return frame


def _is_of(draft: Draft, sources: Sequence[fx.Node], shape: Sequence[Size], frame: Frame) -> bool:
    """Whether a member that is read has this shape and frame, so that it has all elements of the plane."""
    return any(draft.frames[node] == frame and same_sizes(fake(node).shape, shape) for node in sources)


def _join_split(walk: Walk, draft: Draft, node: fx.Node) -> Value:
    """The value of a member that reads the whole plane of a product which the region has in two slices."""
    value = _followed(draft, node)
    if value is None:
        if is_reduction(node):
            raise Refused(Reason.HALVES_TOGETHER, target=target_name(node))
        if not is_pointwise(node):
            raise Refused(Reason.NOT_POINTWISE, target=target_name(node))
        value = _join_pointwise(walk, draft, node, draft.first.b_columns, range(len(draft.anchors)))
    _frame_slice(draft, node, whole=value.is_split)
    return value


def _frame_slice(draft: Draft, node: fx.Node, whole: bool) -> None:
    """The frame of a view of a product in two slices, on the plane of all columns or of one slice."""
    tensor, anchor = tensor_of(node), draft.first
    if tensor is not None and node not in draft.frames:
        frame = Frame.of(tensor.shape, anchor.m, anchor.b_columns if whole else anchor.n)
        if frame is not None:
            draft.frames[node] = frame


def _check_loads(chain: Chain) -> None:
    check_blocks(chain)
    if len(chain.views) > config.max_loads:
        raise Refused(Reason.TOO_MANY_OPERANDS, count=len(chain.views), limit=config.max_loads)
