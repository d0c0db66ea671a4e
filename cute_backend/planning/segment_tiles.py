"""Tiles for regions of one A that share a launch, each with a segment of the columns.

A tile serves them if it serves each of them by itself. Registers and shared memory are those of the segment
that needs most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from cute_backend.planning.registers import holds_values, holds_visit
from cute_backend.planning.rung import Rung
from cute_backend.planning.shared_memory import holds_planes
from cute_backend.planning.subtiles import WHOLE_VISITS, suits_segments
from cute_backend.planning.tiles import Alignment, TileConfig
from cute_backend.spec import EpilogueSpec

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
    return len({load.name in early for load in segment.loaded_planes}) or 1


def _width(spec: EpilogueSpec, widths: Sequence[int]) -> int:
    """The columns of the subtiles of all segments, of which each alone would have `widths`."""
    of_first = bool(spec.narrow_visits)  # first columns of blocks, of which a visit has all
    able = (each for each in sorted(widths) if each in WHOLE_VISITS or (of_first and spec.fits_visit(each)))
    return next(able, min(widths))


def _shape(config: TileConfig) -> TileConfig:
    """A tile without the fields in which segments may differ."""
    return replace(config, subtile_n=config.group_n)


def _is_kept(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether all segments can have the narrowest subtiles that one of them needs, for both alignments of
    planes."""
    # A wider tile is taken if no other holds the blocks of a segment.
    blocks = [segment.pass_columns for segment in spec.segments if not segment.kept]
    if config.tile_n > max((config.target.segment_tile_n, *blocks)):
        return False
    for alignment in Alignment:
        narrow = Rung.of(spec, config, alignment).tile
        if len({_rounds(segment, narrow.subtile_n) for segment in spec.segments}) > 1:
            return False
        if not all(holds_visit(narrow.subtile_n, segment) for segment in spec.segments):
            return False
        whole = narrow.subtile_n in WHOLE_VISITS
        if whole and not all(holds_values(narrow, segment) for segment in spec.segments):
            return False
        if not suits_segments(narrow, spec):
            return False
    return True
