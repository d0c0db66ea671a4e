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
from typing import NamedTuple

import torch
from torch import fx

from cute_backend import config
from cute_backend.fx_walk.graph.mutation import is_view, root
from cute_backend.fx_walk.graph.new_calls import call, evaluate
from cute_backend.fx_walk.graph.sizes import SymbolicSizes
from cute_backend.fx_walk.graph.static import (
    Size,
    arguments,
    collapsed_stride,
    fake,
    first_argument,
    known,
    product,
    same_sizes,
    target_name,
    tensor_of,
)
from cute_backend.fx_walk.graph.working_copy import WorkingCopy
from cute_backend.fx_walk.members.kinds import find_members
from cute_backend.fx_walk.preparation.index_lists import neighbours
from cute_backend.fx_walk.preparation.packed_copies import copied, separate_copies
from cute_backend.fx_walk.preparation.repeats import repeat_after_work
from cute_backend.fx_walk.preparation.row_slices import has_effects
from cute_backend.fx_walk.products.packed_heads import COLUMNS_OF_HEADS
from cute_backend.fx_walk.products.pairs import meet
from cute_backend.fx_walk.refusals.reasons import LABEL, user_label
from cute_backend.fx_walk.region.region import Region
from cute_backend.fx_walk.values.classify import ColumnSlice
from cute_backend.fx_walk.values.lower import is_pointwise
from cute_backend.planning import MAX_SEGMENTS
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
    Its axes in the order of memory are `axes`. `work` is done on all columns before, by pointwise ops that
    read nothing else."""

    node: fx.Node
    start: int
    count: int
    axes: tuple[int, ...]
    period: int
    work: tuple[fx.Node, ...]


_TRIALS = 3
"""The most times that a graph is copied, divided and searched. In each copy but the first, only those
products are divided that gained in the copy before. A model of equal layers needs two: in the second, all
products that are divided gain."""


def divide_packed(graph: fx.Graph, find: Callable[[fx.Graph], list[Region]]) -> None:
    """Divides a product with packed columns into one for each part, if the parts then share a launch that has
    further work. `find` returns the regions of a graph, which it does not change.

    If after `_TRIALS` searches the products that gain still depend on one another, none is divided.
    """
    names = {node.name for node, _ in _packed(graph)} | copied(graph) if config.shared_launches else set()
    for _ in range(_TRIALS):
        if not names:
            return
        trial = WorkingCopy(graph)
        separate_copies(trial.graph, names)
        packed = [(node, parts) for node, parts in _packed(trial.graph) if node.name in names]
        sizes = SymbolicSizes(trial.graph, [node for node, _ in packed])
        divided = {node.name: _Division(trial.graph, node, sizes).into(parts) for node, parts in packed}
        trial.graph.eliminate_dead_code()
        trial.graph.lint()
        regions = find(trial.graph)
        gained = {name for name, division in divided.items() if _gains(division, regions)}
        if gained == names:
            trial.commit()
            return
        names = gained


def _gains(division: _Division, regions: Sequence[Region]) -> bool:
    """Whether one region has all parts of a product, and a pointwise op after any of its products that could
    not be done before the division."""
    for region in regions:
        if set(division.products) <= set(region.products):
            repeated = {*region.products, *division.work}
            return any(is_pointwise(node) and node not in repeated for node in region.nodes)
    return False


def _packed(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[_Part]]]:
    """The products whose readers all read one of two to four disjoint parts of the columns, which together
    are all columns. Each comes with its parts. A product is left whole if a part of it joins
    a region as a member, which needs all columns."""
    found = [
        (node, parts)
        for node in graph.nodes
        if node.op == "call_function" and target_name(node) in _OPERANDS and (parts := _parts(node))
    ]
    divisible = [(node, parts) for node, parts in found if _is_division(parts) and _can_divide(node, parts)]
    members = find_members(graph.nodes) if divisible else {}
    for node, parts in divisible:
        if not any(part.node in members for part in parts):
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
    found = list[_Part]()
    stack: list[tuple[fx.Node, tuple[fx.Node, ...]]] = [(node, (node,))]
    while stack:
        value, work = stack.pop()
        for user in value.users:
            if is_view(user) or neighbours(user) is not None:
                part = _part(user, node, work)
                if part is not None and part.count < part.period:
                    found.append(part)
                else:
                    stack.append((user, work))
            elif _is_work(user, value):
                stack.append((user, (*work, user)))
            else:
                return None
    return found


def _is_work(node: fx.Node, value: fx.Node) -> bool:
    """Whether a node is pointwise work on `value` alone, with all of its elements in the same order."""
    tensor = tensor_of(node)
    return (
        is_pointwise(node)
        and not has_effects(node)
        and node.all_input_nodes == [value]
        and tensor is not None
        and same_sizes(tensor.shape, fake(value).shape)
        and tensor.is_contiguous()
        and fake(value).is_contiguous()
    )


def _part(view: fx.Node, of: fx.Node, work: tuple[fx.Node, ...]) -> _Part | None:
    """The part of a product's columns that a view has, in any order of axes. None if it has another one.
    `work` are the product and the work on all columns that the view is of."""
    tensor, plane = _viewed_tensor(view), fake(work[-1])
    m, n = fake(of).shape
    source = view if is_view(view) else first_argument(view)
    if tensor is None or tensor.dtype is not plane.dtype or not plane.is_contiguous():
        return None
    start = tensor.storage_offset() - plane.storage_offset()
    if root(source) is not work[-1] or not (isinstance(start, int) and isinstance(n, int)):
        return None
    strides = [stride if isinstance(stride, int) else maxsize for stride in tensor.stride()]
    axes = sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True)
    for rows in range(len(axes) + 1):
        lead, last = _Mode.of(tensor, axes[:rows]), _Mode.of(tensor, axes[rows:])
        if not (known(lead.size == m) and (known(lead.stride == n) or known(m == 1))):
            continue
        if known(last.stride == 1):
            return (
                _Part(view, start, last.size, tuple(axes), n, work[1:])
                if isinstance(last.size, int)
                else None
            )
        for heads in range(rows + 1, len(axes)):
            outer, inner = _Mode.of(tensor, axes[rows:heads]), _Mode.of(tensor, axes[heads:])
            period, count = outer.stride, inner.size
            if not (isinstance(period, int) and isinstance(count, int) and known(inner.stride == 1)):
                continue
            if known(outer.size * period == n) and start + count <= period:
                return _Part(view, start, count, tuple(axes), period, work[1:])
    return None


def _viewed_tensor(view: fx.Node) -> torch.Tensor | None:
    """The tensor of a view, or of the slice that has the elements of an index list."""
    taken = neighbours(view)
    if taken is None:
        return tensor_of(view)
    source = fake(first_argument(view))
    with source.fake_mode:  # type: ignore[attr-defined]
        return source.narrow(taken.axis, taken.start, taken.count)


class _Mode(NamedTuple):
    """Several axes of a tensor as one. The stride is None if they have no common one."""

    size: Size
    stride: Size | None

    @staticmethod
    def of(tensor: torch.Tensor, axes: Sequence[int]) -> _Mode:
        sizes, strides = ([each[axis] for axis in axes] for each in (tensor.shape, tensor.stride()))
        return _Mode(product(sizes), collapsed_stride(sizes, strides))


class _Division:
    """The replacement of a product by one for each of its parts, which are `products`. `work` is the work
    before the division, done on each of them."""

    def __init__(self, graph: fx.Graph, node: fx.Node, sizes: SymbolicSizes) -> None:
        self.graph = graph
        self.node = node
        self.sizes = sizes
        self._products: dict[int, fx.Node] = {}
        self._work: dict[tuple[int, fx.Node], fx.Node] = {}

    @property
    def products(self) -> list[fx.Node]:
        return list(self._products.values())

    @property
    def work(self) -> list[fx.Node]:
        return list(self._work.values())

    def into(self, parts: Sequence[_Part]) -> _Division:
        """Replaces the product, and returns this object."""
        for part in parts:
            value = self._value(part)
            with self.graph.inserting_before(part.node):
                view = _viewed(self.graph, value, part, self.sizes)
            part.node.replace_all_uses_with(view)
            _evaluate_views(view)
            repeat_after_work(self.graph, view, self.sizes)
        return self

    def _value(self, part: _Part) -> fx.Node:
        """The product that has a part, after the work."""
        start = part.start
        if start not in self._products:
            with self.graph.inserting_before(self.node):
                self._products[start] = _product(self.graph, self.node, part)
        value = self._products[start]
        for node in part.work:
            if (start, node) not in self._work:
                args = fx.map_arg(node.args, {node.all_input_nodes[0]: value}.__getitem__)
                kwargs = fx.map_arg(node.kwargs, {node.all_input_nodes[0]: value}.__getitem__)
                with self.graph.inserting_before(node):
                    self._work[start, node] = call(self.graph, node, node.target, *args, **kwargs)
            value = self._work[start, node]
        return value


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
        changed[name] = call(graph, node, aten.slice.Tensor, given[name], *bounds)
        changed[name].meta[LABEL] = _label(given[name], part)
    args = [changed.get(name, node.args[i]) for i, name in enumerate(list(given)[: len(node.args)])]
    kwargs = {name: changed.get(name, value) for name, value in node.kwargs.items()}
    return call(graph, node, node.target, *args, **kwargs)


def _label(node: fx.Node, part: _Part) -> str:
    return f"{user_label(node)} {ColumnSlice(part.start, 1, part.count)}"


def _of_heads(graph: fx.Graph, node: fx.Node, given: fx.Node, part: _Part, is_b: bool) -> fx.Node:
    """Copies the columns of a part in every head side by side, by nodes that `packed_heads` recognises. The
    columns of B stay contiguous along K."""
    tensor = fake(given)
    heads = tensor.shape[-1] // part.period
    other = [tensor.shape[0]] if is_b else list(tensor.shape[:-1])
    axis = 0 if is_b else len(other)
    columns = call(graph, node, aten.permute.default, given, [1, 0]) if is_b else given
    shape = [heads, part.period, *other] if is_b else [*other, heads, part.period]
    columns = call(graph, node, aten.reshape.default, columns, shape)
    bounds = (axis + 1, part.start, part.start + part.count)
    blocks = call(graph, node, aten.slice.Tensor, columns, *bounds)
    if is_b:
        blocks = call(graph, node, aten.permute.default, blocks, [2, 0, 1])
    blocks.meta[LABEL] = f"{_label(given, part)} of every {part.period}"
    if not is_b:
        copied = call(graph, node, aten.reshape.default, blocks, [*other, heads * part.count])
        copied.meta[COLUMNS_OF_HEADS] = 1
        return copied
    copied = call(graph, node, aten.permute.default, blocks, [1, 2, 0])
    copied = call(graph, node, aten.reshape.default, copied, [heads * part.count, *other])
    copied = call(graph, node, aten.permute.default, copied, [1, 0])
    copied.meta[COLUMNS_OF_HEADS] = 3
    return copied


def _viewed(graph: fx.Graph, made: fx.Node, part: _Part, sizes: SymbolicSizes) -> fx.Node:
    """The view of a part as it was, of the product that has it alone."""
    shape = fake(part.node).shape
    ordered = [shape[axis] for axis in part.axes]
    result = call(graph, part.node, aten.reshape.default, made, [sizes.argument(size) for size in ordered])
    if list(part.axes) != sorted(part.axes):
        back = [part.axes.index(axis) for axis in range(len(part.axes))]
        result = call(graph, part.node, aten.permute.default, result, back)
    return result


def _evaluate_views(node: fx.Node) -> None:
    """Computes the values of a node's views again, whose strides are those of the part's product now."""
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if is_view(user):
                evaluate(user, fake(node))
                stack.append(user)
