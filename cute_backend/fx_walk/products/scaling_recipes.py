"""Scales of blocks, as `_scaled_mm` and `_scaled_mm_v2` take them, and their recipes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from cute_backend.fx_walk.graph.static import Size, describe, fake, known
from cute_backend.fx_walk.refusals.reasons import Reason, Refused, user_label
from cute_backend.fx_walk.values.classify import ColumnSlice
from cute_backend.numerics import TORCH_DTYPES
from cute_backend.spec import Scaling

TAKEN = (
    "TensorWise, RowWise and BlockWise1x128 or 128x128, of fp32 by rows of A and columns of B, and "
    "BlockWise1x32 or 1x16 in SWIZZLE_32_4_4"
)
"""The supported recipes, for messages."""

SCALINGS: dict[tuple[str, ...], Scaling] = {
    ("BlockWise1x128",): Scaling.LINE,
    ("BlockWise128x128",): Scaling.SQUARE,
}
"""Recipes of fp32 scales that vary along K."""

TILED: dict[tuple[str, ...], Scaling] = {
    ("BlockWise1x32",): Scaling.MX,
    ("BlockWise1x16",): Scaling.NV,
    ("BlockWise1x16", "TensorWise"): Scaling.NV,
}
"""Recipes of scales in tiles, in the MMA's layout. The last one also has a scale of the whole operand."""

SWIZZLE = ("SWIZZLE_32_4_4",)
"""The supported swizzle of tiled scales."""

UNSWIZZLED = ("NO_SWIZZLE",)
"""The swizzle of fp32 scales."""


@dataclass(frozen=True)
class VectorView:
    """A vector beside an operand, such as the scales of its blocks.

    The op takes it as (rows of A, k) or (k, columns of B). If scales are `transposed`, the axes are swapped.
    `padded` scales have more blocks than K. Scales of B may be of a slice of the `columns`. The op takes
    `tiled` scales as one vector, whatever their shape is.
    """

    node: fx.Node
    transposed: bool = False
    padded: bool = False
    columns: ColumnSlice | None = None
    tiled: bool = False


def blocks_of_v2(node: fx.Node, lines: Size, k: Size, scaling: Scaling) -> VectorView:
    """The scales that `_scaled_mm_v2` takes for `lines` rows of A or columns of B, with the axes in the order
    that A's have. Raises Refused if they have another shape or other strides.

    Scales of 1 x 128 blocks are (lines, k). Scales of 128 x 128 blocks are (lines, k) too, or as cuBLAS takes
    them: (k, lines), contiguous along a k that is rounded up to a multiple of 4. Where both fit, strides
    decide.
    """
    scale, blocks, k_blocks = fake(node), scaling.blocks(lines), Scaling.SQUARE.blocks(k)
    padded = (k_blocks + 3) // 4 * 4
    cublas = scaling is Scaling.SQUARE and has_shape(scale.shape, (padded, blocks))
    if cublas and known(scale.stride(0) == 1):
        return VectorView(node, transposed=True, padded=not known(padded == k_blocks))
    if has_shape(scale.shape, (blocks, k_blocks)):
        return VectorView(node)
    taken = describe((blocks, k_blocks))
    if scaling is Scaling.SQUARE:
        taken += f" with any strides, or {describe((padded, blocks))} with a stride of 1 along its first axis"
    raise _other_layout(node, scaling, taken)


def _other_layout(node: fx.Node, scaling: Scaling, taken: str) -> Refused:
    scale = fake(node)
    return Refused(
        Reason.SCALE_LAYOUT,
        operand=user_label(node),
        dtype=scale.dtype,
        shape=describe(scale.shape),
        strides=describe(scale.stride()),
        recipe=f"BlockWise{scaling.value}",
        taken=taken,
    )


def has_shape(shape: torch.Size, expected: tuple[Size, ...]) -> bool:
    return len(shape) == len(expected) and all(
        known(size == want) for size, want in zip(shape, expected, strict=True)
    )


def inferred(scale_a: torch.Tensor) -> Scaling | None:
    """The blocks of tiled scales that `_scaled_mm` infers from their dtype, None if it infers none."""
    return {torch.float8_e8m0fnu: Scaling.MX, torch.float8_e4m3fn: Scaling.NV}.get(scale_a.dtype)


def tiled_scale(node: fx.Node, lines: Size, k: Size, scaling: Scaling) -> VectorView:
    """The scales of `lines` rows of A, or columns of B, by `k` values, in tiles. Raises Refused if their
    dtype or number is wrong, or if they are not contiguous."""
    scale, count, wanted = fake(node), scaling.tiled(lines, k), TORCH_DTYPES[scaling.facts.dtype]
    if scale.dtype is not wanted or not known(scale.numel() == count) or not scale.is_contiguous():
        tiles = "in tiles of 128 rows by 4 scales (SWIZZLE_32_4_4)"
        raise _other_layout(node, scaling, f"{count} contiguous elements of {wanted}, {tiles}")
    return VectorView(node, tiled=True)


def scales_of_groups(node: fx.Node, k: Size, scaling: Scaling) -> VectorView | None:
    """Returns the scales of rows in groups by `k` values, (rows, blocks of K), in tiles. Each group begins a
    new tile. Returns None for other scales. Only the GPU knows how many rows of scales it reads."""
    scale = fake(node)
    padded = (scaling.k_blocks(k) + 3) // 4 * 4
    taken = scale.dtype is TORCH_DTYPES[scaling.facts.dtype] and scale.dim() == 2 and scale.is_contiguous()
    return VectorView(node, tiled=True) if taken and known(scale.shape[1] == padded) else None


def scales_of_each_group(
    node: fx.Node, groups: Size, n: Size, k: Size, scaling: Scaling
) -> VectorView | None:
    """Returns the scales of the (K, N) matrices of all groups, whose columns have `k` values: (groups,
    scales), in tiles. Returns None for other scales."""
    scale = fake(node)
    if scale.dtype is not TORCH_DTYPES[scaling.facts.dtype] or not scale.is_contiguous():
        return None
    taken = has_shape(scale.shape, (groups, scaling.tiled(n, k)))
    return VectorView(node, tiled=True) if taken else None


def block_scaling(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> tuple[Scaling, Scaling] | None:
    """The blocks of A and B that have scales (rows of A, k) and (k, columns of B), or None if there are
    none."""
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


def swizzle_names(swizzle: list[int]) -> tuple[str, ...]:
    """The names of `torch.nn.functional.SwizzleType` members."""
    from torch.nn.functional import SwizzleType

    return tuple(SwizzleType(value).name for value in swizzle) or ("NO_SWIZZLE",)
