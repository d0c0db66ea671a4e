"""Products of which a program reads some rows: the rows are taken before the product.

Of `F.linear(x, weight)[:, -1]`, as of a language model's head, one row of each text is read, and all others
are computed and written for nothing. Inductor takes the rows after the product, and a kernel computes all
rows. If nothing but a slice reads a product, or the pointwise work on one, the slices of its operands are
multiplied instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

import torch
from torch import fx

from cute_backend.fx_walk.broadcast import with_one_open
from cute_backend.fx_walk.lower import is_pointwise
from cute_backend.fx_walk.mutation import Mutations
from cute_backend.fx_walk.questions import is_reduction
from cute_backend.fx_walk.static import (
    arguments,
    collapsed_stride,
    fake,
    known,
    target_name,
    tensor_of,
)

aten = torch.ops.aten

_SLICES = ("aten.select.int", "aten.slice.Tensor")
_RESHAPES = ("aten.reshape.default", "aten.view.default", "aten._unsafe_view.default")
_FACTORS = {"aten.mm.default": "self", "aten.addmm.default": "mat1"}
"""The products that are moved, and the name of A in each."""
_SCALES = ("beta", "alpha")
"""The arguments of `addmm` that are given by name."""

Axes = dict[fx.Node, int]
"""Nodes, each with the axis of its result that is sliced."""


def slice_before_products(graph: fx.Graph) -> None:
    """Moves every slice of rows before the product whose rows it takes, if all that reads the slice is
    pointwise work or reductions and nothing else reads the product or the work in between.

    The product and that work are then computed where the slice was, so no write in place may lie between.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    mutations = Mutations(order)
    for node in order:
        if target_name(node) in _SLICES and node.users and all(map(_is_work, node.users)):
            members = _computed_for(node, order)
            if not any(target_name(member) in _FACTORS for member in members):
                continue
            if mutations.first(min(order[member] for member in members), order[node]) is None:
                with graph.inserting_before(node):
                    node.replace_all_uses_with(_Slicing(graph, node).of_all(members, order))
                graph.erase_node(node)
                for member in sorted(members, key=order.__getitem__, reverse=True):
                    graph.erase_node(member)


def _is_work(node: fx.Node) -> bool:
    return is_pointwise(node) or is_reduction(node)


def _computed_for(cut: fx.Node, order: dict[fx.Node, int]) -> Axes:
    """The products, and the pointwise work and reshapes behind them, that nothing but a slice needs."""
    source = arguments(cut)["self"]
    wanted: Axes = {source: arguments(cut)["dim"] % fake(source).dim()}
    members: Axes = {}
    queue = [-order[source]]
    nodes = {order[source]: source}
    while queue:
        place = -heappop(queue)
        if place not in nodes:
            continue  # it was met before, as an operand of two ops
        node = nodes.pop(place)
        if not all(user is cut or user in members for user in node.users):
            continue
        sources = _sources(node, wanted[node], cut)
        if sources is None or any(wanted.get(each, axis) != axis for each, axis in sources.items()):
            continue
        members[node] = wanted[node]
        for each, axis in sources.items():
            wanted[each] = axis
            if each in order:
                nodes[order[each]] = each
                heappush(queue, -order[each])
    return members


def _sources(node: fx.Node, axis: int, cut: fx.Node) -> Axes | None:
    """The operands of which a slice along this axis of a node's result needs a slice; None for a node that
    can't be computed in slices."""
    if target_name(node) in _FACTORS:
        is_reshaped = any(target_name(user) in _RESHAPES for user in node.users)
        return {} if is_reshaped or _takes_rows(node, [], axis, cut) else None
    if target_name(node) in _RESHAPES:
        product = arguments(node)["self"]
        if target_name(product) not in _FACTORS or len(product.users) > 1:
            return None
        keeps_columns = known(fake(product).shape[-1] == fake(node).shape[-1])
        return {product: 0} if keeps_columns and _takes_rows(product, _lead(node), axis, cut) else None
    if not is_pointwise(node) or tensor_of(node) is None or has_effects(node):
        return None
    rank, found = fake(node).dim(), {}
    for operand in node.all_input_nodes:
        tensor = tensor_of(operand)
        if tensor is None:
            return None
        if tensor.dim() > rank - axis - 1 and tensor.dim():
            found[operand] = axis - rank + tensor.dim()
    return {operand: place for operand, place in found.items() if place >= 0}


def has_effects(node: fx.Node) -> bool:
    """Whether an op writes in place, or draws numbers, which are others for fewer elements."""
    op = node.target
    assert isinstance(op, torch._ops.OpOverload)
    return op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags


def _lead(reshape: fx.Node) -> list[Any]:
    """The leading axes that a reshape gives to rows, as it names them: numbers, nodes, or -1."""
    return list(list(arguments(reshape).values())[1])[:-1]


def _takes_rows(product: fx.Node, lead: Sequence[Any], axis: int, cut: fx.Node) -> bool:
    """Whether a product of rows with these leading axes, if there are several, can be computed for a slice of
    one of them: the rows that are left have one stride in A, and its addend is the same for all."""
    args = arguments(product)
    a = fake(args[_FACTORS[target_name(product)]])
    addend = fake(args["self"]) if target_name(product) == "aten.addmm.default" else None
    if axis >= max(len(lead), 1) or not (addend is None or addend.dim() < 2 or known(addend.shape[0] == 1)):
        return False
    with a.fake_mode:  # type: ignore[attr-defined]
        rows = _sliced(cut, axis)(a.view([*map(_value, lead), a.shape[1]]) if lead else a)
    left = rows.shape[:-1]
    return collapsed_stride(left, rows.stride()[:-1]) is not None and with_one_open(rows.shape) is not None


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
            else:
                result = self._pointwise(node, members[node])
            self.made[node, members[node]] = result
        source = arguments(self.cut)["self"]
        return self.made[source, members[source]]

    def _pointwise(self, node: fx.Node, axis: int) -> fx.Node:
        sources = _sources(node, axis, self.cut) or {}

        def operand(each: fx.Node) -> fx.Node:
            return self._slice(each, sources[each]) if each in sources else each

        args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
        return self._call(node, node.target, *args, **kwargs)

    def _slice(self, operand: fx.Node, axis: int) -> fx.Node:
        """The slice of an operand, which is the same for all if it is broadcast along the axis."""
        if (operand, axis) not in self.made:
            repeats = known(fake(operand).shape[axis] == 1)
            if repeats and target_name(self.cut) == "aten.slice.Tensor":
                return operand
            rest = [0] if repeats else self.rest
            self.made[operand, axis] = self._call(operand, self.cut.target, operand, axis, *rest)
        return self.made[operand, axis]

    def _product(self, product: fx.Node, lead: Sequence[Any], axis: int) -> fx.Node:
        args = arguments(product)
        name = _FACTORS[target_name(product)]
        k = fake(args[name]).shape[1]
        rows = args[name]
        if lead:
            rows = self._call(product, aten.reshape.default, rows, [*lead, k])
        rows = self._call(product, self.cut.target, rows, axis, *self.rest)
        left = fake(rows).shape[:-1]
        if len(left) != 1:
            rows = self._call(product, aten.reshape.default, rows, [-1, k] if left else [1, k])
        factors = [rows if key == name else value for key, value in args.items() if key not in _SCALES]
        scales = {key: args[key] for key in _SCALES if key in args}
        result = self._call(product, product.target, *factors, **scales)
        if len(left) != 1:
            shape = with_one_open((*left, fake(result).shape[-1]))
            result = self._call(product, aten.reshape.default, result, shape)
        return result

    def _call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        made.meta.update(
            {key: like.meta[key] for key in ("stack_trace", "nn_module_stack") if key in like.meta}
        )
        values, named = fx.map_arg((made.args, made.kwargs), lambda node: node.meta["val"])
        with fake(like).fake_mode:  # type: ignore[attr-defined]
            made.meta["val"] = target(*values, **named)
        return made
