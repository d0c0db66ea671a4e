"""Products of which a program reads some rows: the rows are taken before the product.

Of `F.linear(x, weight)[:, -1]`, as of a language model's head, one row of each text is read, and all others
are computed and written for nothing. Inductor takes the rows after the product, and a kernel computes all
rows. If nothing but a slice reads a product, or the pointwise work on one, the slices of its operands are
multiplied instead.

A product stays whole if what reads the slice is no work, if something else reads the product, or if the rows
are no matrix. `why_whole` says which of these it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from operator import getitem
from typing import Any

import torch
from torch import fx

from cute_backend.fx_walk.graph.axes import is_reduction
from cute_backend.fx_walk.graph.mutation import Mutations
from cute_backend.fx_walk.graph.new_calls import call, evaluate
from cute_backend.fx_walk.graph.static import (
    arguments,
    collapsed_stride,
    fake,
    known,
    target_name,
    tensor_of,
)
from cute_backend.fx_walk.preparation.broadcast import with_one_open
from cute_backend.fx_walk.products.questions import after_products
from cute_backend.fx_walk.refusals.reasons import program_name
from cute_backend.fx_walk.values.lower import is_pointwise

aten = torch.ops.aten

_SLICES = ("aten.select.int", "aten.slice.Tensor")
_RESHAPES = ("aten.reshape.default", "aten.view.default", "aten._unsafe_view.default")
_PERMUTE = "aten.permute.default"
_VIEWS = (
    *_SLICES,
    *_RESHAPES,
    _PERMUTE,
    "aten.expand.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.unsqueeze.default",
    "aten.split.Tensor",
    "aten.split_with_sizes.default",
    "aten.unbind.int",
)
"""Views whose elements depend on the shape alone, not on the strides, which a product of fewer rows
changes."""
_FACTORS = {"aten.mm.default": "self", "aten.addmm.default": "mat1"}
"""The products that are moved, and the name of A in each."""
_SCALES = ("beta", "alpha")
"""The arguments of `addmm` that are given by name."""

COPIED_FOR = 8
"""Rows that have no single stride in A are copied there if the product has at least this many times as many
columns as A, as a language model's head has: then the copy moves few bytes beside what is left out."""

Axes = dict[fx.Node, int]
"""Nodes, each with the axis of its result that is sliced."""


class _Whole(Exception):
    """Raised if a product, or the work on one, is computed for all rows. The message is the reason."""


def slice_before_products(graph: fx.Graph) -> None:
    """Moves every slice of rows before the product whose rows it takes, if all that reads the slice, or views
    of it, is pointwise work or reductions, and nothing else reads the product or the work in between.

    The product and that work are then computed where the slice was, so no write in place may lie between.
    """
    while _move_one(graph):
        pass


def _move_one(graph: fx.Graph) -> bool:
    """Moves the first slice that can be moved. Returns whether there is one."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    mutations = Mutations(order)
    for node in order:
        if target_name(node) not in _SLICES:
            continue
        try:
            members = _moved(node, order, mutations)
        except _Whole:
            continue
        with graph.inserting_before(node):
            moved = _Slicing(graph, node).of_all(members, order)
        node.replace_all_uses_with(moved)
        for view in _views_of(moved):
            evaluate(view, fake(moved))
        graph.erase_node(node)
        for member in sorted(members, key=order.__getitem__, reverse=True):
            graph.erase_node(member)
        return True
    return False


def why_whole(cut: fx.Node, order: dict[fx.Node, int], mutations: Mutations) -> str:
    """The reason why the product behind a view that takes some of its rows is computed for all of them."""
    try:
        _moved(cut, order, mutations)
    except _Whole as whole:
        return str(whole)
    return "they are taken after other changes to the graph"


def _moved(cut: fx.Node, order: dict[fx.Node, int], mutations: Mutations) -> Axes:
    """The nodes that a slice is moved before, among them a product. Raises _Whole if it stays."""
    if target_name(cut) not in _SLICES:
        raise _Whole(f"{target_name(cut)} gives several parts of the rows")
    readers = [*_readers_of(cut)]
    if not readers:
        raise _Whole("nothing reads them")
    for reader in readers:
        if reader.op == "output":
            raise _Whole("the program returns them")
        if not (is_pointwise(reader) or is_reduction(reader)):
            raise _Whole(f"{program_name(reader)} reads them, which is neither pointwise nor a reduction")
    members = _computed_for(cut, order)
    between = mutations.first(min(order[member] for member in members), order[cut])
    if between is not None:
        raise _Whole(f"{program_name(between.node)} writes in place between the product and the slice")
    return members


def _views_of(node: fx.Node) -> Iterator[fx.Node]:
    """The views of a value, and of those, in the order in which they are computed."""
    stack = [*reversed(node.users)]
    while stack:
        user = stack.pop()
        if user.target is getitem or target_name(user) in _VIEWS:
            yield user
            stack += reversed(user.users)


def _readers_of(node: fx.Node) -> Iterator[fx.Node]:
    """The users of a value and of its views that are no such views."""
    views = [*_views_of(node)]
    yield from (user for each in (node, *views) for user in each.users if user not in views)


def _computed_for(cut: fx.Node, order: dict[fx.Node, int]) -> Axes:
    """The products, and the pointwise work and views behind them, that nothing but a slice
    needs. Raises _Whole if there is no product among them."""
    source = arguments(cut)["self"]
    wanted: Axes = {source: arguments(cut)["dim"] % fake(source).dim()}
    members: Axes = {}
    whole: dict[fx.Node, str] = {}
    queue = [-order[source]]
    nodes = {order[source]: source}
    while queue:
        place = -heappop(queue)
        if place not in nodes:
            continue  # it was met before, as an operand of two ops
        node = nodes.pop(place)
        try:
            sources = _sources_for(node, wanted, members, cut)
        except _Whole as reason:
            whole[node] = str(reason)
            continue
        members[node] = wanted[node]
        for each, axis in sources.items():
            wanted[each] = axis
            if each in order:
                nodes[order[each]] = each
                heappush(queue, -order[each])
    if not any(target_name(member) in _FACTORS for member in members):
        after = after_products(order)
        raise _Whole(next((why for node, why in whole.items() if node in after), "it follows no product"))
    return members


def _sources_for(node: fx.Node, wanted: Axes, members: Axes, cut: fx.Node) -> Axes:
    """The operands of a node of which its slice needs a slice. Raises _Whole if the slice of the node can't
    be computed from slices, or if something else needs the node."""
    for user in node.users:
        if user is not cut and user not in members:
            what = "the program returns" if user.op == "output" else f"{program_name(user)} reads"
            raise _Whole(f"{what} other rows, too")
    sources = _sources(node, wanted[node], cut)
    if any(wanted.get(each, axis) != axis for each, axis in sources.items()):
        raise _Whole(f"{program_name(node)} combines them with rows of another axis")
    return sources


def _sources(node: fx.Node, axis: int, cut: fx.Node) -> Axes:
    """The operands of which a slice along this axis of a node's result needs a slice. Raises _Whole for a
    node that can't be computed in slices."""
    if target_name(node) in _FACTORS:
        if not any(target_name(user) in _RESHAPES for user in node.users):
            _check_rows(node, [], axis, cut)
        return {}
    if target_name(node) in _RESHAPES:
        product = arguments(node)["self"]
        if target_name(product) not in _FACTORS:
            raise _Whole(f"{target_name(node)} gives pointwise work another shape")
        if len(product.users) > 1:
            raise _Whole("something else reads the product, too")
        if not known(fake(product).shape[-1] == fake(node).shape[-1]):
            raise _Whole(f"{target_name(node)} divides the product's columns")
        _check_rows(product, _lead(node), axis, cut)
        return {product: 0}
    if target_name(node) in (_PERMUTE, *_SLICES):
        return {arguments(node)["self"]: _source_axis(node, axis)}
    if not is_pointwise(node) or tensor_of(node) is None or has_effects(node):
        raise _Whole(f"{target_name(node)} is computed for all rows")
    rank, found = fake(node).dim(), {}
    for operand in node.all_input_nodes:
        tensor = tensor_of(operand)
        if tensor is None:
            raise _Whole(f"{program_name(node)} reads a number that is known only at run time")
        if tensor.dim() > rank - axis - 1 and tensor.dim():
            found[operand] = axis - rank + tensor.dim()
    return {operand: place for operand, place in found.items() if place >= 0}


def _source_axis(view: fx.Node, axis: int) -> int:
    """The axis of the source of a permute, or of a slice along another axis, that becomes this axis."""
    if target_name(view) == _PERMUTE:
        return _dims(view)[axis]
    dim = arguments(view)["dim"] % fake(arguments(view)["self"]).dim()
    if target_name(view) == "aten.select.int":
        return axis + (axis >= dim)
    if axis == dim:
        raise _Whole("they are taken from an axis twice")
    return axis


def _dims(permute: fx.Node) -> list[int]:
    rank = fake(permute).dim()
    return [dim % rank for dim in arguments(permute)["dims"]]


def has_effects(node: fx.Node) -> bool:
    """Whether an op writes in place, or draws numbers, which are others for fewer elements."""
    op = node.target
    assert isinstance(op, torch._ops.OpOverload)
    return op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags


def _lead(reshape: fx.Node) -> list[Any]:
    """The leading axes that a reshape gives to rows, as it names them: numbers, nodes, or -1."""
    return list(list(arguments(reshape).values())[1])[:-1]


def _check_rows(product: fx.Node, lead: Sequence[Any], axis: int, cut: fx.Node) -> None:
    """Raises _Whole if a product of rows with these leading axes, if there are several, can't be computed for
    a slice of one of them: the slice is one of columns, the rows that are left have no single stride in A, or
    its addend has rows."""
    args = arguments(product)
    a = fake(args[_FACTORS[target_name(product)]])
    addend = fake(args["self"]) if target_name(product) == "aten.addmm.default" else None
    if axis >= max(len(lead), 1):
        raise _Whole("it takes columns")
    if not (addend is None or addend.dim() < 2 or known(addend.shape[0] == 1)):
        raise _Whole("the addend of the product has rows, too")
    with a.fake_mode:  # type: ignore[attr-defined]
        rows = _sliced(cut, axis)(a.view([*map(_value, lead), a.shape[1]]) if lead else a)
    left, columns = rows.shape[:-1], fake(product).shape[-1]
    is_copied = collapsed_stride(left, rows.stride()[:-1]) is None
    if is_copied and not known(columns >= COPIED_FOR * a.shape[1]):
        raise _Whole("they have no single stride in A")
    if with_one_open(rows.shape) is None:
        raise _Whole("several of their axes have sizes that are known only at run time")


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _sliced(cut: fx.Node, axis: int) -> Callable[[Any], Any]:
    """The function that takes the slice of a fake tensor that `cut` takes of its own, along another axis."""
    args = list(map(_value, list(arguments(cut).values())[2:]))
    return lambda tensor: cut.target(tensor, axis, *args)  # type: ignore[operator]


class _Slicing:
    """Calls that compute the slice that `cut` takes of a result, from slices of operands."""

    def __init__(self, graph: fx.Graph, cut: fx.Node) -> None:
        self.graph, self.cut = graph, cut
        self.rest = list(arguments(cut).values())[2:]
        self.made: dict[tuple[fx.Node, int], fx.Node] = {}

    def of_all(self, members: Axes, order: dict[fx.Node, int]) -> fx.Node:
        """Makes the slices of the results of all members, and returns that of the last one."""
        for node in sorted(members, key=order.__getitem__):
            if target_name(node) in _RESHAPES:
                result = self._product(arguments(node)["self"], _lead(node), members[node])
            elif target_name(node) in _FACTORS:
                if any(user in members and target_name(user) in _RESHAPES for user in node.users):
                    continue  # it is made for its reshape, whose axes are sliced
                result = self._product(node, [], members[node])
            elif target_name(node) in (_PERMUTE, *_SLICES):
                result = self._viewed(node, members[node])
            else:
                result = self._pointwise(node, members[node])
            self.made[node, members[node]] = result
        source = arguments(self.cut)["self"]
        return self.made[source, members[source]]

    def _pointwise(self, node: fx.Node, axis: int) -> fx.Node:
        sources = _sources(node, axis, self.cut)

        def operand(each: fx.Node) -> fx.Node:
            return self._slice(each, sources[each]) if each in sources else each

        args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
        return call(self.graph, node, node.target, *args, **kwargs)

    def _viewed(self, view: fx.Node, axis: int) -> fx.Node:
        """A permute, or a slice along another axis, of the slice of its source."""
        source, of = arguments(view)["self"], _source_axis(view, axis)
        is_select = target_name(self.cut) == "aten.select.int"

        def left(dims: Sequence[int]) -> list[int]:
            return [dim - (dim > of) if is_select else dim for dim in dims if not is_select or dim != of]

        if target_name(view) == _PERMUTE:
            return call(self.graph, view, view.target, self._slice(source, of), left(_dims(view)))
        _, dim, *rest = arguments(view).values()
        dims = left([dim % fake(source).dim()])
        return call(self.graph, view, view.target, self._slice(source, of), *dims, *rest)

    def _slice(self, operand: fx.Node, axis: int) -> fx.Node:
        """The slice of an operand, which is the same for all if it is broadcast along the axis."""
        if (operand, axis) not in self.made:
            repeats = known(fake(operand).shape[axis] == 1)
            if repeats and target_name(self.cut) == "aten.slice.Tensor":
                return operand
            rest = [0] if repeats else self.rest
            self.made[operand, axis] = call(self.graph, operand, self.cut.target, operand, axis, *rest)
        return self.made[operand, axis]

    def _product(self, product: fx.Node, lead: Sequence[Any], axis: int) -> fx.Node:
        args = arguments(product)
        name = _FACTORS[target_name(product)]
        k = self._depth(args[name])
        rows = args[name]
        if lead:
            rows = call(self.graph, product, aten.reshape.default, rows, [*lead, k])
        rows = call(self.graph, product, self.cut.target, rows, axis, *self.rest)
        left = fake(rows).shape[:-1]
        if len(left) != 1:
            rows = call(self.graph, product, aten.reshape.default, rows, [-1, k] if left else [1, k])
        factors = [rows if key == name else value for key, value in args.items() if key not in _SCALES]
        scales = {key: args[key] for key in _SCALES if key in args}
        result = call(self.graph, product, product.target, *factors, **scales)
        if len(left) != 1:
            shape = with_one_open((*left, fake(result).shape[-1]))
            result = call(self.graph, product, aten.reshape.default, result, shape)
        return result

    def _depth(self, a: fx.Node) -> Any:
        """K, as an argument of a call: a number, or a node if it is symbolic."""
        k = fake(a).shape[1]
        return k if isinstance(k, int) else call(self.graph, a, aten.sym_size.int, a, 1)
