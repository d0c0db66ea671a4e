"""Every decision about a kernel but its text: its tile, and when and where it reads and writes each operand.

Plans are data, made from a spec and sizes alone: no tensor is looked at, and nothing here imports CUTLASS.
What is known of each architecture stands in `targets`, what a spec asks of a tile in `rules`.
"""

from .hoisting import with_rowvecs
from .placements import ByElement, Placement, Ring
from .placing import Plan, plan
from .rules import subtiled
from .search import (
    MAX_CANDIDATES,
    blocks_held,
    candidates,
    choose,
    clustered,
    named,
    offered,
    ranked,
    table,
    tunable,
)
from .served import unserved
from .shared_memory import holds_planes
from .targets import Arch, Target
from .tiles import (
    EPILOGUE_STAGES,
    SMEM_RESERVE,
    TILE_K_BYTES,
    Rowvecs,
    TileConfig,
    Variant,
    tile_k,
)

__all__ = [
    "EPILOGUE_STAGES",
    "MAX_CANDIDATES",
    "SMEM_RESERVE",
    "TILE_K_BYTES",
    "Arch",
    "ByElement",
    "Placement",
    "Plan",
    "Ring",
    "Rowvecs",
    "Target",
    "TileConfig",
    "Variant",
    "blocks_held",
    "candidates",
    "choose",
    "clustered",
    "holds_planes",
    "named",
    "offered",
    "plan",
    "ranked",
    "subtiled",
    "table",
    "tile_k",
    "tunable",
    "unserved",
    "with_rowvecs",
]
