"""Which output tile a CTA works on next: a static, persistent schedule, rastered for L2."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from .config import TileConfig


@dataclass(frozen=True)
class TileSchedule:
    """The tiles of one (M, N) problem, dealt to persistent clusters in turn.

    Cluster `i` of `count` takes the work items i, i + count, ... Work items run down groups of `raster_m`
    cluster rows, column by column, so that the tiles in flight form a block of the output and share rows of A
    and columns of B in L2. `grid_m` and `grid_n` count clusters.
    """

    grid_m: Int32
    grid_n: Int32
    raster_m: int

    @staticmethod
    def of(config: TileConfig, m: Int32, n: Int32) -> TileSchedule:
        """The schedule of a problem: a work item is what one cluster computes at a time."""
        rows = config.tile_m // config.ctas * config.cluster_m
        columns = config.tile_n * config.cluster_n
        return TileSchedule(cute.ceil_div(m, rows), cute.ceil_div(n, columns), config.raster_m)

    @property
    def items(self) -> Int32:
        """The number of work items."""
        return self.grid_m * self.grid_n

    def cluster_coord(self, item: Int32) -> tuple[Int32, Int32]:
        """The cluster row and column of a work item."""
        group_items = self.raster_m * self.grid_n
        group = item // group_items
        first_row = group * self.raster_m
        rows = cutlass.min(self.grid_m - first_row, Int32(self.raster_m))
        local = item - group * group_items
        column = local // rows
        return first_row + local - column * rows, column

    def is_valid(self, item: Int32) -> Boolean:
        """Whether there is such a work item."""
        return item < self.items
