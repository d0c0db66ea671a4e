"""The facts about an architecture that the planner, the emitter and the runtime use: data, its checks, and
what follows from it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
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

CLUSTER_PARTS = (1, 2, 3, 4)
"""The values of split-K for which the CTAs of a tile are a cluster, where there are clusters."""

WIDEST = 256
"""The most columns of an MMA (PTX ISA, wgmma.mma_async and tcgen05.mma)."""

MAX_TILES = 5
"""Tiles that a target may ship for one kind of spec: a launch has kernels compiled for each."""


class Shape(NamedTuple):
    """A tile as a target lists it: fields of a `TileConfig`, before the rules fit it to a spec."""

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    ctas: int = 1
    subtile_n: int = 32
    pingpong: bool = False
    transposed: bool = False
    occupancy: int = 1
    split_k: int = 1


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


class Demand(Enum):
    """The kinds of specs that have tiles of their own if their sizes are unknown."""

    PLANES = "planes"
    """It reads or writes a plane, and is none of the others."""
    REDUCED = "reduced"
    """It neither reads nor writes one."""
    PROMOTED = "promoted"
    """Its fp8 sums are promoted to fp32 as they grow."""
    SCALED = "scaled"
    """The MMA scales its blocks. Tensor memory has to have room for the scales."""
    BLOCKS = "blocks"
    """It is of another kind, but has blocks of columns of which none of the tiles of that kind consists."""
    CONVERTED = "converted"
    """Values of 8 or 4 bits are converted to the dtype of the other operand on their way to the MMA."""


@dataclass(frozen=True)
class EvenTiles:
    """The tiles of transposed products whose columns follow from a known M (`widths.py`)."""

    rows: tuple[int, ...] = ()
    """The rows of the MMA; none if a target has no such tiles."""
    up_to: Mapping[int, int] = field(default_factory=dict)
    """The most rows of D that tiles of some rows serve, as one share; others serve any number."""
    step: int = 8
    """A number that divides their columns: those that the MMA, and the copies of its fragments, take at a
    time."""
    accumulators: int = 256
    """The most accumulators of a thread, for all products."""
    clusters: tuple[int, ...] = (1,)
    """CTAs of a cluster that share the rows of a tile, each with other columns of D."""
    error: float = 0.05
    """The relative error of their times on a target of which no tile was timed, beside that of other tiles.
    Its constants say nothing of narrow visits, so that only a gain of more than that counts."""

    @property
    def columns(self) -> range:
        """The columns that a tile may have."""
        return range(self.step, WIDEST + 1, self.step)


@dataclass(frozen=True)
class Tiles:
    """The tiles of a target."""

    shipped: Mapping[Demand, tuple[Shape, ...]]
    """The tiles that serve specs of unknown sizes, at most `MAX_TILES` of a kind, the largest first. A launch
    has kernels of each. SCALED and REDUCED have those of PLANES if they are not listed."""
    further: tuple[Shape, ...] = ()
    """Further tiles that serve a spec if its sizes are known."""
    splits: tuple[int, ...] = ()
    """The numbers of parts that K may have: none if the template can't split K. The smallest tile that serves
    a spec of known sizes has K in all of them or, where there are clusters, in those of `CLUSTER_PARTS`.
    Tuning tries all for every tile."""

    even: EvenTiles = EvenTiles()
    """The tiles of transposed products whose columns follow from a known M."""

    @property
    def all(self) -> tuple[Shape, ...]:
        """Every tile of the tables, each once, but those for converted values alone, some of which are
        narrower than others can be."""
        shipped = (shapes for kind, shapes in self.shipped.items() if kind is not Demand.CONVERTED)
        return tuple(dict.fromkeys((*chain(*shipped), *self.further)))


class Cut(NamedTuple):
    """The properties that a tile's time depends on: those of a `TileConfig` of the same names."""

    mma_m: int
    mma_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    pingpong: bool = False
    subtile_n: int = 32
    split_k: int = 1
    occupancy: int = 1
    transposed: bool = False


class TileTime(NamedTuple):
    """How long one tile takes, in microseconds, and how well that is known: the constants of
    `planning/cost.py`."""

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
    error: float = 0.0
    """The relative error of predicted times, beside what all tiles of a problem share."""
    in_waves: float = 1.0
    """How many times as long a wave takes if there are several, for tiles that were timed in one. In 128 x
    128 in clusters of 2 x 2, 4096 cubed took 225 us, of which the other constants make 189, and 201 in
    clusters of 1 x 2 (bf16, H100, benchmarks/findings.md)."""

    def of_area(self, ratio: float) -> TileTime:
        """The time of a tile with `ratio` times as many elements."""
        return self._replace(
            own=ratio * self.own, k=ratio * self.k, busy=ratio * self.busy, crossing=ratio * self.crossing
        )

    def longer(self, error: float) -> TileTime:
        """The time if these constants are too short by a relative error."""
        return self.of_area(1 + error)._replace(start=(1 + error) * self.start)


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
    """How many times as long a k tile takes if its sums are scaled by blocks, and columns share scales, for
    tiles that were timed with them. Others have that of their nearest neighbour."""
    by_lines: Mapping[Cut, float] = field(default_factory=dict)
    """The same if each column has a scale of its own."""
    in_small_groups: Mapping[Cut, float] = field(default_factory=dict)
    """The same if rows are in groups that have about 128 rows in the mean."""


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
    iterations of a loop unless they need TMA for planes, or a loop spills; if it is None, they always
    are."""
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
    converts: frozenset[DType] = frozenset()
    """The dtypes of values that it converts to 16 bits between shared memory and the MMA, with zeros and
    scales of groups of K or without."""

    def __post_init__(self) -> None:
        for fault in (self._identity(), self._layout(), self._tables()):
            if fault:
                raise ValueError(f"target {self.name}: {fault}")

    @property
    def fp8(self) -> bool:
        """Whether its MMA multiplies fp8."""
        return not self.operands.isdisjoint(_FP8)

    @property
    def by_wgmma(self) -> bool:
        """Whether it multiplies by wgmma, which leaves accumulators in registers, and moves planes by TMA."""
        return self.planes_by_tma and self.accumulators.in_registers

    @property
    def clusters(self) -> bool:
        """Whether its kernels run in clusters. Elsewhere CTAs that share a tile by split-K pass their sums
        through memory (`templates/split_sums.py`)."""
        return self.planes_by_tma

    @property
    def splits_clusters(self) -> bool:
        """Whether clusters that share operands may each have a part of K. They leave their sums in memory, as
        CTAs do if there are more parts than a cluster has CTAs."""
        return self.clusters and not set(self.tiles.splits) <= set(CLUSTER_PARTS)

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
        shipped = self.tiles.shipped
        if not shipped.get(Demand.PLANES) or not self.timing.tiles:
            return "it ships no tile or times none; it takes one of each at least"
        promoted = len(shipped.get(Demand.PROMOTED, ()))
        if bool(promoted) != self.promotes or (self.promotes and not self.fp8):
            return (
                f"promotes is {self.promotes}, fp8 is {self.fp8} and {promoted} tiles are for "
                "promoted sums; there are some where fp8 sums are promoted, and none elsewhere"
            )
        for kind, table in shipped.items():
            areas = [shape.tile_m * shape.tile_n for shape in table]
            if (len(table) > MAX_TILES and kind is not Demand.BLOCKS) or areas != sorted(areas, reverse=True):
                name = kind.value
                return f"{name} has tiles of {areas} elements; it takes up to {MAX_TILES}, the largest first"
        every = (*chain(*shipped.values()), *self.tiles.further)
        return next(filter(None, map(self._shape, every)), None)

    def _shape(self, shape: Shape) -> str | None:
        tile = f"{shape.tile_m} x {shape.tile_n}"
        rows, block_m = shape.tile_m // shape.ctas, self.accumulators.block_m
        if shape.tile_m % shape.ctas or rows % block_m:
            return f"tile {tile} gives each of {shape.ctas} CTAs {rows} rows; it takes blocks of {block_m}"
        if shape.tile_n > WIDEST:
            return f"tile {tile} has {shape.tile_n} columns; an MMA has at most {WIDEST}"
        widths = [each for each in range(self.least_subtile_n, 65, 8) if shape.tile_n % each == 0]
        if shape.subtile_n not in widths:
            return (
                f"tile {tile} has subtiles of {shape.subtile_n} columns; its columns have subtiles of "
                f"{', '.join(map(str, widths)) or 'no width'}"
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
