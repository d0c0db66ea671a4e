"""The outputs of an epilogue."""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_backend.dtypes import DType
from cute_backend.kinds.axes import Order
from cute_backend.kinds.kind import LEFT_OUT
from cute_backend.kinds.results import PLANE, Form
from cute_backend.spec.chain_ops import Op

REDUCED = "reduced"
"""The name that the result of a reduction has in the ops `Store.after`."""


@dataclass(frozen=True)
class Store:
    """An output: the value `value`, converted to `dtype`, in a `form`: the (M, N) plane by rows or columns,
    or another kind of result (`kinds.results`, `kinds.reductions`).

    Only indices are i64. Extrema of integers keep their dtype; other reductions give floats. Values of blocks
    may be E8M0.

    A reduction may have ops `after` it, on its result and numbers alone, such as a scale from an amax. The
    first ones read REDUCED, and the last one's value is stored. Their names are their own. They are computed
    where the reduction is finished: by the last tile of a row, or by a second kernel.
    """

    name: str
    value: str
    dtype: DType
    form: Form = PLANE
    after: tuple[Op, ...] = field(default=(), metadata=LEFT_OUT)

    @property
    def is_whole(self) -> bool:
        """Whether it has the whole plane by rows in a tensor of its own."""
        return self.form.is_plane and self.form.order is Order.ROW and self.form.count == 1
