"""What a view or a reshape makes of the plane, for the sentence with which it is refused."""

from __future__ import annotations

from torch import fx

from cute_backend.fx_walk.mutation import is_view
from cute_backend.fx_walk.reasons import Reason, Refused
from cute_backend.fx_walk.static import Size, arguments, describe, fake, first_argument, known, target_name


def rearranged(node: fx.Node, n: Size) -> Refused:
    """Why a reshape of a value on the (M, N) plane doesn't give the plane."""
    shape = fake(node).shape
    how = _how(node, n)
    return Refused(Reason.REARRANGED, target=target_name(node), shape=describe(shape), how=how)


def _how(node: fx.Node, n: Size) -> str:
    before, after = fake(first_argument(node)), fake(node)
    if target_name(node) == "aten.expand.default":
        return "repeats its elements"
    if target_name(node) == "aten.permute.default":
        axes = [axis % before.dim() for axis in arguments(node)["dims"]]
        keeps_columns = axes and axes[-1] == before.dim() - 1 and known(before.shape[-1] == n)
        return "moves its rows" if keeps_columns else "moves its columns"
    last = after.shape[-1] if after.dim() else 1
    if known(last == n):
        return "has rows that are not proven to be the plane's"
    if known(n == 1):
        return "takes away the axis of its one column"
    return "splits its columns" if known(n % last == 0) else "joins or splits its columns"


def not_pointwise(node: fx.Node) -> Refused:
    """Why a call on a value on the plane that is neither pointwise nor a reshape is not fused."""
    axis = _axis_taken(node) if is_view(node) else None
    if axis is None:
        return Refused(Reason.NOT_POINTWISE, target=target_name(node))
    is_column = axis == fake(first_argument(node)).dim() - 1
    return Refused(Reason.UNPAIRED if is_column else Reason.PART_OF_ROWS, target=target_name(node))


_TAKES = (
    "aten.slice.Tensor",
    "aten.select.int",
    "aten.split.Tensor",
    "aten.split_with_sizes.default",
    "aten.unbind.int",
    "aten.narrow.default",
)


def _axis_taken(node: fx.Node) -> int | None:
    """The axis of which a slice, a select or a split takes a part, counted from 0; None for other views."""
    if target_name(node) not in _TAKES:
        return None
    axis = arguments(node)["dim"]
    return axis % fake(first_argument(node)).dim()
