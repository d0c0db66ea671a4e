"""A model of the time of a tile's epilogue on sm_100a, where epilogue and MMA run at the same time.

It compares the instructions of the epilogue with the cycles of the MMA. It was not fitted to timings of a
GPU.
"""

from __future__ import annotations

from cute_backend.planning.registers import long_ops
from cute_backend.planning.shared_memory import has_planes, plane_bits
from cute_backend.planning.targets.target import WARPGROUP
from cute_backend.planning.tiles import TileConfig
from cute_backend.spec import EpilogueSpec

ELEMENT, OP, DRAW, PLANE, HOISTED = 4.5, 1.0, 27.0, 1.0, 5.0
"""Instructions that a thread issues, in this order:

- for each element of the tile: to read it from tensor memory, convert it and write it;
- for each op;
- for each op that draws noise;
- for each 16 bits of planes;
- for each element of a hoisted rowvec, whose address is clamped to the last column.

For 256 x 256 x 1024 with rowwise scales on sm_100a, the simulator counts 6.8 instructions for each element
with rowvecs in shared memory, 10.9 with hoisted rowvecs, and 9.0 with bias and relu."""

ALONE = 2.0
"""Cycles for each instruction of a warp that has a scheduler to itself; with two warps to a scheduler, an
instruction takes one cycle. A lone warp stalls because the ops of an element depend on each other, on tensor
memory and on shared memory. This figure is an assumption."""


def mma_cycles(config: TileConfig, spec: EpilogueSpec, k: int) -> float:
    """Returns the cycles that the tensor cores of a multiprocessor need to multiply one tile."""
    products = config.mma_m * config.mma_n * k / config.split_k
    return products * spec.product.a_dtype.bits / 8 / config.target.products_per_cycle


def epilogue_instructions(config: TileConfig, spec: EpilogueSpec, *, hoisted: int = 0) -> float:
    """Returns the instructions that the epilogue issues on one of the four schedulers for a tile.

    A scheduler has one epilogue warp of each warpgroup. The count is a lower bound of the cycles. `hoisted`
    is the number of hoisted rowvecs.
    """
    elements = config.tile_n * config.cta_rows // WARPGROUP
    draws = 0 if has_planes(spec) else long_ops(spec)
    each = ELEMENT + OP * (len(spec.ops) - draws) + DRAW * draws + PLANE * plane_bits(spec) / 16
    return elements * each + hoisted * config.tile_n * HOISTED


def epilogue_cycles(config: TileConfig, spec: EpilogueSpec) -> float:
    """Returns the cycles of a tile's epilogue, estimated from its instructions, with rowvecs in shared
    memory."""
    return epilogue_instructions(config, spec) * (ALONE if config.column_groups == 1 else 1.0)
