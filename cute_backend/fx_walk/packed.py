"""Products whose columns are packed: several results side by side, such as queries, keys and values.

Phi-3 multiplies by one weight and takes q, k and v by slices of columns; others by `chunk`, `split`, or an
axis of three in a view. Each part has work of its own, and as products of one A they would share a launch
(`shared_launch`). So a product of which only such slices are read is divided into products with slices of its
weight, which are views. If its parts then share no launch, or gain no work by it, it stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from sys import maxsize
from typing import Any, NamedTuple

import torch
from torch import fx

from cute_backend import config
from cute_backend.fx_walk.block_parts import find_block_parts
from cute_backend.fx_walk.classify import ColumnSlice
from cute_backend.fx_walk.lower import is_pointwise
from cute_backend.fx_walk.mutation import is_view, root
from cute_backend.fx_walk.packed_heads import COLUMNS_OF_HEADS
from cute_backend.fx_walk.pairs import meet
from cute_backend.fx_walk.reasons import LABEL, user_label
from cute_backend.fx_walk.region import Region
from cute_backend.fx_walk.rewrite import Sizes
from cute_backend.fx_walk.shared_launch import MAX_SEGMENTS
from cute_backend.fx_walk.static import (
    Size,
    arguments,
    collapsed_stride,
    fake,
    known,
    product,
    target_name,
    tensor_of,
)
from cute_backend.fx_walk.working_copy import WorkingCopy
from cute_backend.signature import TMA_ALIGN

aten = torch.ops.aten

_OPERANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "aten.mm.default": ("mat2", ()),
    "aten.addmm.default": ("mat2", ("self",)),
    "aten._scaled_mm.default": ("mat2", ("scale_b", "bias")),
}
"""The products that are divided: in each, the name of B and of operands that may vary along its columns."""


@dataclass(frozen=True)
class _Part:
    """A view of `count` columns from `start` on of all rows of a product, or of every `period` columns of it.
    Its axes in the order of memory are `axes`."""

    node: fx.Node
    start: int
    count: int
    axes: tuple[int, ...]
    period: int


_TRIALS = 3
"""The most times that a graph is copied, divided and searched. In each copy but the first, only those
products are divided that gained in the copy before. A model of equal layers needs two: in the second, all
products that are divided gain."""


def divide_packed(graph: fx.Graph, find: Callable[[fx.Graph], list[Region]]) -> None:
    """Divides a product with packed columns into one for each part, if the parts then share a launch that has
    further work. `find` returns the regions of a graph, which it does not change.

    If after `_TRIALS` searches the products that gain still depend on one another, none is divided.
    """
    names = {node.name for node, _ in _packed(graph)} if config.shared_launches else set()
    for _ in range(_TRIALS):
        if not names:
            return
        trial = WorkingCopy(graph)
        packed = [(node, parts) for node, parts in _packed(trial.graph) if node.name in names]
        sizes = Sizes(trial.graph, [node for node, _ in packed])
        divided = {node.name: _divide(trial.graph, node, parts, sizes) for node, parts in packed}
        trial.graph.eliminate_dead_code()
        trial.graph.lint()
        regions = find(trial.graph)
        gained = {name for name, products in divided.items() if _gains(products, regions)}
        if gained == names:
            trial.commit()
            return
        names = gained


def _gains(products: Sequence[fx.Node], regions: Sequence[Region]) -> bool:
    """Whether one region has all parts of a product, and a pointwise op after any of its products."""
    for region in regions:
        if set(products) <= set(region.products):
            return any(is_pointwise(node) and node not in region.products for node in region.nodes)
    return False


def _packed(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[_Part]]]:
    """The products whose readers all read one of two to four disjoint parts of the columns, which together
    are all columns. Each comes with its parts."""
    joined = find_block_parts(graph.nodes).taken
    for node in graph.nodes:
        if node.op == "call_function" and target_name(node) in _OPERANDS:
            parts = _parts(node) or []
            meet_again = any(part.node in joined for part in parts)  # in a cat
            if not meet_again and _is_division(parts) and _can_divide(node, parts):
                yield node, parts


def _can_divide(node: fx.Node, parts: Sequence[_Part]) -> bool:
    """Whether a product can be divided. If heads are packed side by side, B has to be contiguous along K, and
    operands that vary along columns have one element for each. A part of a head has at least the bytes that
    TMA moves, in every dtype."""
    n = fake(node).shape[-1]
    if parts[0].period == n:
        return True
    given, (b, vectors) = arguments(node), _OPERANDS[target_name(node)]
    tensors = [tensor for name in vectors if (tensor := tensor_of(given[name])) is not None]
    whole = all(known(each.numel() == 1) or known(each.shape[-1] == n) for each in tensors)
    whole = whole and all(part.count % TMA_ALIGN == 0 for part in parts)
    stride, step = fake(given[b]).stride(), TMA_ALIGN // fake(given[b]).element_size()
    return whole and known(stride[0] == 1) and known(stride[1] % step == 0)


def _is_division(parts: Sequence[_Part]) -> bool:
    if not parts or len({part.period for part in parts}) > 1:
        return False
    n = parts[0].period
    places = sorted({(part.start, part.count) for part in parts})
    ends = [0, *(start + count for start, count in places)]
    if not 2 <= len(places) <= MAX_SEGMENTS or [start for start, _ in places] != ends[:-1] or ends[-1] != n:
        return False
    apart = (pair for pair in combinations(parts, 2) if pair[0].start != pair[1].start)
    return not any(meet(left.node, right.node, ()) for left, right in apart)


def _parts(node: fx.Node) -> list[_Part] | None:
    """The views of parts of a product's columns that are read. None if something reads more than a part."""
    found, stack = list[_Part](), [node]
    while stack:
        for user in stack.pop().users:
            if not is_view(user):
                return None
            part = _part(user, node)
            if part is not None and part.count < part.period:
                found.append(part)
            else:
                stack.append(user)
    return found


def _part(view: fx.Node, of: fx.Node) -> _Part | None:
    """The part of a product's columns that a view has, in any order of axes. None if it has another one."""
    tensor, plane = tensor_of(view), fake(of)
    m, n = plane.shape
    if tensor is None or tensor.dtype is not plane.dtype or not plane.is_contiguous() or root(view) is not of:
        return None
    start = tensor.storage_offset() - plane.storage_offset()
    if not (isinstance(start, int) and isinstance(n, int)):
        return None
    strides = [stride if isinstance(stride, int) else maxsize for stride in tensor.stride()]
    axes = sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True)
    for rows in range(len(axes) + 1):
        lead, last = _Mode.of(tensor, axes[:rows]), _Mode.of(tensor, axes[rows:])
        if not (known(lead.size == m) and (known(lead.stride == n) or known(m == 1))):
            continue
        if known(last.stride == 1):
            return _Part(view, start, last.size, tuple(axes), n) if isinstance(last.size, int) else None
        for heads in range(rows + 1, len(axes)):
            outer, inner = _Mode.of(tensor, axes[rows:heads]), _Mode.of(tensor, axes[heads:])
            period, count = outer.stride, inner.size
            if not (isinstance(period, int) and isinstance(count, int) and known(inner.stride == 1)):
                continue
            if known(outer.size * period == n) and start + count <= period:
                return _Part(view, start, count, tuple(axes), period)
    return None


class _Mode(NamedTuple):
    """Several axes of a tensor as one. The stride is None if they have no common one."""

    size: Size
    stride: Size | None

    @staticmethod
    def of(tensor: torch.Tensor, axes: Sequence[int]) -> _Mode:
        sizes, strides = ([each[axis] for axis in axes] for each in (tensor.shape, tensor.stride()))
        return _Mode(product(sizes), collapsed_stride(sizes, strides))


def _divide(graph: fx.Graph, node: fx.Node, parts: Sequence[_Part], sizes: Sizes) -> list[fx.Node]:
    """Replaces a product by one for each of its parts, and returns them."""
    made: dict[int, fx.Node] = {}
    for part in parts:
        if part.start not in made:
            with graph.inserting_before(node):
                made[part.start] = _product(graph, node, part)
        with graph.inserting_before(part.node):
            view = _viewed(graph, made[part.start], part, sizes)
        part.node.replace_all_uses_with(view)
        _evaluate_views(view)
    return list(made.values())


def _product(graph: fx.Graph, node: fx.Node, part: _Part) -> fx.Node:
    given, (b, vectors) = arguments(node), _OPERANDS[target_name(node)]
    n = fake(node).shape[-1]
    changed = {}
    for name in (b, *vectors):
        tensor = tensor_of(given[name])
        if tensor is None or not tensor.dim() or not known(tensor.shape[-1] == n):
            continue
        if part.period < n:
            changed[name] = _of_heads(graph, node, given[name], part, name == b)
            continue
        bounds = (tensor.dim() - 1, part.start, part.start + part.count)
        changed[name] = _call(graph, node, aten.slice.Tensor, given[name], *bounds)
        changed[name].meta[LABEL] = _label(given[name], part)
    args = [changed.get(name, node.args[i]) for i, name in enumerate(list(given)[: len(node.args)])]
    kwargs = {name: changed.get(name, value) for name, value in node.kwargs.items()}
    return _call(graph, node, node.target, *args, **kwargs)


def _label(node: fx.Node, part: _Part) -> str:
    return f"{user_label(node)} {ColumnSlice(part.start, 1, part.count)}"


def _of_heads(graph: fx.Graph, node: fx.Node, given: fx.Node, part: _Part, is_b: bool) -> fx.Node:
    """Copies the columns of a part in every head side by side, by nodes that `packed_heads` recognises. The
    columns of B stay contiguous along K."""
    tensor = fake(given)
    heads = tensor.shape[-1] // part.period
    other = [tensor.shape[0]] if is_b else list(tensor.shape[:-1])
    axis = 0 if is_b else len(other)
    columns = _call(graph, node, aten.permute.default, given, [1, 0]) if is_b else given
    shape = [heads, part.period, *other] if is_b else [*other, heads, part.period]
    columns = _call(graph, node, aten.reshape.default, columns, shape)
    bounds = (axis + 1, part.start, part.start + part.count)
    blocks = _call(graph, node, aten.slice.Tensor, columns, *bounds)
    if is_b:
        blocks = _call(graph, node, aten.permute.default, blocks, [2, 0, 1])
    blocks.meta[LABEL] = f"{_label(given, part)} of every {part.period}"
    if not is_b:
        copied = _call(graph, node, aten.reshape.default, blocks, [*other, heads * part.count])
        copied.meta[COLUMNS_OF_HEADS] = 1
        return copied
    copied = _call(graph, node, aten.permute.default, blocks, [1, 2, 0])
    copied = _call(graph, node, aten.reshape.default, copied, [heads * part.count, *other])
    copied = _call(graph, node, aten.permute.default, copied, [1, 0])
    copied.meta[COLUMNS_OF_HEADS] = 3
    return copied


def _viewed(graph: fx.Graph, made: fx.Node, part: _Part, sizes: Sizes) -> fx.Node:
    """The view of a part as it was, of the product that has it alone."""
    shape = fake(part.node).shape
    ordered = [shape[axis] for axis in part.axes]
    result = _call(graph, part.node, aten.reshape.default, made, [sizes.argument(size) for size in ordered])
    if list(part.axes) != sorted(part.axes):
        back = [part.axes.index(axis) for axis in range(len(part.axes))]
        result = _call(graph, part.node, aten.permute.default, result, back)
    return result


def _evaluate_views(node: fx.Node) -> None:
    """Computes the values of a node's views again, whose strides are those of the part's product now."""
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if is_view(user):
                _evaluate(user, fake(node))
                stack.append(user)


def _call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    made = graph.call_function(target, args, kwargs)
    made.meta.update({key: like.meta[key] for key in ("stack_trace", "nn_module_stack") if key in like.meta})
    _evaluate(made, fake(like))
    return made


def _evaluate(node: fx.Node, like: torch.Tensor) -> None:
    """Computes the value of a node from those of its operands, in the mode of the fake tensor `like`."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    with like.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
