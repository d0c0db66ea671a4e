"""Whether a tile outside of a target's tables can serve a spec, and in how many parts of K."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cute_backend.planning.mainloops import mainloop_of
from cute_backend.planning.registers import NARROW_SUBTILE_N, holds_sums, leaves_registers, long_ops
from cute_backend.planning.rung import Rung
from cute_backend.planning.shared_memory import Rings, has_planes, holds_planes, room_bytes
from cute_backend.planning.subtiles import with_half_subtiles
from cute_backend.planning.targets import Arch, Demand
from cute_backend.planning.tiles import Alignment, TileConfig
from cute_backend.planning.transposing import Tiled
from cute_backend.spec import BColumns, EpilogueSpec, ProductKind


def demand_of(arch: Arch, spec: EpilogueSpec) -> Demand:
    """The kind of a spec, by which it has tiles if its sizes are unknown."""
    of_mainloop = mainloop_of(spec, arch.target).demand
    if of_mainloop is not None:
        return of_mainloop
    return Demand.PLANES if has_planes(spec) else Demand.REDUCED


def in_parts(config: TileConfig) -> Iterator[TileConfig]:
    """Yields a tile with each split-K that it can have."""
    if config.splittable:
        yield from (replace(config, split_k=parts) for parts in config.target.tiles.splits)


def fits(chosen: Tiled) -> bool:
    """Whether a tile outside the table leaves the epilogue enough registers and shared memory, or that of the
    kernel that runs the epilogue. The kernel that multiplies needs registers for what its mainloop has beside
    accumulators."""
    config, spec = chosen.tile.summing, chosen.computed
    return holds_planes(config, spec) and has_registers(config, spec) and holds_sums(chosen.tile, spec)


def has_registers(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a thread has registers by the estimate. If accumulators are in tensor memory, subtiles of half
    the columns are enough (`ladder`)."""
    if leaves_registers(config, spec):
        return True
    in_registers = config.target.accumulators.in_registers
    narrower = None if in_registers else with_half_subtiles(config, spec, Alignment.TMA)
    return narrower is not None and leaves_registers(narrower, spec)


def can_split(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether a tile may have split-K. It may not for groups, whose tiles or k tiles are only counted on
    the device, nor if its mainloop takes all of K, nor if a value is kept in tensor memory, to which each
    read adds the sums of other CTAs.

    Sums may go through memory only if the mainloop and `_can_leave_sums` allow it, and if the first kernel,
    which has no epilogue, has room for its stages. Where there are clusters, the second kernel does not use
    TMA, which a repeating operand with blocks needs, and its tile has to be the same however planes are
    aligned.
    """
    mainloop = mainloop_of(spec, config.target)
    if spec.product.kind.has_offsets or not mainloop.splits:
        return False
    in_registers = config.target.accumulators.in_registers
    # Where accumulators are in tensor memory, each pass would read the sums of other CTAs again.
    if (spec.kept or spec.pass_columns > NARROW_SUBTILE_N) and not in_registers:
        return False
    if not config.sums_in_memory:
        return True
    if not (mainloop.leaves_sums and _can_leave_sums(spec)) or room_bytes(config, Rings()) < 0:
        return False
    if not config.target.clusters:
        return len(spec.accumulators) == 1 and not spec.reductions
    tables = any(load.is_table and load.blocks is not None for load in spec.loaded_planes)
    by_tma, plain = (Rung.of(spec, config, alignment).tile.summing for alignment in Alignment)
    same = by_tma == config.summing and (plain.tile_m, plain.tile_n) == (by_tma.tile_m, by_tma.tile_n)
    return same and not tables and has_planes(spec)


def _can_leave_sums(spec: EpilogueSpec) -> bool:
    """Whether the sums of parts of K may go through memory. Only those of dense products may, and those of a
    pair only if each product has a B of its own."""
    return (
        spec.product.kind is ProductKind.DENSE
        and spec.b_columns is BColumns.APART
        and spec.block_columns == 1
        and not long_ops(spec)
    )
