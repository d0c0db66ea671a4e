"""Tiles for regions of one A that share a launch, each with a segment of the columns.

A tile serves them if it serves each of them by itself. Registers and shared memory are those of the segment
that needs most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from cute_backend.planning.registers import NARROW_SUBTILE_N
from cute_backend.planning.rules import (
    MAX_ROW_IN_A_THREAD,
    WHOLE_VISITS,
    most_written,
    pairs_halves,
    reads,
    subtiled,
)
from cute_backend.planning.shared_memory import holds_planes
from cute_backend.planning.tiles import Alignment, TileConfig
from cute_backend.spec import ROTATE_FIRST, EpilogueSpec, LoadKind

MAX_SEGMENTS = 4
"""The most regions that share a launch: each has an epilogue, and a mainloop, in the text of the kernel."""


def serving_all(
    spec: EpilogueSpec, of: Callable[[EpilogueSpec], Iterable[TileConfig]]
) -> tuple[TileConfig, ...]:
    """The tiles that serve every segment of a spec, of those that `of` lists for each, in the order of the
    first segment's. Subtiles have the width of the segment that needs the narrowest ones, or are the whole
    tile if one segment needs that.

    Tiles with split-K and tiles of the transposed product are left out. No tile serves segments whose planes
    come in different numbers of rounds, since all warps of a CTA count the same stages for every tile.
    """
    every: list[dict[TileConfig, int]] = [{} for _ in spec.segments]
    for columns, segment in zip(every, spec.segments, strict=True):
        for config in of(segment):
            if config.split_k == 1 and not config.transposed:
                columns.setdefault(_shape(config), config.subtile_n)
    shared = (shape for shape in every[0] if all(shape in others for others in every))
    found = (
        replace(shape, subtile_n=_width(spec, [columns[shape] for columns in every])) for shape in shared
    )
    return tuple(config for config in found if holds_planes(config, spec) and _is_kept(config, spec))


def _rounds(segment: EpilogueSpec, subtile_n: int) -> int:
    """How often exact loads of a subtile come: twice if some are read ahead of passes, others by visits."""
    early = segment.early_planes if subtile_n % segment.whole_columns else frozenset()
    return len({load.name in early for load in segment.loads_of(LoadKind.EXACT)}) or 1


def _width(spec: EpilogueSpec, widths: Sequence[int]) -> int:
    """The columns of the subtiles of all segments, of which each alone would have `widths`."""
    able = (width for width in sorted(widths) if width in WHOLE_VISITS or _holds_first(width, spec))
    return next(able, min(widths))


def _holds_first(width: int, spec: EpilogueSpec) -> bool:
    """Whether the spec rotates first columns of blocks, and visits of `width` columns have these."""
    return any(op.op == ROTATE_FIRST for op in spec.ops) and spec.fits_visit(width)


def _shape(config: TileConfig) -> TileConfig:
    """A tile without the fields in which segments may differ."""
    return replace(config, subtile_n=config.group_n)


def _is_kept(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether registers suffice, and all segments can have the narrowest subtiles that one of them needs, for
    both alignments of planes. With two warpgroups for the epilogue, and planes ahead of passes in one segment
    of three, 256 x 256 spilled 8 bytes."""
    # A wider tile is taken if no other holds the blocks of a segment.
    blocks = [segment.pass_columns for segment in spec.segments if not segment.kept]
    if config.tile_n > max((config.target.segment_tile_n, *blocks)) or not _leaves_registers(config, spec):
        return False
    if config.column_groups > 1 and any(segment.kept for segment in spec.segments):
        return False
    widths = [acc.width for acc in spec.accumulators]
    for alignment in Alignment:
        narrow = subtiled(spec, config, alignment)
        if len({_rounds(segment, narrow.subtile_n) for segment in spec.segments}) > 1:
            return False
        for width, segment in zip(widths, spec.segments, strict=True):
            whole = segment.fits_visit(narrow.subtile_n)
            single = width == segment.reordered_columns > narrow.subtile_n
            if single and not _orders_one_block(config):
                return False
            if not (whole and pairs_halves(narrow.subtile_n, segment)):
                return False
            most = most_written(narrow.subtile_n, *reads(segment))
            if most is not None and len(segment.planes) > most:
                return False
            wide = narrow.subtile_n > NARROW_SUBTILE_N and _holds_first(narrow.subtile_n, spec)
            if wide and not _leaves_cache_registers(config, spec):
                return False
            if not wide and subtiled(segment, narrow, alignment) != narrow:
                return False
    return True


def _leaves_cache_registers(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether wide visits, of which a thread has whole rows, leave registers for the places of keys and
    values in a cache. Heads of 128 columns of which 64 are rotated spilled 8 to 88 bytes in 256 x 128 and 128
    x 128 on sm_100a, and none in 128 x 64, which has one such visit."""
    several = config.target.accumulators.row_threads == 1 and config.thread_columns > MAX_ROW_IN_A_THREAD
    return not (several and any(store.cache is not None for store in spec.stores))


def _orders_one_block(config: TileConfig) -> bool:
    """Whether TMA can order the columns of a segment that is one block. On sm_90a the DSL does not compile
    the axis of one block, which TMA needs (4.8: "Failure while executing pass pipeline")."""
    return config.target.accumulators.row_threads == 1


def _leaves_registers(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether the addresses of rotated blocks leave the epilogue enough registers.

    If one tile, or a cluster of several, has all columns of a segment, a CTA has the same columns of it for
    every work item, and the compiler keeps all their addresses and masks in registers. Then 128 x 192, 64 x
    192 and 256 x 128 in clusters of 1 x 2 spilled 8 to 104 bytes (heads of 32, 64, 96 and 128 columns on
    sm_90a), and 256 x 256 with two warpgroups for the epilogue 8 to 32 bytes (heads of 64 and 128 columns, in
    halves or neighbours, on sm_100a). If 64 of 128 columns are rotated, 128 x 128 and 128 x 192 in clusters
    of 1 x 2 and 1 x 4 spilled 8 to 48 bytes (with biases, planes by element, sm_90a). They spilled none if
    every rotated segment had columns of several clusters.

    Tiles wider than others that segments have are for norms by head (`_is_kept`). There 128 x 256 in clusters
    of 1 x 2 spilled none in bf16. With the scales of rows of fp8 it spilled 64 and 72 bytes if keys and
    values had one head of 256 columns, and none if they had four.
    """
    cluster = config.tile_n * config.cluster_n
    if config.tile_n > config.target.segment_tile_n:
        kept = [acc.width for acc in spec.accumulators if spec.loads_of(LoadKind.COLVEC)]
    else:
        widths = zip(spec.accumulators, spec.segments, strict=True)
        kept = [acc.width for acc, segment in widths if _keeps_addresses(config, segment)]
    crowded = config.cluster_n > 1 or config.column_groups > 1
    return not crowded or all(width > cluster for width in kept)


def _keeps_addresses(config: TileConfig, segment: EpilogueSpec) -> bool:
    """Whether a segment leaves no registers for the addresses of all of a tile's columns."""
    first = segment.rotates and not segment.fits_visit(NARROW_SUBTILE_N)
    return segment.rotates if config.column_groups > 1 else segment.reordered_columns > 0 or first
