"""Gathers of a few elements of each row, taken from products and not from what is computed of these.

`gather(f(y), -1, index)` of pointwise work becomes `f(gather(y, -1, index))`. Then nothing needs the work on
the whole plane, or a kernel keeps the elements that are gathered (`members/picked.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from cute_backend.fx_walk.graph.axes import is_reduction, picks_from_rows
from cute_backend.fx_walk.graph.mutation import Mutations
from cute_backend.fx_walk.graph.new_calls import call
from cute_backend.fx_walk.graph.static import fake, first_argument, known, same_sizes, target_name, tensor_of
from cute_backend.fx_walk.members.kinds import find_members
from cute_backend.fx_walk.preparation.broadcast import with_one_open
from cute_backend.fx_walk.products.anchors import is_anchor
from cute_backend.fx_walk.products.questions import after_products, base
from cute_backend.fx_walk.values.lower import is_pointwise, is_reshape
from cute_backend.fx_walk.values.rounded import mark_rounded

aten = torch.ops.aten

_NARROW = (torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.bool)
"""The dtypes of at most 16 bits that torch gathers on every device: it gathers no fp8 on a CPU."""


def take_from_products(graph: fx.Graph) -> None:
    """Moves gathers of one element of each row before the pointwise work and the views whose results they
    read, where these follow a product. A gather after a write in place stays, because it would read memory
    later. So does one behind rows' numbers that follow from the product by more than a reduction, such as the
    log of a sum: the plane is then written in any case, and its element can be read."""
    gathers = [node for node in graph.nodes if picks_from_rows(node)]
    if not gathers:
        return
    after, behind = after_products(graph.nodes), behind_products(graph.nodes)
    others = behind - find_members(graph.nodes).keys()
    order = {node: position for position, node in enumerate(graph.nodes)}
    written = Mutations(order).start
    for gather in gathers:
        source, is_written = first_argument(gather), written is not None and order[gather] > written
        able = source in after and not is_written and planes_before(source) is not None
        if able and is_narrow(gather, behind) and _reads_none_of(others, source):
            with graph.inserting_before(gather):
                gather.replace_all_uses_with(Elements(graph).of(source, gather.args[2]))
            graph.erase_node(gather)
    graph.eliminate_dead_code()


def behind_products(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes of a graph that depend on products, and these."""
    found: set[fx.Node] = set()
    for node in nodes:
        if is_anchor(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _reads_none_of(others: Collection[fx.Node], source: fx.Node) -> bool:
    """Whether the work before a gather reads no number of rows that is one of these nodes."""
    stack, seen = [source], set[fx.Node]()
    while stack:
        node = stack.pop()
        planes = [] if node in seen else planes_before(node) or []
        seen.add(node)
        stack += planes
        numbers = (each for each in node.all_input_nodes if planes and each not in planes)
        if any(each in others for each in numbers):
            return False
    return True


def is_narrow(
    gather: fx.Node, behind: Collection[fx.Node], instead: Mapping[fx.Node, fx.Node] | None = None
) -> bool:
    """Whether the elements that a gather needs are those of products, of planes of a narrow dtype, or of rows
    that are not `behind` products. `instead` is as for `Elements`."""
    return all(
        is_anchor(leaf) or (leaf not in behind if is_row(leaf) else fake(leaf).dtype in _NARROW)
        for leaf in _leaves(gather, instead or {})
    )


def is_row(node: fx.Node) -> bool:
    """Whether a tensor is one row, which all rows of a plane share."""
    shape = fake(node).shape
    return len(shape) > 0 and all(known(size == 1) for size in shape[:-1])


def _leaves(gather: fx.Node, instead: Mapping[fx.Node, fx.Node]) -> Iterator[fx.Node]:
    stack, seen = [first_argument(gather)], set[fx.Node]()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        planes = [instead[node]] if node in instead else planes_before(node)
        if planes is None:
            yield node
        else:
            stack += planes


def planes_before(node: fx.Node) -> list[fx.Node] | None:
    """The planes from which a gather can take elements instead of from `node`. For a pointwise op, these are
    the operands of its shape, and vectors along its rows, if the others are the same for a whole row; for a
    view with the same rows, its source.

    None if a gather has to read `node` itself, because it is another op, or is in memory in any case.
    """
    result = tensor_of(node)
    if result is None or any(not _is_work(user) for user in node.users):
        return None
    if is_reshape(node):
        shape = fake(first_argument(node)).shape
        keeps_rows = len(shape) > 1 and len(result.shape) > 1 and known(shape[-1] == result.shape[-1])
        return (
            [first_argument(node)]
            if keeps_rows and with_one_open(shape) and with_one_open(result.shape)
            else None
        )
    if not is_pointwise(node):
        return None
    planes = []
    for source in node.all_input_nodes:
        tensor = tensor_of(source)
        if tensor is None:
            return None
        if same_sizes(tensor.shape, result.shape) or (is_row(source) and known(tensor.numel() > 1)):
            planes.append(source)
        elif tensor.dim() and not (tensor.dim() <= result.dim() and known(tensor.shape[-1] == 1)):
            return None
    return planes or None


def _is_work(user: fx.Node) -> bool:
    is_gather = target_name(user) == "aten.gather.default"
    return is_gather or is_pointwise(user) or is_reduction(user) or is_reshape(user)


class Elements:
    """The elements that gathers take, computed from those of the planes before what they read.

    `instead` has nodes whose elements are those of another plane with the same rows, changed by `change`.
    """

    def __init__(
        self,
        graph: fx.Graph,
        instead: Mapping[fx.Node, fx.Node] | None = None,
        change: Callable[[fx.Node], fx.Node] = lambda element: element,
    ) -> None:
        self._graph, self._instead, self._change = graph, instead or {}, change

    def of(self, node: fx.Node, index: Any) -> fx.Node:
        """The elements at an index along the last axis of a node, as new calls at the graph's place of
        insertion."""
        made: dict[tuple[fx.Node, Any], fx.Node] = {}
        behind: dict[tuple[fx.Node, Any], Any] = {}
        """The index with which the planes before a node are read."""
        stack = [(node, index)]
        while stack:
            current, at = stack[-1]
            instead = self._instead.get(current)
            planes = [instead] if instead is not None else planes_before(current) or []
            if (current, at) not in behind:
                behind[current, at] = self._before_reshape(current, at, planes)
            of = {plane: (plane, behind[current, at]) for plane in planes}
            if missing := [each for each in of.values() if each not in made]:
                stack += missing
                continue
            taken = {plane: made[each] for plane, each in of.items()}
            made[current, at] = self._element(current, at, taken)
            stack.pop()
        return made[node, index]

    def _before_reshape(self, node: fx.Node, index: Any, planes: list[fx.Node]) -> Any:
        """The index of elements of the source of a reshape; that of the node's own for any other node."""
        if not planes or node in self._instead or not is_reshape(node):
            return index
        shape, behind = fake(index).shape, fake(planes[0]).shape[:-1]
        return call(self._graph, node, aten.reshape.default, index, with_one_open((*behind, shape[-1])))

    def _element(self, node: fx.Node, index: Any, taken: dict[fx.Node, fx.Node]) -> fx.Node:
        """The elements of a node, from those that are taken of the planes before it."""
        if node in self._instead:
            return self._change(taken[self._instead[node]])
        if not taken:
            if not same_sizes(fake(node).shape[:-1], fake(index).shape[:-1]):
                row = call(self._graph, node, aten.reshape.default, node, [-1])
                return call(self._graph, node, aten.index.Tensor, row, [index])
            mark_rounded(base(node))
            return call(self._graph, node, aten.gather.default, node, -1, index)
        if is_reshape(node):
            (source,) = taken.values()
            return call(self._graph, node, aten.reshape.default, source, with_one_open(fake(index).shape))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: taken.get(source, source))
        return call(self._graph, node, node.target, *args, **kwargs)
