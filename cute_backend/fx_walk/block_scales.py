"""Scales of blocks, as `_scaled_mm` and `_scaled_mm_v2` take them, and by which recipes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from cute_backend.fx_walk.classify import ColumnSlice
from cute_backend.fx_walk.static import Size, fake, known
from cute_backend.spec import Scaling

TAKEN = "TensorWise, RowWise and BlockWise1x128 or 128x128, of fp32 by rows of A and columns of B"
"""Recipes that are taken, for refusals."""

SCALINGS: dict[tuple[str, ...], Scaling] = {
    ("BlockWise1x128",): Scaling.LINE,
    ("BlockWise128x128",): Scaling.SQUARE,
}
"""Recipes of fp32 scales that vary along K."""


@dataclass(frozen=True)
class BlockScale:
    """The scales of an operand's blocks: as the op takes them, (rows of A, k) or (k, columns of B), or, where
    `transposed`, the other way round. `padded` ones have more than K has blocks. Of B it may be of a slice
    of the `columns`."""

    node: fx.Node
    transposed: bool = False
    padded: bool = False
    columns: ColumnSlice | None = None


def blocks_of_v2(node: fx.Node, lines: Size, k: Size, scaling: Scaling) -> BlockScale | None:
    """The scales that `_scaled_mm_v2` takes of `lines` rows of A, or columns of B, turned as those of A are;
    None where their shape is another.

    Scales of 1 x 128 blocks are (lines, k). Scales of 128 x 128 blocks are (lines, k) too, or as cuBLAS takes
    them: (k, lines), contiguous along a k that is rounded up to a multiple of 4. Where both fit, strides
    decide.
    """
    scale, blocks, k_blocks = fake(node), scaling.blocks(lines), Scaling.SQUARE.blocks(k)
    padded = (k_blocks + 3) // 4 * 4
    cublas = scaling is Scaling.SQUARE and has_shape(scale.shape, (padded, blocks))
    if cublas and known(scale.stride(0) == 1):
        return BlockScale(node, transposed=True, padded=not known(padded == k_blocks))
    return BlockScale(node) if has_shape(scale.shape, (blocks, k_blocks)) else None


def has_shape(shape: torch.Size, expected: tuple[Size, ...]) -> bool:
    return len(shape) == len(expected) and all(
        known(size == want) for size, want in zip(shape, expected, strict=True)
    )


def mx_recipe(scale_a: torch.Tensor) -> str | None:
    """The recipe of Blackwell's MMA that `_scaled_mm` would infer from the scales, None if there is none."""
    recipes = {torch.float8_e8m0fnu: "BlockWise1x32", torch.float8_e4m3fn: "BlockWise1x16"}
    return recipes.get(scale_a.dtype)


def block_scaling(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> tuple[Scaling, Scaling] | None:
    """By which blocks of A and B scales (rows of A, k) and (k, columns of B) are, None if by none."""
    if scale_a.dim() != 2 or scale_b.dim() != 2:
        return None
    (m, k), n = a.shape, b.shape[1]
    blocks = Scaling.SQUARE.blocks(k)
    if not (known(scale_a.shape[1] == blocks) and known(scale_b.shape[0] == blocks)):
        return None
    rows, columns = _scaling(scale_a.shape[0], m), _scaling(scale_b.shape[1], n)
    return None if rows is None or columns is None else (rows, columns)


def _scaling(count: Size, lines: Size) -> Scaling | None:
    return next((each for each in (Scaling.LINE, Scaling.SQUARE) if known(count == each.blocks(lines))), None)


def recipe_names(recipe: list[int]) -> tuple[str, ...]:
    """The names of `torch.nn.functional.ScalingType` members."""
    from torch.nn.functional import ScalingType

    return tuple(ScalingType(value).name for value in recipe)
