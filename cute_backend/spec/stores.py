"""The outputs of an epilogue: planes, reductions, and one value for each block of columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from cute_backend.dtypes import DType
from cute_backend.kinds.reductions import Reduction
from cute_backend.kinds.results import ByHeads, Cache, Heads
from cute_backend.spec.chain_ops import Op
from cute_backend.spec.loads import Order

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

    It is the (M, N) plane, written in `order`, or its reduction, (M,), (N,) or 0-d, rounded to `dtype` when
    it is complete. Only indices are i64. Extrema of integers keep their dtype; other reductions give floats.

    With a `block`, a number of columns, it is (M, N / block) in `order`, with the value at the first column
    of every block. This is meant for reductions of blocks, and for values that are computed from these alone.
    Such values may be E8M0, and then TILED: the scales of blocks of 32 values of the next product's K, in the
    layout that its MMA reads.

    A plane by rows may be a `part` of a result, whose stores follow each other in a spec. Or its memory has
    `heads`: its tensor is still (M, N) and dense, but elements are in another order. Or it is written to some
    rows of a `cache`, whose tensor is (B * L, N).

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
    def batch_rows(self) -> int:
        """The rows of a batch, of which M is a multiple; 0 without batches, and if a launch says how many."""
        of_reduction = 0 if self.reduce is None else self.reduce.rows
        return of_reduction if self.by_heads is None else self.by_heads.rows
