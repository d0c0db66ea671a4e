"""Every decision about a kernel but its text: its tile, and when and where it reads and writes each operand.

Plans are data, made from a spec and sizes alone: nothing here imports torch or CUTLASS.
"""

from .placement import Placement, Plan, Variant, plan, subtiled
from .search import (
    MAX_CANDIDATES,
    candidates,
    choose,
    clustered,
    holds_planes,
    offered,
    ranked,
    table,
    tunable,
)
from .tiles import (
    EPILOGUE_STAGES,
    MIN_AB_STAGES,
    SMEM_BYTES,
    SMEM_RESERVE,
    TILE_K_BYTES,
    Arch,
    TileConfig,
    tile_k,
)

__all__ = [
    "EPILOGUE_STAGES",
    "MAX_CANDIDATES",
    "MIN_AB_STAGES",
    "SMEM_BYTES",
    "SMEM_RESERVE",
    "TILE_K_BYTES",
    "Arch",
    "Placement",
    "Plan",
    "TileConfig",
    "Variant",
    "candidates",
    "choose",
    "clustered",
    "holds_planes",
    "offered",
    "plan",
    "ranked",
    "subtiled",
    "table",
    "tile_k",
    "tunable",
]
