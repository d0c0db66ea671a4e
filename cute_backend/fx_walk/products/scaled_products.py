"""Reads `_scaled_mm` and its second version, by the scales of A and B."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from cute_backend.fx_walk.graph.static import arguments, describe, fake, known
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.products.product_operands import (
    accumulator_of,
    bias_of,
    check_devices,
    operand_dtypes,
    out_dtype,
    unmultiplied,
)
from cute_backend.fx_walk.products.scaling_recipes import (
    SCALINGS,
    SWIZZLE,
    TAKEN,
    TILED,
    UNSWIZZLED,
    VectorView,
    block_scaling,
    blocks_of_v2,
    has_shape,
    inferred,
    recipe_names,
    swizzle_names,
    tiled_scale,
)
from cute_backend.fx_walk.refusals.reasons import Reason, Refused, user_label
from cute_backend.fx_walk.values.classify import classify_vector
from cute_backend.numerics import TORCH_DTYPES
from cute_backend.spec import DType, LoadKind, Scaling


def read_scaled_mm(node: fx.Node) -> Anchor:
    args = arguments(node)
    if args["scale_result"] is not None:
        raise Refused(Reason.SCALE_RESULT)
    a, b, scale_a, scale_b = args["self"], args["mat2"], args["scale_a"], args["scale_b"]
    shape_a, shape_b = fake(scale_a).shape, fake(scale_b).shape
    m, n = fake(a).shape[0], fake(b).shape[1]
    tensorwise = known(fake(scale_a).numel() == 1) and known(fake(scale_b).numel() == 1)
    rowwise = has_shape(shape_a, (m, 1)) and has_shape(shape_b, (1, n))
    if not tensorwise and not rowwise:
        if (tiled := inferred(fake(scale_a))) is not None:
            return _scaled_by_mma(node, a, b, tiled, (scale_a, scale_b), args["bias"])
        scaling = block_scaling(fake(a), fake(b), fake(scale_a), fake(scale_b))
        if scaling is not None:
            return _block_scaled(node, a, b, scaling, VectorView(scale_a), VectorView(scale_b), args["bias"])
        raise _mixed(node, a, b, scale_a, scale_b)
    return _scaled(node, a, b, scale_a, scale_b, args["bias"], args["use_fast_accum"])


def read_scaled_mm_v2(node: fx.Node) -> Anchor:
    args = arguments(node)
    recipes = (recipe_names(args["recipe_a"]), recipe_names(args["recipe_b"]))
    a, b = args["self"], args["mat2"]
    if recipes[0] in TILED and recipes[0] == recipes[1]:
        _check_swizzles(args, recipes, SWIZZLE)
        return _tiled_v2(node, args, recipes[0])
    if recipes[0] in SCALINGS and recipes[1] in SCALINGS:
        _check_swizzles(args, recipes, UNSWIZZLED)
        scaling = (SCALINGS[recipes[0]], SCALINGS[recipes[1]])
        of_a = blocks_of_v2(args["scale_a"][0], fake(a).shape[0], fake(a).shape[1], scaling[0])
        of_b = blocks_of_v2(args["scale_b"][0], fake(b).shape[1], fake(a).shape[1], scaling[1])
        # The op takes scales of A as (rows, k), and those of B as the transpose of (columns, k).
        of_b = replace(of_b, transposed=not of_b.transposed)
        return _block_scaled(node, a, b, scaling, of_a, of_b, args["bias"])
    if recipes not in ((("TensorWise",), ("TensorWise",)), (("RowWise",), ("RowWise",))):
        raise Refused(Reason.RECIPE, recipe=_by(recipes), taken=TAKEN)
    (scale_a,), (scale_b,) = args["scale_a"], args["scale_b"]
    expected = (1, 1) if recipes[0] == ("TensorWise",) else (fake(a).shape[0], fake(b).shape[1])
    for scale, count in zip((scale_a, scale_b), expected, strict=True):
        if not known(fake(scale).numel() == count):
            raise _mixed(node, a, b, scale_a, scale_b)
    return _scaled(node, a, b, scale_a, scale_b, args["bias"], args["use_fast_accum"])


def _check_swizzles(
    args: dict[str, Any], recipes: Sequence[tuple[str, ...]], wanted: tuple[str, ...]
) -> None:
    """Raises Refused unless the scales of the blocks of both operands have the swizzle `wanted`."""
    swizzles = [swizzle_names(args[name])[:1] for name in ("swizzle_a", "swizzle_b")]
    if swizzles != [wanted, wanted]:
        swizzle = " by ".join("".join(names) for names in swizzles)
        raise Refused(Reason.RECIPE, recipe=f"{_by(recipes)} in {swizzle}", taken=TAKEN)


def _by(recipes: Sequence[tuple[str, ...]]) -> str:
    """The recipes of A and B, or one if they are equal."""
    return " by ".join("+".join(names) for names in dict.fromkeys(recipes))


def _mixed(node: fx.Node, a: fx.Node, b: fx.Node, scale_a: fx.Node, scale_b: fx.Node) -> Refused:
    (m, k), n = fake(a).shape, fake(b).shape[1]
    row_blocks, k_blocks, column_blocks = map(Scaling.SQUARE.blocks, (m, k, n))
    return Refused(
        Reason.MIXED_SCALES,
        scale_a=describe(fake(scale_a).shape),
        scale_b=describe(fake(scale_b).shape),
        m=m,
        n=n,
        row_blocks=row_blocks,
        k_blocks=k_blocks,
        column_blocks=column_blocks,
    )


def _scaled(
    node: fx.Node,
    a: fx.Node,
    b: fx.Node,
    scale_a: fx.Node,
    scale_b: fx.Node,
    bias: fx.Node | None,
    fast_accum: bool,
) -> Anchor:
    return _with_vectors(fp8(node, a, b, (scale_a, scale_b), bias, fast_accum), scale_a, scale_b)


def _with_vectors(anchor: Anchor, scale_a: fx.Node, scale_b: fx.Node) -> Anchor:
    """The product with scales of rows and columns, or of whole operands."""
    of_rows = classify_vector(scale_a, LoadKind.COLVEC, anchor.device)
    return replace(anchor, scale_a=of_rows, scale_b=classify_vector(scale_b, LoadKind.ROWVEC, anchor.device))


def _check_scale(scale: fx.Node) -> None:
    """Raises Refused unless a scale is fp32."""
    if fake(scale).dtype is not torch.float32:
        raise Refused(Reason.SCALE_DTYPE, operand=user_label(scale), dtype=fake(scale).dtype)


def _block_scaled(
    node: fx.Node,
    a: fx.Node,
    b: fx.Node,
    scaling: tuple[Scaling, Scaling],
    a_blocks: VectorView,
    b_blocks: VectorView,
    bias: fx.Node | None,
) -> Anchor:
    anchor = fp8(node, a, b, (a_blocks.node, b_blocks.node), bias, fast_accum=False)
    check_devices((a_blocks.node, b_blocks.node), anchor.device)
    accumulator = replace(anchor.accumulator, a_scaling=scaling[0], b_scaling=scaling[1])
    return replace(anchor, accumulator=accumulator, a_vectors=(a_blocks,), b_vectors=(b_blocks,))


def _tiled_v2(node: fx.Node, args: dict[str, Any], recipe: tuple[str, ...]) -> Anchor:
    """Reads a product of `_scaled_mm_v2` with scales of blocks in tiles and, if the recipe has them, scales
    of whole operands."""
    (of_a, *whole_a), (of_b, *whole_b) = args["scale_a"], args["scale_b"]
    anchor = _scaled_by_mma(node, args["self"], args["mat2"], TILED[recipe], (of_a, of_b), args["bias"])
    if len(recipe) == 1:
        return anchor
    (scale_a,), (scale_b,) = whole_a, whole_b
    for scale in (scale_a, scale_b):
        _check_scale(scale)
        if not known(fake(scale).numel() == 1):
            raise _mixed(node, args["self"], args["mat2"], scale_a, scale_b)
    return _with_vectors(anchor, scale_a, scale_b)


def _scaled_by_mma(
    node: fx.Node,
    a: fx.Node,
    b: fx.Node,
    scaling: Scaling,
    scales: tuple[fx.Node, fx.Node],
    bias: fx.Node | None,
) -> Anchor:
    """The product whose blocks the MMA scales, with its bias."""
    a_dtype, b_dtype = scaled_dtypes(a, b, scaling)
    values = fake(a).shape[1] * a_dtype.values
    of_a = tiled_scale(scales[0], fake(a).shape[0], values, scaling)
    of_b = tiled_scale(scales[1], fake(b).shape[1], values, scaling)
    accumulator = accumulator_of(node, a, b, a_dtype, b_dtype, fast_accum=True)
    check_devices(scales, fake(node).device)
    return Anchor(
        node=node,
        a=a,
        b=b,
        accumulator=replace(accumulator, a_scaling=scaling, b_scaling=scaling),
        out_dtype=out_dtype(fake(node).dtype),
        addend=bias_of(node, bias),
        a_vectors=(of_a,),
        b_vectors=(of_b,),
    )


def scaled_dtypes(a: fx.Node, b: fx.Node, scaling: Scaling) -> tuple[DType, DType]:
    """The dtypes of operands whose blocks the MMA scales. Raises Refused if it multiplies no such pair."""
    dtypes = {TORCH_DTYPES[dtype]: dtype for dtype in scaling.facts.operands}
    a_dtype, b_dtype = dtypes.get(fake(a).dtype), dtypes.get(fake(b).dtype)
    if a_dtype is None or b_dtype is None or a_dtype.is_fp8 != b_dtype.is_fp8:
        raise unmultiplied(a, b)
    if a_dtype is b_dtype is DType.E5M2:
        raise unmultiplied(a, b)
    return a_dtype, b_dtype


def fp8(
    node: fx.Node,
    a: fx.Node,
    b: fx.Node,
    scales: tuple[fx.Node, fx.Node],
    bias: fx.Node | None,
    fast_accum: bool,
) -> Anchor:
    """The product without its scales, and with its bias."""
    a_dtype, b_dtype = operand_dtypes(a, b, (DType.E4M3, DType.E5M2))
    if a_dtype is DType.E5M2 and b_dtype is DType.E5M2:
        raise unmultiplied(a, b)
    for scale in scales:
        _check_scale(scale)
    return Anchor(
        node=node,
        a=a,
        b=b,
        accumulator=accumulator_of(node, a, b, a_dtype, b_dtype, fast_accum),
        out_dtype=out_dtype(fake(node).dtype),
        addend=bias_of(node, bias),
    )
