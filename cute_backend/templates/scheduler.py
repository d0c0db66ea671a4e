"""The order in which a CTA works on output tiles: a persistent schedule, rastered for L2."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_backend.planning import TileConfig
from cute_backend.templates.crew import WARP


@dataclass(frozen=True)
class Place:
    """The place of a work item: its cluster row and column in the `batch`-th product. The product's rows of
    the plane begin at `first` and end before `end`."""

    row: Int32
    column: Int32
    batch: Any
    first: Any
    end: Int32


@dataclass(frozen=True)
class KPlace(Place):
    """A place whose product sums over a group of K, which begins at `first_k` and ends before `end_k`, both
    multiples of `step`. If `tail` is not 0, the group has only the first `tail` of its last `step`
    indices."""

    first_k: Int32
    end_k: Int32
    step: int
    tail: Any


@dataclass(frozen=True)
class ScaledPlace(Place):
    """A place in a group of rows whose scales lie in tiles; the group's first tile is `first_tile`."""

    first_tile: Int32


@dataclass(frozen=True)
class TileSchedule:
    """The tiles of one (M, N) problem, dealt round-robin to persistent clusters.

    Cluster `i` of `count` takes the work items i, i + count, ... Work items run down groups of `raster_m`
    cluster rows, column by column, so that the tiles in flight form a block of the output and share rows of A
    and columns of B in L2. `grid_m` and `grid_n` are the numbers of cluster rows and columns. `group_items`
    is the number of items in a full group, and `last_rows` the number of cluster rows in the last group where
    it is not full. Both are precomputed divisors, since every warp divides by them for every tile.
    """

    m: Int32
    grid_m: Int32
    grid_n: Int32
    raster_m: int
    group_items: cute.FastDivmodDivisorV2
    last_rows: cute.FastDivmodDivisorV2

    @staticmethod
    def of(config: TileConfig, m: Int32, n: Int32) -> TileSchedule:
        """The schedule of a problem, in which a work item is the output that a cluster computes at a time."""
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
        """The place of a work item."""
        row, column = self.cluster_coord(item)
        return Place(row, column, 0, 0, self.m)

    def is_valid(self, item: Int32) -> Boolean:
        """Whether `item` is a work item of this schedule."""
        return item < self.items


@dataclass(frozen=True)
class BatchSchedule:
    """The tiles of `batches` problems of one size, one problem after another."""

    tiles: TileSchedule
    batches: Int32
    batch_items: cute.FastDivmodDivisorV2

    @staticmethod
    def of(config: TileConfig, m: Int32, n: Int32, batches: Int32) -> BatchSchedule:
        """The schedule of `batches` problems of size (M, N)."""
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
        """The place of a work item."""
        batch, local = (Int32(part) for part in divmod(item, self.batch_items))
        row, column = self.tiles.cluster_coord(local)
        first = batch * self.tiles.m
        return Place(row, column, batch, first, first + self.tiles.m)

    def is_valid(self, item: Int32) -> Boolean:
        """Whether `item` is a work item of this schedule."""
        return item < self.items


@dataclass(frozen=True)
class KGroupSchedule:
    """The tiles of products of one size, one product after another. Each sums over its own group of K.

    `offsets` (groups,) holds the end of each group: the index in K after its last. Only the device knows
    these values, so they are clamped (`bounds`) and rounded down to multiples of `step`: whatever they are, a
    group lies between 0 and `k`.
    """

    products: BatchSchedule
    k: Int32
    offsets: cute.Tensor
    step: int

    @property
    def grid_m(self) -> Int32:
        return self.products.grid_m

    @property
    def grid_n(self) -> Int32:
        return self.products.grid_n

    @property
    def items(self) -> Int32:
        """The number of work items."""
        return self.products.items

    def place(self, item: Int32) -> KPlace:
        """The place of a work item. An item beyond the last gets an empty range of K."""
        place = self.products.place(item)
        begin, end = bounds(self.offsets, self.k, place.batch)
        first, whole, tail = begin // self.step * self.step, end // self.step * self.step, 0
        if self.step > 1:
            is_last = (place.batch == self.products.batches - 1) & (begin < end)
            tail = cutlass.select_(is_last, end - whole, Int32(0))
            whole = cutlass.select_(tail > 0, whole + self.step, whole)
        of_product = (place.row, place.column, place.batch, place.first, place.end)
        return KPlace(*of_product, first, whole, self.step, tail)

    def is_valid(self, item: Int32) -> Boolean:
        """Whether `item` is a work item of this schedule."""
        return self.products.is_valid(item)


@dataclass(frozen=True)
class GroupSchedule:
    """The tiles of groups of rows that follow each other in a plane of `m` rows. The schedule takes one group
    after another, and rasters each as a problem of its own.

    `offsets` (groups,) holds the end of each group: the row after its last. Only the device knows these
    values, so they are clamped (`bounds`), and all but the last are rounded down to multiples of `step`:
    whatever they are, a group begins at 0 or later, and ends neither before it begins nor beyond `m`. All
    threads of a warp must call `counted` and `place` together, since each lane examines a different group.
    One cluster computes `cluster_rows` rows at a time, which form a cluster row. `rows` is the number of
    cluster rows in all groups; `counted` sets it. With `tile_rows`, a `place` has the first tile of its
    group's scales, of which each group has one for every `tile_rows` rows.
    """

    m: Int32
    cluster_rows: int
    columns: cute.FastDivmodDivisorV2
    grid_n: Int32
    raster_m: int
    raster_items: cute.FastDivmodDivisorV2
    offsets: cute.Tensor
    tile_rows: int = 0
    step: int = 1
    rows: Any = None

    @staticmethod
    def of(
        config: TileConfig, m: Int32, n: Int32, offsets: cute.Tensor, tile_rows: int = 0, step: int = 1
    ) -> GroupSchedule:
        """The schedule of groups; their rows are not counted yet."""
        rows = config.tile_m // config.ctas * config.cluster_m
        grid_n = cute.ceil_div(n, config.tile_n * config.cluster_n)
        columns = cute.fast_divmod_create_divisor_v2(grid_n)
        raster_items = cute.fast_divmod_create_divisor_v2(config.raster_m * grid_n)
        return GroupSchedule(
            m, rows, columns, grid_n, config.raster_m, raster_items, offsets, tile_rows, step
        )

    @property
    def groups(self) -> Int32:
        """The number of groups."""
        return self.offsets.shape[0]

    @property
    def most_items(self) -> Int32:
        """An upper bound on the number of work items, for offsets in ascending order."""
        return (cute.ceil_div(self.m, self.cluster_rows) + self.groups) * self.grid_n

    @property
    def items(self) -> Int32:
        """The number of work items."""
        return self.rows * self.grid_n

    @property
    def grid_m(self) -> Int32:
        """The mean number of cluster rows in a group, rounded up. If it is more than 1, B is read again, so
        the kernel for sm_90a loads it with the priority to stay in L2."""
        return cute.ceil_div(self.rows, self.groups)

    def counted(self) -> GroupSchedule:
        """This schedule with its cluster rows counted. This is the first method to read `offsets`."""
        return replace(self, rows=self._count())

    def is_valid(self, item: Int32) -> Boolean:
        """Whether `item` is a work item of this schedule."""
        return item < self.items

    def place(self, item: Int32) -> Place:
        """The place of a work item."""
        row, column, group, first, end, tile = self._find(item)
        if self.tile_rows:
            return ScaledPlace(row, column, group, first, end, tile)
        return Place(row, column, group, first, end)

    @cute.jit
    def _count(self) -> Int32:
        rows = Int32(0)
        for chunk in cutlass.range(cute.ceil_div(self.groups, WARP), unroll=1):
            first, end = self._bounds(chunk * WARP + cute.arch.lane_idx())
            rows += cute.ceil_div(end - first, self.cluster_rows)
        return cute.arch.warp_redux_sync(rows, "add")

    @cute.jit
    def _find(self, item: Int32) -> tuple[Int32, Int32, Int32, Int32, Int32, Int32]:
        """The item's cluster row and column in its group, the group, its first row, its exclusive end, and
        with `tile_rows` its first tile of scales."""
        wanted = Int32(divmod(item, self.columns)[0])
        chunk, before, tile = Int32(0), Int32(0), Int32(0)
        first, end, through = self._chunk(chunk)
        while before + cute.arch.shuffle_sync(through, WARP - 1) <= wanted:
            if cutlass.const_expr(self.tile_rows > 0):
                tile += cute.arch.shuffle_sync(self._tiles_through(first, end), WARP - 1)
            before += cute.arch.shuffle_sync(through, WARP - 1)
            chunk += WARP
            first, end, through = self._chunk(chunk)
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(before + through <= wanted))
        if cutlass.const_expr(self.tile_rows > 0):
            tiles = self._tiles_through(first, end) - cute.ceil_div(end - first, self.tile_rows)
            tile += cute.arch.shuffle_sync(tiles, passed)
        first, end = cute.arch.shuffle_sync(first, passed), cute.arch.shuffle_sync(end, passed)
        rows = cute.ceil_div(end - first, self.cluster_rows)
        before += cute.arch.shuffle_sync(through, passed) - rows
        block, local = (Int32(part) for part in divmod(item - before * self.grid_n, self.raster_items))
        high = cutlass.min(rows - block * self.raster_m, self.raster_m)
        column = local // high
        row = block * self.raster_m + local - column * high
        return row, column, chunk + passed, first, end, tile

    def _bounds(self, group: Int32) -> tuple[Int32, Int32]:
        first, end = bounds(self.offsets, self.m, group)
        if self.step == 1:
            return first, end
        is_last = group == self.groups - 1
        return first // self.step * self.step, cutlass.select_(is_last, end, end // self.step * self.step)

    def _tiles_through(self, first: Int32, end: Int32) -> Int32:
        """The tiles of scales of the groups of all lanes up to and including this one, whose group's rows are
        `first` to `end`."""
        return self._scan(cute.ceil_div(end - first, self.tile_rows), cute.arch.lane_idx())

    def _chunk(self, chunk: Int32) -> tuple[Int32, Int32, Int32]:
        """Assigns each lane one of the 32 groups from `chunk` on. Returns the first row of the lane's group,
        the row after its last, and the number of cluster rows in the groups from `chunk` through it."""
        lane = cute.arch.lane_idx()
        first, end = self._bounds(chunk + lane)
        return first, end, self._scan(cute.ceil_div(end - first, self.cluster_rows), lane)

    @cute.jit
    def _scan(self, count: Int32, lane: Int32) -> Int32:
        """The sum of `count` over all lanes up to and including this one."""
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(count, 1 << step)
            if lane >= 1 << step:
                count += other
        return count


Schedule: TypeAlias = TileSchedule | BatchSchedule | GroupSchedule | KGroupSchedule


@cute.jit
def bounds(offsets: cute.Tensor, count: Int32, group: Int32) -> tuple[Int32, Int32]:
    """The first row or column of a group and the one after its last, out of `count`. A group beyond the last
    is empty. Offsets are clamped: whatever they hold, a group begins at 0 or later, and ends neither before
    it begins nor beyond `count`."""
    first, end = Int32(0), Int32(0)
    if group < offsets.shape[0]:
        if group > 0:
            first = cutlass.min(cutlass.max(offsets[group - 1], 0), count)
        end = cutlass.min(cutlass.max(offsets[group], first), count)
    return first, end
