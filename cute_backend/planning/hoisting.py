"""Whether visits that would be the iterations of a loop are unrolled, so that a thread can hold rowvecs.

A hoisted rowvec is read before the accumulator wait. Its latency hides under the MMA of the same tile, if
the epilogue of the tile before is done early enough. It needs no staging warp, no shared memory and no
barrier.
"""

from __future__ import annotations

from dataclasses import replace

from cute_backend.planning.naming import words
from cute_backend.planning.registers import hoist_budget, hoisted_registers, long_ops
from cute_backend.planning.rules import subtiled
from cute_backend.planning.shared_memory import plane_bits
from cute_backend.planning.tiles import Alignment, Rowvecs, TileConfig
from cute_backend.planning.transposing import multiplied
from cute_backend.spec import EpilogueSpec, LoadKind

ELEMENT, OP, PLANE, HOISTED = 4.5, 1.0, 1.0, 5.0
"""Instructions that a thread issues: for each element of the tile, to read it from tensor memory, convert it
and write it; for each op; for each 16 bits of planes; and for each element of a hoisted rowvec, whose address
is clamped to the last column. The simulator counts on sm_100a, for 256 x 256 x 1024 and rowwise scales, 6.8
for each element with rowvecs in shared memory and 10.9 with hoisted ones, and with bias and relu 9.0."""


def hoisting(config: TileConfig, spec: EpilogueSpec, k: int) -> TileConfig:
    """The configuration for a problem of depth `k`, unrolled where that hoists every rowvec of the spec and
    the MMA takes longer than the epilogue and the hoisted loads together.

    Draws of noise stay in a loop: unrolled, they take the compilers minutes.
    """
    if not can_hoist(config, spec):
        return config
    unrolled = replace(config, unrolled=True)
    return unrolled if mma_cycles(unrolled, spec, k) > epilogue_instructions(unrolled, spec) else config


def with_rowvecs(config: TileConfig, spec: EpilogueSpec, rowvecs: Rowvecs) -> TileConfig:
    """The configuration with its rowvecs placed as `rowvecs` asks, or unchanged if the spec has none.

    Raises UsageError for a hoist where visits are the iterations of a loop, however many registers there are.
    """
    if not multiplied(spec, config).loads_of(LoadKind.ROWVEC) or rowvecs is Rowvecs.AUTO:
        return config
    if rowvecs is Rowvecs.SMEM_STAGED:
        return replace(config, unrolled=False, rowvecs=rowvecs)
    unrolls = config.target.unrolled_subtile_n is None
    hoisted = replace(config, unrolled=unrolls, rowvecs=rowvecs)
    if long_ops(spec) or any(subtiled(spec, hoisted, alignment).rolled for alignment in Alignment):
        from cute_backend.errors import UsageError  # here, since few processes raise it

        raise UsageError(
            f"config.rowvec_placement is {rowvecs.value!r}, but {words(spec)} in tile {config.name} of "
            f"{config.arch.value} has visits that are turns of a loop, which can't index registers; "
            "'auto' and 'smem_staged' serve it"
        )
    return hoisted


def can_hoist(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether the configuration, unrolled, has registers for every rowvec of the spec, and there is one."""
    rowvecs = multiplied(spec, config).loads_of(LoadKind.ROWVEC)
    if config.target.unrolled_subtile_n is not None or not rowvecs or long_ops(spec):
        return False
    unrolled = subtiled(spec, replace(config, unrolled=True), Alignment.TMA)
    needed = sum(hoisted_registers(load, unrolled) for load in rowvecs)
    return needed <= hoist_budget(multiplied(spec, config), unrolled, Alignment.TMA)


def mma_cycles(config: TileConfig, spec: EpilogueSpec, k: int) -> float:
    """Cycles for which the tensor cores of a multiprocessor multiply one tile."""
    multiplied = config.cta_rows * config.mma_n * k
    return multiplied * spec.product.a_dtype.bits / 8 / config.target.products_per_cycle


def epilogue_instructions(config: TileConfig, spec: EpilogueSpec) -> float:
    """Instructions that one warp of the epilogue issues for a tile, every rowvec hoisted. They are its cycles
    at the least, since each of four warps has a scheduler of its own."""
    elements = config.thread_columns * config.thread_rows
    each = ELEMENT + OP * len(spec.ops) + PLANE * plane_bits(spec) / 16
    hoisted = len(multiplied(spec, config).loads_of(LoadKind.ROWVEC)) * config.thread_columns
    return elements * each + hoisted * HOISTED
