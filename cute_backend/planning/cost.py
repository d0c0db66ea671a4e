"""The cost model, which predicts the time of a problem with a given tile.

Its constants were fitted to timings. The file of each target has the constants of that target, and names the
machine that they were measured on.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cache
from typing import Any, NamedTuple

from cute_backend.planning.mainloops import mainloop_of
from cute_backend.planning.registers import long_ops
from cute_backend.planning.shared_memory import plane_bits
from cute_backend.planning.sizes import Sizes
from cute_backend.planning.targets import Arch, Cut, TileTime
from cute_backend.planning.tiles import TILE_K_BYTES, TileConfig
from cute_backend.planning.transposing import Tiled
from cute_backend.spec import EpilogueSpec, Major, ProductKind

_OVERLAP = 8
"""The exponent of the norm that combines the time of the tiles with the time of memory. The two overlap, and
almost completely unless they are equal."""


SUM_BITS = 32
"""Bits of one partial sum, over a part of K."""

SUMS_US = 3.0
"""Fixed time, in microseconds, of the second kernel, which adds up the sums of parts of K. The time of its
memory traffic (`SUMS_SHARE`) is added to it."""

SUMS_SHARE = 0.5
"""The share of memory bandwidth at which sums are written and read again. With 0.5, the tile that is chosen
takes 1.02 times as long as the fastest one, in the mean of ten problems of few tiles in bf16; with 0.25, it
takes 1.11 times as long (H100)."""

PARTS_SHARE = 0.75
"""The share of memory bandwidth at which clusters that multicast read A and B for parts of K. With the whole
bandwidth, the model would choose four parts for 96 x 4096 x 14336: 55.9 us in place of 46.7 (H100)."""

SUMS_OF_A_PART_US = 0.25
"""Time, in microseconds, that a CTA of the second kernel takes for each part of each product of a pair, if it
has 64 rows of them. Without it, the model would choose six parts for a gated pair of 208 x 608 x 7488: 16.8
us in place of 13.0 (H200). With this constant and PARTS_SHARE, the chosen tile was never slower than the one
that was chosen when clusters and pairs had no parts, for 20 problems on an H100 and 7 on an H200."""

ROTATED_US = 0.019
"""Time, in microseconds, by which rotating the halves of blocks lengthens a wave on Hopper whose epilogue no
MMA hides, for each accumulator of a thread. For q, k and v of a Llama 8B layer at 2,048 tokens, it was 2.3 us
(H200) and 3.3 (H100) with 128 accumulators. With 0.019, the chosen tile takes 1.003 times as long as the
faster of 128 x 128 under ping-pong and 256 x 128, as a geometric mean of 30 problems of three models, at most
1.04 times; without, 1.011 times, at most 1.07 (H100, benchmarks/findings.md)."""

BLOCKS_US = 0.023
"""`ROTATED_US` for reducing blocks of columns. For 4096 cubed in bf16, a norm by head of 128 columns added
9.7 us in 256 x 128 and 11.7 in 128 x 256, to four waves, and 0.6 to 2.8 in 128 x 128 under ping-pong
(H100)."""

TRANSPOSED_ROWS = 1.25
"""How many times as long a k tile takes in a transposed tile if rows are reduced, which lie along the columns
of its MMA. With each row's largest element, transposed tiles took 1.13 to 1.38 times as long as predicted
without this constant, and others 0.90 to 1.14 times, as medians of 40 drawn problems in bf16 (seed 53, H200,
benchmarks/findings.md)."""

RIM = 64
"""Rows and columns by which the area of a tile grows to one that its time is in proportion to. The tensor
cores' work is in proportion to the area, the bytes of A and B to rows and columns. If the time of each timed
tile without ping-pong is predicted from its neighbour of another size, in a wave of 8 KiB of K, the error is
0.054 (root mean square) with 64, 0.058 with 48 or 96, and 0.116 without a rim."""

UNTIMED_ERROR = 0.06
"""The relative error of the time of a tile that was not timed, beside that of its nearest neighbour."""

DRAWING = 1.05
"""How many times as long a k tile takes in a tile of 128 rows under ping-pong if noise is drawn: the tokens
of 256 rows took 525 and 579 us under ping-pong, and 498 without (H200, benchmarks/findings.md)."""

SMALL_GROUPS = range(65, 193)
"""The mean numbers of rows in a group for which `Timing.in_small_groups` was measured."""

_L2_LINE = 128
"""Bytes of a line of L2."""


class Work(NamedTuple):
    """The figures of a problem that a tile's time depends on. The fields may be tensors, of many problems."""

    waves: Any
    """Waves of clusters over the multiprocessors; a partial wave counts as one."""
    busy: Any
    """Waves of clusters; a partial wave counts as the share of the multiprocessors that it occupies."""
    depth: Any
    """The depth of a tile: KiB along K, times `_k_times`."""
    crossing: Any
    """1 if rows of A and B may begin inside an L2 line, so that one row of a TMA box spans two lines; else
    0."""
    beyond: Any
    """Rows beyond the last row of A that TMA fills with zeros, for each tile of a CTA."""
    moved: Any
    """Bytes of the operands and the planes."""
    delivered: Any
    """Bytes of A and B that all CTAs together receive from L2. Each CTA receives its own copy of what a
    cluster multicasts. It is 0 for 8-bit operands and for groups, which it was not found to limit."""
    converting: Any
    """Microseconds in which a multiprocessor converts a tile, of a weight that is stored in fewer bits."""
    beside: Any
    """Microseconds that the constants of a tile leave out: those of epilogues that they were not fitted to,
    and of a second kernel."""

    def microseconds(self, tile: TileTime, beyond_us: Any, bytes_per_us: Any, l2_bytes_per_us: Any) -> Any:
        """Returns the predicted time."""
        tiles = self.waves * (tile.own + (tile.k + self.beyond * beyond_us) * self.depth)
        tiles += self.busy * (tile.busy + self.crossing * tile.crossing) * self.depth
        tiles *= 1 + (self.waves > 1) * (tile.in_waves - 1)
        longest = tiles**_OVERLAP + (self.moved / bytes_per_us) ** _OVERLAP
        longest += (self.waves * (self.converting + (self.converting > 0) * tile.own)) ** _OVERLAP
        longest += (self.delivered / l2_bytes_per_us) ** _OVERLAP
        return tile.start + longest ** (1 / _OVERLAP) + self.beside


def cost(config: TileConfig, spec: EpilogueSpec, sizes: Sizes, sm_count: int, careful: bool = False) -> float:
    """Returns the predicted time of a problem on `sm_count` multiprocessors, in microseconds. If `careful`,
    it is the time if the constants of the tile are too short by their error.

    The model counts waves of clusters. A wave that has work for few multiprocessors takes less than a full
    one, and no problem takes less time than its memory traffic. Each segment of columns begins with a new
    tile, and all are assumed to have the planes of the segment that moves the most bytes.
    """
    if len(spec.segments) > 1:
        columns = config.columns_at_once
        n = columns * sum(-(-acc.width // columns) for acc in spec.accumulators)
        whole = sizes._replace(n=n, groups=None)
        return max(cost(config, segment, whole, sm_count, careful) for segment in spec.segments)
    timing = config.target.timing
    tile = time_of(config.arch, config.cut)
    if careful:
        mainloop = mainloop_of(spec, config.target)
        error = mainloop.untimed_error * (config.cut not in mainloop.timed)
        tile = tile.longer(error if mainloop.timed else tile.error)
    work = work_of(Tiled(spec, config), sizes, sm_count)
    return float(work.microseconds(tile, timing.beyond_us, timing.bytes_per_us, timing.l2_bytes_per_us))


def _k_times(config: TileConfig, spec: EpilogueSpec, m: int, groups: int | None) -> float:
    """Returns how many times as long a k tile takes as the constants of its tile say."""
    if config.transposed and spec.reduces_rows:
        return TRANSPOSED_ROWS
    mainloop = mainloop_of(spec, config.target)
    if timed := mainloop.timed:
        return timed[nearest(timed, config.cut)]
    if config.pingpong and config.cta_rows > 64 and long_ops(spec):
        return DRAWING
    if spec.product.kind is ProductKind.GROUPED and groups and -(-m // groups) in SMALL_GROUPS:
        return config.target.timing.in_small_groups.get(config.cut, 1.0)
    return mainloop.k_times(config)


def _exposed_us(config: TileConfig, spec: EpilogueSpec) -> float:
    """Returns the time of a wave that the constants of its tile, which were fitted to other epilogues, leave
    out. The last wave is left out too: its epilogue takes equally long in all tiles."""
    if config.pingpong or not config.target.by_wgmma:
        return 0.0
    us = ROTATED_US if spec.reordered_columns else 0.0
    us += BLOCKS_US if spec.whole_columns > 1 else 0.0
    return us * config.thread_accumulators


def _sums_us(config: TileConfig, m: int, n: int) -> float:
    """Returns the predicted time of the second kernel, which adds up the sums of parts of K."""
    planes = config.products * config.split_k
    moved = planes * m * n * SUM_BITS / 8
    us = SUMS_US + moved / (SUMS_SHARE * config.target.timing.bytes_per_us)
    if config.products == 1:
        return us
    tile_m = config.summing.tile_m
    rows = min(n if config.transposed else m, tile_m) / tile_m
    return us + SUMS_OF_A_PART_US * planes * rows


def work_of(chosen: Tiled, sizes: Sizes, sm_count: int) -> Work:
    """Returns the work of a problem that is cut into tiles.

    A tile of 64 rows whose A is not multicast skips the rows beyond the last one. Other tiles pay for them:
    the last row of tiles is seldom full, the CTAs of a cluster wait for the slowest one, and each CTA writes
    multicast zeros.

    The sizes of groups are not known before a launch, so the model assumes a random split with the known
    mean. The rows beyond the end of a group belong to the next group and cost no more than other rows.
    """
    config, spec, (m, n, k, groups) = chosen.tile, chosen.computed, sizes
    times = _k_times(config, chosen.spec, m, groups)
    second_us = _sums_us(config, m, n) if config.sums_in_memory else 0.0
    operand_rows, of_k = m + n * config.products, k
    if spec.product.kind is ProductKind.K_GROUPED:
        # Each product gets the mean share of K; A and B are read once.
        products = groups or 1
        operand_rows, k, groups = m // products + n * config.products, -(-k // products), None
    if config.transposed:
        m, n = n, m
    rows, columns = config.cta_rows * config.cluster_m, config.tile_n * config.cluster_n
    cluster_rows = -(-m // rows) if groups is None else _cluster_rows(rows, m, groups)
    reached = config.target.timing.reached.get(config.cluster_size, 1.0)
    in_flight = max(int(sm_count * reached) * config.occupancy // config.cluster_size, 1)
    parts = config.split_k if config.sums_in_memory else 1
    full, last = divmod(parts * cluster_rows * -(-n // columns) - 1, in_flight)
    a_bits = spec.product.k_bits(spec.product.a_dtype)
    k_bytes = k * a_bits // 8
    depth = -(-k_bytes // (config.split_k * TILE_K_BYTES)) * TILE_K_BYTES / 1024
    whole = groups is None and (config.mma_m > 64 or config.cluster_n > 1)
    past = min(cluster_rows * rows - m, config.cta_rows) * config.stacked
    beyond = past * config.cluster_n / cluster_rows if whole else 0.0
    matrices = 1 if groups is None else min(groups, m)
    if matrices > 1:
        operand_rows = m + n * config.products * matrices
    # D is (M, N) of the transposed product here, if its weight is converted.
    further_bits = spec.product.k_bits(spec.product.b_dtype) - a_bits
    operands = (operand_rows * a_bits + n * further_bits) * of_k // 8
    moved = operands + m * n * plane_bits(spec) / 8
    if config.sums_in_memory and config.multicasts:
        moved /= PARTS_SHARE
    crossing = float(k_bytes % _L2_LINE != 0 and spec.product.b_major is Major.K)
    ctas = parts * cluster_rows * -(-n // columns) * config.cluster_size
    delivered = ctas * depth * 1024 / TILE_K_BYTES * config.ab_stage_bytes
    if spec.product.a_dtype.bits < 16 or spec.product.kind.has_offsets:
        delivered = 0.0
    converting = mainloop_of(spec, config.target).microseconds(config) * depth
    depth *= times
    busy = full + (last + 1) / in_flight
    beside = full * _exposed_us(config, spec) + second_us
    return Work(full + 1, busy, depth, crossing, beyond, moved, delivered, converting, beside)


def _cluster_rows(rows: int, m: int, groups: int) -> int:
    """Returns the number of cluster rows in all groups, for a random split.

    Each group wastes half a cluster row in the mean. If most groups have fewer rows than a cluster, each
    group takes one cluster row.
    """
    filled = min(groups, m)
    return max(filled, round(m / rows + filled / 2))


@cache
def time_of(arch: Arch, cut: Cut) -> TileTime:
    """Returns the time of a tile. For a tile that was not timed, this is the time of the nearest tile that
    was, scaled by the ratio of their areas with a rim, with the error of that tile and `UNTIMED_ERROR`. The
    errors of a target of which no tile was timed are 0, except those of tiles as wide as the rows."""
    timed = arch.target.timing.tiles
    if cut in timed:
        return timed[cut]
    near = nearest(timed, cut)
    time = timed[near].of_area(_rimmed_area(cut) / _rimmed_area(near))
    if time.error == 0:
        return time._replace(error=arch.target.tiles.even.error * cut.transposed)
    known = near._replace(subtile_n=cut.subtile_n) == cut
    return time if known else time._replace(error=time.error + UNTIMED_ERROR)


def _rimmed_area(cut: Cut) -> int:
    """The area of a tile with its rim."""
    return (cut.mma_m + RIM) * (cut.mma_n + RIM)


def nearest(timed: Collection[Cut], cut: Cut) -> Cut:
    """Returns the timed tile that is most like `cut`: of those with as many parts of K and ping-pong alike,
    the one with the nearest numbers of rows and columns, by their logarithms."""

    def unlike(other: Cut) -> tuple[float, ...]:
        kind = [getattr(other, name) != getattr(cut, name) for name in ("split_k", "pingpong")]
        size = math.log2(cut.mma_m / other.mma_m), math.log2(cut.mma_n / other.mma_n)
        clusters = abs(other.cluster_m - cut.cluster_m) + abs(other.cluster_n - cut.cluster_n)
        turned, visits = other.transposed != cut.transposed, abs(other.subtile_n - cut.subtile_n)
        return (*kind, round(sum(map(abs, size)), 3), clusters, turned, visits)

    return min(timed, key=unlike)
