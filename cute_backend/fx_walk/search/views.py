"""Descriptions of what a view or a reshape does to the plane, for the sentence that refuses it."""

from __future__ import annotations

from torch import fx

from cute_backend.fx_walk.graph.frame import Frame
from cute_backend.fx_walk.graph.mutation import is_view
from cute_backend.fx_walk.graph.static import arguments, describe, fake, first_argument, target_name
from cute_backend.fx_walk.preparation.row_slices import why_whole
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.search.walk import Walk
from cute_backend.fx_walk.values.lower import is_pointwise_of_several


def rearranged(node: fx.Node, frame: Frame | None) -> Refused:
    """The reason why a reshape of a value with `frame` has no place on the plane."""
    return Refused(
        Reason.REARRANGED, target=target_name(node), shape=describe(fake(node).shape), how=_how(node, frame)
    )


def _how(node: fx.Node, frame: Frame | None) -> str:
    if target_name(node) == "aten.expand.default":
        return "repeats its elements"
    if frame is not None and not frame.is_in_order:
        return "joins axes that were moved"
    return "isn't proven to keep rows and columns apart"


def not_pointwise(walk: Walk, node: fx.Node, frame: Frame | None) -> Refused:
    """The refusal of a call on a value with `frame` that is not pointwise with one result, and no reshape."""
    if is_pointwise_of_several(node):
        return Refused(Reason.UNSUPPORTED_OP, target=target_name(node), why="gives several tensors")
    axis = _axis_taken(node) if is_view(node) else None
    if axis is None:
        return Refused(Reason.NOT_POINTWISE, target=target_name(node))
    columns = (fake(first_argument(node)).dim() - 1,) if frame is None else frame.n_axes
    is_column = axis in columns and not (frame is not None and axis in frame.m_axes)
    if is_column:
        return Refused(Reason.UNPAIRED, target=target_name(node))
    why = why_whole(node, walk.order, walk.mutations)
    return Refused(Reason.PART_OF_ROWS, target=target_name(node), why=why)


_TAKES = (
    "aten.slice.Tensor",
    "aten.select.int",
    "aten.split.Tensor",
    "aten.split_with_sizes.default",
    "aten.unbind.int",
    "aten.narrow.default",
)


def _axis_taken(node: fx.Node) -> int | None:
    """The axis, counted from 0, from which a slice, a select or a split takes a part. None for other
    views."""
    if target_name(node) not in _TAKES:
        return None
    axis = arguments(node)["dim"]
    return axis % fake(first_argument(node)).dim()
