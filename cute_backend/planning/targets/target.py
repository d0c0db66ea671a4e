"""The facts about an architecture that the planner, the emitter and the runtime use: data, its checks, and
what follows from it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from cute_backend.spec import DType, Scaling

_FP8 = (DType.E4M3, DType.E5M2)

WARPGROUP = 128
"""Threads of a warpgroup: the most that share the rows of one block of an accumulator."""

LARGEST_SMEM_BYTES = 227 * 1024
"""Shared memory of one CTA, the most on any architecture (CUDA C++ Programming Guide, Table 27)."""

MAX_REGISTERS = 255
"""Registers of one thread, the most on any architecture (the same table)."""

MAX_TILES = 5
"""Tiles that a target may ship for one kind of spec: a launch has kernels compiled for each."""


class Shape(NamedTuple):
    """A tile as a target ships it: the fields of a `TileConfig` that no spec changes."""

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    ctas: int = 1
    subtile_n: int = 32
    pingpong: bool = False
    transposed: bool = False
    occupancy: int = 1


@dataclass(frozen=True)
class Accumulators:
    """Who has which elements of an accumulator, and where they are kept.

    Rows of the tile are dealt to the warpgroups of the epilogue in blocks of `block_m`, those of one MMA
    instruction. Within a block `row_threads` threads share each row and its columns evenly. With
    `in_registers` the accumulators of a whole tile lie in the registers of these threads; else they lie in
    tensor memory, from where a subtile is read at a time.
    """

    block_m: int
    row_threads: int
    in_registers: bool
    group_blocks: int = 1
    """Blocks of a tile up to which one warpgroup has them all; of more, two have every other one."""


@dataclass(frozen=True)
class Tiles:
    """The tiles of a target, each table with the largest first.

    `shipped` serves specs with planes, and what the other tables don't; `reduced` those that neither read nor
    write a plane, `promoted` those whose fp8 sums are promoted to fp32 as they grow. `alone` is for few rows,
    where the smallest of a table can't be cut for a spec. `tried` has those that only tuning tries, with
    each of `clusters`, (cluster_m, cluster_n), on top.
    """

    shipped: tuple[Shape, ...]
    tried: tuple[Shape, ...]
    clusters: tuple[tuple[int, int], ...]
    scaled: tuple[Shape, ...] = ()
    """Tiles of products whose blocks the MMA scales, which leave tensor memory room for the scales."""
    reduced: tuple[Shape, ...] = ()
    promoted: tuple[Shape, ...] = ()
    alone: Shape | None = None
    sized: tuple[Shape, ...] = ()
    """Further tiles that the heuristic chooses from if sizes are known, for specs that `shipped` serves. A
    launch of unknown sizes has no kernels of them."""
    pairs: tuple[Shape, ...] = ()
    """Further tiles like those of `sized`, for specs of two products."""
    sized_by_blocks: tuple[Shape, ...] = ()
    """The tiles of `sized` for specs whose sums are scaled by blocks as they are promoted."""
    middle: tuple[Shape, ...] = ()
    """Further tiles like those of `sized`. They were timed for up to `middle_rows` rows; for more rows, they
    have to be predicted to be faster by more than the model's error."""
    middle_rows: int = 0
    large_clusters: tuple[Shape, ...] = ()
    """Further tiles like those of `sized`, in clusters of four CTAs, for problems of one wave. They have to
    be predicted to be faster by more than the model's error."""
    blocks: tuple[Shape, ...] = ()
    """Further tiles for blocks of columns of which no tile above consists, such as heads of 80 columns."""
    whole_blocks: tuple[Shape, ...] = ()
    """Further tiles that are one visit, for blocks of columns that no other visit holds whole."""
    packed: tuple[Shape, ...] = ()
    """Further tiles for products that share a launch and a B, whose columns are packed by heads."""
    small_groups: Shape | None = None
    """The tile for products of rows in groups that have about 128 rows in the mean."""
    splits: tuple[int, ...] = ()
    """The values of split-K that the smallest tile of a table may have: none if the template can't split
    K."""
    parted: tuple[Shape, ...] = ()
    """The tiles that may also have K in `parts`, more than a cluster has CTAs: for few tiles and a long K."""
    parts: tuple[int, ...] = ()
    """The values of split-K of the tiles in `parted`. CTAs leave their sums in memory then."""
    tried_splits: tuple[int, ...] = ()
    """The values of split-K that only tuning tries, for every tile that can be split."""
    parted_clusters: tuple[Shape, ...] = ()
    """The tiles that may have K in `tried_splits` parts, their sums in memory. Their CTAs share operands, so
    they can't also add up each other's sums."""
    tried_parted: tuple[Shape, ...] = ()
    """The tiles like those of `parted_clusters` that only tuning tries, also with K in `parts`."""

    @property
    def tables(self) -> dict[str, tuple[Shape, ...]]:
        """The tables by name, each of which a launch may choose from."""
        return {name: getattr(self, name) for name in ("shipped", "reduced", "promoted", "scaled")}

    @property
    def all(self) -> tuple[Shape, ...]:
        """Every tile above, except `small_groups`, `parted`, `parted_clusters` and `tried_parted`."""
        alone = () if self.alone is None else (self.alone,)
        further = (
            self.sized,
            self.sized_by_blocks,
            self.middle,
            self.large_clusters,
            self.blocks,
            self.whole_blocks,
            self.packed,
            self.tried,
        )
        return (*chain(*self.tables.values(), *further), *alone)


class Cut(NamedTuple):
    """The properties that a tile's time depends on: the rows of a CTA, the columns of its MMA, and the fields
    of a `TileConfig` of the same names."""

    cta_rows: int
    mma_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    pingpong: bool = False
    subtile_n: int = 32
    split_k: int = 1
    occupancy: int = 1


class TileTime(NamedTuple):
    """How long one tile takes, in microseconds: the constants of `planning/cost.py`."""

    start: float
    """A kernel's start and its last epilogue, which nothing hides."""
    own: float
    """The part of a wave's time that does not depend on K."""
    k: float
    """A wave's time for each KiB of K, if few other multiprocessors are busy."""
    busy: float
    """An addition to `k` if all multiprocessors are busy, for waits for L2 and memory and a lower clock."""
    crossing: float
    """An addition to `busy` if rows of A and B do not begin at lines of L2, because K is not a multiple of
    128 bytes."""


@dataclass(frozen=True)
class Timing:
    """The constants of the cost model (`planning/cost.py`) for one GPU."""

    tiles: Mapping[Cut, TileTime]
    """The tiles that were measured. A tile that was not has the time of the most similar one, scaled by
    area."""
    reached: Mapping[int, float]
    """The share of the multiprocessors that clusters occupy, by the number of CTAs in a cluster, if that is
    not all of them."""
    beyond_us: float
    """TMA's time to fill a row beyond the last of A with zeros, for each KiB of K, in microseconds."""
    bytes_per_us: float
    """The bandwidth of memory."""
    l2_bytes_per_us: float = math.inf
    """The bandwidth at which all multiprocessors together receive A and B from L2."""
    by_blocks: Mapping[Cut, float] = field(default_factory=dict)
    """How many times as long a k tile takes if its sums are scaled by blocks, and columns share scales; 1 for
    tiles that are not listed."""
    by_lines: Mapping[Cut, float] = field(default_factory=dict)
    """The same if each column has a scale of its own."""


@dataclass(frozen=True, eq=False)
class Target:
    """One architecture. Raises ValueError if its facts contradict each other."""

    name: str
    """The name that the assembler knows, such as "sm_90a"."""
    family: str
    """The name that people know, such as "Hopper"."""
    capability: tuple[int, int]
    """The compute capability of a device that runs its kernels."""
    gpu: str
    """The GPU to plan for on a machine that has none."""
    sm_count: int
    """The number of its multiprocessors (data sheet)."""
    smem_bytes: int
    """Shared memory that one CTA can have (CUDA C++ Programming Guide, Table 27)."""
    least_ab_stages: int
    """Stages of A and B below which the MMA waits for memory."""
    template: str
    """The class of its kernels, as "module:Class"; a string, so that planning imports no CUTLASS."""
    operands: frozenset[DType]
    """The dtypes that its MMA multiplies."""
    planes_by_tma: bool
    """Whether its kernels move planes by TMA, and run in the clusters that came with it. It is False for RTX
    Blackwell, whose kernels load only A and B by TMA."""
    promotes: bool
    """Whether its MMA drops bits of fp8 sums, so that `use_fast_accum=False` promotes them. For other
    targets the argument makes no difference."""
    products_per_cycle: int
    """Products of 8-bit operands that the tensor cores of a multiprocessor sum up in a cycle."""
    accumulators: Accumulators
    least_subtile_n: int
    """Columns of the narrowest subtile."""
    unrolled_subtile_n: int | None
    """Columns of a subtile from which on visits are unrolled. With narrower subtiles, visits are the
    iterations of a loop unless they need TMA for planes; if it is None, they always are."""
    epilogue_registers: int
    """The registers that a thread of the epilogue may use."""
    tiles: Tiles
    timing: Timing = field(repr=False)
    segment_tile_n: int = 0
    """Columns of the widest tile whose kernels may have columns in segments, each with a B and an epilogue of
    its own; 0 if no kernel may."""
    shallow_k_bytes: int = 0
    """Bytes of K up to which A and B keep fewer stages, and planes get more (`TileConfig.shallow`)."""
    scalings: frozenset[Scaling] = frozenset()
    """The blocks whose scales its mainloops support."""

    def __post_init__(self) -> None:
        for fault in (self._identity(), self._layout(), self._tables()):
            if fault:
                raise ValueError(f"target {self.name}: {fault}")

    @property
    def fp8(self) -> bool:
        """Whether its MMA multiplies fp8."""
        return not self.operands.isdisjoint(_FP8)

    @property
    def clusters(self) -> bool:
        """Whether its kernels run in clusters. Elsewhere CTAs that share a tile by split-K pass their sums
        through memory (`templates/split_sums.py`)."""
        return self.tiles.clusters != ((1, 1),)

    @property
    def groups(self) -> bool:
        """Whether its template schedules groups of rows, whose sizes only the device knows."""
        return self.planes_by_tma

    @property
    def pdl(self) -> bool:
        """Whether a kernel may begin before the end of the one before it (PTX ISA, griddepcontrol)."""
        return self.capability >= (9, 0)

    @property
    def stmatrix(self) -> bool:
        """Whether a warp writes 8 x 8 matrices to shared memory by one instruction (PTX ISA, stmatrix)."""
        return self.capability >= (9, 0)

    @property
    def version(self) -> str:
        """Its compute capability as people write it, such as "9.0"."""
        return ".".join(map(str, self.capability))

    def _identity(self) -> str | None:
        major, minor = self.capability
        if re.fullmatch(rf"sm_{major}{minor}[af]?", self.name) is None:
            return (
                f"compute capability {major}.{minor} is that of sm_{major}{minor}, with a suffix or without"
            )
        if re.fullmatch(r"[\w.]+:[A-Za-z]\w*", self.template) is None:
            return f"the template is {self.template!r}; it is named as 'module:Class'"
        if self.sm_count < 1:
            return f"{self.gpu} has {self.sm_count} multiprocessors; a target plans for one at least"
        return None

    def _layout(self) -> str | None:
        block_m, row_threads = self.accumulators.block_m, self.accumulators.row_threads
        if block_m * row_threads % WARPGROUP:
            return (
                f"{WARPGROUP} threads, {row_threads} to a row, can't own whole rows of a block of {block_m}: "
                f"{block_m} times {row_threads} is no multiple of {WARPGROUP}"
            )
        if not 0 < self.epilogue_registers <= MAX_REGISTERS:
            return f"a thread has {self.epilogue_registers} registers; it can have up to {MAX_REGISTERS}"
        if not 0 < self.smem_bytes <= LARGEST_SMEM_BYTES:
            return (
                f"a CTA has {self.smem_bytes} bytes of shared memory; none has more than {LARGEST_SMEM_BYTES}"
            )
        if self.least_ab_stages < 2:
            return f"A and B have {self.least_ab_stages} stages; one is copied while one is multiplied"
        return None

    def _tables(self) -> str | None:
        tiles = self.tiles
        if not tiles.shipped or not tiles.tried or not self.timing.tiles:
            return "it ships no tile, tunes none or times none; it takes one of each at least"
        if bool(tiles.promoted) != self.promotes or (self.promotes and not self.fp8):
            return (
                f"promotes is {self.promotes}, fp8 is {self.fp8} and {len(tiles.promoted)} tiles are for "
                "promoted sums; there are some where fp8 sums are promoted, and none elsewhere"
            )
        for name, table in tiles.tables.items():
            areas = [shape.tile_m * shape.tile_n for shape in table]
            if len(table) > MAX_TILES or areas != sorted(areas, reverse=True):
                return f"{name} has tiles of {areas} elements; it takes up to {MAX_TILES}, the largest first"
        if not self.planes_by_tma and self.clusters:
            return f"clusters {tiles.clusters} need TMA, which it does not have"
        return next(filter(None, map(self._shape, tiles.all)), None)

    def _shape(self, shape: Shape) -> str | None:
        tile = f"{shape.tile_m} x {shape.tile_n}"
        rows, block_m = shape.tile_m // shape.ctas, self.accumulators.block_m
        if shape.tile_m % shape.ctas or rows % block_m:
            return f"tile {tile} gives each of {shape.ctas} CTAs {rows} rows; it takes blocks of {block_m}"
        if shape.subtile_n < self.least_subtile_n or shape.tile_n % shape.subtile_n:
            return (
                f"tile {tile} has subtiles of {shape.subtile_n} columns; they divide it, and have "
                f"{self.least_subtile_n} at least"
            )
        if shape.cluster_m % shape.ctas:
            return f"tile {tile} has {shape.ctas} CTAs in clusters {shape.cluster_m} high"
        if not self.planes_by_tma and shape.cluster_m * shape.cluster_n > 1:
            return f"tile {tile} is in clusters of {shape.cluster_m} x {shape.cluster_n}, which need TMA"
        if shape.pingpong and not self.accumulators.in_registers:
            return f"tile {tile} is ping-pong, but tensor memory has the accumulators of two tiles anyway"
        if shape.pingpong and not self.planes_by_tma:
            return f"tile {tile} is ping-pong, and ping-pong needs a target that moves planes by TMA"
        return None
