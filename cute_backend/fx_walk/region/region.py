"""A region of a graph: the nodes and values that one kernel multiplies, loads, computes and stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from cute_backend.fx_walk.graph.frame import Frame
from cute_backend.fx_walk.graph.mutation import root
from cute_backend.fx_walk.graph.static import RESULT_DTYPES, Size, fake, known, product
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.products.questions import is_only_read
from cute_backend.fx_walk.products.scaling_recipes import VectorView
from cute_backend.fx_walk.products.stored_weights import written_from
from cute_backend.fx_walk.refusals.reasons import user_label
from cute_backend.fx_walk.region.value import E8M0, Value
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.fx_walk.values.classify import ColumnSlice, LoadView
from cute_backend.kinds.results import HEAD_COLUMNS, Form, Heads, PartOf
from cute_backend.ops import PAIRINGS
from cute_backend.planning import CUT_HEAD_COLUMNS, MOST_CONVERTED_ROWS
from cute_backend.spec import (
    PAIRED_DTYPES,
    BColumns,
    DType,
    EpilogueSpec,
    Order,
    ProductKind,
    Store,
)


@dataclass(frozen=True)
class CacheWrite:
    """The nodes that write a result to a `cache`, which is an input of the graph (`cache_writes.py`). The
    result of the last one is the cache after it."""

    nodes: tuple[fx.Node, ...]
    cache: fx.Node


@dataclass(frozen=True)
class Region:
    """The nodes of a graph that become one kernel: one product, two products of one A, or one in two slices.

    `nodes` are those that the kernel replaces. `views` are the loads, in the spec's order. `outputs` maps
    each node whose value the kernel stores to the index of its result: views of one another share one.
    `frames` maps those that are planes to their frames on the plane of the product. `origins` maps the name
    of each op of the spec to the node that it computes, wholly or in part. Regions of one A may share a
    launch: `needs_shared_launch` says whether this one has members only for that case, and `unshared` why it
    shares none or why its halves make no pair, or is empty. `caches` maps the outputs that the kernel writes
    to caches to the nodes that do so in the graph.
    """

    anchors: tuple[Anchor, ...]
    nodes: tuple[fx.Node, ...]
    spec: EpilogueSpec
    views: tuple[LoadView, ...]
    outputs: dict[fx.Node, int]
    frames: dict[fx.Node, Frame]
    origins: dict[str, fx.Node]
    needs_shared_launch: bool = False
    unshared: str = ""
    caches: Mapping[fx.Node, CacheWrite] = field(default_factory=dict)

    @property
    def first(self) -> Anchor:
        """The first anchor. All anchors of a region share A, sizes and the device."""
        return self.anchors[0]

    @property
    def is_shared(self) -> bool:
        """Whether it has several products whose results never meet, each with a segment of the columns."""
        return self.spec.b_columns is BColumns.SEGMENTS

    @property
    def products(self) -> list[fx.Node]:
        """The nodes of the products."""
        return list(dict.fromkeys(anchor.node for anchor in self.anchors))

    @property
    def a_nodes(self) -> list[fx.Node]:
        """The op's argument `a`."""
        return self.first.a_side

    @property
    def b_views(self) -> list[tuple[fx.Node, ColumnSlice | None]]:
        """Every B that the op takes, and the slice of its columns."""
        if self.spec.b_columns is BColumns.INTERLEAVED:
            return [(self.first.b, None)]
        return [(anchor.b, anchor.columns) for anchor in self.anchors]

    @property
    def b_vectors(self) -> list[VectorView]:
        """The vectors beside every B, in the order of the op's argument `b`: first the scales of all."""
        every = (anchor.b_vectors for anchor in self.anchors[: self.spec.b_count])
        return [vector for of_all in zip(*every, strict=True) for vector in of_all]

    @property
    def load_nodes(self) -> list[fx.Node]:
        return [view.node for view in self.views]

    @property
    def load_labels(self) -> list[str]:
        """The user's names of the loads: those of inputs if `collect` knows them, otherwise by their
        lines."""
        return [_label(view.node, view.columns) for view in self.views]

    @property
    def product_labels(self) -> list[str]:
        """The user's name of B, for each accumulator, with the dtype that a kernel converts it from, or in
        which another kernel writes it at each call."""
        return [_product_label(anchor) for anchor in self.anchors]

    @property
    def problem(self) -> tuple[Size, Size, Size]:
        """M, N and K."""
        n = self.spec.plane_n(self.first.n) if len(self.spec.segments) > 1 else self.first.n
        return self.first.m, n, self.first.k

    @property
    def groups(self) -> Size | None:
        """The number of groups of the rows of a grouped product, or of K."""
        return None if self.first.offsets is None else fake(self.first.offsets).shape[0]


def _product_label(anchor: Anchor) -> str:
    stored = None if anchor.accumulator.is_converted else written_from(anchor.b)
    if stored is None:
        return _label(anchor.b, anchor.columns) + _conversion(anchor)
    written, given = fake(anchor.b), str(fake(stored).dtype).removeprefix("torch.")
    to = anchor.accumulator.b_dtype.value
    size = written.numel() * written.element_size()
    bytes_ = f", {size:,} bytes" if isinstance(size, int) else ""
    return f"{_label(stored, anchor.columns)}, {given} written in {to} at each call{bytes_}"


def _conversion(anchor: Anchor) -> str:
    acc = anchor.accumulator
    if not acc.is_converted:
        return ""
    beyond = f" (beyond {MOST_CONVERTED_ROWS} rows in memory, at each call)"
    rows = "" if isinstance(anchor.m, int) else beyond
    return f", {acc.b_dtype.value}{acc.b_scales.of_values} converted to {acc.a_dtype.value}{rows}"


def _label(node: fx.Node, columns: ColumnSlice | None) -> str:
    label = user_label(node)
    return label if columns is None else f"{label} {columns}"


def stores_of(
    anchor: Anchor,
    chain: Chain,
    nodes: list[fx.Node],
    values: dict[fx.Node, Value],
    frames: dict[fx.Node, Frame],
) -> tuple[list[Store], dict[fx.Node, int]]:
    """The stores for the nodes that escape, and the index of the result that holds each node's value. `chain`
    gets the ops that put even and odd columns side by side.

    Views of one another share a result, and so do equal values that are only read, such as an activation that
    a program spells again for each of its readers. A value and its clone that a graph returns do not: the
    caller may write to one of them.
    """
    stores: list[Store] = []
    outputs: dict[fx.Node, int] = {}
    index: dict[tuple[tuple[Store, ...], fx.Node | None], int] = {}
    for node in nodes:
        with chain.lowering(node):
            written = tuple(_stores(anchor, chain, node, values[node], frames.get(node)))
        memory = None if is_only_read(root(node)) else root(node)
        if (written, memory) not in index:
            first = len(stores)
            stores += (replace(store, name=f"out{first + i}") for i, store in enumerate(written))
        outputs[node] = index.setdefault((written, memory), len(index))
    return stores, outputs


def _stores(
    anchor: Anchor, chain: Chain, node: fx.Node, value: Value, frame: Frame | None
) -> Iterator[Store]:
    """The stores of a node, without names yet: one, or one for each part."""
    form, parts = stored_form(anchor, chain, node, value, frame), value.parts
    assert parts and form is not None
    dtype = DType.E8M0 if fake(node).dtype is E8M0 else RESULT_DTYPES[fake(node).dtype]
    if value.alternate:
        pair = chain.emit(PAIRINGS[dtype], *parts)
        assert isinstance(pair, str)
        yield Store("", pair, PAIRED_DTYPES[dtype], form)
        return
    for place, stored in enumerate(parts):
        part = PartOf(place, len(parts)) if len(parts) > 1 else form
        yield Store("", stored, dtype, part, value.after)


def stored_form(
    anchor: Anchor, chain: Chain, node: fx.Node, value: Value, frame: Frame | None
) -> Form | None:
    """The form in which a dense plane, a plane with an element for each block, or a dense reduction has the
    strides of a node. None if there is none, or if no kernel stores the node's dtype. Parts of a result are
    only possible in row-major order."""
    tensor, block = fake(node), 1 if frame is None else frame.block
    if not value.can_store(tensor.dtype):
        return None
    if Order.ROW not in value.orders:
        return value.form(value.orders[0], block)
    if frame is None:
        axes = list(range(tensor.dim()))
    else:
        axes = list(frame.order(tensor.dim()) if frame.block == 1 else frame.axes)
    sizes, strides = ([of[axis] for axis in axes] for of in (tensor.shape, tensor.stride()))
    layouts = [(Order.ROW, _row_major(sizes))]
    if (
        Order.COLUMN in value.orders
        and anchor.accumulator.kind in (ProductKind.DENSE, ProductKind.GROUPED)
        and not (frame is not None and frame.joins)
    ):
        columns = 1 if frame is None else max(1, len(frame.n_axes))
        layouts.append((Order.COLUMN, _column_major(sizes, columns, anchor.m)))
    for order, wanted in layouts:
        if _has_strides(sizes, strides, wanted):
            return value.form(order, block)
    if frame is None or not value.is_plane or anchor.accumulator.kind is not ProductKind.DENSE:
        return None
    return _heads(anchor, chain, value.parts[0], _by_heads(tensor, frame))


def _heads(anchor: Anchor, chain: Chain, value: str, sizes: tuple[Size, Size] | None) -> Heads | None:
    """Heads with these `sizes`, S and D; None if a kernel can't write them. D has to be a number, and S has
    to be one or follow from M and the operands of the value."""
    rows, columns = sizes or (None, None)
    if not isinstance(columns, int) or columns % HEAD_COLUMNS:
        return None
    # A visit has columns of one head, which are a part of other heads only where it has heads whole.
    if columns % CUT_HEAD_COLUMNS and columns not in chain.blocks:
        return None
    if isinstance(rows, int):
        return Heads(rows, columns)
    at_launch = chain.innermost_modes(value) or [anchor.m]
    return Heads(0, columns) if all(known(size == rows) for size in at_launch) else None


def is_by_heads(node: fx.Node, frame: Frame | None) -> bool:
    """Whether a value with this frame is contiguous as (B, H, S, D)."""
    return frame is not None and _by_heads(fake(node), frame) is not None


def _by_heads(tensor: torch.Tensor, frame: Frame) -> tuple[Size, Size] | None:
    """S and D of a plane whose memory is (B, H, S, D), contiguous. None if the memory is anything else."""
    axes = frame.heads_first
    if axes is None or frame.block > 1:
        return None
    sizes, strides = ([of[axis] for axis in axes] for of in (tensor.shape, tensor.stride()))
    return (sizes[-2], sizes[-1]) if _has_strides(sizes, strides, _row_major(sizes)) else None


def _has_strides(sizes: Sequence[Size], strides: Sequence[Size], wanted: Sequence[Size]) -> bool:
    """Whether a tensor has the wanted strides, apart from axes of one element, whose strides say nothing."""
    return all(
        known(size == 1) or known(stride == want)
        for size, stride, want in zip(sizes, strides, wanted, strict=True)
    )


def _row_major(sizes: Sequence[Size]) -> list[Size]:
    return [product(sizes[axis + 1 :]) for axis in range(len(sizes))]


def _column_major(sizes: Sequence[Size], columns: int, m: Size) -> list[Size]:
    """The strides of a value whose last axes, `columns` of them, are N, and whose M is one contiguous
    mode."""
    outer = [m * stride for stride in _row_major(sizes[-columns:])]
    return [*_row_major(sizes[:-columns]), *outer]
