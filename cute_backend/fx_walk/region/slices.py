"""The plane of one product that a region has in two slices of its columns, as if they were two products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import fx

from cute_backend.fx_walk.graph.mutation import is_view
from cute_backend.fx_walk.graph.static import first_argument, target_name
from cute_backend.fx_walk.products.pairs import column_slice, same_slice
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.region.value import Plane, Reading, Value
from cute_backend.fx_walk.values.classify import ColumnSlice
from cute_backend.spec import Operand

if TYPE_CHECKING:
    from cute_backend.fx_walk.region.draft import Draft


@dataclass(frozen=True)
class Slices(Value):
    """The two values of a member that holds the plane of a product in two slices of its columns.

    If `whole`, its elements lie on the plane; otherwise it is a view on the way to the slices.
    """

    values: Sequence[Operand]
    whole: bool
    alternate: bool
    is_split = True

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(map(str, self.values)) if self.whole else ()

    @property
    def operands(self) -> Sequence[Operand]:
        return self.values

    def renamed(self, names: Mapping[Operand, Operand]) -> Slices:
        return replace(self, values=tuple(names.get(value, value) for value in self.values))

    def read(self, draft: Draft, reading: Reading) -> Operand:
        if reading.side is None or not self.whole:
            raise Refused(Reason.UNPAIRED, target=target_name(reading.node))
        return self.values[reading.side]

    def is_followed(self, draft: Draft, node: fx.Node) -> bool:
        return is_view(node) and draft.values.get(first_argument(node)) is self

    def follow(self, draft: Draft, node: fx.Node) -> Value:
        taken = column_slice(node, draft.first.m)
        if taken is None:
            return replace(self, whole=False)
        for value, anchor in zip(self.values, draft.anchors, strict=True):
            if anchor.columns is not None and same_slice(taken, anchor.columns):
                return Plane(value)
        return replace(self, whole=same_slice(taken, ColumnSlice(0, 1, draft.first.b_columns)))
