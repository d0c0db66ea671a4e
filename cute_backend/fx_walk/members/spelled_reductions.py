"""Reductions as graphs spell them.

Most are one call. `max` with a dimension is a call that gives a pair; `logsumexp` arrives decomposed, and its
steps are recognised only together, because the third reads the result of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from cute_backend.fx_walk.graph.axes import reduced_axes
from cute_backend.fx_walk.graph.spelled import SpelledOtherwise, operands
from cute_backend.fx_walk.graph.static import (
    DTYPES,
    RESULT_DTYPES,
    arguments,
    fake,
    first_argument,
    known,
    target_name,
    tensor_of,
)
from cute_backend.fx_walk.values.lower import filling, is_pointwise, is_reshape
from cute_backend.kinds import reductions


@dataclass(frozen=True)
class Found:
    """A reduction of a graph: `head` has the result of reducing `source` over the axes `dims`.

    `inner` are the nodes that serve it alone, in order: the call that gives a pair, and steps on the way.
    `dtype` is the dtype that the elements are cast to first, None if they are not cast. With a `correction`
    it is the variance: the sum of the squared deviations from the mean, divided by the number of elements
    less the correction.
    """

    head: fx.Node
    source: fx.Node
    kind: reductions.ReductionKind
    dims: tuple[int, ...]
    dtype: torch.dtype | None = None
    inner: tuple[fx.Node, ...] = ()
    correction: float | None = None

    @property
    def is_of_blocks_alone(self) -> bool:
        """Whether a kernel reduces over blocks of columns, and not over rows."""
        return self.correction is not None or any(target_name(node) in _MOMENTS for node in self.inner)


def read_reduction(head: fx.Node) -> Found | None:
    """The reduction whose result a node has; None if it has none of a reduction that a kernel could do."""
    if head.op == "call_function":
        for read in (_read_call, _read_pair, _read_moment, _read_logsumexp):
            if (found := read(head)) is not None:
                return found
    return None


def feeds(node: fx.Node, wanted: Callable[[fx.Node], bool]) -> fx.Node | None:
    """The first wanted node that depends on `node` through pointwise work and views only."""
    stack, seen = list(node.users), set()
    while stack:
        user = stack.pop()
        if user in seen or user.op != "call_function":
            continue
        seen.add(user)
        if wanted(user):
            return user
        if user.target is getitem or is_pointwise(user) or is_reshape(user):
            stack.extend(user.users)
    return None


_CALLS = {
    call: tuple(kind for kind in reductions.REDUCTIONS if call in kind.aten)
    for call in (call for kind in reductions.REDUCTIONS for call in kind.aten)
}
"""The kinds that each call may compute; one with several results has kinds for each."""


_ANY = ("aten.any.default", "aten.any.dim", "aten.any.dims")
"""The largest of truth values; torch makes `amax` of them one of these."""


def _read_call(node: fx.Node) -> Found | None:
    target, result = target_name(node), tensor_of(node)
    if result is None:
        return None
    if target in _ANY and result.dtype is torch.bool:
        args = arguments(node)
        if target == "aten.any.dims" and args.get("dim") == []:
            return None  # only for this op an empty list means no axis, and None means all axes
        return Found(node, args["self"], reductions.MAX, reduced_axes(node), torch.bool)
    return _found(node, node, target)


def _read_pair(node: fx.Node) -> Found | None:
    if node.target is not getitem:
        return None
    pair, index = node.args
    if not isinstance(pair, fx.Node) or pair.op != "call_function":
        return None
    return _found(node, pair, (target_name(pair), index))  # type: ignore[arg-type]


def _found(head: fx.Node, call: fx.Node, spelled: str | tuple[str, int]) -> Found | None:
    """The reduction whose result `head` is; of several kinds that a call may compute, the first whose
    results have its dtype."""
    if spelled not in _CALLS:
        return None
    args, kinds = arguments(call), _CALLS[spelled]
    own, result = DTYPES.get(fake(args["self"]).dtype), RESULT_DTYPES.get(fake(head).dtype)
    fitting = (kind for kind in kinds if own is not None and result in kind.stored_as(own))
    kind, inner = next(fitting, kinds[0]), () if call is head else (call,)
    return Found(head, args["self"], kind, reduced_axes(call), args.get("dtype"), inner)


_MOMENTS = ("aten.var_mean.correction",)
"""Calls that give the variance and the mean."""


def _read_moment(node: fx.Node) -> Found | None:
    """A variance, or one result of the pair of variance and mean."""
    call, index = node, 0
    if node.target is getitem:
        call, index = node.args  # type: ignore[assignment]
        if not isinstance(call, fx.Node) or call.op != "call_function" or target_name(call) not in _MOMENTS:
            return None
    elif target_name(node) != "aten.var.correction":
        return None
    args = arguments(call)
    correction = 1 if args["correction"] is None else args["correction"]
    if not isinstance(correction, (int, float)):
        return None
    dims, inner = reduced_axes(call), () if call is node else (call,)
    if index == 1:
        return Found(node, args["self"], reductions.MEAN, dims, inner=inner)
    return Found(node, args["self"], reductions.SUM, dims, inner=inner, correction=float(correction))


_SQUEEZES = ("aten.squeeze.dims", "aten.squeeze.dim", "aten.reshape.default", "aten.view.default")


def _read_logsumexp(node: fx.Node) -> Found | None:
    """A logsumexp in torch's decomposition, whose shift is 0 where the largest element is infinite.

        shift = where(abs(amax(x)) == inf, 0, amax(x))
        log(sum(exp(x - shift))) + shift

    None if anything outside reads a step, because the steps are then needed themselves.
    """
    for match in (_match_logsumexp, _match_of_softmax):
        try:
            return match(node)
        except SpelledOtherwise:
            continue
    return None


def _match_logsumexp(node: fx.Node) -> Found:
    log, added = operands(node, "aten.add.Tensor", 2)
    (total,) = operands(log, "aten.log.default", 1)
    exponential, *_ = operands(total, "aten.sum.dim_IntList", 3)
    (difference,) = operands(exponential, "aten.exp.default", 1)
    source, shift = operands(difference, "aten.sub.Tensor", 2)
    infinite, zero, otherwise = operands(shift, "aten.where.self", 3)
    magnitude, infinity = operands(infinite, "aten.eq.Scalar", 2)
    (largest,) = operands(magnitude, "aten.abs.default", 1)
    maximised, *_ = operands(largest, "aten.amax.default", 3)
    if not isinstance(source, fx.Node) or not isinstance(added, fx.Node) or not isinstance(zero, fx.Node):
        raise SpelledOtherwise
    squeezed = target_name(added) in _SQUEEZES and first_argument(added) is shift
    inner = {log, added, total, exponential, difference, shift, infinite, magnitude, largest}
    if not (
        (added is shift or squeezed)
        and _same_shape(log, added)
        and maximised is source
        and otherwise is largest
        and infinity == float("inf")
        and filling(zero) == 0
        and reduced_axes(total) == reduced_axes(largest)
        and all(user is node or user in inner for step in inner for user in step.users)
    ):
        raise SpelledOtherwise
    return Found(node, source, reductions.LOGSUMEXP, reduced_axes(total), inner=tuple(sorted(inner)))


def _match_of_softmax(node: fx.Node) -> Found:
    """The logsumexp as `separate_logsumexps` writes it, whose shift is always the largest element. If that is
    infinite, the sum is NaN, and so is every value that depends on it. So an infinite result of a kernel has
    to become NaN, too."""
    log, largest = operands(node, "aten.add.Tensor", 2)
    (total,) = operands(log, "aten.log.default", 1)
    exponential, *_ = operands(total, "aten.sum.dim_IntList", 3)
    (difference,) = operands(exponential, "aten.exp.default", 1)
    source, shift = operands(difference, "aten.sub.Tensor", 2)
    maximised, *_ = operands(largest, "aten.amax.default", 3)
    steps = {log, total, exponential, difference}
    if not (
        shift is largest
        and maximised is source
        and _same_shape(log, largest)
        and reduced_axes(total) == reduced_axes(largest)
        and all(user is node or user in steps for step in steps for user in step.users)
        and all(_ends_in_nan(user, node) for user in node.users)
    ):
        raise SpelledOtherwise
    inner = steps if set(largest.users) - {node, difference} else {*steps, largest}
    return Found(node, source, reductions.LOGSUMEXP, reduced_axes(total), inner=tuple(sorted(inner)))


def _ends_in_nan(user: fx.Node, node: fx.Node) -> bool:
    """Whether a reader turns infinity into NaN: it is `node * 0`, or the sum of that and the node."""
    if target_name(user) == "aten.mul.Tensor":
        return operands(user, "aten.mul.Tensor", 2) == [node, 0]
    value, nothing = operands(user, "aten.add.Tensor", 2)
    return value is node and operands(nothing, "aten.mul.Tensor", 2) == [node, 0]


def _same_shape(left: fx.Node, right: fx.Node) -> bool:
    shapes = fake(left).shape, fake(right).shape
    return len(shapes[0]) == len(shapes[1]) and all(known(a == b) for a, b in zip(*shapes, strict=True))
