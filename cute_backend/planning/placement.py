"""When and where a kernel reads each of its epilogue's operands: decided before any text is written.

The rules, by class:

    scalar   SCALAR          once, before the accumulator wait
    colvec   ROW_READ        one value for each row that a thread owns, before the accumulator wait
    rowvec   REGISTER_HOIST  the thread's columns in registers before the accumulator wait, while a budget
                             lasts; never under ping-pong or where visits are turns of a loop, as on sm_100a
             SMEM_STAGED     else a warp brings the tile's columns to shared memory ahead of the wait
    exact    TMA             into shared memory ahead of the wait, while planes fit beside the operand stages
             VECTOR          else each thread reads its elements when it needs them

Register hoists are budgeted because one spill costs more than every exposed load; planes in shared memory are
budgeted because they take stages from the MMA's operands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from ..spec import DType, EpilogueSpec, Load, LoadKind
from .search import NARROW_SUBTILE_N, holds_planes
from .tiles import EPILOGUE_STAGES, Arch, TileConfig


class Placement(str, Enum):
    """How a load reaches the registers."""

    SCALAR = "scalar"
    ROW_READ = "row_read"
    REGISTER_HOIST = "register_hoist"
    SMEM_STAGED = "smem_staged"
    TMA = "tma"
    VECTOR = "vector"


class Variant(str, Enum):
    """What is known of the exact loads and the outputs when a kernel is compiled."""

    TMA = "tma"
    """Base addresses and the strides that are not 1 are multiples of 16 bytes."""
    PLAIN = "plain"
    """Nothing beyond the alignment of an element: they are read and written by element, masked."""


@dataclass(frozen=True)
class Plan:
    """The placement of every load, by name, and the stores that go through shared memory by TMA."""

    placements: dict[str, Placement]
    tma_stores: tuple[str, ...]

    def having(self, placement: Placement, spec: EpilogueSpec) -> tuple[Load, ...]:
        """The spec's loads of one placement, in order."""
        return tuple(load for load in spec.loads if self.placements[load.name] is placement)


def plan(spec: EpilogueSpec, config: TileConfig, variant: Variant) -> Plan:
    """Places the loads and stores of a spec for one configuration and alignment."""
    config = subtiled(spec, config, variant)
    registers = _hoist_budget(spec, config, variant)
    smem = config.epilogue_smem_bytes - sum(
        _ring_bytes(config.tile_n, load.dtype) for load in spec.loads if load.kind is LoadKind.ROWVEC
    )
    tma_stores = []
    for store in spec.planes:
        cost = _ring_bytes(config.stage_elements, store.dtype)
        if variant is Variant.TMA and cost <= smem:
            tma_stores.append(store.name)
            smem -= cost
    placements = {}
    for load in spec.loads:
        if load.kind is LoadKind.SCALAR:
            placements[load.name] = Placement.SCALAR
        elif load.kind is LoadKind.COLVEC:
            placements[load.name] = Placement.ROW_READ
        elif load.kind is LoadKind.ROWVEC:
            hoisted = config.thread_columns <= registers
            placements[load.name] = Placement.REGISTER_HOIST if hoisted else Placement.SMEM_STAGED
            registers -= config.thread_columns if hoisted else 0
        else:
            cost = _ring_bytes(config.stage_elements, load.dtype)
            by_tma = variant is Variant.TMA and load.order is not None and cost <= smem
            placements[load.name] = Placement.TMA if by_tma else Placement.VECTOR
            smem -= cost if by_tma else 0
    return Plan(placements, tuple(tma_stores))


_LEAST_SUBTILE_N = {Arch.SM90A: 8, Arch.SM100A: 16}
"""Columns of the core matrices that wgmma's accumulators are laid out in; of TMA's least box, in bytes."""

_ROW_BITS = {Arch.SM90A: 1280, Arch.SM100A: 2560}
"""Of planes, in a row of a subtile, where they narrow it: the most that leaves them without a spill, of up to
eight planes with gelu and a row maximum, in every configuration of the table."""


def subtiled(spec: EpilogueSpec, config: TileConfig, variant: Variant) -> TileConfig:
    """The configuration with the subtiles that an alignment gets.

    Wide ones make waits for TMA rarer, where shared memory holds all planes. What is read and written by
    element doesn't wait, and has two registers of address for each element of a subtile: half as many keep it
    from spilling, and fewer still, with the visits in a loop, where there are several planes. On sm_100a a
    thread has a whole row of a subtile, and several planes of it fill its registers however they are read.
    """
    whole = variant is Variant.TMA and holds_planes(config, spec)
    columns = config.subtile_n if whole else min(config.subtile_n, NARROW_SUBTILE_N)
    if config.arch is Arch.SM100A or (config.products == 1 and variant is Variant.PLAIN):
        exact = [load.dtype for load in spec.loads_of(LoadKind.EXACT)]
        bits = sum(dtype.bits for dtype in [*exact, *(store.dtype for store in spec.planes)])
        while columns > _LEAST_SUBTILE_N[config.arch] and columns * bits > _ROW_BITS[config.arch]:
            columns //= 2
    return replace(config, subtile_n=columns)


def _ring_bytes(elements: int, dtype: DType) -> int:
    """Shared memory for the fewest stages of something of `elements` a stage."""
    return EPILOGUE_STAGES * elements * dtype.bits // 8


_WORKING_REGISTERS = 68
"""Kept for addresses, the chain and the first output; with what `_hoist_budget` counts, the least that leaves
the shared epilogues without a spill in every configuration of the table."""

_THREAD_REGISTERS = 232
"""What a thread of the Hopper epilogue may have: see MMA_REGISTERS in its template."""


def _hoist_budget(spec: EpilogueSpec, config: TileConfig, variant: Variant) -> int:
    """fp32 registers of a thread that hoisted rowvecs may take.

    On sm_90a the accumulators live in the same registers, beside two sets of sums where fp8's are promoted,
    and so do a subtile's fragments of the planes (an exact load as it comes and as it is widened, and its
    addresses where it is read by element) and what is read ahead for rows. On sm_100a a thread owns a whole
    row of the tile: a hoisted rowvec would cost it a register and a load for every column, and keep the
    loop over subtiles unrolled, so nothing is hoisted there. Nor is it under ping-pong: what a warpgroup
    does before its MMA must hide, with its last epilogue, under the other one's MMA, and a load and its
    clamped address for every column took a sixth of a tile's time (H200, M = N = 8192, K = 1024).
    """
    if config.rolled or config.pingpong:
        return 0
    fragments = max(len(spec.planes) - 1, 0)
    for load in spec.loads_of(LoadKind.EXACT):
        fragments += 2 if variant is Variant.TMA and load.order is not None else 3
    taken = config.thread_accumulators * (1 if spec.product.fast_accum else 3)
    taken += fragments * config.block_m * config.subtile_n // 128
    taken += len(spec.loads_of(LoadKind.COLVEC)) * config.cta_rows // (32 * config.sharing)
    return _THREAD_REGISTERS - _WORKING_REGISTERS - taken
