"""Work on repeated heads, moved in front of the repetition.

Falcon repeats the key of a group for each query of it, and rotates the copies. They are equal, so the key is
rotated once, by the kernel of its product, and then repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

import torch
from torch import fx

from cute_backend.fx_walk.graph.mutation import is_view
from cute_backend.fx_walk.graph.new_calls import call
from cute_backend.fx_walk.graph.sizes import SymbolicSizes
from cute_backend.fx_walk.graph.static import arguments, fake, known, same_sizes, target_name, tensor_of
from cute_backend.fx_walk.preparation.row_slices import has_effects
from cute_backend.fx_walk.values.lower import is_pointwise

aten = torch.ops.aten

_KEEPS_AXIS = ("aten.cat.default", "aten.slice.Tensor")
"""Calls whose result has the axes of their tensors, which work along the axis `dim`."""


@dataclass(frozen=True)
class _Once:
    """A value before its elements are repeated: those along `axis`, `times` each. `is_work` says whether it
    is computed by a pointwise op."""

    node: fx.Node
    axis: int
    times: int
    is_work: bool = False


def repeat_after_work(graph: fx.Graph, value: fx.Node, sizes: SymbolicSizes) -> None:
    """Computes the pointwise work on repetitions of `value`, or of views of it, before they are repeated.

    A repetition is an `expand` of one axis. The work may move and join axes, and may take slices and join
    them again along other axes, as in a rotation.
    """
    for node in list(_expanded(value)):
        _Moved(graph, sizes).behind(node)


def _expanded(value: fx.Node) -> Iterator[fx.Node]:
    stack = [value]
    while stack:
        for user in stack.pop().users:
            if target_name(user) == "aten.expand.default":
                yield user
            elif is_view(user):
                stack.append(user)


class _Moved:
    """The work behind one repetition, done before it."""

    def __init__(self, graph: fx.Graph, sizes: SymbolicSizes) -> None:
        self.graph = graph
        self.sizes = sizes
        self.once: dict[fx.Node, _Once] = {}

    def behind(self, expand: fx.Node) -> None:
        """Replaces the results of all work behind an `expand`."""
        source = arguments(expand)["self"]
        before, after = fake(source).shape, fake(expand).shape
        if len(before) != len(after):
            return
        axes = [axis for axis in range(len(before)) if not known(before[axis] == after[axis])]
        if len(axes) != 1 or not isinstance(after[axes[0]], int):
            return
        self.once[expand] = _Once(source, axes[0], after[axes[0]])
        order = {node: place for place, node in enumerate(self.graph.nodes)}
        behind = {order[user]: user for user in expand.users}
        queue = sorted(behind)
        while queue:
            node = behind[heappop(queue)]
            if not self._add(node):
                continue
            for user in node.users:
                if order[user] not in behind:
                    behind[order[user]] = user
                    heappush(queue, order[user])
        for node, once in self.once.items():
            others = [user for user in node.users if user not in self.once]
            if once.is_work and others:
                repeated = self._repeated(node, once)
                for user in others:
                    user.replace_input_with(node, repeated)

    def _add(self, node: fx.Node) -> bool:
        """Computes a node before the repetition. Returns whether it could."""
        place = self._place(node)
        if place is None:
            return False
        axis, times = place
        with self.graph.inserting_before(node):
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._narrow)
            if target_name(node) == "aten.reshape.default":
                shape = [self.sizes.argument(size) for size in fake(node).shape]
                shape[axis] = fake(node).shape[axis] // times
                args, kwargs = (args[0], shape), {}
            made = call(self.graph, node, node.target, *args, **kwargs)
        self.once[node] = _Once(made, axis, times, self._is_work(node))
        return True

    def _narrow(self, node: fx.Node) -> fx.Node:
        return self.once[node].node if node in self.once else node

    def _is_work(self, node: fx.Node) -> bool:
        is_copy = target_name(node) == "aten.clone.default"
        before = any(self.once[each].is_work for each in node.all_input_nodes if each in self.once)
        return before or (is_pointwise(node) and not is_copy)

    def _place(self, node: fx.Node) -> tuple[int, int] | None:
        """The axis of a node's result whose elements are repeated, and how often. None if they are not, or
        the call is not one that can be done before."""
        tensor = tensor_of(node)
        found = {self.once[each] for each in node.all_input_nodes if each in self.once}
        places = {(fake(once.node).dim() - once.axis, once.times) for once in found}
        if tensor is None or len(places) != 1:
            return None
        ((behind, times),) = places
        axis = tensor.dim() - behind
        name = target_name(node)
        if is_pointwise(node):
            others = [tensor_of(each) for each in node.all_input_nodes if each not in self.once]
            alike = all(
                each is not None and (each.dim() < behind or known(each.shape[-behind] == 1))
                for each in others
            )
            return (axis, times) if alike and not has_effects(node) else None
        if name in _KEEPS_AXIS:
            whole = all(each in self.once for each in node.all_input_nodes)
            return (axis, times) if whole and arguments(node)["dim"] % tensor.dim() != axis else None
        if name == "aten.permute.default":
            dims = [dim % tensor.dim() for dim in arguments(node)["dims"]]
            return dims.index(axis), times
        if name == "aten.reshape.default":
            return self._joined(node, times)
        return None

    def _joined(self, node: fx.Node, times: int) -> tuple[int, int] | None:
        """The place of repetitions after a reshape that joins their axis with the one before."""
        source = arguments(node)["self"]
        before, after, axis = fake(source).shape, fake(node).shape, self.once[source].axis
        is_alone = known(fake(self.once[source].node).shape[axis] == 1)
        if not axis or not is_alone or not isinstance(before[axis - 1], int):
            return None
        joined = [*before[: axis - 1], before[axis - 1] * before[axis], *before[axis + 1 :]]
        return (axis - 1, times) if same_sizes(after, joined) else None

    def _repeated(self, node: fx.Node, once: _Once) -> fx.Node:
        """The value of a node, from that before the repetition."""
        shape = fake(node).shape
        expanded = [once.times if axis == once.axis + 1 else -1 for axis in range(len(shape) + 1)]
        with self.graph.inserting_before(node):
            result = call(self.graph, node, aten.unsqueeze.default, once.node, once.axis + 1)
            result = call(self.graph, node, aten.expand.default, result, expanded)
            result = call(self.graph, node, aten.clone.default, result, memory_format=torch.contiguous_format)
            return call(self.graph, node, aten.reshape.default, result, [*map(self.sizes.argument, shape)])
