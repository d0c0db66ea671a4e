"""Planes of a region that a program concatenates, like the gradients of gate and up for one weight.

`torch.cat((dgate, dup), -1)` is (M, 2 N), and so is a `stack` of them before the columns, which arrives as a
`cat` of (M, 1, N). A kernel writes each plane into its part of the joined one.
"""

from __future__ import annotations

from torch import fx

from cute_backend.fx_walk.draft import Draft
from cute_backend.fx_walk.pairs import Concatenated
from cute_backend.fx_walk.reasons import Reason, Refused
from cute_backend.fx_walk.static import arguments, fake, target_name

_CONCATENATIONS = ("aten.cat.default",)
"""The ops that join tensors; Inductor writes a `stack` as one of them."""


def is_concatenation(node: fx.Node) -> bool:
    return node.op == "call_function" and target_name(node) in _CONCATENATIONS


def concatenated(draft: Draft, node: fx.Node) -> Concatenated:
    """The value of a `cat` as a member. Raises Refused unless it joins only planes of the region, along an
    axis that comes after those of M and before those of N."""
    args, values = arguments(node), list[str]()
    axis = args["dim"] % fake(node).dim()
    for each in args["tensors"]:
        value, frame = draft.values.get(each), draft.frames.get(each)
        beside = frame is not None and frame.block == 1 and frame.is_in_order
        beside = beside and all(row < axis for row in frame.m_axes)  # type: ignore[union-attr]
        beside = beside and all(column >= axis for column in frame.n_axes)  # type: ignore[union-attr]
        if not isinstance(value, str) or not beside or fake(each).dtype is not fake(node).dtype:
            raise Refused(Reason.NOT_POINTWISE, target=target_name(node))
        values.append(value)
    return Concatenated(tuple(values))
