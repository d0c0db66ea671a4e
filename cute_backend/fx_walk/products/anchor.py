"""An anchor: the matrix product that a region grows from, with the work of its op on the accumulator."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from cute_backend.fx_walk.graph.frame import Frame
from cute_backend.fx_walk.graph.static import Size, fake, known, product
from cute_backend.fx_walk.products.scaling_recipes import VectorView
from cute_backend.fx_walk.refusals.reasons import Refused
from cute_backend.fx_walk.values.activation import Activation
from cute_backend.fx_walk.values.classify import ColumnSlice, LoadView
from cute_backend.spec import SCALE_TILE, Accumulator, ProductKind

Number = float | int | bool


@dataclass(frozen=True)
class Addend:
    """`beta * input` of `addmm`, or the bias of `_scaled_mm` with a `beta` of 1."""

    view: LoadView
    beta: Number


@dataclass(frozen=True)
class Anchor:
    """A matrix product (M, K) x (K, N): result = out_dtype(acc * scale_a * scale_b * alpha + addend), or of
    `activation` of that.

    In a batched product, (B, M, K) x (B, K, N), the plane has the rows of all batches, and M is their number.
    In a grouped one, (M, K) x (G, K, N), `offsets` (G,) holds for each group the row after its last. If K is
    in groups, (M, K) x (K, N), it holds the index of K after the group's last, and the plane has the rows of
    all groups' products.

    A product of columns in groups, (G, N, K) x (K, M), is `transposed`: the plane is that of the transposed
    product, whose rows are in groups. `a` is then the op's second operand and `b` its first, and the
    transpose of each is multiplied.

    If B is converted from a weight of 8 bits, `stored` is the product with that weight, whose values a kernel
    converts itself, or the reason why none does.

    `a_vectors` and `b_vectors` come beside A and B, and vary along K: scales of their blocks, or the scales,
    and zeros, of a weight's groups of K, each (K / group, N).

    With `columns` it is the product with that slice of B's columns, and N is the number of columns in the
    slice.
    """

    node: fx.Node
    a: fx.Node
    b: fx.Node
    accumulator: Accumulator
    out_dtype: torch.dtype
    scale_a: LoadView | None = None
    scale_b: LoadView | None = None
    alpha: Number = 1
    addend: Addend | None = None
    activation: Activation | None = None
    columns: ColumnSlice | None = None
    a_vectors: tuple[VectorView, ...] = ()
    b_vectors: tuple[VectorView, ...] = ()
    offsets: fx.Node | None = None
    transposed: bool = False
    stored: Anchor | Refused | None = None

    def of_slice(self, columns: ColumnSlice, accumulator: Accumulator) -> Anchor:
        """The product with a slice of the columns of B."""
        return replace(
            self,
            accumulator=accumulator,
            scale_b=self.scale_b and self.scale_b.of_slice(columns),
            addend=self.addend and Addend(self.addend.view.of_slice(columns), self.addend.beta),
            columns=columns,
            stored=None,
            b_vectors=tuple(replace(each, columns=self._blocks_of(columns)) for each in self.b_vectors),
        )

    def _blocks_of(self, columns: ColumnSlice) -> ColumnSlice | None:
        """The blocks of B's scales that a slice of columns needs, None for all of them. The even and the odd
        columns need all. Scales of groups of K have all columns."""
        if self.accumulator.weight_groups is not None:
            return columns
        lines = self.accumulator.b_scaling.lines
        if not known(columns.step == 1):
            return None
        scaling = self.accumulator.b_scaling
        if scaling.by_mma:
            # The tiles of scales of neighbouring columns are consecutive, so a slice has one range of them.
            values = self.k * self.accumulator.a_dtype.values
            first, count = (scaling.tiled(size, values) for size in (columns.start, columns.count))
            return ColumnSlice(first, 1, count)
        return ColumnSlice(columns.start // lines, 1, self.accumulator.b_scaling.blocks(columns.count))

    def splits_blocks(self, columns: ColumnSlice) -> bool:
        """Whether a slice begins within a block that has one scale."""
        scaling = self.accumulator.b_scaling
        lines = SCALE_TILE[0] if scaling.by_mma else scaling.lines
        return not (known(columns.step == 2) or known(columns.start % lines == 0))

    def with_a(self, other: dict[fx.Node, fx.Node]) -> Anchor:
        """The product with nodes of the same value for A, its scale and its offsets."""
        scale = self.scale_a and replace(self.scale_a, node=other[self.scale_a.node])
        beside = tuple(replace(each, node=other[each.node]) for each in self.a_vectors)
        offsets = self.offsets and other[self.offsets]
        stored = self.stored.with_a(other) if isinstance(self.stored, Anchor) else self.stored
        return replace(self, a=other[self.a], scale_a=scale, a_vectors=beside, offsets=offsets, stored=stored)

    @property
    def a_side(self) -> list[fx.Node]:
        """The op's argument `a`: A, and the offsets of its groups if it has groups."""
        return [self.a] if self.offsets is None else [self.a, self.offsets]

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes that the op reads."""
        addend = None if self.addend is None else self.addend.view
        views = (self.scale_a, self.scale_b, addend, *self.a_vectors, *self.b_vectors)
        return [*self.a_side, self.b, *(view.node for view in views if view is not None)]

    @property
    def device(self) -> torch.device:
        return fake(self.node).device

    @property
    def m(self) -> Size:
        products = fake(self.offsets).shape if self._has_k_in_groups and self.offsets else ()
        return product((*products, *self._multiplied(self.a)[:-1]))

    @property
    def n(self) -> Size:
        return self.b_columns if self.columns is None else self.columns.count

    @property
    def k(self) -> Size:
        return self._multiplied(self.a)[-1]

    @property
    def b_columns(self) -> Size:
        """The number of B's columns, which is more than N for a slice."""
        if self.accumulator.b_block:
            return product(fake(self.b).shape[1:])
        return self._multiplied(self.b)[-1]

    def _multiplied(self, operand: fx.Node) -> list[Size]:
        """The shape of an operand as it is multiplied."""
        *outer, rows, columns = fake(operand).shape
        return [*outer, columns, rows] if self.transposed else [*outer, rows, columns]

    @property
    def frame(self) -> Frame:
        """How the op's result lies on the plane."""
        shape = fake(self.node).shape
        if self.transposed:
            rows, columns = ((axis,) if not known(shape[axis] == 1) else () for axis in (1, 0))
            return Frame(rows, columns)
        frame = Frame.of(shape, self.m, self.b_columns)
        assert frame is not None
        return frame

    @property
    def _has_k_in_groups(self) -> bool:
        return self.accumulator.kind is ProductKind.K_GROUPED

    @property
    def stands_alone(self) -> bool:
        """Whether a region is useful even if nothing follows the product, because the op itself has an
        epilogue, or because Inductor would write the converted weight to memory first."""
        scaled = self.scale_a is not None or bool(self.a_vectors)
        return scaled or self.activation is not None or self.accumulator.is_converted
