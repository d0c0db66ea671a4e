"""One element of each row, at a column that an operand names: the logit of a label.

`gather(y, -1, index)` with one index a row reads the plane, which is then written for it. A kernel meets
every element anyway, so it keeps the one whose column is the row's index:

    row_max(where(column == index, y, -inf))

A row whose index is no column gets -inf. For torch such an index is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from cute_backend.fx_walk.graph.axes import picks_from_rows
from cute_backend.fx_walk.graph.static import PLACES, arguments, fake, target_name
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.region.member import Member, Search
from cute_backend.fx_walk.region.reduced import Reduced
from cute_backend.fx_walk.region.value import Value
from cute_backend.fx_walk.values.classify import classify
from cute_backend.fx_walk.values.held import check_places
from cute_backend.kinds.reductions import MAX
from cute_backend.spec import Axis, Const, Reduction


@dataclass(frozen=True)
class Picked(Member):
    """A `gather` of one element of each row of `source`, at the columns `index`."""

    source: fx.Node
    index: fx.Node

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        return (self.index,)

    def joins(self, draft: Draft) -> bool:
        return self.source in draft.values

    def join(self, search: Search, draft: Draft) -> Value:
        frame, chain = draft.frames.get(self.source), draft.chain
        if frame is None or not frame.is_plain or frame.n_axes != (fake(self.source).dim() - 1,):
            raise Refused(Reason.NOT_POINTWISE, target=target_name(self.head))
        value = draft.read(self.source, self.head)
        check_places(chain)
        if not chain.dtype(value).is_float or chain.dtype(value).is_fp8:
            raise Refused(Reason.UNSUPPORTED_DTYPE, operand=self.source, dtype=fake(self.source).dtype)
        shape = fake(self.source).shape
        index = chain.load(classify(self.index, shape, draft.first.device, frame, PLACES))
        chosen = chain.emit("eq", chain.emit("column_index"), index)
        picked = chain.emit("where", chosen, value, Const(-float("inf")))
        return Reduced(str(picked), Reduction(Axis.ROW, MAX))


def find(nodes: Iterable[fx.Node]) -> Iterator[Member]:
    """The gathers of one element of each row."""
    for node in filter(picks_from_rows, nodes):
        args = arguments(node)
        yield Picked(node, (), args["self"], args["index"])
