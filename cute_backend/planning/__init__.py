"""The decisions about a kernel: its tile, and when and where it reads and writes each operand.

Plans are data, made from a spec and sizes alone: no code here inspects a tensor or imports CUTLASS. The text
of a kernel is written elsewhere (`memory_ops`).

- Facts about each architecture: `targets`, `served`.
- Tiles: `tiles`, `rules` (what a spec demands of its tile), `subtiles` (what its alignment does), `rung` (a
  tile as it runs), `constraints` (what a user demands), `sizes`, `search`, `fitting`, `widths` (tiles for a
  known M), `untuned`, `cost`, `doubt` (tiles to measure), `epilogue_time`, `halving`, `hoisting`, `shallow`,
  `transposing`, `segment_tiles`, `misfits` (why a tile that a user names can't be had).
- Mainloops, each with all that planning asks about it: `mainloop` (their face), `mainloops` (all of them),
  `promoting`, `converting`, `block_scaled` (the face of those with scales), `sum_scales`, `mma_scales`.
- Reductions of rows: `last_tile`.
- Placements: `placements`, `placing`.
- Resources: `registers`, `budget`, `shared_memory`, `stages`, `stage_scales`, `capacity`.
- The plan of a kernel, with all of these decisions: `kernel_plan`; the plans that may take its place:
  `ladder`.
- Names of kernels: `naming`.
"""

from cute_backend.planning.capacity import PLANES, REDUCTIONS, plane_bits_held, planes_written
from cute_backend.planning.constraints import UNCONSTRAINED, Constraints
from cute_backend.planning.converting import MOST_CONVERTED_ROWS, MOST_ROWS_IN_GROUPS
from cute_backend.planning.doubt import doubted
from cute_backend.planning.hoisting import with_rowvecs
from cute_backend.planning.kernel_plan import Plan, plan, rungs
from cute_backend.planning.last_tile import LAST_TILE_RESULTS
from cute_backend.planning.placements import ByElement, Carrier, Placement
from cute_backend.planning.placing import Placing, is_one_block
from cute_backend.planning.registers import NARROW_SUBTILE_N
from cute_backend.planning.rules import CUT_HEAD_COLUMNS
from cute_backend.planning.rung import Rung
from cute_backend.planning.search import (
    MAX_CANDIDATES,
    candidates,
    choose,
    clustered,
    fastest,
    held,
    named,
    offered,
    ranked,
    serves,
    tile_table,
    tunable,
)
from cute_backend.planning.segment_tiles import MAX_SEGMENTS
from cute_backend.planning.served import unserved
from cute_backend.planning.shared_memory import holds_planes
from cute_backend.planning.sizes import Sizes
from cute_backend.planning.stages import Stages
from cute_backend.planning.targets import Arch, Target
from cute_backend.planning.tiles import (
    SMEM_RESERVE,
    TILE_K_BYTES,
    Alignment,
    Rowvecs,
    TileConfig,
    tile_k,
)
from cute_backend.planning.untuned import (
    BUCKETS,
    bucket_of,
    buckets_of,
    covering,
    needs_second_kernel,
    untuned,
)
