"""The outputs of an epilogue: planes, reductions, and one value for each block of columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from cute_backend.dtypes import DType
from cute_backend.kinds.axes import Order
from cute_backend.kinds.reductions import Reduction
from cute_backend.kinds.results import ByHeads, Cache, Form, Heads, OfBlocks, TiledScales, WholePlane
from cute_backend.spec.chain_ops import Op

REDUCED = "reduced"
"""The name that the result of a reduction has in the ops `Store.after`."""


@dataclass(frozen=True)
class Part:
    """The place of a plane in a result (M, `count` * N) that several stores write side by side. Its columns
    begin at `index` * N."""

    index: int
    count: int


@dataclass(frozen=True)
class Store:
    """An output: the value `value`, converted to `dtype`.

    It is the (M, N) plane, written in `order`, or its reduction, rounded to `dtype` when it is complete. Only
    indices are i64. Extrema of integers keep their dtype; other reductions give floats. With a `block`, a
    number of columns, it has one value for each block. Such values may be E8M0, and then TILED.

    A plane by rows may be a `part` of a result, whose stores follow each other in a spec, or its memory is by
    `heads`, or in a `cache`.

    A reduction may have ops `after` it, on its result and numbers alone, such as a scale from an amax. The
    first ones read REDUCED, and the last one's value is stored. Their names are their own. They are computed
    where the reduction is finished: by the last tile of a row, or by a second kernel.
    """

    name: str
    value: str
    dtype: DType
    order: Order = Order.ROW
    reduce: Union[Reduction, None] = None
    block: int = 0
    part: Union[Part, None] = None
    heads: Union[Heads, None] = None
    after: tuple[Op, ...] = ()
    cache: Union[Cache, None] = None

    @property
    def by_heads(self) -> ByHeads | None:
        """The memory of a plane that is by heads: its own, or that of a cache."""
        return self.heads or self.cache

    @property
    def form(self) -> Form:
        """Its elements, and where they are in memory."""
        if self.block or self.order is Order.TILED:
            of_blocks = TiledScales if self.order is Order.TILED else OfBlocks
            return self.reduce or of_blocks(self.order, self.block)
        return self.reduce or self.by_heads or WholePlane(self.order)

    @property
    def is_whole(self) -> bool:
        """Whether it has the whole plane by rows in a tensor of its own."""
        return self.form.is_plane and self.order is Order.ROW and self.part is None
