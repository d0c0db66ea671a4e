"""The registers of an epilogue thread: how many its values take, and how many it can have without spilling.

A spill costs more than an exposed load, so each limit here comes from builds: ptxas reports no spill for any
tile that ships, with every shared epilogue and alignment (test/templates/test_spills.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_backend.planning.shared_memory import SumScales, has_planes
from cute_backend.planning.targets.target import WARPGROUP
from cute_backend.planning.tiles import Alignment, TileConfig
from cute_backend.spec import (
    FIRST_VISITS,
    Axis,
    EpilogueSpec,
    Load,
    LoadKind,
    ProductKind,
    ReduceKind,
    Scaling,
)

NARROW_SUBTILE_N = 32
"""Columns of a subtile if wider subtiles would leave planes no room in shared memory, or gain nothing."""

WORKING = 68
"""Registers kept for addresses, the chain and the first output, beside those that `Registers` counts. This is
the smallest number with which no shared epilogue spills in any tile that ships."""

WORKING_ON_HALVES = 60
"""`WORKING` for a thread that has half of a tile's columns, with accumulators in tensor memory."""

COPYING = 40
"""Registers kept for addresses of operands without TMA, because the warps that multiply also copy the
operands. Without them, a scale and a bias that were hoisted beside 128 accumulators spilled up to 88 bytes
(sm_86 and sm_89)."""

MAX_ACCUMULATORS = 128
"""The most accumulators of a thread that leave registers for any epilogue."""

MAX_ACCUMULATORS_BY_TMA = 160
"""The most accumulators of a thread that leave registers for an epilogue that only reads vectors, and planes
that TMA moves (`is_by_tma`). By element, 128 x 160 under ping-pong spilled 112 to 168 bytes."""

MAX_ACCUMULATORS_OF_FEW_PLANES = 192
"""`MAX_ACCUMULATORS_BY_TMA` for at most `FEW_PLANES` planes, read and written. With three, 128 x 192 under
ping-pong spilled 8 to 32 bytes."""

FEW_PLANES = 2

MAX_PLANES_BY_TMA = 2
"""The most planes that are read, and that are written, beside more than `MAX_ACCUMULATORS` accumulators."""

MAX_PROMOTED_ONCE = 96
"""The most accumulators of a thread that, with one set of sums, leave registers for an epilogue."""

MAX_SUMMED_COLUMNS = 128
"""The most accumulators of a thread that adds up the scaled sums of k tiles from tensor memory."""

MAX_SUMMED_OF_PAIRS = 64
"""`MAX_SUMMED_COLUMNS` for a pair of products with two warpgroups. With 128 columns, in 256 x 128 x 2, planes
that are written by element spilled 8 bytes."""

MAX_PROMOTED_TWICE = 64
"""The most accumulators of a thread that leave registers for two sets of sums."""

MAX_BESIDE_TWO_SETS = 34
"""The most registers for planes and rows that leave a thread room for two sets of sums, if each column has a
scale of its own. With 36 registers in 128 x 128, 8 bytes were spilled; with 50 in 64 x 128, 16 bytes."""

MAX_BESIDE_ROWS = 64
"""The most accumulators of a thread that also keeps values for each row: partials of reductions, or addresses
of a plane that is read by element whatever the alignment. With the 96 accumulators of 128 x 192, 16 bytes
were spilled; with the 128 of 128 x 256, up to 96 bytes."""

MAX_BESIDE_BLOCKS = 96
"""The most accumulators of a thread that also keeps the values of a visit until blocks are reduced. With the
128 accumulators of 128 x 256, addresses of a plane that is written by element spilled 32 bytes."""

MAX_WRITTEN_BESIDE_PASSES = 2
"""The most planes that a kernel writes beside results of blocks and more than `MAX_CROWDED` accumulators in a
thread. With three in fp32, 128 x 128 under ping-pong spilled 16 bytes, and 128 x 192 spilled 8."""

MAX_KEPT = 160
"""The most accumulators and partials of a thread that leave registers for a few draws of noise."""

MAX_CROWDED = 64
"""The most accumulators of a crowded thread (`is_crowded`). With the 96 of 64 x 192, it spilled 40 bytes."""

MAX_PAIRED_LOADS = 2
"""The most exact loads of a pair of products with 128 accumulators in each thread. With three loads, 16 bytes
were spilled; with four loads and four results, 184 bytes."""

MAX_HOISTED_COLUMNS = 128
"""The most columns of a thread that leave registers for a hoisted rowvec. With the 256 columns of 256 x 256
on sm_100a, 16-bit rowvecs spilled 24 bytes."""

UNHOISTED_BY_ELEMENT = 112
"""A number of accumulators that leaves a thread no registers for a hoisted rowvec if planes are written by
element. With the 112 accumulators of 128 x 224, a 16-bit rowvec spilled 24 bytes, although none spilled with
the 128 of 128 x 256."""

MAX_LOADS_WITHOUT_TMA = 3
"""The most exact loads beside 128 accumulators on targets without TMA for planes."""

MAX_PLANES_WITHOUT_TMA = 7
"""The most planes for which, without TMA, some may be in shared memory while others are not."""


@dataclass(frozen=True)
class Registers:
    """The 32-bit registers in which one thread keeps its values of a tile."""

    accumulators: int
    """Accumulators, if they are kept in registers."""
    promoted: int
    """Further sets of sums, if fp8 sums are promoted."""
    fragments: int
    """A subtile of each plane: an exact load before and after it is widened, and its addresses if it is read
    by element; and each output except the first, which `WORKING` counts."""
    rows: int
    """Values of colvecs that are read ahead: one of each colvec for each row."""
    partials: int
    """Partial results of reductions: at most two registers for each row."""

    @staticmethod
    def of(spec: EpilogueSpec, config: TileConfig, alignment: Alignment) -> Registers:
        """Counts the registers for a spec and an alignment. The configuration must have the subtiles of that
        alignment (`rules.subtiled`)."""
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
        # Where warps copy operands, a plane of several modes spilled 48 bytes beside two hoisted rowvecs.
        fragments += 2 + by_element + (load.is_split and not config.target.planes_by_tma)
    return fragments * config.block_m * config.subtile_n // WARPGROUP


def _rows(spec: EpilogueSpec, config: TileConfig) -> int:
    return len(spec.loads_of(LoadKind.COLVEC)) * config.thread_rows


def is_promoted(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether fp8 sums are promoted to fp32 as they grow."""
    return config.target.promotes and not spec.product.fast_accum


def sets_of_sums(config: TileConfig, spec: EpilogueSpec) -> int:
    """Returns how many sets of sums a thread has beside its accumulators: 0 unless fp8 sums are promoted.

    With two sets, a thread adds one while the tensor cores work on the other. There is only one if the
    accumulators leave no registers for two, or if each column has a scale of its own and the thread keeps
    many other values.
    """
    if not is_promoted(config, spec):
        return 0
    crowded = config.thread_accumulators > MAX_PROMOTED_TWICE
    if spec.product.b_scaling is Scaling.LINE:
        kept = _fragments(spec, config, Alignment.TMA) + _rows(spec, config)
        crowded = crowded or kept > MAX_BESIDE_TWO_SETS
    return 1 if crowded else 2


def pieces_of_sums(config: TileConfig, spec: EpilogueSpec) -> int:
    """Returns the number of pieces that a tile's columns are cut into, for products with block scales.

    A thread has the sums of one piece at a time. There are two pieces if the accumulators leave no registers
    for all sums: halves of the columns if a warpgroup has 64 rows. If it has two blocks of 64 rows and each
    column has a scale of its own, they are the pieces, and scales of columns stay in registers for both
    (`shares_column_scales`).
    """
    if not is_promoted(config, spec) or not spec.product.is_block_scaled:
        return 1
    one_block = config.cta_rows == config.block_m * config.sharing
    able = one_block or shares_column_scales(config, spec)
    return 2 if able and config.thread_accumulators > MAX_PROMOTED_ONCE else 1


def shares_column_scales(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a thread has two blocks of rows and keeps scales of columns from one to the other.

    It does if rows and columns have scales of their own, and the epilogue leaves registers beside the
    accumulators and the sums of one block: it writes one plane, and reads one rowvec, scalars and planes at
    most, and elements of planes have 16 bits. In 256 x 128, 8 to 32 bytes were spilled beside a colvec, up to
    24 beside two rowvecs, 56 beside two results, 48 and 40 beside planes in fp32 and fp8, and 8 if blocks of
    A have 128 rows.
    """
    vectors = spec.loads_of(LoadKind.COLVEC, LoadKind.ROWVEC, LoadKind.GROUPVEC)
    short = len(vectors) <= 1 and not spec.loads_of(LoadKind.COLVEC)
    alone = len(spec.accumulators) == len(spec.planes) == len(spec.stores) == 1
    dtypes = {store.dtype for store in spec.planes} | {load.dtype for load in spec.loads_of(LoadKind.EXACT)}
    short = short and all(dtype.bits == 16 for dtype in dtypes)
    tall = config.cta_rows == 2 * config.block_m * config.sharing
    lines = spec.product.a_scaling is spec.product.b_scaling is Scaling.LINE
    return tall and is_promoted(config, spec) and lines and short and alone


def k_tiles_a_step(config: TileConfig, spec: EpilogueSpec) -> int:
    """Returns how many k tiles a step of the main loop has, for products with block scales.

    With one set of sums, 4096 rows took 0.96 to 1.00 times as long with eight k tiles as with two, if columns
    share scales and the epilogue reads no plane. If it reads one, 4096 x 24576 x 1536 took 1.05 times as long
    with eight. If each column has a scale, 256 x 128 is the fastest with two, and 128 x 256 with four (H100,
    benchmarks/findings/block-scales.md).
    """
    if sets_of_sums(config, spec) > 1:
        return 4
    if spec.product.b_scaling is Scaling.LINE:
        return 2 if config.cta_rows > config.block_m * config.sharing else 4
    return 2 if spec.loads_of(LoadKind.EXACT) else 8


def most_promoted_loads(spec: EpilogueSpec) -> int:
    """Returns the most exact loads that leave promoted sums of 128 rows registers.

    With four loads, 8 bytes were spilled; with one load beside row maxima of groups of K, 24 bytes.
    """
    return 0 if spec.product.kind is ProductKind.K_GROUPED and spec.reductions else 3


def leaves_sums_registers(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a thread's accumulators leave registers for promoted sums. True if no sums are promoted.

    If accumulators are in tensor memory, a thread has registers for those of its columns only while it adds
    up the scaled sums of k tiles. The epilogue has all registers afterwards. Where
    accumulators are in registers and values are kept for passes, 128 x 256 and 256 x 128 spilled 8 to 120
    bytes although a thread has the sums of one piece at a time.
    """
    if not config.target.accumulators.in_registers:
        summed = config.products * config.group_n
        pair = config.products > 1 and config.column_groups > 1
        most = MAX_SUMMED_OF_PAIRS if pair else MAX_SUMMED_COLUMNS
        return SumScales.of(spec) is None or summed <= most
    if not is_promoted(config, spec):
        return True
    most = MAX_PROMOTED_ONCE if spec.product.is_block_scaled else MAX_PROMOTED_TWICE
    in_pieces = pieces_of_sums(config, spec) > 1 and not spec.kept
    return config.thread_accumulators <= (MAX_ACCUMULATORS if in_pieces else most)


def hoisted_registers(load: Load, config: TileConfig) -> int:
    """Returns the registers of a hoisted rowvec. Two 16-bit values share a register; other dtypes are not
    packed."""
    return config.thread_columns // (2 if load.dtype.bits == 16 else 1)


def hoist_budget(spec: EpilogueSpec, config: TileConfig, alignment: Alignment) -> int:
    """Returns the fp32 registers of a thread that hoisted rowvecs may take.

    It is 0 if visits are the iterations of a loop, since registers can't be indexed at run time, and for more
    than `MAX_HOISTED_COLUMNS` columns. It is also 0 with ping-pong: there, the MMA of one warpgroup has
    to hide the last epilogue of the other and all that the other does before its next MMA. A load and a
    clamped address for every column took too long for that: a sixth of a tile's time (H200, M = N = 8192,
    K = 1024).
    """
    if config.rolled or config.pingpong or config.thread_columns > MAX_HOISTED_COLUMNS:
        return 0
    kept = Registers.of(spec, config, alignment)
    if alignment is Alignment.PLAIN and kept.accumulators == UNHOISTED_BY_ELEMENT:
        return 0
    taken = kept.accumulators + kept.promoted + kept.fragments + kept.rows
    if not config.target.accumulators.in_registers:
        taken += config.products * config.subtile_n  # the sums that a visit reads from tensor memory
    if not config.target.planes_by_tma:
        if alignment is Alignment.PLAIN and kept.accumulators >= UNHOISTED_BY_ELEMENT:
            return 0
        taken += COPYING
    working = WORKING if config.column_groups == 1 else WORKING_ON_HALVES
    # All are staged unless they are hoisted.
    vectors = len(spec.loads_of(LoadKind.ROWVEC, LoadKind.GROUPVEC))
    return config.epilogue_registers(spec.product.kind, vectors) - working - taken


def leaves_registers(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a tile's accumulators leave a thread registers for the epilogue. If the spec draws noise, the
    accumulators and partials must also leave registers for the draws."""
    if not config.target.accumulators.in_registers:
        return leaves_sums_registers(config, spec)
    kept = Registers.of(spec, config, Alignment.TMA)
    most = _most_accumulators(spec, config)
    if has_planes(spec) and (spec.reductions or by_element(spec, config)):
        alone = (config.thread_rows <= 2 and _has_one_extremum(spec)) or _has_one_statistic(spec)
        most = most if alone and config.target.clusters else min(most, MAX_BESIDE_ROWS)
    if spec.visit_columns > 1:
        most = min(most, MAX_BESIDE_BLOCKS)
    if _writes_much_beside_passes(spec):
        most = min(most, MAX_CROWDED)
    return (
        kept.accumulators <= most
        and leaves_sums_registers(config, spec)
        and leaves_registers_without_tma(config, spec)
        and (long_ops(spec) == 0 or kept.accumulators + kept.partials <= MAX_KEPT)
    )


def _most_accumulators(spec: EpilogueSpec, config: TileConfig) -> int:
    if not is_by_tma(spec, config):
        return MAX_ACCUMULATORS
    planes = len(spec.loads_of(LoadKind.EXACT)) + len(spec.planes)
    return MAX_ACCUMULATORS_OF_FEW_PLANES if planes <= FEW_PLANES else MAX_ACCUMULATORS_BY_TMA


def suits_any_epilogue(config: TileConfig) -> bool:
    """Whether a thread has at most `MAX_ACCUMULATORS` accumulators in registers."""
    return not config.target.accumulators.in_registers or config.thread_accumulators <= MAX_ACCUMULATORS


def is_by_tma(spec: EpilogueSpec, config: TileConfig) -> bool:
    """Whether TMA moves all planes of a spec if they are aligned, and a thread keeps nothing for rows,
    columns or blocks beside them."""
    product = spec.product
    return (
        config.target.planes_by_tma
        and product.kind is ProductKind.DENSE
        and len(spec.loads_of(LoadKind.EXACT)) <= MAX_PLANES_BY_TMA
        and len(spec.planes) == len(spec.stores) <= MAX_PLANES_BY_TMA
        and spec.whole_columns == 1
        and not spec.rotated_columns
        and not any(load.blocks for load in spec.loads)
        and not long_ops(spec)
        and not by_element(spec, config)
    )


def _has_one_extremum(spec: EpilogueSpec) -> bool:
    """Whether a spec writes one plane, reads none, and finds the largest or smallest element of each row or
    column.

    With partials of two rows, the 128 accumulators of 128 x 256 spilled nothing (row maxima in bf16, fp8).
    With partials of four rows, 256 x 128 spilled 64 bytes if planes are written by element.
    For 4096 cubed in bf16, 128 x 256 took 188 us, and the fastest tile with 64 accumulators in each thread
    took 213 us (an H100).
    """
    reductions = [store.reduce for store in spec.reductions if store.reduce is not None]
    return (
        len(spec.accumulators) == len(spec.planes) == len(reductions) == 1
        and not spec.loads_of(LoadKind.EXACT)
        and reductions[0].axis is not Axis.ALL
        and reductions[0].kind in (ReduceKind.MAX, ReduceKind.MIN)
    )


def _has_one_statistic(spec: EpilogueSpec) -> bool:
    """Whether a 16-bit product writes one plane and the mean or sum of each row, and reads one plane at most
    and nothing else, as behind the attention and the MLP of a transformer.

    The 128 accumulators of 128 x 256 and 256 x 128 spilled nothing beside a residual and a mean of squares.
    With a bias and gelu too, 128 x 256 spilled 40 bytes if planes are written by element.
    """
    reductions = [store.reduce for store in spec.reductions if store.reduce is not None]
    return (
        len(spec.accumulators) == len(spec.planes) == len(reductions) == 1
        and spec.product.a_dtype.bits == 16
        and len(spec.loads) == len(spec.loads_of(LoadKind.EXACT)) <= 1
        and not any(load.is_split for load in spec.loads)
        and reductions[0].axis is Axis.ROW
        and reductions[0].kind in (ReduceKind.SUM, ReduceKind.MEAN)
    )


def leaves_registers_without_tma(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether accumulators leave enough registers in warps that also copy their operands and keep the
    addresses.

    With 128 accumulators, kernels spilled:

    - 16 bytes with partials of rows and a plane (row maxima in 128 x 128 on sm_121a);
    - 8 bytes with an argmax alone (256 x 128 on sm_80);
    - 48 bytes with four planes that are read, and 368 bytes if the product is a pair (128 x 128 and
      128 x 64 x 2 on sm_80);
    - 232 bytes with two planes that are read by element and values that are kept until columns are rotated
      (128 x 128 on sm_80);
    - 8 bytes with vectors of blocks of columns, and with a softmax of blocks behind a plane (128 x 128 on
      sm_80);
    - 48 bytes with even and odd columns that are written in pairs, by element (128 x 64 x 2 on sm_80).
    """
    many = len(spec.loads_of(LoadKind.EXACT)) > MAX_LOADS_WITHOUT_TMA
    many = many or (spec.rotated_columns > 0 and by_element(spec, config) > 1)
    blocks = any(load.blocks is not None for load in spec.loads)
    pairs = any(store.dtype.values > 1 for store in spec.stores)
    many = many or spec.kept != ""
    if config.target.planes_by_tma or not (spec.reductions or many or blocks or pairs):
        return True
    return config.thread_accumulators <= MAX_BESIDE_ROWS


def is_crowded(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a thread lacks registers under ping-pong, where one warpgroup has all accumulators of a tile.

    It does if more than one plane is read by element whatever the alignment, if a pair of products reads many
    planes, if more than `MAX_WRITTEN_BESIDE_PASSES` planes are written beside results of blocks, or if a
    visit keeps its values until blocks of columns are reduced; the last spilled 64 bytes beside a plane that
    is read by element.

    A plane that is read by element takes two registers of address for each element of a subtile.
    """
    exact = spec.loads_of(LoadKind.EXACT)
    many = config.products > 1 and len(exact) > MAX_PAIRED_LOADS
    many = many or _writes_much_beside_passes(spec)
    return config.pingpong and (by_element(spec, config) > 1 or many or spec.visit_columns > 1)


def _writes_much_beside_passes(spec: EpilogueSpec) -> bool:
    return spec.pass_columns > 0 and len(spec.planes) > MAX_WRITTEN_BESIDE_PASSES


def by_element(spec: EpilogueSpec, config: TileConfig) -> int:
    """Returns how many planes are read by element, each element from its own address, whatever the alignment.

    These are the planes whose M or N consists of several modes, except those whose columns within a subtile
    are contiguous.
    """
    split = [load for load in spec.loads_of(LoadKind.EXACT) if load.is_split]
    runs = [load for load in split if load.in_runs and _is_of_one_block(load, spec, config)]
    return sum(load not in runs and not _by_tma(load, spec, config) for load in split)


def _by_tma(load: Load, spec: EpilogueSpec, config: TileConfig) -> bool:
    """Whether TMA loads a table in boxes when planes are aligned. Otherwise, a thread reads its columns of a
    row from one address, since subtiles are narrow (`rules.narrow_subtiles_by_element`)."""
    if not load.is_table or load.blocks is None or spec.product.kind is not ProductKind.DENSE:
        return False
    columns, period = load.blocks.columns, load.blocks.period
    widths = (*FIRST_VISITS, config.subtile_n)
    whole = columns % NARROW_SUBTILE_N == 0
    if period:
        whole = any(period % width == 0 and columns <= width for width in widths)
    return config.target.planes_by_tma and (whole or _is_of_one_block(load, spec, config))


def _is_of_one_block(load: Load, spec: EpilogueSpec, config: TileConfig) -> bool:
    """Whether the subtiles of a kernel that rotates blocks are within blocks of a load."""
    if load.blocks is None or not spec.reordered_columns:
        return False
    least = config.target.unrolled_subtile_n or config.target.least_subtile_n
    return load.blocks.columns >= least


def long_ops(spec: EpilogueSpec) -> int:
    """Returns how many ops of a spec take many instructions, such as draws; a visit has only a few of
    each."""
    from cute_backend.ops import OPS  # here, since few kernels need it

    return sum(OPS[op.op].is_long for op in spec.ops)
