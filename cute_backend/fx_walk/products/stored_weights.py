"""Weights that are stored in 8 or 4 bits, and converted to those of the input in front of their product.

A quantised weight reaches the pass as a chain from the stored values: a conversion, often to fp32, a
multiplication by a scale of each column of B or of the whole weight, a conversion to the input's dtype, and
views between them. Libraries differ in where they convert, multiply and view. All that matters is that every
step is one of these, and that nothing else reads what is between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import getitem

from torch import fx

from cute_backend import config
from cute_backend.fx_walk.graph.axes import is_reduction
from cute_backend.fx_walk.graph.mutation import is_view, root
from cute_backend.fx_walk.graph.static import (
    Size,
    arguments,
    describe,
    fake,
    first_argument,
    known,
    same_sizes,
    target_name,
    tensor_of,
)
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.products.packed_weights import (
    are_of_one_byte,
    in_memory,
    packed_values,
    stored_dtype,
)
from cute_backend.fx_walk.products.product_operands import accumulator_of
from cute_backend.fx_walk.products.scaling_recipes import VectorView
from cute_backend.fx_walk.products.weight_groups import (
    CONVERSION,
    SCALING,
    SUBTRACTION,
    SWAPS,
    Axes,
    exchanges,
    read_grouped,
)
from cute_backend.fx_walk.refusals.reasons import Reason, Refused, user_label
from cute_backend.fx_walk.values.classify import classify_vector
from cute_backend.fx_walk.values.lower import is_pointwise, is_reshape
from cute_backend.planning import MOST_CONVERTED_ROWS, MOST_ROWS_IN_GROUPS, Target
from cute_backend.spec import DType, LoadKind, Precision, ProductKind


@dataclass(frozen=True)
class Step:
    """A conversion or a multiplication of a weight of two axes, and the `operand` of the multiplication.
    `is_swapped` says that the product reads the result with its axes exchanged."""

    node: fx.Node
    is_swapped: bool
    operand: fx.Node | None = None


@dataclass(frozen=True)
class StoredWeight:
    """The stored values of a weight, and the steps that make it what a product reads, the first one first.
    `is_swapped` says that the product reads them with their axes exchanged."""

    node: fx.Node
    is_swapped: bool
    steps: tuple[Step, ...]


def stored_weight(b: fx.Node) -> StoredWeight | None:
    """The stored weight that B, of two axes, is made from. None if it is made in another way, or if something
    else reads a step of it."""
    found = _read(b)
    return found if isinstance(found, StoredWeight) else None


def _read(b: fx.Node) -> StoredWeight | fx.Node:
    """The same, or the node that is no step of such a weight, and is the nearest to B."""
    node, is_swapped, steps = b, False, list[Step]()
    while True:
        tensor = tensor_of(node)
        if tensor is None or tensor.dim() != 2:
            return node
        target = target_name(node) if node.op == "call_function" else ""
        is_view_of_packed = target in SWAPS and packed_values(arguments(node)["self"]) is not None
        if stored_dtype(node) is not None and not is_view_of_packed:
            is_converted = steps or tensor.dtype.itemsize > 1  # numbers may follow the conversion of nibbles
            return StoredWeight(node, is_swapped, tuple(reversed(steps))) if is_converted else node
        if node.op != "call_function" or len(node.users) != 1:
            return node
        if target in SWAPS:
            node, is_swapped = arguments(node)["self"], is_swapped is not exchanges(node)
        elif target == CONVERSION and tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            steps.append(Step(node, is_swapped))
            node = arguments(node)["a"]
        elif target == SCALING and (operands := _scaled(node, is_swapped)) is not None:
            steps.append(Step(node, is_swapped, operands[1]))
            node = operands[0]
        else:
            return node


def _scaled(product: fx.Node, is_swapped: bool) -> tuple[fx.Node, fx.Node] | None:
    """The weight and the scale of a multiplication: of two axes each, or the scale is one number, or has the
    axis of the columns alone."""
    left, right = arguments(product)["self"], arguments(product)["other"]
    for weight, scale in ((left, right), (right, left)):
        tensor, of = tensor_of(scale), tensor_of(weight)
        if tensor is None or of is None or not tensor.dtype.is_floating_point:
            continue
        is_number = known(tensor.numel() == 1)
        has_axes = tensor.dim() == 2 or (tensor.dim() == 1 and not is_swapped)
        is_vector = has_axes and not same_sizes(tensor.shape, of.shape)
        if (is_number or is_vector) and same_sizes(of.shape, fake(product).shape):
            return weight, scale
    return None


def written_from(b: fx.Node) -> fx.Node | None:
    """The input of a graph from whose 8 bits other kernels write B at each call, in 16: an operand of the ops
    that compute it, with as many elements as B or, of two values each, half as many. None if B is in memory,
    or is computed from other inputs."""
    tensor, behind = tensor_of(b), [b]
    if tensor is None or tensor.dtype.itemsize < 2:
        return None
    seen = set(behind)
    for node in behind:
        if node.op != "call_function" or not (
            is_view(node) or is_pointwise(node) or is_reduction(node) or _joins_values(node)
        ):
            continue
        for operand in node.all_input_nodes:
            held = tensor_of(operand)
            is_whole = is_view(operand) if held is None else known(2 * held.numel() >= tensor.numel())
            if operand in seen or not is_whole:  # the parts of a split are a list of views
                continue
            if operand.op in ("placeholder", "get_attr") and stored_dtype(operand) is not None:
                return operand
            seen.add(operand)
            behind.append(operand)
    return None


def _joins_values(node: fx.Node) -> bool:
    """Whether a call joins the values of bytes of several."""
    return target_name(node) == "aten.cat.default" and are_of_one_byte(arguments(node)["tensors"])


def with_stored_weight(anchor: Anchor) -> Anchor | Refused | None:
    """The product with the stored weight that B is converted from, whose scale is applied to the sums, or
    whose scales of groups are `b_vectors`. None if there is no such weight, if views are still between its
    steps, or if no kernel could read it. If no kernel converts its groups, or takes one of its steps, it is
    the refusal of these."""
    if anchor.accumulator.kind is not ProductKind.DENSE:
        return None
    found = _read(anchor.b)
    if isinstance(found, fx.Node):
        return _in_groups(anchor, found)
    if found.is_swapped or any(step.is_swapped for step in found.steps):
        return None
    stored, dtype = in_memory(found.node), stored_dtype(found.node)
    if dtype is None or not _is_along_k(found.node, dtype, *fake(found.node).shape):
        return None
    scaled = [(step.node, _uncast(step.operand)) for step in found.steps if step.operand is not None]
    for i, (node, scale) in enumerate(scaled):
        if i > 0 or not _is_of_columns(scale, anchor.n):
            return _of_other_steps(anchor, node)
    scales = [scale for _, scale in scaled]
    try:
        acc = accumulator_of(anchor.node, anchor.a, stored, dtype, dtype, fast_accum=True)
        views = [classify_vector(scale, LoadKind.ROWVEC, anchor.device) for scale in scales]
    except Refused:
        return None
    acc = replace(acc, a_dtype=anchor.accumulator.a_dtype)
    return replace(anchor, b=stored, accumulator=acc, scale_b=views[0] if views else None)


def _of_other_steps(anchor: Anchor, step: fx.Node) -> Refused | None:
    """The refusal of a step between stored values and B that no kernel takes; None if B is not made from
    such."""
    weight = written_from(anchor.b)
    while step.target is getitem:
        step = first_argument(step)
    if weight is None or step.op != "call_function":
        return None
    tensors = {node: tensor_of(node) for node in step.all_input_nodes}
    shapes = [describe(tensor.shape) for tensor in tensors.values() if tensor is not None]
    numbers = [str(each) for each in step.args if isinstance(each, (int, float))]
    readers = f", with {len(step.users)} readers" if len(step.users) > 1 else ""
    op = f"{target_name(step)} of {' and '.join([*shapes, *numbers])}{readers}"
    return Refused(Reason.WEIGHT_STEPS, weight=user_label(weight), step=step, op=op)


def _in_groups(anchor: Anchor, stop: fx.Node) -> Anchor | Refused | None:
    """The product with the stored weight in groups of K that B is converted from. None if there is none, or
    if its scales are not along K, as `bring_weights_to_products` brings those that kernels take. `stop` is no
    step of a weight that is in no groups."""
    found = read_grouped(anchor.b)
    if isinstance(found, fx.Node):
        # A reshape may be a step of a weight in groups. The step that no kernel takes is the earlier one.
        ends = (found, stop) if is_reshape(stop) else (stop,)
        return _of_other_steps(anchor, next(node for node in stop.graph.nodes if node in ends))
    to = anchor.accumulator.a_dtype
    try:
        groups, stored, dtype = found.groups(to), in_memory(found.node), stored_dtype(found.node)
        is_along_k = dtype is not None and _is_along_k(found.node, dtype, found.k, found.n)
        if found.axes is not Axes.ALONG_K or dtype is None or not is_along_k:
            return None
        acc = accumulator_of(anchor.node, anchor.a, stored, dtype, dtype, fast_accum=True)
    except Refused as refused:
        return refused if refused.reason is Reason.WEIGHT_GROUPS else None
    vectors = (found.vectors.get(name) for name in (SCALING, SUBTRACTION))
    nodes = tuple(VectorView(vector.node) for vector in vectors if vector is not None)
    shape = (found.k // found.values, found.n)
    given = [fake(each.node) for each in nodes]
    if not all(each.device == anchor.device and same_sizes(each.shape, shape) for each in given):
        return None
    acc = replace(acc, a_dtype=to, weight_groups=groups)
    return replace(anchor, b=stored, accumulator=acc, b_vectors=nodes)


def _uncast(scale: fx.Node) -> fx.Node:
    """A scale as it is in memory, if it is a cast of that. No cast of it rounds, as it is applied in fp32."""
    if scale.op != "call_function" or target_name(scale) != CONVERSION:
        return scale
    source = first_argument(scale)
    in_memory = root(source).op in ("placeholder", "get_attr")
    return source if in_memory and fake(source).dtype.is_floating_point else scale


def _is_of_columns(scale: fx.Node, n: Size) -> bool:
    """Whether a scale is one number, or has one for each of the `n` columns of B."""
    tensor = fake(scale)
    return known(tensor.numel() == 1) or (known(tensor.shape[-1] == n) and known(tensor.numel() == n))


def _is_along_k(values: fx.Node, dtype: DType, k: Size, n: Size) -> bool:
    """Whether the elements (K, N) of a column of B lie side by side, or those (K / 2, N) of two values, which
    are neighbours along K."""
    tensor, packed = fake(in_memory(values)), packed_values(values)
    if tensor.dim() != 2 or not known(tensor.stride(0) == 1) or (packed is not None and packed.axis != 1):
        return False
    return known(tensor.shape[0] * dtype.values == k) and known(tensor.shape[1] == n)


def may_be_few(m: Size, in_groups: bool) -> bool:
    """Whether launches of M rows may have no more than a kernel converts a weight for. A launch of more
    converts the weight in memory; one that is in groups of K would take many kernels of torch there, so its M
    has to be known."""
    return known(m <= MOST_ROWS_IN_GROUPS) if in_groups else not known(m > MOST_CONVERTED_ROWS)


def may_convert(anchor: Anchor, target: Target | None) -> bool:
    """Whether kernels of a target, or of some target, convert weights for as many rows, if no step of these
    is refused."""
    in_groups = isinstance(anchor.stored, Refused) and anchor.stored.reason is Reason.WEIGHT_GROUPS
    able = target is None or bool(target.converts)
    return able and config.tile is None and not config.batch_invariant and may_be_few(anchor.m, in_groups)


def is_worth_converting(stored: Anchor, target: Target | None, precision: Precision) -> bool:
    """Whether a kernel that converts the weight itself is expected to be faster than one that reads it in 16
    bits, after another kernel wrote it so: up to `MOST_CONVERTED_ROWS` rows, or `MOST_ROWS_IN_GROUPS`. If M
    is not known, launches of more rows convert it in memory, unless it is in groups of K. A scale that is
    applied to the sums leaves a rounding of the weight out, which eager's precision has; so bits would depend
    on M, and batch invariance forbids it. A tile by name is one for weights in 16 bits."""
    if config.batch_invariant or config.tile is not None:
        return False
    if precision is Precision.EAGER and stored.scale_b is not None:
        return False
    acc = stored.accumulator
    if target is not None and acc.b_dtype not in target.converts:
        return False
    return may_be_few(stored.m, acc.weight_groups is not None)
