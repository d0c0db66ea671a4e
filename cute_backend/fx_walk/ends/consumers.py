"""The kernels that read a region's results: a model of Inductor's fusion, for counting bytes.

- Every kernel that reads the result of pointwise work or a reshape computes it itself, and none writes it,
  unless a product, a call, an output or another region needs it in memory.
- Work over the rows of the plane, pointwise or a reduction of the last axis, is one kernel until something
  ends its round. Reductions of other axes are another kernel.
- A kernel that reduces the plane and then works on the plane with the result reads its input twice, unless it
  holds rows of that length (`boundary.ROW_HELD`).
- Work on a reduction's result alone is done by the kernel that reduces, if that is Inductor's.
- A product, a call of another kind and a reduction of other axes than the last end a round; work that follows
  from them is in a later one. Rounds are counted from the start of the graph.
- An op that joins tensors to a larger one, as the gradients of gate and up are joined, or pads one, is a
  kernel that does the work before it as it writes. So is a copy whose axes are in another order. A reduction
  is written into its place in the larger tensor by the kernel that computes it, if that is Inductor's, and
  otherwise copied there by one more kernel.
- A view, such as a slice, changes how its readers read. Any other op for which Inductor generates code, such
  as an index, a flip or a pooling, reads as pointwise work does, in whatever dtype is in memory.
- A reduction of fewer than eight elements is pointwise: Inductor writes it out.
- Otherwise a kernel reads a buffer once, however many of its ops do, and nothing that it computes itself.

Inductor may need fewer bytes, by fusing work of several rounds that share inputs, or more, by writing results
that are expensive to compute again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import prod
from operator import getitem

import torch
from torch import fx
from torch._inductor import config as inductor_config

from cute_backend.fx_walk.graph.axes import is_reduction, reduced_axes
from cute_backend.fx_walk.graph.mutation import is_view
from cute_backend.fx_walk.graph.static import arguments, fake, first_argument, known, tensor_of
from cute_backend.fx_walk.values.lower import is_pointwise, is_reshape


@dataclass(frozen=True)
class InductorKernel:
    """A kernel of Inductor's: its round, and whether it runs over the plane by columns, to reduce them."""

    round: int
    by_columns: bool = False


class Rounds:
    """The round of every node of a graph, whose nodes come in order."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._rounds: dict[fx.Node, int] = {}
        after: dict[fx.Node, int] = {}
        for node in nodes:
            own = max((after.get(source, 0) for source in node.all_input_nodes), default=0)
            self._rounds[node] = own
            after[node] = own + _ends_round(node)

    def kernel_of(self, node: fx.Node) -> InductorKernel:
        """The kernel that computes a pointwise op or a reduction."""
        return InductorKernel(self._rounds[node], reduces(node) and not _is_by_rows(node))


def reduces(node: fx.Node) -> bool:
    """Whether a node is a reduction that Inductor does not write out as pointwise work."""
    if not is_reduction(node):
        return False
    source = tensor_of(first_argument(node))
    if source is None:
        return True
    return not known(prod(source.shape[axis] for axis in reduced_axes(node)) < _WRITTEN_OUT)


_WRITTEN_OUT = 8
"""Elements from which on a reduction is a loop (`unroll_reductions_threshold` of Inductor's settings)."""


def reads_in_place(node: fx.Node) -> bool:
    """Whether Inductor computes what a call reads as the call's own kernel reads it, or as the readers of a
    view do, so that no kernel has to write it before. `as_strided` is a view of memory."""
    if node.target is getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or not is_generated(node.target):
        return False
    if node.target._schema.is_mutable or (is_view(node) and _reads_memory(node.target)):
        return False
    return not (_is_ordered_by_aten(node) or _is_drawn_by_aten(node.target))


def _is_drawn_by_aten(op: torch._ops.OpOverload) -> bool:
    """Whether aten draws an op's random numbers, so that they are eager's."""
    return inductor_config.fallback_random and torch.Tag.nondeterministic_seeded in op.tags


_ORDERS = ("sort", "topk", "kthvalue", "median", "mode")
_SORTED = 512
"""The length of the longest rows that Inductor sorts itself. It leaves all else that orders elements to aten
(`triton.decompose_sort_ops` of its settings)."""


def _is_ordered_by_aten(node: fx.Node) -> bool:
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    if name != "sort":
        return name in _ORDERS
    args = arguments(node)
    source = tensor_of(args["self"])
    return source is None or not known(source.shape[args["dim"]] <= _SORTED)


@cache
def is_generated(op: torch._ops.OpOverload) -> bool:
    """Whether Inductor generates code for an op. Its lowerings to kernels of other kinds are in modules of
    their own, and those to calls of aten are all made by one function."""
    # An import of the pass must not import all of Inductor, which is imported wherever the pass runs.
    from torch._inductor import lowering

    if op not in lowering.lowerings:
        return False
    made = inspect.unwrap(lowering.lowerings[op])
    is_fallback = made.__qualname__.startswith(lowering.fallback_handler.__qualname__)
    return made.__module__ == lowering.__name__ and not is_fallback


@cache
def _reads_memory(op: torch._ops.OpOverload) -> bool:
    from torch._inductor import lowering

    return op in lowering.needs_realized_inputs


def picks_elements(node: fx.Node, source: fx.Node) -> bool:
    """Whether each element of a call's result is one of `source`: of a view, or at a place that an integer
    tensor has, as for an index, a gather or an embedding."""
    if is_view(node):
        return True
    places = [tensor for each in node.all_input_nodes[1:] if (tensor := tensor_of(each)) is not None]
    return first_argument(node) is source and any(not each.is_floating_point() for each in places)


def _ends_round(node: fx.Node) -> bool:
    if node.op != "call_function" or is_pointwise(node) or is_view(node) or is_reshape(node):
        return False
    return reduces(node) and not _is_by_rows(node) if is_reduction(node) else True


def _is_by_rows(reduction: fx.Node) -> bool:
    """Whether a reduction is over the last axis only."""
    source = first_argument(reduction)
    return tensor_of(source) is not None and reduced_axes(reduction) == (fake(source).dim() - 1,)
