"""The kernels that read a region's results: a model of Inductor's fusion, for counting bytes.

- Every kernel that reads the result of pointwise work or a reshape computes it itself, and none writes it,
  unless a product, a call, an output or another region needs it in memory.
- Work over the rows of the plane, pointwise or a reduction of the last axis, is one kernel until something
  ends its wave. Reductions of other axes are another kernel.
- A kernel that reduces the plane and then works on the plane with the result reads its input twice, unless it
  holds rows of that length (`boundary.ROW_HELD`).
- Work on a reduction's result alone is done by the kernel that reduces, if that is Inductor's.
- A product, a call of another kind and a reduction of other axes than the last end a wave; work that follows
  from them is in a later one. Waves are counted from the start of the graph.
- An op that joins tensors to a larger one, as the gradients of gate and up are joined, or pads one, is a
  kernel that does the work before it as it writes. So is a copy whose axes are in another order. A reduction
  is written into its place in the larger tensor by the kernel that computes it, if that is Inductor's, and
  otherwise copied there by one more kernel.
- A reduction of fewer than eight elements is pointwise: Inductor writes it out.
- Otherwise a kernel reads a buffer once, however many of its ops do, and nothing that it computes itself.

Inductor may need fewer bytes, by fusing work of several waves that share inputs, or more, by writing results
that are expensive to compute again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from torch import fx

from cute_backend.fx_walk.lower import is_pointwise, is_reshape
from cute_backend.fx_walk.mutation import is_view
from cute_backend.fx_walk.questions import is_reduction
from cute_backend.fx_walk.reductions import reduced_axes
from cute_backend.fx_walk.static import fake, first_argument, known, tensor_of


@dataclass(frozen=True)
class Kernel:
    """A kernel of Inductor's: its wave, and whether it runs over the plane by columns, to reduce them."""

    wave: int
    by_columns: bool = False


class Waves:
    """The wave of every node of a graph, whose nodes come in order."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._waves: dict[fx.Node, int] = {}
        after: dict[fx.Node, int] = {}
        for node in nodes:
            wave = max((after.get(source, 0) for source in node.all_input_nodes), default=0)
            self._waves[node] = wave
            after[node] = wave + _ends_wave(node)

    def kernel_of(self, node: fx.Node) -> Kernel:
        """The kernel that computes a pointwise op or a reduction."""
        return Kernel(self._waves[node], reduces(node) and not _is_by_rows(node))


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


def _ends_wave(node: fx.Node) -> bool:
    if node.op != "call_function" or is_pointwise(node) or is_view(node) or is_reshape(node):
        return False
    return reduces(node) and not _is_by_rows(node) if is_reduction(node) else True


def _is_by_rows(reduction: fx.Node) -> bool:
    """Whether a reduction is over the last axis only."""
    source = first_argument(reduction)
    return tensor_of(source) is not None and reduced_axes(reduction) == (fake(source).dim() - 1,)
