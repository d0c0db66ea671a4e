"""The registers of an epilogue thread: how many its values take, and how many cause no spill.

One spill costs more than every exposed load, so each limit here is one that a build has shown: ptxas finds no
spill in any tile that ships, under every shared epilogue and alignment (test/templates/test_spills.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_backend.planning.shared_memory import has_planes
from cute_backend.planning.targets.target import WARPGROUP
from cute_backend.planning.tiles import Alignment, TileConfig
from cute_backend.spec import Axis, EpilogueSpec, Load, LoadKind, ProductKind, ReduceKind, Scaling

NARROW_SUBTILE_N = 32
"""Columns of a subtile where wider ones leave planes no room in shared memory, or gain nothing."""

WORKING = 68
"""Kept for addresses, the chain and the first output; with what `Registers` counts, the least that leaves the
shared epilogues without a spill in every tile that ships."""

WORKING_ON_HALVES = 60
"""The same for a thread that has half of a tile's columns, whose accumulators lie in tensor memory."""

COPYING = 40
"""Registers kept for addresses of operands if there is no TMA, because the warps that multiply copy them: a
scale and a bias that were hoisted beside 128 accumulators spilled up to 88 bytes (sm_86 and sm_89)."""

MAX_ACCUMULATORS = 128
"""Accumulators of a thread that leave registers for an epilogue."""

MAX_PROMOTED_ONCE = 96
"""Accumulators of a thread beside one set of sums that leave registers for an epilogue."""

MAX_PROMOTED_TWICE = 64
"""Accumulators of a thread beside which it has two sets of sums."""

MAX_BESIDE_TWO_SETS = 34
"""Registers for planes and for rows that leave a thread room for two sets of sums where single columns have
scales: beside 36 and 50 of them, in 128 x 128 and 64 x 128, 8 and 16 bytes were spilled."""

MAX_BESIDE_ROWS = 64
"""Accumulators of a thread that leave registers beside what it keeps for each row: partials of reductions, or
addresses of a plane that is read by element whatever the alignment. With the 96 of 128 x 192 16 bytes were
spilled, with the 128 of 128 x 256 up to 96."""

MAX_BESIDE_BLOCKS = 96
"""Accumulators of a thread that leave registers beside what a visit keeps until blocks are reduced: with the
128 of 128 x 256, addresses of a plane that is written by element spilled 32 bytes."""

MAX_KEPT = 160
"""Accumulators and partials of a thread that leave registers for a few draws of noise."""

MAX_CROWDED = 64
"""Accumulators that leave a crowded thread its registers: with the 96 of 64 x 192, 40 bytes were spilled."""

MAX_PAIRED_LOADS = 2
"""Exact loads beside which a pair's 128 accumulators of a thread leave registers: with three, 16 bytes were
spilled, with four and as many results 184."""

MAX_HOISTED_COLUMNS = 128
"""Columns of a thread that leave it registers for a hoisted rowvec: 16-bit ones of the 256 columns of
256 x 256 on sm_100a spilled 24 bytes."""

UNHOISTED_BY_ELEMENT = 112
"""Accumulators of a thread that leave no registers for a hoisted rowvec where planes are written by element:
beside the 112 of 128 x 224 a 16-bit one spilled 24 bytes, though none spilled beside the 128 of 128 x 256."""

MAX_LOADS_OF_WARPS = 3
"""Exact loads beside which 128 accumulators leave registers where there is no TMA for planes."""

MAX_PLANES_OF_WARPS = 7
"""Planes of which some may be in shared memory and others not, where there is no TMA for them."""

MAX_PROMOTED_LOADS = 3
"""Exact loads beside which promoted sums of 128 rows leave registers: with four, 8 bytes were spilled."""


@dataclass(frozen=True)
class Registers:
    """The 32-bit registers in which one thread keeps its values of a tile."""

    accumulators: int
    """Sums, where they live in registers."""
    promoted: int
    """Further sets of sums, where fp8's are promoted."""
    fragments: int
    """A subtile of each plane: an exact load as it comes and as it is widened, and its addresses where it is
    read by element; every output but the first, which `WORKING` counts."""
    rows: int
    """Values that are read ahead for rows: one of each colvec for each row."""
    partials: int
    """Partial results of reductions: at most two registers for each row."""

    @staticmethod
    def of(spec: EpilogueSpec, config: TileConfig, alignment: Alignment) -> Registers:
        """For a spec, a configuration whose subtiles are those of the alignment, and that alignment."""
        accumulators = config.thread_accumulators if config.target.accumulators.in_registers else 0
        return Registers(
            accumulators,
            sets_of_sums(config, spec) * accumulators // pieces_of_sums(config, spec),
            _fragments(spec, config, alignment),
            _rows(spec, config),
            2 * len(spec.reductions) * config.thread_rows,
        )


def _fragments(spec: EpilogueSpec, config: TileConfig, alignment: Alignment) -> int:
    fragments = max(len(spec.planes) - 1, 0)
    for load in spec.loads_of(LoadKind.EXACT):
        by_element = alignment is not Alignment.TMA or (
            load.order is None and not _by_tma(load, spec, config)
        )
        # Where warps copy, a plane of several modes spilled 48 bytes beside two hoisted rowvecs.
        fragments += 2 + by_element + (load.is_split and not config.target.tma)
    return fragments * config.block_m * config.subtile_n // WARPGROUP


def _rows(spec: EpilogueSpec, config: TileConfig) -> int:
    return len(spec.loads_of(LoadKind.COLVEC)) * config.thread_rows


def is_promoted(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether fp8 sums are promoted to fp32 as they grow."""
    return config.target.promotes and not spec.product.fast_accum


def sets_of_sums(config: TileConfig, spec: EpilogueSpec) -> int:
    """Sets of sums that a thread has beside its accumulators, where fp8's are promoted: two, so that it adds
    one while the tensor cores are at work on the other; one beside more accumulators than leave registers for
    two, or beside more that it keeps where single columns have scales."""
    if not is_promoted(config, spec):
        return 0
    crowded = config.thread_accumulators > MAX_PROMOTED_TWICE
    if spec.product.b_scaling is Scaling.LINE:
        kept = _fragments(spec, config, Alignment.TMA) + _rows(spec, config)
        crowded = crowded or kept > MAX_BESIDE_TWO_SETS
    return 1 if crowded else 2


def pieces_of_sums(config: TileConfig, spec: EpilogueSpec) -> int:
    """Pieces of a tile's columns, of which a thread has the sums of one at a time, where blocks are scaled:
    two beside more accumulators than leave registers for the sums of all. A warpgroup has 64 rows then."""
    one_block = config.cta_rows == config.block_m * config.sharing
    many = config.thread_accumulators > MAX_PROMOTED_ONCE
    return 2 if is_promoted(config, spec) and spec.product.is_block_scaled and many and one_block else 1


def leaves_sums_registers(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a thread's accumulators leave registers for sums that are promoted, where any are."""
    if not is_promoted(config, spec):
        return True
    most = MAX_PROMOTED_ONCE if spec.product.is_block_scaled else MAX_PROMOTED_TWICE
    return config.thread_accumulators <= (MAX_ACCUMULATORS if pieces_of_sums(config, spec) > 1 else most)


def hoisted_registers(load: Load, config: TileConfig) -> int:
    """The registers of a hoisted rowvec: two values of 16 bits share one, and no other dtype is packed."""
    return config.thread_columns // (2 if load.dtype.bits == 16 else 1)


def hoist_budget(spec: EpilogueSpec, config: TileConfig, alignment: Alignment) -> int:
    """fp32 registers of a thread that hoisted rowvecs may take.

    0 where visits are the iterations of a loop, since registers can't be indexed at run time, and for more
    than `MAX_HOISTED_COLUMNS` columns. Under ping-pong it is 0 too: the work of a warpgroup before its MMA,
    and its last epilogue, must hide under the other one's MMA, and a load and its clamped address for every
    column took a sixth of a tile's time (H200, M = N = 8192, K = 1024).
    """
    if config.rolled or config.pingpong or config.thread_columns > MAX_HOISTED_COLUMNS:
        return 0
    kept = Registers.of(spec, config, alignment)
    if alignment is Alignment.PLAIN and kept.accumulators == UNHOISTED_BY_ELEMENT:
        return 0
    taken = kept.accumulators + kept.promoted + kept.fragments + kept.rows
    if not config.target.accumulators.in_registers:
        taken += config.products * config.subtile_n  # the sums that a visit reads from tensor memory
    if not config.target.tma:
        if alignment is Alignment.PLAIN and kept.accumulators >= UNHOISTED_BY_ELEMENT:
            return 0
        taken += COPYING
    working = WORKING if config.column_groups == 1 else WORKING_ON_HALVES
    return config.epilogue_registers - working - taken


def leaves_registers(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a tile's accumulators leave a thread registers for an epilogue, and partials for draws."""
    if not config.target.accumulators.in_registers:
        return True
    kept = Registers.of(spec, config, Alignment.TMA)
    most = MAX_ACCUMULATORS
    if has_planes(spec) and (spec.reductions or by_element(spec, config)):
        alone = config.target.clusters and config.thread_rows <= 2 and _has_one_row_extremum(spec)
        most = most if alone else min(most, MAX_BESIDE_ROWS)
    if spec.whole_columns > 1:
        most = min(most, MAX_BESIDE_BLOCKS)
    return (
        kept.accumulators <= most
        and leaves_sums_registers(config, spec)
        and leaves_warps_registers(config, spec)
        and (long_ops(spec) == 0 or kept.accumulators + kept.partials <= MAX_KEPT)
    )


def _has_one_row_extremum(spec: EpilogueSpec) -> bool:
    """Whether a spec writes one plane, reads none, and finds the largest or smallest element of each row.

    Beside partials of two rows, the 128 accumulators of 128 x 256 spilled nothing (row maxima in bf16, fp8);
    beside those of four rows, 256 x 128 spilled 64 bytes where planes are written by element.
    For 4096 cubed in bf16 that tile took 188 us, the fastest one of 64 accumulators a thread 213 (an H100).
    """
    reductions = [store.reduce for store in spec.reductions if store.reduce is not None]
    return (
        len(spec.accumulators) == len(spec.planes) == len(reductions) == 1
        and not spec.loads_of(LoadKind.EXACT)
        and reductions[0].axis is Axis.ROW
        and reductions[0].kind in (ReduceKind.MAX, ReduceKind.MIN)
    )


def leaves_warps_registers(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether accumulators leave registers to warps that copy their operands too, and keep their addresses.

    Beside 128, partials of rows and a plane spilled 16 bytes (row maxima in 128 x 128 on sm_121a), and an
    argmax alone 8 (256 x 128 on sm_80). Four planes that are read spilled 48, and 368 beside those of a pair
    (128 x 128 and 128 x 64 x 2 on sm_80). Two planes that are read by element spilled 232 bytes beside what
    is kept until columns are rotated (128 x 128 on sm_80), and vectors of blocks of columns 8.
    """
    many = len(spec.loads_of(LoadKind.EXACT)) > MAX_LOADS_OF_WARPS
    many = many or (spec.rotated_columns > 0 and by_element(spec, config) > 1)
    blocks = any(load.blocks is not None for load in spec.loads)
    if config.target.tma or not (spec.reductions or many or blocks):
        return True
    return config.thread_accumulators <= MAX_BESIDE_ROWS


def is_crowded(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a thread under ping-pong, which has a whole tile's accumulators of its rows, lacks registers:
    more than one plane is read by element whatever the alignment, a pair reads many, or a visit keeps what it
    has until blocks of columns are reduced, which spilled 64 bytes beside a plane that is read by element.

    A plane that is read by element takes two registers of address for each element of a subtile.
    """
    exact = spec.loads_of(LoadKind.EXACT)
    many = config.products > 1 and len(exact) > MAX_PAIRED_LOADS
    return config.pingpong and (by_element(spec, config) > 1 or many or spec.whole_columns > 1)


def by_element(spec: EpilogueSpec, config: TileConfig) -> int:
    """The planes that are read by element whatever the alignment, each from an address of its own: where M or
    N is several modes, but for those whose columns in a subtile lie side by side."""
    split = [load for load in spec.loads_of(LoadKind.EXACT) if load.is_split]
    runs = [load for load in split if load.in_runs and spec.reordered_columns > 0]
    return sum(load not in runs and not _by_tma(load, spec, config) for load in split)


def _by_tma(load: Load, spec: EpilogueSpec, config: TileConfig) -> bool:
    """Whether TMA brings boxes of a table, where planes are aligned. Elsewhere a thread reads its columns of
    a row from one address, since subtiles are narrow (`rules.narrow_subtiles_by_element`)."""
    if not load.is_table or load.blocks is None or spec.product.kind is not ProductKind.DENSE:
        return False
    of_one_block = spec.reordered_columns > 0 or load.blocks.columns % NARROW_SUBTILE_N == 0
    return config.target.tma and of_one_block


def long_ops(spec: EpilogueSpec) -> int:
    """Ops of a spec that take many instructions, such as draws, so that a visit has only a few of each."""
    from cute_backend.ops import OPS  # here, since few kernels need it

    return sum(OPS[op.op].is_long for op in spec.ops)
