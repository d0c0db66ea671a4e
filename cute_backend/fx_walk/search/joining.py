"""One step of a region's growth: a node joins, or is refused.

A member may be a pointwise op on the (M, N) plane, a view that splits the plane's rows or columns or moves
their axes, or several nodes that join as a whole, such as a reduction (`members/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import fx

from cute_backend import config
from cute_backend.fx_walk.graph.axes import is_reduction
from cute_backend.fx_walk.graph.frame import Frame
from cute_backend.fx_walk.graph.mutation import is_view
from cute_backend.fx_walk.graph.static import (
    Size,
    describe,
    fake,
    first_argument,
    same_sizes,
    target_name,
    tensor_of,
)
from cute_backend.fx_walk.products.pairs import column_slice, same_slice
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.region.draft import Draft, alternates
from cute_backend.fx_walk.region.value import E8M0, Plane, Slices, Value
from cute_backend.fx_walk.search.dependences import check_mutations
from cute_backend.fx_walk.search.resolve import Reader, resolve
from cute_backend.fx_walk.search.views import not_pointwise, rearranged
from cute_backend.fx_walk.search.walk import Walk
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.fx_walk.values.classify import ColumnSlice
from cute_backend.fx_walk.values.held import check_blocks
from cute_backend.fx_walk.values.lower import is_pointwise, is_reshape, lower
from cute_backend.fx_walk.values.rounded import as_in_memory
from cute_backend.spec import Operand


def join(walk: Walk, draft: Draft, node: fx.Node) -> Value:
    """The value of `node` as a member of the region. Raises Refused if it can't be one."""
    anchor = draft.first
    if draft.split(node):
        joined = _join_split(walk, draft, node)
        _frame_slice(draft, node, whole=joined.is_split)
        return joined
    member = walk.member(draft, node)
    if member is not None:
        value = member.join(walk, draft)
        check_mutations(walk, draft, node)
        return value
    for before in draft.values_read(node):
        if before.is_followed(draft, node):
            value = before.follow(draft, node)
            check_mutations(walk, draft, node)
            return value
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
    return Plane(_join_pointwise(walk, draft, node, anchor.n, (None,))[0])


def _join_pointwise(
    walk: Walk, draft: Draft, node: fx.Node, n: Size, sides: Sequence[int | None]
) -> list[Operand]:
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
    return values


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
    slices = [anchor.columns for anchor in draft.anchors]
    n = draft.first.b_columns
    if is_view(node):
        source = draft.values.get(first_argument(node))
        if not isinstance(source, Slices):
            raise Refused(Reason.UNPAIRED, target=target_name(node))
        taken = column_slice(node, draft.first.m)
        if taken is None:
            return replace(source, whole=False)
        for value, columns in zip(source.values, slices, strict=True):
            if columns is not None and same_slice(taken, columns):
                return Plane(value)
        return replace(source, whole=same_slice(taken, ColumnSlice(0, 1, n)))
    if is_reduction(node):
        raise Refused(Reason.HALVES_TOGETHER, target=target_name(node))
    if not is_pointwise(node):
        raise Refused(Reason.NOT_POINTWISE, target=target_name(node))
    values = _join_pointwise(walk, draft, node, n, range(len(slices)))
    return Slices(tuple(values), True, alternates(draft.first))


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
