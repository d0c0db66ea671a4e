"""Tiles for regions of one A that share a launch, each with a segment of the columns.

A tile serves them if it serves each of them by itself. Registers and shared memory are those of the segment
that needs most. If their weights are converted, they are the rows of a transposed tile, and so are segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from cute_backend.planning.registers import holds_values, holds_visit
from cute_backend.planning.rung import Rung
from cute_backend.planning.shared_memory import holds_planes
from cute_backend.planning.subtiles import WHOLE_VISITS, suits_segments
from cute_backend.planning.tiles import Alignment, TileConfig
from cute_backend.planning.transposing import Tiled
from cute_backend.spec import EpilogueSpec

MAX_SEGMENTS = 4
"""The most regions that share a launch: each has an epilogue, and a mainloop, in the text of the kernel."""


def serving_all(
    spec: EpilogueSpec, of: Callable[[EpilogueSpec], Iterable[TileConfig]]
) -> tuple[TileConfig, ...]:
    """The tiles that serve every segment of a spec, of those that `of` lists for each, in the order of the
    first segment's. Subtiles have the width of the segment that needs the narrowest ones, or are the whole
    tile if one segment needs that.

    Tiles with split-K are left out, and so are tiles of the transposed product, unless weights are converted.
    No tile serves segments whose planes come in different numbers of rounds, since all warps of a CTA count
    the same stages for every tile.
    """
    every: list[dict[tuple[TileConfig, bool], TileConfig]] = [{} for _ in spec.segments]
    for tiles, segment in zip(every, spec.segments, strict=True):
        for config in of(segment):
            if config.split_k == 1 and config.transposed is spec.product.is_converted:
                tiles.setdefault(_shape(config), config)
    shared = ([tiles[shape] for tiles in every] for shape in every[0] if all(shape in each for each in every))
    found = (_together(spec, of_each) for of_each in shared)
    return tuple(config for config in found if _is_kept(config, spec))


def _together(spec: EpilogueSpec, of_each: Sequence[TileConfig]) -> TileConfig:
    """One of the tiles of all segments, which differ in their subtiles."""
    width = _width(spec, [config.subtile_n for config in of_each])
    return next(config for config in of_each if config.subtile_n == width)


def _rounds(segment: EpilogueSpec, subtile_n: int) -> int:
    """How often exact loads of a subtile come: twice if some are read ahead of passes, others by visits."""
    early = segment.early_planes if subtile_n % segment.whole_columns else frozenset()
    return len({load.name in early for load in segment.loaded_planes}) or 1


def _width(spec: EpilogueSpec, widths: Sequence[int]) -> int:
    """The columns of the subtiles of all segments, of which each alone would have `widths`."""
    of_first = bool(spec.narrow_visits)  # first columns of blocks, of which a visit has all
    able = (each for each in sorted(widths) if each in WHOLE_VISITS or (of_first and spec.fits_visit(each)))
    return next(able, min(widths))


def _shape(config: TileConfig) -> tuple[TileConfig, bool]:
    """A tile without its subtiles, in which segments may differ, and whether visits are unrolled."""
    return replace(config, unrolled=False, subtile_n=config.group_n), config.unrolled


def _is_kept(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether shared memory holds all planes, and all segments can have the narrowest subtiles that one of
    them needs, for both alignments of planes."""
    if not holds_planes(config, Tiled(spec, config).computed):
        return False
    # A wider tile is taken if no other holds the blocks of a segment.
    blocks = [segment.pass_columns for segment in spec.segments if not segment.kept]
    if config.tile_n > max((config.target.segment_tile_n, *blocks)):
        return False
    for alignment in Alignment:
        rung = Rung.of(spec, config, alignment)
        narrow, segments = rung.tile, rung.computed.segments
        if len({_rounds(segment, narrow.subtile_n) for segment in segments}) > 1:
            return False
        if not all(holds_visit(narrow.subtile_n, segment) for segment in segments):
            return False
        whole = narrow.subtile_n in WHOLE_VISITS
        if whole and not all(holds_values(narrow, segment) for segment in segments):
            return False
        if not suits_segments(narrow, rung.computed):
            return False
    return True
