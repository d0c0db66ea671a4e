"""The tiles that a kernel may be compiled with, one after another, until it spills nothing.

Whether a tile leaves a thread registers for an epilogue is the compiler's answer. The estimate of registers
only leaves out tiles that would most likely have to be replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cute_backend.planning.registers import NARROW_SUBTILE_N, long_ops
from cute_backend.planning.rules import suited
from cute_backend.planning.rung import Rung
from cute_backend.planning.search import tile_table
from cute_backend.planning.segment_tiles import serving_all
from cute_backend.planning.targets import Shape
from cute_backend.planning.tiles import Alignment, Rowvecs, TileConfig
from cute_backend.planning.widths import LEAST_SHARE, visit_columns
from cute_backend.spec import EpilogueSpec

MAX_LOWER_RUNGS = 2
"""The most tiles that a kernel is compiled with after the first one."""


def first_rung(spec: EpilogueSpec, config: TileConfig, alignment: Alignment) -> TileConfig:
    """The tile that a kernel is compiled with first, as it runs: the one that was chosen or, if that leaves a
    thread too few registers by the estimate, the first step down that leaves enough."""
    chosen = Rung.of(spec, config, alignment)
    if config.rowvecs is Rowvecs.REGISTER_HOIST or chosen.fits:
        return chosen.tile
    return next((each for each in _steps_down(chosen) if each.fits), chosen).tile


def lower_rungs(spec: EpilogueSpec, first: TileConfig, alignment: Alignment) -> tuple[TileConfig, ...]:
    """The tiles that are tried, one after another, if a kernel spills in its first one, which runs as it is
    here. A step that does not fit by the estimate is left out if a lower one does."""
    above = Rung(spec, first, alignment)
    steps = [each for each in dict.fromkeys(_steps_down(above)) if each != above]
    kept = (each.tile for i, each in enumerate(steps) if each.fits or not any(low.fits for low in steps[i:]))
    return tuple(kept)[:MAX_LOWER_RUNGS]


def _steps_down(above: Rung) -> Iterator[Rung]:
    """Yields the tile with simpler visits, if accumulators are in tensor memory, the next smaller tile of the
    same cluster, the smallest one that serves the spec, that with subtiles of half the columns, and, on
    Hopper, the tile with its visits unrolled, since a loop needs registers to move accumulators. If ops are
    long, a smaller tile has as many of their values in a visit, so all steps have half the columns, and
    none is unrolled, which would take minutes."""
    spec, config = above.spec, above.tile

    def step(tile: TileConfig) -> Rung:
        fitted = Rung.of(spec, tile, above.alignment)
        return fitted.with_half_subtiles() if long_ops(spec) else fitted

    if long_ops(spec):
        yield step(config)
    if not config.target.accumulators.in_registers:
        alone = step(replace(config, column_groups=1, unrolled=False))
        yield alone if alone != above else above.with_half_subtiles()
    if (smaller := _next_smaller(spec, config)) is not None:
        yield step(smaller)
    smallest = step(tile_table(config.arch, spec)[-1])
    yield smallest
    yield smallest.with_half_subtiles()
    if config.target.by_wgmma and config.rolled and not long_ops(spec):
        yield replace(above, tile=replace(config, unrolled=True))


def _next_smaller(spec: EpilogueSpec, config: TileConfig) -> TileConfig | None:
    """The next smaller tile of the same cluster, or None if none serves the spec: with columns of a power of
    two, without ping-pong, with half of the rows or, failing these, with half of the columns. Of transposed
    products, whose tiles have any width, it may be narrower than those of the tables. A narrow one gives up a
    quarter of its columns: each further tile reads, and may convert, all of the weight again."""
    subtile_n = min(config.subtile_n, NARROW_SUBTILE_N)
    shape = Shape(*(getattr(config, field) for field in Shape._fields))
    shape = shape._replace(tile_m=config.tile_m * config.stacked, tile_n=config.mma_n, subtile_n=subtile_n)
    rows, columns = shape.tile_m // 2, (1 << (config.mma_n - 1).bit_length()) // 2
    narrowest = min(each.tile_n for each in config.target.tiles.all)
    if config.transposed:
        narrowest = config.target.tiles.even.step
        if config.mma_n <= LEAST_SHARE:
            columns = config.mma_n * 3 // 4 // narrowest * narrowest
    fewer = shape._replace(tile_n=columns)
    if columns % subtile_n and columns >= narrowest:
        fewer = fewer._replace(subtile_n=visit_columns(columns))
    smaller = [fewer] if config.mma_n < 2 * columns else []
    smaller += [shape._replace(pingpong=False)] if config.pingpong else []
    smaller += [shape._replace(tile_m=rows)] if rows % (config.block_m * config.ctas) == 0 else []
    smaller.append(fewer)
    smaller = [each for each in smaller if each.tile_n >= narrowest]
    found = (tile for each in smaller for tile in _suited(spec, config, each))
    able = (each for each in found if _accumulators(each) < _accumulators(config))
    kept = {name: getattr(config, name) for name in ("split_k", "raster_m", "rowvecs", "shallow")}
    return next((replace(each, **kept) for each in able), None)


def _accumulators(config: TileConfig) -> int:
    """The accumulators of a thread or, if they are in tensor memory, of a CTA."""
    in_registers = config.target.accumulators.in_registers
    return config.thread_accumulators if in_registers else config.mma_m * config.mma_n


def _suited(spec: EpilogueSpec, config: TileConfig, shape: Shape) -> tuple[TileConfig, ...]:
    """A shape as the rules fit it to a spec; none if it can't serve the spec."""
    if len(spec.segments) > 1:
        return serving_all(spec, lambda segment: suited(config.arch, (shape,), segment))
    return suited(config.arch, (shape,), spec)
