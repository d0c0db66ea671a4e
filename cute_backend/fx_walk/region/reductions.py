"""Reductions of a value on the plane, over rows, over columns and over everything, as graphs spell them.

A reduction is the end of a region: its result is complete only when the kernel has ended, so no node of the
same region can read it. Most are one call. `max` with a dimension is a call that gives a pair; `logsumexp`
arrives decomposed, and its steps are recognised only together, because the third reads the result of the
first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from cute_backend.fx_walk.graph.frame import Frame
from cute_backend.fx_walk.graph.spelled import SpelledOtherwise, operands
from cute_backend.fx_walk.graph.static import (
    Size,
    arguments,
    describe,
    fake,
    first_argument,
    known,
    on_plane,
    product,
    target_name,
    tensor_of,
)
from cute_backend.fx_walk.products.questions import is_reduction
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.fx_walk.values.classify import supported_dtype
from cute_backend.fx_walk.values.lower import CASTS, filling, is_pointwise, is_reshape, lower_cast
from cute_backend.spec import BATCH_ROWS, Axis, DType, Op, Operand, ProductKind, ReduceKind, Reduction


@dataclass(frozen=True)
class Reduced:
    """The result of a member: the reduction of the chain's value `value`, to which the ops `after` are
    applied, if there are any."""

    value: str
    reduce: Reduction
    after: tuple[Op, ...] = ()


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
    kind: ReduceKind
    dims: tuple[int, ...]
    dtype: torch.dtype | None = None
    inner: tuple[fx.Node, ...] = ()
    correction: float | None = None

    @property
    def is_of_blocks_alone(self) -> bool:
        """Whether a kernel reduces over blocks of columns, and not over rows."""
        return self.correction is not None or any(target_name(node) in _MOMENTS for node in self.inner)


def find_reductions(nodes: Iterable[fx.Node]) -> dict[fx.Node, Found]:
    """The reductions of a graph that a kernel could do, by their heads."""
    found: dict[fx.Node, Found] = {}
    for node in nodes:
        if node.op == "call_function":
            for read in (_read_call, _read_pair, _read_moment, _read_logsumexp):
                reduction = read(node)
                if reduction is not None:
                    found[node] = reduction
    return found


def reduced(found: Found, chain: Chain, value: Operand, frame: Frame) -> Reduced:
    """A reduction of `value`, which is the chain's value of `found.source` and has `frame`.

    Raises Refused if it covers a part of M that is not the rows of a batch, or the rows of several products,
    or has a dtype that no kernel reduces.
    """
    rows = _batch_rows(found, frame)
    axis = Axis.COLUMN if rows else _axis(found, frame)
    if axis is not Axis.ROW and any(acc.kind is not ProductKind.DENSE for acc in chain.accumulators):
        raise Refused(Reason.BATCHED, target=target_name(found.head))
    if found.dtype is not None:
        value = lower_cast(chain, value, supported_dtype(found.head, found.dtype))
    own = chain.dtype(value)
    if own is DType.I32:
        raise Refused(Reason.UNSUPPORTED_DTYPE, operand=found.source, dtype=fake(found.source).dtype)
    if not found.kind.is_index:
        result = supported_dtype(found.head, fake(found.head).dtype)
        if not (result.is_float or (found.kind.is_extremum and result is own)):
            raise Refused(
                Reason.UNSUPPORTED_DTYPE, operand=found.head, dtype=f"an integer {found.kind.value}"
            )
    assert isinstance(value, str)
    return Reduced(value, Reduction(axis, found.kind, rows))


def keeps_reduced(node: fx.Node) -> bool:
    """Whether a reader of a reduction's result only changes its form, so that the kernel can write the
    reader's result: another shape with its axes in order, or rounding from fp32 to 16 bits."""
    before, after = tensor_of(first_argument(node)), tensor_of(node)
    if node.op != "call_function" or before is None or after is None or before.device != after.device:
        return False
    if is_reshape(node):
        return target_name(node) != "aten.permute.default" and known(before.numel() == after.numel())
    is_cast = target_name(node) in CASTS
    return is_cast and before.dtype is torch.float32 and after.dtype in (torch.bfloat16, torch.float16)


def refuse_unknown(node: fx.Node, m: Size, n: Size) -> None:
    """Raises Refused for a reduction that kernels do not compute, such as the variance."""
    back = feeds(node, lambda user: is_pointwise(user) and _on_plane(user, m, n))
    if back is not None:
        raise Refused(Reason.FEEDBACK, reduction=node, into=back)
    raise Refused(Reason.REDUCTION, target=target_name(node))


def refuse_rounds(found: Found, steps: Collection[fx.Node], m: Size, n: Size) -> None:
    """Raises Refused for a reduction whose result another reduction of the plane needs, as in softmax.

    Inductor does both in one kernel that holds a row, and gains nothing if the first is already done. `steps`
    of a reduction that a kernel does as a whole are excepted.
    """

    def reduces(user: fx.Node) -> bool:
        return is_reduction(user) and user not in steps and _on_plane(first_argument(user), m, n)

    back = feeds(found.head, reduces)
    if back is not None:
        raise Refused(Reason.FEEDBACK, reduction=found.head, into=back)


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


def _on_plane(value: Any, m: Size, n: Size) -> bool:
    tensor = tensor_of(value) if isinstance(value, fx.Node) else None
    return tensor is not None and on_plane(tensor.shape, m, n)


def _batch_rows(found: Found, frame: Frame) -> int:
    """The rows of a batch, if a reduction is over the last axes of M and over no others that have several
    elements; 0 otherwise, and if partials of columns would span two batches."""
    shape = fake(found.source).shape
    gone = [axis for axis in found.dims if not known(shape[axis] == 1)]
    last = list(frame.m_axes[len(frame.m_axes) - len(gone) :])
    rows = product(shape[axis] for axis in gone)
    is_part = gone == last and 0 < len(gone) < len(frame.m_axes)
    if not is_part or frame.block > 1 or not frame.is_in_order or found.kind.is_index:
        return 0
    return rows if isinstance(rows, int) and rows % BATCH_ROWS == 0 else 0


def _axis(found: Found, frame: Frame) -> Axis:
    """The axis of a reduction over `found.dims`. Axes of size 1 count only if no other axis decides.

    The kernel writes the remaining axes, and counts an index, in the order of the product.
    """
    axis, shape = _over(found, frame), describe(fake(found.source).shape)
    if frame.block > 1:
        raise _refused(found, f"{shape}, which has one element for each {frame.block} columns")
    left, gone = {
        Axis.ROW: (frame.m_axes, frame.n_axes),
        Axis.COLUMN: (frame.n_axes, frame.m_axes),
        Axis.ALL: ((), frame.axes),
    }[axis]
    if any(list(axes) != sorted(axes) for axes in (left, gone if found.kind.is_index else ())):
        raise _refused(found, f"{shape}, whose axes were moved")
    return axis


def _over(found: Found, frame: Frame) -> Axis:
    shape = fake(found.source).shape
    columns = set(frame.n_axes) or {len(shape) - 1} - set(frame.m_axes)
    rows = {axis for axis in range(len(shape)) if axis not in columns}
    long, leading, trailing = set(frame.m_axes), rows & set(found.dims), columns & set(found.dims)
    over_m = bool(leading) and long <= leading
    if trailing == columns:
        if not leading or not long & leading:
            return Axis.ROW
        if over_m:
            return Axis.ALL
    elif over_m and not trailing:
        return Axis.COLUMN
    raise _refused(found, describe(shape))


def _refused(found: Found, shape: str) -> Refused:
    return Refused(
        Reason.REDUCED_AXES, target=target_name(found.head), axes=describe(found.dims), shape=shape
    )


# Spellings

_CALLS = {
    "aten.sum.default": ReduceKind.SUM,
    "aten.sum.dim_IntList": ReduceKind.SUM,
    "aten.mean.default": ReduceKind.MEAN,
    "aten.mean.dim": ReduceKind.MEAN,
    "aten.prod.default": ReduceKind.PROD,
    "aten.prod.dim_int": ReduceKind.PROD,
    "aten.amax.default": ReduceKind.MAX,
    "aten.max.default": ReduceKind.MAX,
    "aten.amin.default": ReduceKind.MIN,
    "aten.min.default": ReduceKind.MIN,
    "aten.argmax.default": ReduceKind.ARGMAX,
    "aten.argmin.default": ReduceKind.ARGMIN,
    "aten.logsumexp.default": ReduceKind.LOGSUMEXP,
}

_ANY = ("aten.any.default", "aten.any.dim", "aten.any.dims")
"""The largest of truth values; torch makes `amax` of them one of these."""

_PAIRS = {
    "aten.max.dim": (ReduceKind.MAX, ReduceKind.ARGMAX),
    "aten.min.dim": (ReduceKind.MIN, ReduceKind.ARGMIN),
}


def _read_call(node: fx.Node) -> Found | None:
    target, result = target_name(node), tensor_of(node)
    if result is None:
        return None
    if target in _ANY and result.dtype is torch.bool:
        args = arguments(node)
        if target == "aten.any.dims" and args.get("dim") == []:
            return None  # only for this op an empty list means no axis, and None means all axes
        return Found(node, args["self"], ReduceKind.MAX, _dims(args["self"], args.get("dim")), torch.bool)
    kind = _CALLS.get(target)
    if kind is None:
        return None
    args = arguments(node)
    return Found(node, args["self"], kind, _dims(args["self"], args.get("dim")), args.get("dtype"))


def _read_pair(node: fx.Node) -> Found | None:
    if node.target is not getitem:
        return None
    pair, index = node.args
    if not isinstance(pair, fx.Node) or pair.op != "call_function" or target_name(pair) not in _PAIRS:
        return None
    args = arguments(pair)
    kind = _PAIRS[target_name(pair)][index]  # type: ignore[index]
    return Found(node, args["self"], kind, _dims(args["self"], args["dim"]), inner=(pair,))


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
    dims, inner = _dims(args["self"], args.get("dim")), () if call is node else (call,)
    if index == 1:
        return Found(node, args["self"], ReduceKind.MEAN, dims, inner=inner)
    return Found(node, args["self"], ReduceKind.SUM, dims, inner=inner, correction=float(correction))


def reduced_axes(node: fx.Node) -> tuple[int, ...]:
    """The axes that a call of any reduction reduces, counted from 0."""
    args = arguments(node)
    return _dims(args["self"], args.get("dim"))


def _dims(source: fx.Node, dim: Any) -> tuple[int, ...]:
    """The axes that a call reduces, counted from 0; all of them where it names none. A tensor without axes
    may be reduced over its axis 0 or -1, which torch takes for none."""
    rank = fake(source).dim()
    dims = [dim] if isinstance(dim, int) else list(dim or range(rank))
    return tuple(sorted({axis % rank for axis in dims})) if rank else ()


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
    exponential, dims, _ = operands(total, "aten.sum.dim_IntList", 3)
    (difference,) = operands(exponential, "aten.exp.default", 1)
    source, shift = operands(difference, "aten.sub.Tensor", 2)
    infinite, zero, otherwise = operands(shift, "aten.where.self", 3)
    magnitude, infinity = operands(infinite, "aten.eq.Scalar", 2)
    (largest,) = operands(magnitude, "aten.abs.default", 1)
    maximised, dims_of_largest, _ = operands(largest, "aten.amax.default", 3)
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
        and _dims(source, dims) == _dims(source, dims_of_largest)
        and all(user is node or user in inner for step in inner for user in step.users)
    ):
        raise SpelledOtherwise
    return Found(node, source, ReduceKind.LOGSUMEXP, _dims(source, dims), inner=tuple(sorted(inner)))


def _match_of_softmax(node: fx.Node) -> Found:
    """The logsumexp as `separate_logsumexps` writes it, whose shift is always the largest element. If that is
    infinite, the sum is NaN, and so is every value that depends on it. So an infinite result of a kernel has
    to become NaN, too."""
    log, largest = operands(node, "aten.add.Tensor", 2)
    (total,) = operands(log, "aten.log.default", 1)
    exponential, dims, _ = operands(total, "aten.sum.dim_IntList", 3)
    (difference,) = operands(exponential, "aten.exp.default", 1)
    source, shift = operands(difference, "aten.sub.Tensor", 2)
    maximised, dims_of_largest, _ = operands(largest, "aten.amax.default", 3)
    steps = {log, total, exponential, difference}
    if not (
        shift is largest
        and maximised is source
        and _same_shape(log, largest)
        and _dims(source, dims) == _dims(source, dims_of_largest)
        and all(user is node or user in steps for step in steps for user in step.users)
        and all(_ends_in_nan(user, node) for user in node.users)
    ):
        raise SpelledOtherwise
    inner = steps if set(largest.users) - {node, difference} else {*steps, largest}
    return Found(node, source, ReduceKind.LOGSUMEXP, _dims(source, dims), inner=tuple(sorted(inner)))


def _ends_in_nan(user: fx.Node, node: fx.Node) -> bool:
    """Whether a reader turns infinity into NaN: it is `node * 0`, or the sum of that and the node."""
    if target_name(user) == "aten.mul.Tensor":
        return operands(user, "aten.mul.Tensor", 2) == [node, 0]
    value, nothing = operands(user, "aten.add.Tensor", 2)
    return value is node and operands(nothing, "aten.mul.Tensor", 2) == [node, 0]


def _same_shape(left: fx.Node, right: fx.Node) -> bool:
    shapes = fake(left).shape, fake(right).shape
    return len(shapes[0]) == len(shapes[1]) and all(known(a == b) for a, b in zip(*shapes, strict=True))
