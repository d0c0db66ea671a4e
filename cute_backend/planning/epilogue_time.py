"""A model of the time that the epilogue of a tile takes beside its MMA, where both run at once: on sm_100a.

It counts instructions against cycles. It was not fitted to times of a GPU.
"""

from __future__ import annotations

from cute_backend.planning.registers import long_ops
from cute_backend.planning.shared_memory import has_planes, plane_bits
from cute_backend.planning.targets.target import WARPGROUP
from cute_backend.planning.tiles import TileConfig
from cute_backend.planning.transposing import multiplied
from cute_backend.spec import EpilogueSpec, LoadKind

ELEMENT, OP, DRAW, PLANE, HOISTED = 4.5, 1.0, 27.0, 1.0, 5.0
"""Instructions that a thread issues: for each element of the tile, to read it from tensor memory, convert it
and write it; for each op, and for each that draws noise; for each 16 bits of planes; and for each element of
a hoisted rowvec, whose address is clamped to the last column. The simulator counts on sm_100a, for 256 x 256
x 1024 and rowwise scales, 6.8 for each element with rowvecs in shared memory and 10.9 with hoisted ones, and
with bias and relu 9.0."""

ALONE = 2.0
"""Cycles for each instruction of a warp that has a scheduler to itself, where two warps take one: the chain
of an element waits for its own results, for tensor memory and for shared memory. An assumption."""


def mma_cycles(config: TileConfig, spec: EpilogueSpec, k: int) -> float:
    """Cycles for which the tensor cores of a multiprocessor multiply one tile."""
    multiplied = config.cta_rows * config.mma_n * k / config.split_k
    return multiplied * spec.product.a_dtype.bits / 8 / config.target.products_per_cycle


def epilogue_instructions(config: TileConfig, spec: EpilogueSpec, *, hoisted: bool) -> float:
    """Instructions that the epilogue's warps on one of the four schedulers issue for a tile, with every
    rowvec hoisted or none: one warp, or one of each warpgroup. They are its cycles at the least."""
    elements = config.tile_n * config.cta_rows // WARPGROUP
    draws = 0 if has_planes(spec) else long_ops(spec)
    each = ELEMENT + OP * (len(spec.ops) - draws) + DRAW * draws + PLANE * plane_bits(spec) / 16
    rowvecs = len(multiplied(spec, config).loads_of(LoadKind.ROWVEC)) if hoisted else 0
    return elements * each + rowvecs * config.tile_n * HOISTED


def epilogue_cycles(config: TileConfig, spec: EpilogueSpec) -> float:
    """Cycles that the epilogue of a tile takes, by its instructions, with rowvecs in shared memory."""
    instructions = epilogue_instructions(config, spec, hoisted=False)
    return instructions * (ALONE if config.column_groups == 1 else 1.0)
