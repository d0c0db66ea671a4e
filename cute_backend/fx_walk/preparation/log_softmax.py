"""Cross entropy: the log of a softmax after a product, of which few elements are read.

torch decomposes it into passes over the rows, each of which reads the result of the one before it:

    shifted = y - amax(y)
    gather(shifted - log(sum(exp(shifted))), -1, target)

A kernel has no whole row before its end. Written as `gather(y) - logsumexp(y)`, the loss has one reduction of
the rows, which the product's kernel computes and writes, and reads a few elements of the product.

The logsumexp is that of the elements in memory, which are rounded to 16 bits, because the backward pass reads
those: a row's softmax, `exp(y - logsumexp)`, adds up to 1 only if both use the same `y`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cute_backend.fx_walk.graph.axes import is_reduction
from cute_backend.fx_walk.graph.mutation import Mutations
from cute_backend.fx_walk.graph.spelled import SpelledOtherwise, operands
from cute_backend.fx_walk.graph.static import fake, known, same_sizes, target_name, tensor_of
from cute_backend.fx_walk.preparation.broadcast import with_one_open
from cute_backend.fx_walk.products.anchors import is_anchor
from cute_backend.fx_walk.products.questions import after_products, base
from cute_backend.fx_walk.values.lower import is_pointwise, is_reshape
from cute_backend.fx_walk.values.rounded import mark_rounded

aten = torch.ops.aten


def separate_logsumexps(graph: fx.Graph) -> None:
    """Rewrites the log of a softmax after a product, if only gathers read it: each gathered element becomes
    the product's element minus the logsumexp of its row.

    Other readers of the log of the sum, such as the backward pass, read the logsumexp minus the largest
    element. An infinite element makes its row NaN, as in a softmax. A gather after a write in place stays
    unchanged, because it would read memory later than the softmax did.
    """
    logs = [node for node in graph.nodes if node.op == "call_function" and node.target is aten.log.default]
    if not logs:
        return
    after = after_products(graph.nodes)
    order = {node: position for position, node in enumerate(graph.nodes)}
    written = Mutations(order).start
    for log in logs:
        try:
            found = _read(log)
        except SpelledOtherwise:
            continue
        is_written = written is not None and any(order[gather] > written for gather in found.gathers)
        if (
            found.gathers
            and found.rows in after
            and not is_written
            and all(map(found.is_narrow, found.gathers))
        ):
            _Writer(graph, found).write()
    graph.eliminate_dead_code()


@dataclass(frozen=True)
class _LogSoftmax:
    """The steps of the log of a softmax of `rows`, and the gathers from its `result`, empty if something
    else reads it."""

    rows: fx.Node
    largest: fx.Node
    shifted: fx.Node
    log: fx.Node
    result: fx.Node
    gathers: tuple[fx.Node, ...]

    def is_narrow(self, gather: fx.Node) -> bool:
        """Whether a gather reads only products, or values of at most 16 bits per element."""
        return all(is_anchor(leaf) or fake(leaf).element_size() <= 2 for leaf in self._leaves(gather))

    def _leaves(self, gather: fx.Node) -> Iterator[fx.Node]:
        stack, seen = [first(gather)], set[fx.Node]()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            planes = [self.rows] if node is self.result else planes_before(node)
            if planes is None:
                yield node
            else:
                stack += planes


def _read(log: fx.Node) -> _LogSoftmax:
    """The log of a softmax over the last axis. Raises SpelledOtherwise."""
    (total,) = operands(log, "aten.log.default", 1)
    exponential, dims, keeps = operands(total, "aten.sum.dim_IntList", 3)
    (shifted,) = operands(exponential, "aten.exp.default", 1)
    difference = _unscaled(shifted)
    rows, largest = operands(difference, "aten.sub.Tensor", 2)
    source, dims_of_largest, keeps_largest = operands(largest, "aten.amax.default", 3)
    rank = fake(rows).dim()
    results = [user for user in log.users if target_name(user) == "aten.sub.Tensor"]
    results = [user for user in results if operands(user, "aten.sub.Tensor", 2) == [shifted, log]]
    if not (
        source is rows
        and keeps
        and keeps_largest
        and rank > 1
        and all([axis % rank for axis in axes] == [rank - 1] for axes in (dims, dims_of_largest))
        and len(results) == 1
        and set(shifted.users) == {exponential, *results}
        and len(total.users) == len(exponential.users) == 1
    ):
        raise SpelledOtherwise
    return _LogSoftmax(rows, largest, shifted, log, results[0], tuple(_gathers(results[0])))


def _unscaled(shifted: fx.Node) -> fx.Node:
    """The difference of rows and their largest elements.

    Inductor writes `c * t - amax(c * t)` as `c * (t - amax(t))` if all elements are finite, and `t / c`
    likewise, and selects one of the two. They are equal except for rounding.
    """
    if target_name(shifted) != "aten.where.self":
        return shifted
    _, scaled, plain = operands(shifted, "aten.where.self", 3)
    rows, _ = operands(plain, "aten.sub.Tensor", 2)
    scales = target_name(scaled)
    if scales not in ("aten.mul.Tensor", "aten.div.Tensor"):
        raise SpelledOtherwise
    source, scale = operands(rows, scales, 2)
    difference, magnitude = operands(scaled, scales, 2)
    signed, largest = operands(difference, "aten.sub.Tensor", 2)
    of, sign = operands(signed, "aten.mul.Tensor", 2)
    numbers = all(isinstance(each, (int, float)) for each in (scale, magnitude, sign))
    if not (
        numbers
        and of is source
        and abs(sign) == 1
        and sign * scale == magnitude
        and operands(largest, "aten.amax.default", 3)[0] is signed
    ):
        raise SpelledOtherwise
    return plain


def _gathers(result: fx.Node) -> Iterator[fx.Node]:
    """The gathers along the last axis, one at least for each row, from a value, or from pointwise results or
    views of it; nothing if anything else reads one of them."""
    found, stack = [], [result]
    while stack:
        node = stack.pop()
        for user in node.users:
            if target_name(user) == "aten.gather.default" and _is_along_rows(user):
                found.append(user)
            elif planes_before(user) == [node]:
                stack.append(user)
            else:
                return
    yield from found


def _is_along_rows(gather: fx.Node) -> bool:
    source, axis, index = fake(first(gather)), gather.args[1], fake(gather.args[2])  # type: ignore[arg-type]
    return axis in (-1, source.dim() - 1) and same_sizes(source.shape[:-1], index.shape[:-1])


def first(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def planes_before(node: fx.Node) -> list[fx.Node] | None:
    """The planes from which a gather can take elements instead of from `node`. For a pointwise op, these are
    the operands of its shape, if the others are the same for a whole row; for a view with the same rows, its
    source.

    None if a gather has to read `node` itself, because it is another op, or is in memory in any case.
    """
    result = tensor_of(node)
    if result is None or any(not _is_work(user) for user in node.users):
        return None
    if is_reshape(node):
        shape = fake(first(node)).shape
        keeps_rows = len(shape) > 1 and len(result.shape) > 1 and known(shape[-1] == result.shape[-1])
        return [first(node)] if keeps_rows and with_one_open(shape) and with_one_open(result.shape) else None
    if not is_pointwise(node):
        return None
    planes = []
    for source in node.all_input_nodes:
        tensor = tensor_of(source)
        if tensor is None:
            return None
        if same_sizes(tensor.shape, result.shape):
            planes.append(source)
        elif tensor.dim() and not (tensor.dim() <= result.dim() and known(tensor.shape[-1] == 1)):
            return None
    return planes or None


def _is_work(user: fx.Node) -> bool:
    is_gather = target_name(user) == "aten.gather.default"
    return is_gather or is_pointwise(user) or is_reduction(user) or is_reshape(user)


@dataclass
class _Writer:
    graph: fx.Graph
    found: _LogSoftmax

    def write(self) -> None:
        found = self.found
        with self.graph.inserting_after(found.log):
            sums = self._call(found.log, aten.add.Tensor, found.log, found.largest)
        with self.graph.inserting_after(sums):
            infinite = self._call(found.log, aten.mul.Tensor, sums, 0)
        with self.graph.inserting_after(infinite):
            logsumexp = self._call(found.log, aten.add.Tensor, sums, infinite)
        for gather in found.gathers:
            with self.graph.inserting_before(gather):
                gather.replace_all_uses_with(self._gathered(first(gather), gather.args[2], logsumexp))
        for user in list(found.log.users):
            if user not in (sums, found.result):
                with self.graph.inserting_after(logsumexp):
                    log = self._call(found.log, aten.sub.Tensor, logsumexp, found.largest)
                user.replace_input_with(found.log, log)
        if found.shifted is not _unscaled(found.shifted):
            found.shifted.replace_all_uses_with(_unscaled(found.shifted))

    def _gathered(self, node: fx.Node, index: Any, logsumexp: fx.Node) -> fx.Node:
        """The elements at an index along the last axis, of another plane of the same rows."""
        made: dict[tuple[fx.Node, Any], fx.Node] = {}
        behind: dict[tuple[fx.Node, Any], Any] = {}
        """The index with which the planes before a node are read."""
        stack = [(node, index)]
        while stack:
            current, at = stack[-1]
            planes = [self.found.rows] if current is self.found.result else planes_before(current) or []
            if (current, at) not in behind:
                behind[current, at] = self._before_reshape(current, at, planes)
            of = {plane: (plane, behind[current, at]) for plane in planes}
            if missing := [each for each in of.values() if each not in made]:
                stack += missing
                continue
            taken = {plane: made[each] for plane, each in of.items()}
            made[current, at] = self._element(current, at, taken, logsumexp)
            stack.pop()
        return made[node, index]

    def _before_reshape(self, node: fx.Node, index: Any, planes: list[fx.Node]) -> Any:
        """The index of elements of the source of a reshape; that of the node's own for any other node."""
        if not planes or node is self.found.result or not is_reshape(node):
            return index
        shape, behind = fake(index).shape, fake(planes[0]).shape[:-1]
        return self._call(node, aten.reshape.default, index, with_one_open((*behind, shape[-1])))

    def _element(
        self, node: fx.Node, index: Any, taken: dict[fx.Node, fx.Node], logsumexp: fx.Node
    ) -> fx.Node:
        """The elements of a node, from those that are taken of the planes before it."""
        if node is self.found.result:
            return self._call(node, aten.sub.Tensor, taken[self.found.rows], logsumexp)
        if not taken:
            mark_rounded(base(node))
            return self._call(node, aten.gather.default, node, -1, index)
        if is_reshape(node):
            (source,) = taken.values()
            return self._call(node, aten.reshape.default, source, with_one_open(fake(index).shape))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: taken.get(source, source))
        return self._call(node, node.target, *args, **kwargs)

    def _call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        made.meta.update({key: like.meta[key] for key in ("stack_trace",) if key in like.meta})
        with fake(like).fake_mode:  # type: ignore[attr-defined]
            values = fx.map_arg((made.args, made.kwargs), lambda source: source.meta["val"])
            made.meta["val"] = target(*values[0], **values[1])
        return made
