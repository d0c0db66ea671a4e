"""Which output tile a CTA works on next: a static, persistent schedule, rastered for L2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..planning import TileConfig


@dataclass(frozen=True)
class Place:
    """Where a work item lies: the cluster row and column of a product, which is the `batch`-th of several and
    whose rows of the plane begin at `first` and end before `end`."""

    row: Int32
    column: Int32
    batch: Any
    first: Any
    end: Int32


@dataclass(frozen=True)
class TileSchedule:
    """The tiles of one (M, N) problem, dealt round-robin to persistent clusters.

    Cluster `i` of `count` takes the work items i, i + count, ... Work items run down groups of `raster_m`
    cluster rows, column by column, so that the tiles in flight form a block of the output and share rows of A
    and columns of B in L2. `grid_m` and `grid_n` count clusters, `group_items` the items of a full group and
    `last_rows` the rows of a last one that is not full; divisors, since every warp divides for every tile.
    """

    m: Int32
    grid_m: Int32
    grid_n: Int32
    raster_m: int
    group_items: cute.FastDivmodDivisorV2
    last_rows: cute.FastDivmodDivisorV2

    @staticmethod
    def of(config: TileConfig, m: Int32, n: Int32) -> TileSchedule:
        """The schedule of a problem: a work item is what one cluster computes at a time."""
        grid_m = cute.ceil_div(m, config.tile_m // config.ctas * config.cluster_m)
        grid_n = cute.ceil_div(n, config.tile_n * config.cluster_n)
        group_items = cute.fast_divmod_create_divisor_v2(config.raster_m * grid_n)
        last_rows = cute.fast_divmod_create_divisor_v2(cutlass.max(grid_m % config.raster_m, 1))
        return TileSchedule(m, grid_m, grid_n, config.raster_m, group_items, last_rows)

    @property
    def items(self) -> Int32:
        """The number of work items."""
        return self.grid_m * self.grid_n

    @cute.jit
    def cluster_coord(self, item: Int32) -> tuple[Int32, Int32]:
        """The cluster row and column of a work item."""
        group, local = (Int32(part) for part in divmod(item, self.group_items))
        first_row = group * self.raster_m
        column = local // self.raster_m
        row = local - column * self.raster_m
        last_column, last_row = (Int32(part) for part in divmod(local, self.last_rows))
        if first_row + self.raster_m > self.grid_m:
            column, row = last_column, last_row
        return first_row + row, column

    def place(self, item: Int32) -> Place:
        """Where a work item lies."""
        row, column = self.cluster_coord(item)
        return Place(row, column, 0, 0, self.m)

    def is_valid(self, item: Int32) -> Boolean:
        """Whether there is such a work item."""
        return item < self.items


@dataclass(frozen=True)
class BatchSchedule:
    """The tiles of `batches` problems of one size: all of one, then all of the next."""

    tiles: TileSchedule
    batches: Int32
    batch_items: cute.FastDivmodDivisorV2

    @staticmethod
    def of(config: TileConfig, m: Int32, n: Int32, batches: Int32) -> BatchSchedule:
        """The schedule of `batches` times (M, N)."""
        tiles = TileSchedule.of(config, m, n)
        return BatchSchedule(tiles, batches, cute.fast_divmod_create_divisor_v2(tiles.items))

    @property
    def grid_m(self) -> Int32:
        return self.tiles.grid_m

    @property
    def grid_n(self) -> Int32:
        return self.tiles.grid_n

    @property
    def items(self) -> Int32:
        """The number of work items."""
        return self.tiles.items * self.batches

    def place(self, item: Int32) -> Place:
        """Where a work item lies."""
        batch, local = (Int32(part) for part in divmod(item, self.batch_items))
        row, column = self.tiles.cluster_coord(local)
        first = batch * self.tiles.m
        return Place(row, column, batch, first, first + self.tiles.m)

    def is_valid(self, item: Int32) -> Boolean:
        """Whether there is such a work item."""
        return item < self.items
