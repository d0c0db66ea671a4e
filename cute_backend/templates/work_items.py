"""The work items of a CTA: which tiles it computes, and which rows of A and which part of K each needs.

A work item is a tile of a product: of the only one, of one of a batch, of a group of rows or of a group of K.
With split-K, it is a part of K of a tile: through memory, the parts are scheduled as products of a batch, and
in a cluster each CTA has a part of all tiles of the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_backend.templates.scheduler import KGroupSchedule, KPlace, Place, Schedule


@dataclass(frozen=True)
class WorkItems:
    """The work items of a CTA: `first` and every `step`-th after it.

    Those whose epilogue it runs begin at `epilogue`, which lies beyond the last item in a CTA that publishes
    its sums to another. An item has `k_tiles` k tiles from `first_k` on, unless its place says otherwise. If
    parts of K leave their sums in memory, `rows` are the rows of A.
    """

    schedule: Schedule
    first: Any
    step: Any
    epilogue: Any
    tile_k: int
    k_tiles: Int32
    first_k: Any = 0
    rows: Int32 | None = None

    def is_valid(self, item: Int32) -> Boolean:
        """Whether `item` is a work item."""
        return self.schedule.is_valid(item)

    def place(self, item: Int32) -> Place:
        """The place of a work item."""
        return self.schedule.place(item)

    def of_a(self, place: Place) -> Place:
        """The place of the rows of A: parts of K write rows of their own, and read all rows of A."""
        return place if self.rows is None else replace(place, first=0, end=self.rows)

    def begin_k(self, batch: Any) -> Any:
        """The first k tile of an item of the `batch`-th product, counted from the first of its group of K if
        there are such."""
        return self.first_k if self.rows is None else batch * self.k_tiles

    def k_tiles_of(self, place: Place) -> Int32:
        """The number of k tiles at a place. An empty group of K gets one, which is wholly out of bounds and
        reads as zeros."""
        if isinstance(place, KPlace):
            return cutlass.max(cute.ceil_div(place.end_k - place.first_k, self.tile_k), 1)
        return self.k_tiles

    def k_tiles_at(self, item: Int32) -> Int32:
        """The number of k tiles of a work item, which may lie beyond the last."""
        if isinstance(self.schedule, KGroupSchedule):
            return self.k_tiles_of(self.schedule.place(item))
        return self.k_tiles
