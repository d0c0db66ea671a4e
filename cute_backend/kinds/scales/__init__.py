"""Vectors beside the operands of a product, which vary along K: scales of blocks in `blocks.py`, scales and
zeros of a weight's groups of K in `weight_groups.py`. `vectors.py` has the face of both.
"""

from cute_backend.kinds.scales.blocks import SCALE_BLOCK, BlockFormat, Scaling, sum_of_blocks
from cute_backend.kinds.scales.vectors import Scales, Side, Vector, shown
from cute_backend.kinds.scales.weight_groups import GROUP_SIZES, SPAN, WeightGroups, has_integers

__all__ = [
    "GROUP_SIZES",
    "SCALE_BLOCK",
    "SPAN",
    "BlockFormat",
    "Scales",
    "Scaling",
    "Side",
    "Vector",
    "WeightGroups",
    "has_integers",
    "shown",
    "sum_of_blocks",
]
