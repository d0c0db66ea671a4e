"""Tile configurations: how a kernel may cut its problem."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from cute_backend.planning.targets import Arch, Cut, Target
from cute_backend.planning.targets.target import CLUSTER_PARTS, WARPGROUP
from cute_backend.signature import TMA_ALIGN
from cute_backend.spec import BColumns, DType, Order, ProductKind

SMEM_RESERVE = 1024 + 512
"""Bytes of shared memory kept for aligning the first swizzled buffer, and for barriers."""

DEFAULT_RASTER = 8
"""Rows of clusters in a group of tiles that share operands in L2 (`TileConfig.usual_raster`)."""

EPILOGUE_STAGES = 2
"""The fewest stages of each load and output that the epilogue passes through shared memory, except those of
`TileConfig.store_stages`."""

ENOUGH_AB_STAGES = 5
"""Stages of A and B that hide the latency of memory. Further stages gain less than further subtiles in
flight; one stage fewer costs 5 percent at M = N = K = 4096 on an H200."""

SHALLOW_AB_STAGES = 4
"""Stages of A and B that are enough if a tile has few k tiles (`Target.shallow_k_bytes`)."""

MAX_STAGES = 4
"""The most stages of exact loads, and of outputs: they suffice to hide the latency of TMA's loads and
stores."""

CTA_SMEM_BYTES = 1024
"""Bytes of shared memory that the system reserves for each CTA (CUDA C++ Programming Guide,
Table 27)."""

SPLITS = (*CLUSTER_PARTS, 6, 8, 12, 16)
"""The values of split-K."""

MAX_WORKING_THREADS = 256
"""The most threads that can have 255 registers each, of the 65536 of a multiprocessor."""

STARTING_REGISTERS = 168
"""Registers that each thread begins with if two warpgroups each have half of a tile's columns, and a third
one loads and multiplies. The third then gives registers up to the other two."""

SHARED_REGISTERS = 216
"""Registers of an epilogue thread if there are two warpgroups of these, and the threads that load or multiply
need more than 56 on sm_100a, or 40 on sm_90a: to work for two warpgroups there, or to find the group of each
tile and stage two vectors here. They then have 72."""

TILE_K_BYTES = 128
"""Bytes of K in one pipeline stage: one row of the 128-byte swizzle."""


STAGED_COLUMNS = 32
"""Columns of a rowvec that a warp stages in shared memory at once, one a lane."""


WARP_COLUMNS = 16
"""Columns of a plane that a warp copies at once by ldmatrix or stmatrix. If warps copy planes without TMA,
subtiles have a multiple of them. Of a stmatrix that transposes the DSL makes four matrices even if two are
asked for."""


class Alignment(str, Enum):
    """The alignment of exact loads and outputs that a kernel is compiled for."""

    TMA = "tma"
    """Base addresses and the strides that are not 1 are multiples of 16 bytes."""
    PLAIN = "plain"
    """Exact loads and outputs are only aligned to their elements, and are read and written by element,
    masked."""

    @property
    def words(self) -> str:
        """The alignment in words, for people."""
        return f"planes aligned to {'16 bytes' if self is Alignment.TMA else 'their elements'}"


class Rowvecs(str, Enum):
    """Where rowvecs are kept, as `config.rowvec_placement` names it."""

    AUTO = "auto"
    """In registers if the budget allows it and the model of the epilogue's time predicts a gain, else in
    shared memory."""
    REGISTER_HOIST = "register_hoist"
    """In registers, whatever the budget says. A kernel that spills is refused."""
    SMEM_STAGED = "smem_staged"


@dataclass(frozen=True)
class TileConfig:
    """How one kernel cuts its problem.

    `tile_m` x `tile_n` is the output tile of one MMA: of one CTA, or on sm_100a with `ctas` = 2 of a pair of
    CTAs that each have half of its rows. A cluster is `cluster_m` x `cluster_n` CTAs; the CTAs of a cluster
    multicast the operand tiles that they share. The epilogue works through a tile in subtiles of `subtile_n`
    columns. On sm_90a two warpgroups share a tile of 128 or 256 rows, or with `pingpong` alternate on tiles,
    so that one's epilogue runs under the other's MMA. Tiles are visited in groups of `raster_m` rows of
    clusters, so that those in flight share operands in L2.

    With `split_k` above 1, `split_k` CTAs share each tile, and each multiplies a part of K, without
    ping-pong: up to four CTAs of a cluster on sm_90a and sm_100a; otherwise CTAs that leave their sums
    in memory (`sums_in_memory`).

    With `unrolled`, visits are unrolled instead of being the iterations of a loop, so that each visit can
    index the values that a thread holds in registers: hoisted rowvecs. If accumulators are in registers, the
    rules set it for narrow subtiles whose planes pass through shared memory
    (`subtiles.unrolled_visits_of_planes`), and the last rung of a tile whose loop spills has it (`ladder`).

    A tile with `transposed` computes D^T = B^T A^T: `tile_m` counts columns of D, and `tile_n` rows
    (`planning/transposing.py`).

    With an `occupancy` above 1, a multiprocessor works on that many CTAs at once, so that the tensor cores
    work on the tile of one CTA while another one waits or runs its epilogue. The CTAs share the shared memory
    and the registers of the multiprocessor evenly.

    With two `column_groups`, on sm_100a, two warpgroups run the epilogue. Each has half of the tile's
    columns, in whole subtiles.

    TMA moves planes in boxes of `box_subtiles` neighbouring subtiles, which visits read and write one after
    another. The rules set more than one for halves of blocks (`subtiles.boxes_of_two_subtiles`).

    A `shallow` kernel is for few k tiles. A and B keep fewer stages (`enough_ab_stages`), and the planes of
    the epilogue get the shared memory.

    A tile that `converts` multiplies stored values, its rows, by values of 16 bits. It converts the former
    between shared memory and the MMA, and has 128 bytes of K of them in a stage. Each byte has `packing`
    values.

    With two `products` a tile has two accumulators, and the MMA is twice as wide: it has the columns of one B
    beside those of another, or, INTERLEAVED, the even columns of one B among its odd ones. If it is
    transposed, the MMA is twice as tall instead, since a stage has the rows of both weights, one below the
    other.
    """

    arch: Arch
    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    ctas: int = 1
    subtile_n: int = 32
    pingpong: bool = False
    raster_m: int = DEFAULT_RASTER
    products: int = 1
    b_columns: BColumns = BColumns.APART
    split_k: int = 1
    unrolled: bool = False
    transposed: bool = False
    rowvecs: Rowvecs = Rowvecs.AUTO
    occupancy: int = 1
    column_groups: int = 1
    shallow: bool = False
    box_subtiles: int = 1
    converts: bool = False
    packing: int = 1

    def __post_init__(self) -> None:
        if self.split_k not in SPLITS:
            *others, last = SPLITS
            accepted = f"{', '.join(map(str, others))} or {last}"
            raise ValueError(f"split_k is {self.split_k}; a tile may be split over {accepted} CTAs")
        if self.pingpong and not self.target.accumulators.in_registers:
            raise ValueError(
                f"tile {self.name} of {self.arch.value} is ping-pong, which takes accumulators in registers; "
                "tensor memory has those of two tiles anyway"
            )
        if self.transposed and self.ctas > 1:
            raise ValueError(
                f"tile {self.name} is transposed, of {self.ctas} CTAs; a transposed one is of one CTA"
            )
        least = self.target.unrolled_subtile_n
        if self.unrolled and least is not None and self.subtile_n >= least:
            raise ValueError(
                f"tile {self.name} of {self.arch.value} has unrolled visits, but there its subtiles of "
                f"{self.subtile_n} columns decide: {least} and more are unrolled, and fewer only for planes "
                "in shared memory or where a loop spills"
            )
        threads = WARPGROUP * self.warpgroups * self.occupancy
        if self.occupancy < 1 or (self.occupancy > 1 and threads > MAX_WORKING_THREADS):
            raise ValueError(
                f"tile {self.name} has {self.occupancy} CTAs of {self.warpgroups} warpgroups on a "
                f"multiprocessor, which has registers for the accumulators of {MAX_WORKING_THREADS} threads: "
                f"at most {MAX_WORKING_THREADS // (WARPGROUP * self.warpgroups)} CTAs"
            )
        if self.column_groups != 1 and (self.column_groups != 2 or self.group_n % self.subtile_n):
            raise ValueError(
                f"tile {self.name} has {self.tile_n} columns for {self.column_groups} warpgroups, in "
                f"subtiles of {self.subtile_n}; one has them all, or two have as many subtiles each"
            )
        if self.column_groups > 1 and self.target.accumulators.in_registers:
            raise ValueError(
                f"tile {self.name} of {self.arch.value} has its columns in {self.column_groups} groups, but "
                "warpgroups share a tile by its rows there, since each multiplies its own"
            )
        if self.occupancy > 1 and self.target.planes_by_tma:
            raise ValueError(
                f"tile {self.name} of {self.arch.value} has {self.occupancy} CTAs on a multiprocessor; with "
                "TMA one CTA has enough loads in flight"
            )
        if self.split_k > 1 and not self.splittable:
            able = [arch.value for arch in Arch if arch.target.tiles.splits]
            sharing = [arch.value for arch in Arch if arch.target.splits_clusters]
            raise ValueError(
                f"tile {self.name} of {self.arch.value} has K in {self.split_k} parts, which one of "
                f"{' or '.join(able)} can have without ping-pong and, except on {' or '.join(sharing)}, "
                "without a cluster that multicasts"
            )

    def check_visits(self) -> None:
        """Raises ValueError unless visits cover the columns of the tile, and boxes its visits."""
        columns, left = self.group_n, self.group_n % self.subtile_n
        if left:
            raise ValueError(
                f"tile {self.name} has {columns} columns for visits of {self.subtile_n}, which leave "
                f"{left} out; the columns of a visit divide them"
            )
        if columns % self.box_n:
            raise ValueError(
                f"tile {self.name} has {columns // self.subtile_n} visits in boxes of {self.box_subtiles}, "
                f"which leave {columns % self.box_n // self.subtile_n} out; the visits of a box divide them"
            )

    @property
    def target(self) -> Target:
        """The facts about its architecture."""
        return self.arch.target

    @property
    def splittable(self) -> bool:
        """Whether CTAs may share it by split-K."""
        alone = not self.multicasts or self.target.splits_clusters
        return bool(self.target.tiles.splits) and not self.pingpong and alone

    @property
    def multicasts(self) -> bool:
        """Whether a cluster of CTAs shares operands."""
        return self.cluster_m * self.cluster_n > 1

    @property
    def sums_in_memory(self) -> bool:
        """Whether CTAs leave the sums of parts of K in memory, for a second kernel to add up.

        They do so unless the CTAs of a tile are a cluster. That needs a target with clusters, few parts, and
        a cluster that does not share operands.
        """
        in_cluster = self.target.clusters and self.split_k in CLUSTER_PARTS and not self.multicasts
        return self.split_k > 1 and not in_cluster

    @property
    def summing(self) -> TileConfig:
        """The tile of the kernel that runs the epilogue: this one or, if sums are in memory, that of the
        second kernel. The second kernel mostly reads, and multiplies nothing. If the target has clusters, its
        tiles are therefore smaller, so that there are enough of them for all multiprocessors. A warp stages
        a rowvec by one element a lane, so they are not narrower than STAGED_COLUMNS. Warps copy planes in
        subtiles of whole `WARP_COLUMNS`, also if those of this tile are not."""
        if not self.sums_in_memory:
            return self
        if not self.target.clusters:
            return replace(self, split_k=1)
        alone = replace(self, split_k=1, cluster_m=1, cluster_n=1)
        if self.subtile_n % WARP_COLUMNS:
            return replace(alone, tile_m=self.block_m, tile_n=STAGED_COLUMNS, subtile_n=WARP_COLUMNS)
        return replace(alone, tile_m=self.block_m, tile_n=max(self.subtile_n, STAGED_COLUMNS))

    @property
    def name(self) -> str:
        """A name for file names and tables, such as `128x256_2x1`; `_by64` stands for subtiles of 64 columns,
        and `128x64x2` for a tile of two accumulators."""
        suffix = "_2cta" if self.ctas == 2 else "_pingpong" if self.pingpong else ""
        suffix += f"_by{self.subtile_n}" if self.subtile_n != 32 else ""
        suffix += f"_split{self.split_k}" if self.split_k > 1 else ""
        suffix += "_unrolled" if self.unrolled else ""
        suffix += "_transposed" if self.transposed else ""
        suffix += f"_occupancy{self.occupancy}" if self.occupancy > 1 else ""
        suffix += "_halves" if self.column_groups > 1 else ""
        suffix += "_shallow" if self.shallow else ""
        suffix += f"_{self.rowvecs.value}" if self.rowvecs is not Rowvecs.AUTO else ""
        tile = f"{self.tile_m}x{self.tile_n}" + (f"x{self.products}" if self.products > 1 else "")
        return f"{tile}_{self.cluster_m}x{self.cluster_n}{suffix}"

    @property
    def words(self) -> str:
        """The whole configuration in words, which explanations and the headers of kernels show."""
        shape = f"{self.products} accumulators of " if self.products > 1 else ""
        shape += f"{self.tile_m} by {self.tile_n}"
        shape += " of the transposed product" if self.transposed else ""
        if self.ctas > 1:
            shape += f", {self.ctas} CTAs a tile"
        if self.pingpong:
            shape += ", ping-pong"
        shape += f", split-K of {self.split_k}, one CTA per part" if self.split_k > 1 else ""
        shape += f", {self.occupancy} CTAs on a multiprocessor" if self.occupancy > 1 else ""
        shape += ", a warpgroup for the epilogue of each half" if self.column_groups > 1 else ""
        several = self.cluster_m * self.cluster_n > 1
        clusters = f"clusters of {self.cluster_m} by {self.cluster_n}, " if several else ""
        unrolled = ", unrolled" if self.unrolled else ""
        unrolled += ", shallow" if self.shallow else ""
        boxes = f" in boxes of {self.box_n}" if self.box_subtiles > 1 else ""
        subtiles = f"subtiles of {self.subtile_n} columns{boxes}"
        return f"{shape}, {clusters}{subtiles}{unrolled}, raster {self.raster_m}"

    @property
    def cut(self) -> Cut:
        """The properties that the time of a tile depends on. If sums are in memory, they describe a part of
        K."""
        cut = Cut(*(getattr(self, field) for field in Cut._fields))
        return cut._replace(split_k=1) if self.sums_in_memory else cut

    @property
    def cluster_size(self) -> int:
        """CTAs in a cluster."""
        return self.cluster_m * self.cluster_n * (1 if self.sums_in_memory else self.split_k)

    @property
    def columns_at_once(self) -> int:
        """Columns of D that a cluster computes at a time."""
        return self.tile_m * self.cluster_m if self.transposed else self.tile_n * self.cluster_n

    @property
    def cta_rows(self) -> int:
        """Rows of the tile in one CTA."""
        return self.tile_m // self.ctas

    @property
    def stacked(self) -> int:
        """Number of products whose rows lie below each other in the MMA: those of a transposed tile, each of
        which has an A of its own. They share B."""
        return self.products if self.transposed else 1

    @property
    def abreast(self) -> int:
        """Number of products whose columns lie side by side in the MMA. They share A."""
        return self.products // self.stacked

    @property
    def mma_m(self) -> int:
        """Rows of the MMA, in one CTA."""
        return self.cta_rows * self.stacked

    @property
    def mma_n(self) -> int:
        """Columns of the MMA."""
        return self.tile_n * self.abreast

    @property
    def pieces(self) -> int:
        """Number of tensors that a stage of B is loaded from."""
        return 1 if self.b_columns is BColumns.INTERLEAVED else self.abreast

    @property
    def piece_n(self) -> int:
        """Columns of a stage of B, in one CTA, that come from one tensor."""
        return self.mma_n // (self.pieces * self.ctas)

    @property
    def thread_columns(self) -> int:
        """Columns of the tile in which one thread of the epilogue has elements."""
        return self.group_n // self.target.accumulators.row_threads

    @property
    def group_n(self) -> int:
        """Neighbouring columns of the tile whose elements one warpgroup of the epilogue has."""
        return self.tile_n // self.column_groups

    @property
    def thread_rows(self) -> int:
        """Rows of the tile in which one thread of the epilogue has elements."""
        return self.cta_rows * self.target.accumulators.row_threads // (WARPGROUP * self.row_groups)

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a CTA that run the epilogue. Two share a tile if it has an even number of blocks of
        rows for them; one has all three of 192 rows."""
        blocks = self.cta_rows // self.block_m
        shared = blocks > self.target.accumulators.group_blocks and blocks % 2 == 0
        return 2 if self.pingpong or shared else self.column_groups

    @property
    def sharing(self) -> int:
        """How many of the `warpgroups` work on one tile at a time."""
        return 1 if self.pingpong else self.warpgroups

    @property
    def row_groups(self) -> int:
        """How many of the warpgroups that share a tile have different rows of it."""
        return self.sharing // self.column_groups

    @property
    def rolled(self) -> bool:
        """Whether visits are the iterations of a loop, which long chains need; otherwise they are
        unrolled."""
        unrolled = self.target.unrolled_subtile_n
        return not self.unrolled and (unrolled is None or self.subtile_n < unrolled)

    @property
    def block_m(self) -> int:
        """Rows of a subtile: those of one MMA instruction that one warpgroup owns."""
        return self.target.accumulators.block_m

    @property
    def blocks(self) -> int:
        """Blocks of `block_m` rows of each product of the tile that one warpgroup has."""
        return self.cta_rows // (self.block_m * self.sharing)

    @property
    def warp_rows(self) -> int:
        """Rows of a subtile that one warp of the epilogue has."""
        return self.block_m // 4

    @property
    def tile_warps(self) -> int:
        """Warps of a CTA that run the epilogue of one tile."""
        return 4 * self.sharing

    @property
    def row_warps(self) -> int:
        """How many of the warps that share a tile have different rows of it."""
        return 4 * self.row_groups

    def epilogue_registers(self, kind: ProductKind, staged: int) -> int:
        """Registers that a thread of the epilogue may use, for which `staged` vectors are staged."""
        finding = kind is ProductKind.GROUPED and staged > 1 and self.warpgroups > 1
        return SHARED_REGISTERS if finding or self.column_groups > 1 else self.target.epilogue_registers

    @property
    def thread_accumulators(self) -> int:
        """fp32 accumulators of one epilogue thread for a tile."""
        return self.mma_m * self.mma_n // (WARPGROUP * self.sharing)

    @property
    def ab_stage_bytes(self) -> int:
        """Shared memory of one CTA for one stage of A and B."""
        columns = self.mma_n // self.ctas * (2 * self.packing if self.converts else 1)
        return (self.mma_m + columns) * TILE_K_BYTES

    @property
    def sum_bytes(self) -> int:
        """Shared memory of one CTA for the partial sums of split-K that it passes to another CTA."""
        return 4 * self.mma_m * self.mma_n if self.split_k > 1 and not self.sums_in_memory else 0

    @property
    def stage_elements(self) -> int:
        """Elements in one stage of an exact load or an output: a box for each warpgroup of the CTA."""
        return self.block_m * self.warpgroups * self.box_n

    @property
    def box_n(self) -> int:
        """Columns of a box in which TMA moves planes."""
        return self.subtile_n * self.box_subtiles

    def has_whole_runs(self, order: Order | None, dtype: DType) -> bool:
        """Whether the columns of a subtile are a multiple of the 16 bytes that TMA copies, where a plane is
        contiguous along them: 8 columns of fp8 are not."""
        return order is not Order.ROW or self.subtile_n * dtype.bits % (TMA_ALIGN * 8) == 0

    @property
    def load_stages(self) -> int:
        """The fewest stages of an exact load. They have two subtiles, whatever a box has."""
        return max(EPILOGUE_STAGES // self.box_subtiles, 1)

    @property
    def staged_n(self) -> int:
        """Elements of a staged rowvec in shared memory: the tile's columns, rounded up to those that a warp
        stages at once."""
        return -(-self.tile_n // STAGED_COLUMNS) * STAGED_COLUMNS

    @property
    def smem_bytes(self) -> int:
        """Shared memory that one CTA can have."""
        if self.occupancy == 1:
            return self.target.smem_bytes
        return (self.target.smem_bytes + CTA_SMEM_BYTES) // self.occupancy - CTA_SMEM_BYTES

    @property
    def least_ab_stages(self) -> int:
        """Stages of A and B below which the MMA waits for memory. If a multiprocessor has further CTAs, two
        are enough: the tensor cores work for the other CTAs while this one waits."""
        return self.target.least_ab_stages if self.occupancy == 1 else 2

    @property
    def usual_raster(self) -> int:
        """The rows of clusters in a group if nothing was tuned.

        On Hopper a group has 2048 rows of D or, with clusters of few rows, 16 of them. In groups of 16 rows,
        clusters of 128 rows took 0.92 to 1.00 times as long as in groups of 8, for 14 products of 7e10 to
        1.3e12 operations in bf16 (H100).
        """
        return 16 if self.target.by_wgmma and self.cta_rows * self.cluster_m == 128 else DEFAULT_RASTER

    @property
    def enough_ab_stages(self) -> int:
        """Stages of A and B beyond which planes get the shared memory."""
        return SHALLOW_AB_STAGES if self.shallow else ENOUGH_AB_STAGES

    @property
    def store_stages(self) -> int:
        """The fewest stages of an output: two subtiles if TMA empties them; one if the warp that fills the
        stage also empties it before it goes on."""
        return self.load_stages if self.target.planes_by_tma else 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for cache keys and manifests."""
        enums = {"arch": self.arch.value, "b_columns": self.b_columns.value, "rowvecs": self.rowvecs.value}
        # Only where it is needed, so that other kernels keep their names.
        left_out = {"packing"} if self.packing == 1 else set()
        return {name: value for name, value in (asdict(self) | enums).items() if name not in left_out}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> TileConfig:
        """The inverse of `to_dict`."""
        arch, rowvecs = Arch(data["arch"]), Rowvecs(data.get("rowvecs", Rowvecs.AUTO))
        return TileConfig(
            **{**data, "arch": arch, "b_columns": BColumns(data["b_columns"]), "rowvecs": rowvecs}
        )


def tile_k(dtype: DType) -> int:
    """Elements of K in one pipeline stage."""
    return TILE_K_BYTES * 8 // dtype.bits
