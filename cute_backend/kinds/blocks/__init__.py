"""The ops whose results depend on blocks of neighbouring columns: reductions, rotations, and parts of blocks.

To add a kind, write a `BlockOp` in a file here and name it in `BLOCK_OPS`.
"""

from __future__ import annotations

from cute_backend.kinds.blocks.kind import BlockOp
from cute_backend.kinds.blocks.parts import PART
from cute_backend.kinds.blocks.reduced import BLOCK_REDUCTIONS
from cute_backend.kinds.blocks.rotations import ROTATE_FIRST, ROTATE_HALF
from cute_backend.kinds.reductions import ReductionKind

__all__ = [
    "BLOCK_OPS",
    "PART",
    "ROTATE_FIRST",
    "ROTATE_HALF",
    "BlockOp",
    "reducing",
]

BLOCK_OPS: dict[str, BlockOp] = {
    op.name: op for op in (*BLOCK_REDUCTIONS.values(), ROTATE_HALF, ROTATE_FIRST, PART)
}
"""All kinds, by the names that ops of a spec have."""


def reducing(kind: ReductionKind) -> BlockOp:
    """The op that reduces blocks by a kind of reduction. Raises KeyError if none does."""
    return BLOCK_REDUCTIONS[kind.name]
