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

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from cute_backend.fx_walk.graph.axes import is_gather_along_rows, reduced_axes
from cute_backend.fx_walk.graph.mutation import Mutations
from cute_backend.fx_walk.graph.new_calls import call
from cute_backend.fx_walk.graph.spelled import SpelledOtherwise, operands
from cute_backend.fx_walk.graph.static import arguments, fake, first_argument, target_name
from cute_backend.fx_walk.preparation.gathers import (
    Elements,
    behind_products,
    is_narrow,
    is_row,
    planes_before,
)
from cute_backend.fx_walk.products.questions import after_products
from cute_backend.fx_walk.values.lower import CASTS

aten, prims = torch.ops.aten, torch.ops.prims


def separate_logsumexps(graph: fx.Graph) -> None:
    """Rewrites the log of a softmax after a product, if only gathers and sums of its rows read it, which a
    loss with label smoothing has. Each gathered element becomes the product's element minus the logsumexp of
    its row, and a sum of a row becomes that of the product's row minus N times its logsumexp.

    Other readers of the log of the sum, such as the backward pass, read the logsumexp minus the largest
    element. An infinite element makes its row NaN, as in a softmax. A gather after a write in place stays
    unchanged, because it would read memory later than the softmax did.
    """
    logs = [node for node in graph.nodes if node.op == "call_function" and node.target is aten.log.default]
    if not logs:
        return
    after, behind = after_products(graph.nodes), behind_products(graph.nodes)
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
            and all(is_narrow(gather, behind, found.elements) for gather in found.gathers)
        ):
            _Writer(graph, found).write()
    graph.eliminate_dead_code()


@dataclass(frozen=True)
class _LogSoftmax:
    """The steps of the log of a softmax of `rows`, and the gathers from its `result` and the sums of its
    rows; none if something else reads it."""

    rows: fx.Node
    largest: fx.Node
    shifted: fx.Node
    log: fx.Node
    result: fx.Node
    gathers: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]

    @property
    def elements(self) -> Mapping[fx.Node, fx.Node]:
        """The planes whose elements those of others are, less a value of the row."""
        return {self.result: self.rows}


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
    return _LogSoftmax(rows, largest, shifted, log, results[0], *_readers(results[0]))


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


def _readers(result: fx.Node) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """The gathers along the last axis, one at least for each row, from a value, or from pointwise results or
    views of it, and the sums of its rows, or of casts of them; nothing if anything else reads one of them."""
    gathers, sums, stack = [], [], [result]
    while stack:
        node = stack.pop()
        for user in node.users:
            planes = planes_before(user)
            if is_gather_along_rows(user):
                gathers.append(user)
            elif _is_sum_of_rows(user) and (node is result or target_name(node) in CASTS):
                sums.append(user)
            elif planes and all(plane is node or is_row(plane) for plane in planes):
                stack.append(user)
            else:
                return (), ()
    return tuple(gathers), tuple(sums)


def _is_sum_of_rows(node: fx.Node) -> bool:
    """Whether a call adds up rows whose length is known."""
    if target_name(node) != "aten.sum.dim_IntList":
        return False
    shape = fake(first_argument(node)).shape
    return reduced_axes(node) == (len(shape) - 1,) and isinstance(shape[-1], int)


@dataclass
class _Writer:
    graph: fx.Graph
    found: _LogSoftmax

    def write(self) -> None:
        found = self.found
        with self.graph.inserting_after(found.log):
            sums = call(self.graph, found.log, aten.add.Tensor, found.log, found.largest)
        with self.graph.inserting_after(sums):
            infinite = call(self.graph, found.log, aten.mul.Tensor, sums, 0)
        with self.graph.inserting_after(infinite):
            logsumexp = call(self.graph, found.log, aten.add.Tensor, sums, infinite)

        def less_logsumexp(element: fx.Node) -> fx.Node:
            return call(self.graph, found.result, aten.sub.Tensor, element, logsumexp)

        for gather in found.gathers:
            with self.graph.inserting_before(gather):
                elements = Elements(self.graph, found.elements, less_logsumexp)
                gather.replace_all_uses_with(elements.of(first_argument(gather), gather.args[2]))
        for total in found.sums:
            with self.graph.inserting_before(total):
                total.replace_all_uses_with(self._sum(total, logsumexp))
        for user in list(found.log.users):
            if user not in (sums, found.result):
                with self.graph.inserting_after(logsumexp):
                    log = call(self.graph, found.log, aten.sub.Tensor, logsumexp, found.largest)
                user.replace_input_with(found.log, log)
        if found.shifted is not _unscaled(found.shifted):
            found.shifted.replace_all_uses_with(_unscaled(found.shifted))

    def _sum(self, total: fx.Node, logsumexp: fx.Node) -> fx.Node:
        """The sum of a row less the logsumexp of each of its elements."""
        rows, args = self.found.rows, arguments(total)
        row = call(self.graph, total, aten.sum.dim_IntList, rows, [-1], True, dtype=torch.float32)
        all_of = call(self.graph, total, aten.mul.Tensor, logsumexp, fake(rows).shape[-1])
        left = call(self.graph, total, aten.sub.Tensor, row, all_of)
        if not args["keepdim"]:
            left = call(self.graph, total, aten.squeeze.dim, left, -1)
        dtype = fake(total).dtype
        return (
            call(self.graph, total, prims.convert_element_type.default, left, dtype)
            if dtype is not torch.float32
            else left
        )
