"""The subtiles that a tile gets by how planes move, and what visits need.

Planes move by TMA, or by element if they are not aligned. The rules here are applied to a tile that serves a
spec (`rules`), for each of these alignments.
"""

from __future__ import annotations

from dataclasses import replace

from cute_backend.planning.registers import NARROW_SUBTILE_N
from cute_backend.planning.shared_memory import has_planes, holds_planes
from cute_backend.planning.tiles import Alignment, Rowvecs, TileConfig
from cute_backend.signature import TMA_ALIGN
from cute_backend.spec import LEAST_AHEAD, DType, EpilogueSpec, Major, Order, ProductKind

WHOLE_VISITS = (80, 96)
"""Columns of tiles that are one visit, for blocks of which none of `WHOLE_SUBTILES` consists."""

_PAIRED = 16
"""Columns of the smallest block of which each thread of a row has equally many columns in both halves."""

ROW_BITS = 1024
"""Bits of a row of the widest swizzle of shared memory, 128 bytes."""

PLAIN_COLUMNS = 16
"""Columns of visits whose planes move by element, unless blocks need wider ones."""

LEAST_COLUMNS = 8
"""Columns of the narrowest visits: those of the core matrices that Hopper's accumulators are laid out in."""


def narrow_subtiles_without_room(config: TileConfig, spec: EpilogueSpec, alignment: Alignment) -> TileConfig:
    """Narrows subtiles unless shared memory holds all planes. Wide subtiles make waits for TMA rarer, but
    reads and writes by element do not wait for TMA."""
    return config if holds_planes(config, spec) else narrowed(config, spec)


def rolled_visits_by_element(config: TileConfig, spec: EpilogueSpec, alignment: Alignment) -> TileConfig:
    """Narrows subtiles to `PLAIN_COLUMNS` if planes move by element, unless blocks need wider ones. Visits
    are then the iterations of a loop, so that a thread has the addresses of one visit at a time. A loop can't
    index rowvecs that have to be in registers."""
    if alignment is not Alignment.PLAIN or not has_planes(spec) or config.rowvecs is Rowvecs.REGISTER_HOIST:
        return config
    while config.subtile_n > PLAIN_COLUMNS:
        narrower = with_half_subtiles(config, spec, alignment)
        if narrower is None:
            break
        config = narrower
    return replace(config, unrolled=False)


def with_half_subtiles(config: TileConfig, spec: EpilogueSpec, alignment: Alignment) -> TileConfig | None:
    """The tile with subtiles of half the columns, or None if visits would lack what they need: all columns
    of a block, boxes that TMA moves, or a loop that has no second product and no plane in shared memory."""
    target, columns = config.target, config.subtile_n // 2
    moves = (alignment is Alignment.TMA and has_planes(spec)) or spec.pass_columns
    least = max(target.least_subtile_n, LEAST_AHEAD) if moves else LEAST_COLUMNS
    if config.subtile_n in WHOLE_VISITS or columns % LEAST_COLUMNS or columns < least:
        return None
    looped = not target.planes_by_tma and columns < (target.unrolled_subtile_n or 0)
    if looped and (config.products > 1 or (alignment is Alignment.TMA and has_planes(spec))):
        return None
    fits = spec.fits_visit(columns) and pairs_halves(columns, spec)
    return replace(config, subtile_n=columns, box_subtiles=1) if fits else None


def unrolled_visits_of_planes(config: TileConfig, spec: EpilogueSpec, alignment: Alignment) -> TileConfig:
    """Unrolls visits of narrow subtiles if planes pass through shared memory, whose stages an unrolled visit
    knows, or if a visit has accumulators of two products. Visits without planes remain the iterations of a
    loop."""
    if config.target.unrolled_subtile_n is None or not config.rolled:
        return config
    by_tma = alignment is Alignment.TMA and has_planes(spec)
    return replace(config, unrolled=True) if by_tma or config.products > 1 else config


def boxes_of_two_subtiles(config: TileConfig, spec: EpilogueSpec, alignment: Alignment) -> TileConfig:
    """Gives boxes of planes two subtiles if a subtile has a part of both halves of a block, on Hopper.

    TMA copies such a box in runs, as many columns of each half as a subtile has. With runs of 16 columns, 32
    bytes in bf16, q, k and v of a Llama 8B layer with rotary embeddings took 152 us at 2,048 tokens, and with
    runs of 32 columns 147. Without cosines and sines they took 145 (H100, benchmarks/findings.md).
    """
    whole = config.box_subtiles > 1 or (spec.reordered_columns > config.subtile_n and has_planes(spec))
    able = alignment is Alignment.TMA and holds_boxes_of_two(config, spec)
    return replace(config, box_subtiles=2) if whole and able else config


def holds_boxes_of_two(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether planes may move in boxes of two subtiles. Each half of a box, or a box whose columns are
    neighbours, has at most the 128 bytes of a row of the swizzle."""
    wide = 2 * config.subtile_n
    if not config.target.by_wgmma or config.tile_n % wide:
        return False
    block = spec.reordered_columns
    planes = [load.dtype.bits for load in spec.loaded_planes]
    bits = max(planes + [store.dtype.bits for store in spec.planes], default=0)
    run = config.subtile_n if block > config.subtile_n else wide
    blocks = [load.blocks.columns for load in spec.loads if load.blocks is not None]
    return (
        run * bits <= ROW_BITS
        and (pairs_halves(wide, spec) if block > config.subtile_n else spec.whole_columns == 1)
        and not any(columns % wide for columns in (*spec.cut_columns, *blocks))
        and not any(load.blocks is not None and load.blocks.period for load in spec.loads)
    )


SUBTILE_RULES = (
    narrow_subtiles_without_room,
    rolled_visits_by_element,
    unrolled_visits_of_planes,
    boxes_of_two_subtiles,
)
"""The rules by which an alignment sets the width of subtiles, in the order of application."""


def moved(spec: EpilogueSpec, alignment: Alignment) -> Alignment:
    """Returns the alignment that decides how planes move.

    Every plane moves by element if the boxes of one may begin elsewhere than at multiples of 16 bytes along
    contiguous memory: such a copy ended in CUDA error 715 on an H200.
    """
    planes = [(load.order, load.dtype) for load in spec.loaded_planes]
    planes += [(store.form.order, store.dtype) for store in spec.planes]
    return Alignment.PLAIN if any(_begins_anywhere(*plane, spec) for plane in planes) else alignment


def _begins_anywhere(order: Order | None, dtype: DType, spec: EpilogueSpec) -> bool:
    """Whether boxes of a plane may begin at any multiple of its element along contiguous memory.

    The boxes of a group begin at its first row, along which a plane by columns is contiguous. Groups begin at
    any row if A is contiguous along K, and otherwise at multiples of 16 bytes of A.
    """
    product = spec.product
    if product.kind is not ProductKind.GROUPED or order is not Order.COLUMN:
        return False
    return product.a_major is Major.K or dtype.bits < product.a_dtype.bits


def subtiled(config: TileConfig, spec: EpilogueSpec, alignment: Alignment) -> TileConfig:
    """The configuration with the subtiles that it gets if planes move by an alignment: the narrowest of its
    segments' that have what all segments need of blocks, if columns are in segments."""

    def of_one(segment: EpilogueSpec) -> TileConfig:
        ruled = config
        for rule in SUBTILE_RULES:
            ruled = rule(ruled, segment, alignment)
        return ruled

    if len(spec.segments) == 1:
        return of_one(spec)
    every = (*map(of_one, spec.segments), config)
    fitting = [each for each in every if suits_segments(each, spec)]
    found = min(fitting or every, key=lambda each: (each.subtile_n, each.rolled, -each.box_subtiles))
    able = all(holds_boxes_of_two(found, segment) for segment in spec.segments)
    return found if able else replace(found, box_subtiles=1)


def suits_segments(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether the subtiles of a tile have what every segment of columns needs of blocks.

    A segment that is one block has no order of its own on sm_90a: there the DSL does not compile the axis of
    one block, which TMA needs (4.8: "Failure while executing pass pipeline").
    """
    columns, orders_one = config.subtile_n, config.target.accumulators.row_threads == 1
    widths = (acc.width for acc in spec.accumulators)
    return all(
        segment.fits_visit(columns)
        and pairs_halves(columns, segment)
        and (orders_one or width != segment.reordered_columns or width <= columns)
        for width, segment in zip(widths, spec.segments, strict=True)
    )


def pairs_halves(columns: int, spec: EpilogueSpec) -> bool:
    """Whether subtiles of `columns` columns can pair halves of rotated blocks, in runs of at least the 16
    bytes that TMA needs, or hold whole blocks. True if the spec rotates no halves."""
    planes = [load.dtype.bits for load in spec.loads if load.order is not None or load.is_table]
    bits = min(planes + [store.dtype.bits for store in spec.planes], default=8)
    block = spec.reordered_columns
    if not block or columns >= block:
        return not block or (columns % block == 0 and block % _PAIRED == 0)
    # If B's blocks were larger than the rotated ones, B would have six axes; TMA takes at most five.
    # Of every eight columns, each thread that shares a row has equally many.
    fits = spec.product.b_block in (0, block) and columns // 2 % 8 == 0
    return fits and block // 2 % (columns // 2) == 0 and columns // 2 * bits >= TMA_ALIGN * 8


def narrowed(config: TileConfig, spec: EpilogueSpec) -> TileConfig:
    """Narrows subtiles, except those that hold whole blocks, which `whole_blocks_of_columns` has set, of this
    spec or of another segment, and those that hold first columns of blocks."""
    if spec.visit_columns > 1 or config.subtile_n in WHOLE_VISITS or not spec.fits_visit(NARROW_SUBTILE_N):
        return config
    narrow = min(config.subtile_n, NARROW_SUBTILE_N)
    return replace(config, subtile_n=narrow) if config.tile_n % narrow == 0 else config
