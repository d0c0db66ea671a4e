"""Decides whether the loop over visits is unrolled, so that a thread can hold rowvecs in registers.

A hoisted rowvec is read before the accumulator wait. The MMA of the same tile hides its latency, if the
epilogue of the previous tile is done early enough. It needs no staging warp, no shared memory and no
barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cute_backend.planning.epilogue_time import epilogue_instructions, mma_cycles
from cute_backend.planning.halving import MAX_THREAD_COLUMNS
from cute_backend.planning.mainloops import mainloop_of
from cute_backend.planning.naming import words
from cute_backend.planning.registers import hoist_budget, hoisted_registers, long_ops
from cute_backend.planning.rung import Rung
from cute_backend.planning.tiles import Alignment, Rowvecs, TileConfig
from cute_backend.spec import EpilogueSpec, Load, LoadKind


def hoisting(config: TileConfig, spec: EpilogueSpec, k: int) -> TileConfig:
    """Returns the configuration for a problem of depth `k`. It is unrolled if that hoists every rowvec of the
    spec, and the MMA takes longer than the epilogue and the hoisted loads together.

    Draws of noise stay in a loop, because the compilers take minutes for unrolled ones.
    """
    if not (rowvecs := _hoisted(config, spec)):
        return config
    hidden = mma_cycles(config, spec, k) > epilogue_instructions(config, spec, hoisted=len(rowvecs))
    return replace(config, unrolled=True) if hidden else config


def with_rowvecs(config: TileConfig, spec: EpilogueSpec, rowvecs: Rowvecs) -> TileConfig:
    """Returns the configuration with its rowvecs placed as `rowvecs` asks, or unchanged if the spec has none.

    Raises UsageError if rowvecs should be hoisted but visits are the iterations of a loop, however many
    registers there are.
    """
    if rowvecs is Rowvecs.AUTO or not Rung(spec, config, Alignment.TMA).computed.loads_of(LoadKind.ROWVEC):
        return config
    if rowvecs is Rowvecs.SMEM_STAGED:
        return replace(config, unrolled=False, rowvecs=rowvecs)
    unrolls = config.target.unrolled_subtile_n is None
    hoisted = replace(config, unrolled=unrolls, rowvecs=rowvecs)
    if long_ops(spec) or any(Rung.of(spec, hoisted, each).tile.rolled for each in Alignment):
        from cute_backend.errors import UsageError  # here, since few processes raise it

        raise UsageError(
            f"config.rowvec_placement is {rowvecs.value!r}, but {words(spec)} in tile {config.name} of "
            f"{config.arch.value} does not unroll its visits, and a loop can't index registers; "
            "rowvec_placement='auto' and 'smem_staged' serve it"
        )
    return hoisted


def can_hoist(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether the spec has rowvecs and the configuration, once unrolled, has registers for all of them."""
    return bool(_hoisted(config, spec))


def _hoisted(config: TileConfig, spec: EpilogueSpec) -> Sequence[Load]:
    """The rowvecs of a spec, unless the configuration, once unrolled, lacks registers for some.

    The MMA hides nothing of warps that work while it multiplies. Reductions and passes are left in a loop:
    unrolled, the compiler keeps their partials of several visits beside the vectors. So are more columns than
    `MAX_THREAD_COLUMNS`, of which each would be a load before the wait.
    """
    if config.target.unrolled_subtile_n is not None or not mainloop_of(spec, config.target).frees_epilogue:
        return ()
    wide = config.products * config.group_n > MAX_THREAD_COLUMNS
    if wide or long_ops(spec) or spec.reductions or spec.pass_columns:
        return ()
    unrolled = Rung.of(spec, replace(config, unrolled=True), Alignment.TMA)
    rowvecs = unrolled.computed.loads_of(LoadKind.ROWVEC)
    needed = sum(hoisted_registers(load, unrolled.tile) for load in rowvecs)
    return rowvecs if needed <= hoist_budget(unrolled.computed, unrolled.tile, Alignment.TMA) else ()
