"""A region as found: what one kernel multiplies, loads, computes and stores, in terms of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from cute_backend.fx_walk.anchors import Anchor
from cute_backend.fx_walk.classify import LoadView
from cute_backend.fx_walk.mutation import root
from cute_backend.fx_walk.reasons import program_name
from cute_backend.fx_walk.static import DTYPES, Size, fake, known, product
from cute_backend.spec import DType, EpilogueSpec, Operand, Order, Store

LABEL = "cute_backend_label"
"""The entry of a placeholder's meta with the user's name for it."""


@dataclass(frozen=True)
class Region:
    """What becomes one kernel.

    `views` are the loads, in the order of `spec.loads`. `outputs` maps each node of the graph that is
    replaced to the index of its store: views of one another share one.
    """

    anchor: Anchor
    nodes: tuple[fx.Node, ...]
    spec: EpilogueSpec
    views: tuple[LoadView, ...]
    outputs: dict[fx.Node, int]

    @property
    def a_nodes(self) -> list[fx.Node]:
        return [self.anchor.a]

    @property
    def b_nodes(self) -> list[fx.Node]:
        return [self.anchor.b]

    @property
    def load_nodes(self) -> list[fx.Node]:
        return [view.node for view in self.views]

    @property
    def load_labels(self) -> list[str]:
        """The user's names of the loads: of inputs, where `collect` knows them, else by the lines."""
        sources = [root(view.node) for view in self.views]
        return [source.meta.get(LABEL) or program_name(source) for source in sources]

    @property
    def problem(self) -> tuple[Size, Size, Size]:
        """M, N and K."""
        return self.anchor.m, self.anchor.n, fake(self.anchor.a).shape[1]


def stores_of(
    anchor: Anchor, nodes: list[fx.Node], values: dict[fx.Node, Operand]
) -> tuple[list[Store], dict[fx.Node, int]]:
    """What has to be written for the nodes that escape, and which of these stores each node has its value in.

    Views of one another share a store. A value and its clone do not: they are equal until someone writes to
    one of them, and a graph that keeps both does so for a reason, as Inductor has dropped all other clones.
    """
    stores: list[Store] = []
    outputs: dict[fx.Node, int] = {}
    index: dict[tuple[str, DType, Order, fx.Node], int] = {}
    for node in nodes:
        value, dtype, order = values[node], DTYPES[fake(node).dtype], store_order(anchor, node)
        assert isinstance(value, str) and order is not None
        outputs[node] = index.setdefault((value, dtype, order, root(node)), len(stores))
        if outputs[node] == len(stores):
            stores.append(Store(f"out{len(stores)}", value, dtype, order))
    return stores, outputs


def store_order(anchor: Anchor, node: fx.Node) -> Order | None:
    """The order in which a dense plane has the strides of a node, None where there is none."""
    tensor = fake(node)
    sizes, strides = list(tensor.shape), list(tensor.stride())
    for order, wanted in ((Order.ROW, _row_major(sizes)), (Order.COLUMN, _column_major(sizes, anchor.m))):
        if all(
            known(size == 1) or known(stride == want)
            for size, stride, want in zip(sizes, strides, wanted, strict=True)
        ):
            return order
    return None


def _row_major(sizes: Sequence[Size]) -> list[Size]:
    return [product(sizes[axis + 1 :]) for axis in range(len(sizes))]


def _column_major(sizes: Sequence[Size], m: Size) -> list[Size]:
    """The strides of a (..., N) tensor whose leading axes are one contiguous M, and N outside of it."""
    return [*_row_major(sizes[:-1]), m]
