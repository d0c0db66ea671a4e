"""The rules that fit a tile to what a spec computes. Each states its reason and its evidence.

Rules are applied in order. A rule returns the tile, changed if the spec needs that, or None if the tile can't
serve the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import gcd

from cute_backend.planning.halving import MAX_THREAD_COLUMNS, can_halve
from cute_backend.planning.mainloops import mainloop_of
from cute_backend.planning.registers import (
    MAX_ROW_IN_A_THREAD,
    NARROW_SUBTILE_N,
    holds_sums,
    holds_visit,
    long_ops,
)
from cute_backend.planning.shared_memory import ab_stages, has_planes, holds_planes
from cute_backend.planning.subtiles import WHOLE_VISITS, narrowed, pairs_halves
from cute_backend.planning.targets import Arch, Shape
from cute_backend.planning.tiles import ENOUGH_AB_STAGES, TileConfig, tile_k
from cute_backend.planning.transposing import Tiled, can_transpose
from cute_backend.spec import LEAST_AHEAD, BColumns, DType, EpilogueSpec, Major, ProductKind

Rule = Callable[[TileConfig, EpilogueSpec], TileConfig | None]

WHOLE_SUBTILES: tuple[int, ...] = (32, 64, 128)
"""Columns of subtiles that hold blocks whole."""

MAX_BLOCK = 256
"""Columns of the largest blocks that are reduced or whose halves are rotated: those of the widest tile, and
of the largest attention heads."""

PAIRING_SUBTILES = (32, 16)
"""Columns of subtiles that hold equally many columns of both halves of a block."""

HALF_HEAD_COLUMNS = 40
"""Columns of a visit in which first columns of heads of 80 columns are rotated if a thread has whole rows:
half of a head."""

CUT_HEAD_COLUMNS = 32
"""A number that divides the columns of heads by which planes are stored, if visits don't have heads whole."""

_DRAWN_COLUMNS = 16
"""Columns of a visit that draws noise: the fewest in which a thread has all elements of a Philox block."""


def one_mma_for_all_products(config: TileConfig, spec: EpilogueSpec) -> TileConfig | None:
    """Divides the columns of the MMA among a spec's accumulators, so that one stage of A serves all of them.
    If the product is transposed, its rows are divided, so that one stage of B serves all. Only some
    mainloops have such tiles (`Mainloop.stacks`), in which each product has whole blocks of rows."""
    products = len(spec.accumulators)
    if not config.transposed or products == 1:
        return replace(config, tile_n=config.tile_n // products, products=products, b_columns=spec.b_columns)
    able = mainloop_of(spec, config.target).stacks and config.tile_m % (products * config.block_m) == 0
    return replace(config, tile_m=config.tile_m // products, products=products) if able else None


def columns_of_an_instruction(config: TileConfig, spec: EpilogueSpec) -> TileConfig | None:
    """Requires a number of columns that the MMA has an instruction for: a multiple of the target's step, and
    for wgmma of int8 one of 16 beyond 24 columns (PTX ISA, wgmma.mma_async)."""
    limited = config.target.by_wgmma and spec.product.dtype is DType.I32 and config.mma_n > 24
    step = 16 if limited else config.target.tiles.even.step
    return config if config.mma_n % step == 0 else None


def operands_of_the_mainloop(config: TileConfig, spec: EpilogueSpec) -> TileConfig | None:
    """Requires what the spec's mainloop does (`Mainloop.suited`)."""
    return mainloop_of(spec, config.target).suited(config)


def whole_subtiles(config: TileConfig, spec: EpilogueSpec) -> TileConfig | None:
    """Requires whole subtiles in a tile's columns, so that visits cover them, and a visit has equally many
    columns of each product of a pair. A tile whose columns are whole wider subtiles has no narrow ones."""
    columns = config.tile_n // config.ctas
    if config.subtile_n < NARROW_SUBTILE_N and columns % NARROW_SUBTILE_N == 0:
        config = replace(config, subtile_n=NARROW_SUBTILE_N)
    shared = config.tile_n if config.products == 1 else columns
    return None if shared % config.subtile_n else config


def whole_rows_of_the_swizzle(config: TileConfig, spec: EpilogueSpec) -> TileConfig | None:
    """Requires that the pieces of a stage of B, one from each B of a pair, are whole rows of the 128-byte
    swizzle. If B is contiguous along N, a piece of 32 columns of 16 bits would be half a row."""
    row = tile_k(spec.product.b_dtype) if _b_along_n(spec) else 8
    return config if config.products == 1 or config.piece_n % row == 0 else None


def equal_shares_of_b(config: TileConfig, spec: EpilogueSpec) -> TileConfig | None:
    """Requires that the CTAs of a cluster share a stage of B evenly.

    They divide its columns or, if B is contiguous along N, its rows of K, all of which are in each TMA box.
    Three CTAs can take 64 of 192 columns each, but not a third of the 64 rows of K in a box.
    """
    shared = tile_k(spec.product.b_dtype) if _b_along_n(spec) else config.piece_n
    return None if shared % config.cluster_m else config


def whole_blocks_of_b(config: TileConfig, spec: EpilogueSpec) -> TileConfig | None:
    """Requires that the columns of a CTA's tile, and those of its share of B, are whole blocks of B's columns
    or an equal part of one. TMA copies each block, or part, as one box."""
    block = spec.product.b_block
    shares = (config.tile_n, config.tile_n // config.cluster_m) if block else ()
    return None if any(min(each % block, block % each) for each in shares) else config


def few_draws_in_a_visit(config: TileConfig, spec: EpilogueSpec) -> TileConfig:
    """If a spec draws noise, narrows its subtiles, and turns ping-pong off in clusters of tall tiles.

    A tile is tall if a CTA has more than 64 rows of it.

    A draw takes some 28 instructions, and the compilers interleave all draws of a visit and of unrolled
    visits. When a draw took some hundred, a whole tile took two minutes to compile. Ping-pong does not hide
    this work if there are enough rows for clusters of tiles: 256 rows by 128256 columns took 579 us with
    ping-pong and 537 us without. It does hide the work if reading B takes the time: 96 rows took 312 us
    (H200).
    """
    if config.products > 1 or has_planes(spec):
        return config
    if not long_ops(spec):
        return config
    pingpong = config.pingpong and (config.cta_rows <= 64 or config.cluster_m == 1)
    return replace(config, pingpong=pingpong, subtile_n=_DRAWN_COLUMNS)


def narrow_subtiles_by_element(config: TileConfig, spec: EpilogueSpec) -> TileConfig:
    """Narrows subtiles if planes are read by element whatever the alignment, because M or N is several modes.
    Wide subtiles make waits for TMA rarer, but these reads do not wait for TMA."""
    by_element = any(load.is_split for load in spec.loaded_planes)
    return narrowed(config, spec) if by_element else config


def narrow_subtiles_of_groups(config: TileConfig, spec: EpilogueSpec) -> TileConfig:
    """Narrows subtiles for rows in groups. With 128 x 128 in clusters of 1 x 2, 16 products of experts took,
    in the geometric mean, 1.02 times as long with subtiles of 64 columns as with subtiles of 32 (H200)."""
    return narrowed(config, spec) if spec.product.kind is ProductKind.GROUPED else config


def narrow_subtiles_for_stages(config: TileConfig, spec: EpilogueSpec) -> TileConfig:
    """Narrows subtiles if that leaves more of the stages that A and B need.

    With subtiles of 64 columns in 128 x 128, three bf16 planes leave four stages, and four planes leave
    three. An epilogue that reads two planes and writes two took 1.43 times as long as with 32 columns; one
    that reads one plane and writes two took 1.08 times as long (4096 x 14336 x 4096, H200,
    benchmarks/findings.md).
    """
    narrow = narrowed(config, spec)
    enough = min(ab_stages(narrow, spec), ENOUGH_AB_STAGES)
    return config if ab_stages(config, spec) >= enough else narrow


def a_multiprocessor_of_its_own(config: TileConfig, spec: EpilogueSpec) -> TileConfig:
    """Puts one CTA on a multiprocessor if planes leave no room for the stages of A and B of several CTAs."""
    return config if holds_planes(config, spec) else replace(config, occupancy=1)


def whole_blocks_of_columns(config: TileConfig, spec: EpilogueSpec) -> TileConfig | None:
    """Gives a tile whole blocks of columns if ops reduce blocks and other ops read the results.

    If passes over narrower subtiles can reduce them, a subtile only has to divide a block or hold it whole.
    Otherwise a visit has whole blocks. The subtile is the narrowest that holds these, among powers of two.
    For other blocks, it may be a whole tile on Hopper, whose threads have only a part of each row. Planes
    that such a wide visit reads have room in shared memory, if need be without those of a second warpgroup.
    """
    if spec.pass_columns:
        return _in_passes(config, spec.pass_columns)
    block, columns = spec.whole_columns, config.tile_n // config.ctas
    if block == 1 or _holds_first_in_a_thread(config, spec):
        return config
    widths = WHOLE_SUBTILES
    if config.products == 1 and config.target.by_wgmma:
        widths += (columns,) * (columns in WHOLE_VISITS)
    whole = (width for width in widths if width % block == 0 and columns % width == 0)
    width = None if block % 8 else next(whole, None)
    if width is None or width > MAX_ROW_IN_A_THREAD * config.target.accumulators.row_threads:
        return None
    if not holds_visit(width, spec):
        return None
    config = replace(config, subtile_n=width)
    beside = width <= MAX_ROW_IN_A_THREAD or not spec.loaded_planes or holds_planes(config, spec)
    return config if beside else replace(config, pingpong=False)


def _in_passes(config: TileConfig, block: int) -> TileConfig | None:
    """Requires whole blocks in a tile, and subtiles that divide blocks or consist of whole ones."""
    columns = config.subtile_n if config.subtile_n % block == 0 else gcd(block, config.subtile_n)
    whole = config.tile_n % block == 0 and columns >= LEAST_AHEAD
    return replace(config, subtile_n=columns) if whole else None


def first_columns_in_a_visit(config: TileConfig, spec: EpilogueSpec) -> TileConfig | None:
    """Gives a visit all columns that ops need if these are the first of a block, of which a visit has a
    part or the whole. TMA brings no table to a visit of two blocks of 48 columns."""
    if not spec.narrow_visits:
        return config
    columns = config.tile_n // config.ctas
    widths: tuple[int, ...] = (config.subtile_n,)
    if spec.whole_columns == 1:
        widths += spec.narrow_visits
    elif _holds_first_in_a_thread(config, spec):
        widths = (HALF_HEAD_COLUMNS,)
    most = MAX_ROW_IN_A_THREAD * config.target.accumulators.row_threads
    fitting = (each for each in widths if columns % each == 0 and each <= most and spec.fits_visit(each))
    width = next(fitting, None)
    apart = spec.b_columns is not BColumns.INTERLEAVED
    return replace(config, subtile_n=width) if apart and width is not None else None


def _holds_first_in_a_thread(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a thread has a row of a visit that is half of a head of 80 columns, and so has all columns that
    are rotated."""
    if not spec.narrow_visits:
        return False
    able = config.target.accumulators.row_threads == 1 and config.products == 1
    return able and spec.fits_visit(HALF_HEAD_COLUMNS) and not spec.fits_visit(NARROW_SUBTILE_N)


def halves_of_rotated_blocks(config: TileConfig, spec: EpilogueSpec) -> TileConfig | None:
    """Gives a visit equally many columns of the first and the second half of a rotated block.

    A subtile then holds columns together with their partners, and operands and results are viewed with their
    columns reordered (`pair_halves`). TMA loads the columns in that order if a CTA's tile consists of whole
    blocks or a block of whole tiles, and the same holds for its share of B, which also has whole subtiles. If
    only subtiles wider than a block fit, a subtile holds whole blocks, whose columns are not reordered.
    Neighbouring columns are in one thread anyway, unless the even and the odd ones belong to two products.
    """
    block = spec.reordered_columns
    if not block:
        return None if spec.halved_columns and spec.b_columns is not BColumns.APART else config
    shares = (config.tile_n, config.tile_n // config.cluster_m)
    if not _can_pair(config, spec) or any(min(each % block, block % each) for each in shares):
        return None
    if spec.visit_columns == 1:
        least = config.target.unrolled_subtile_n or config.target.least_subtile_n
        widths = [each for each in PAIRING_SUBTILES if least <= each <= config.subtile_n]
        whole = [each for each in widths if each >= block or not any(share % each for share in shares)]
        fitting = [each for each in whole if pairs_halves(each, spec)]
        fitting.sort(key=lambda each: each > block)
        config = replace(config, subtile_n=next(iter(fitting), 0))
    return config if config.subtile_n and pairs_halves(config.subtile_n, spec) else None


def subtiles_within_heads(config: TileConfig, spec: EpilogueSpec) -> TileConfig | None:
    """Narrows subtiles, so that the columns of each are of one head, if planes are stored by heads. Beside
    blocks that need wider subtiles, such planes are written by element."""
    if spec.visit_columns > 1 or spec.reordered_columns:
        return config
    columns = gcd(*spec.cut_columns)
    if columns % CUT_HEAD_COLUMNS:
        return None
    return replace(config, subtile_n=gcd(columns, config.subtile_n)) if columns else config


def _can_pair(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a kernel may reorder the columns of rotated blocks.

    TMA must load B, which must be contiguous along K, in one dense product whose scales don't leave it in
    order. No value may depend on the index of a column, and the rotated blocks must divide all others, heads
    and parts of them among these. No table may have the first columns of blocks alone.
    """
    product, block = spec.product, spec.reordered_columns
    blocks = {load.blocks.columns for load in spec.loads if load.blocks is not None}
    blocks |= {op.columns_together for op in spec.ops}
    blocks |= {store.form.whole_columns for store in spec.stores}
    blocks |= {product.b_block, *spec.cut_columns}
    return (
        config.target.planes_by_tma
        and config.products == 1
        and product.kind is ProductKind.DENSE
        and not product.in_order
        and not _b_along_n(spec)
        and not spec.reductions
        and not any(op.op == "column_index" for op in spec.ops)
        and not any(columns % block for columns in blocks)
        and not any(load.blocks is not None and load.blocks.period for load in spec.loads)
        and block <= MAX_BLOCK
    )


def two_warpgroups_for_wide_tiles(config: TileConfig, spec: EpilogueSpec) -> TileConfig:
    """Gives half of the columns to a second warpgroup if a thread would have more than `MAX_THREAD_COLUMNS`.
    A thread then has registers for hoisted rowvecs, and the last epilogue, which no MMA hides, takes half the
    time. Sums that a thread adds up for the mainloop are columns, too, of all products at once."""
    columns = max(config.thread_columns, mainloop_of(spec, config.target).registers(config))
    wide = columns > MAX_THREAD_COLUMNS and can_halve(config, spec)
    return replace(config, column_groups=2) if wide else config


def registers_for_sums(config: TileConfig, spec: EpilogueSpec) -> TileConfig | None:
    """Requires registers for the sums that a thread adds up for the mainloop if accumulators are in tensor
    memory: those of at most `MAX_THREAD_COLUMNS` columns of all products. In registers, there are as many as
    these take."""
    sums = mainloop_of(spec, config.target).registers(config)
    if config.target.accumulators.in_registers or not sums:
        return config
    return config if sums <= MAX_THREAD_COLUMNS and holds_sums(config, spec) else None


RULES: tuple[Rule, ...] = (
    one_mma_for_all_products,
    operands_of_the_mainloop,
    columns_of_an_instruction,
    equal_shares_of_b,
    whole_blocks_of_b,
    whole_subtiles,
    whole_rows_of_the_swizzle,
    few_draws_in_a_visit,
    narrow_subtiles_by_element,
    narrow_subtiles_of_groups,
    narrow_subtiles_for_stages,
    a_multiprocessor_of_its_own,
    whole_blocks_of_columns,
    first_columns_in_a_visit,
    halves_of_rotated_blocks,
    subtiles_within_heads,
    two_warpgroups_for_wide_tiles,
    registers_for_sums,
)
"""The rules, in the order in which they are applied."""


def suited(arch: Arch, shapes: Iterable[Shape], spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    """Returns the configurations of an architecture's tiles that can serve a spec, as the rules change them,
    each once."""
    served = (_ruled(Tiled(spec, TileConfig(arch, **shape._asdict()))) for shape in shapes)
    found = (replace(each, raster_m=each.usual_raster) for each in served if each is not None)
    return tuple(dict.fromkeys(found))


def _ruled(chosen: Tiled) -> TileConfig | None:
    if chosen.tile.transposed and not can_transpose(chosen.spec):
        return None
    ruled: TileConfig | None = chosen.tile
    for rule in RULES:
        if ruled is not None:
            ruled = rule(ruled, chosen.computed)
    return ruled


def _b_along_n(spec: EpilogueSpec) -> bool:
    return spec.product.b_major is not Major.K
