"""Reads `_grouped_mm`, and `_scaled_grouped_mm` in both versions: groups of rows, of columns or of K."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from cute_backend.fx_walk.graph.static import Size, arguments, describe, fake, known, target_name
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.products.dense_products import dense
from cute_backend.fx_walk.products.product_operands import accumulator_of, check_devices, out_dtype
from cute_backend.fx_walk.products.scaled_products import fp8, scaled_dtypes
from cute_backend.fx_walk.products.scaling_recipes import (
    SWIZZLE,
    TILED,
    has_shape,
    recipe_names,
    scales_of_each_group,
    scales_of_groups,
    swizzle_names,
)
from cute_backend.fx_walk.refusals.reasons import Reason, Refused, user_label
from cute_backend.fx_walk.values.classify import (
    LoadView,
    classify_group_scalar,
    classify_pieces,
    classify_table,
    classify_vector,
)
from cute_backend.spec import LoadKind, Scaling

_FORMS = "(M, K) by (G, K, N), (G, M, K) by (K, N) and (M, K) by (K, N) with offsets"


def read_grouped_mm(node: fx.Node) -> Anchor:
    """Reads a `grouped_mm`, which has groups of rows, of columns or of K, by their offsets, or without
    offsets a batch."""
    args = arguments(node)
    a, b, offsets = args["self"], args["mat2"], args["offs"]
    taken = ((3, 3),) if offsets is None else ((2, 3), (3, 2), (2, 2))
    _check_bias(node)
    if (fake(a).dim(), fake(b).dim()) not in taken:
        raise _other_form(node, _FORMS if offsets is not None else "(G, M, K) by (G, K, N)")
    return _in_rows(replace(dense(node, a, b), offsets=offsets))


def _in_rows(anchor: Anchor) -> Anchor:
    """The product, transposed if its columns lie in groups."""
    if (fake(anchor.a).dim(), fake(anchor.b).dim()) != (3, 2):
        return anchor
    acc = anchor.accumulator
    flipped = replace(acc, a_dtype=acc.b_dtype, b_dtype=acc.a_dtype, a_major=acc.b_major, b_major=acc.a_major)
    return replace(anchor, a=anchor.b, b=anchor.a, accumulator=flipped, transposed=True)


def read_scaled_grouped_mm(node: fx.Node) -> Anchor:
    args = arguments(node)
    if args["scale_result"] is not None:
        raise _refused(node, "has a scale_result, which no kernel applies")
    scales = args["scale_a"], args["scale_b"]
    if fake(scales[0]).dtype is torch.float8_e8m0fnu:
        return _groups_scaled_by_mma(node, Scaling.MX, *scales)
    return _scaled_groups(node, *scales)


def read_scaled_grouped_mm_v2(node: fx.Node) -> Anchor:
    args = arguments(node)
    recipe, other = (recipe_names(args[name]) for name in ("recipe_a", "recipe_b"))
    (scale_a, *whole_a), (scale_b, *whole_b) = args["scale_a"], args["scale_b"]
    if recipe != other or len(args["scale_a"]) != len(recipe) or len(args["scale_b"]) != len(recipe):
        raise _other_recipe(node, recipe, other)
    if recipe == ("RowWise",):
        return _scaled_groups(node, scale_a, scale_b)
    swizzles = [swizzle_names(args[name])[:1] for name in ("swizzle_a", "swizzle_b")]
    if recipe not in TILED or swizzles != [SWIZZLE, SWIZZLE]:
        raise _other_recipe(node, recipe, other)
    anchor = _groups_scaled_by_mma(node, TILED[recipe], scale_a, scale_b)
    if len(recipe) == 1:
        return anchor
    (whole_a,), (whole_b,) = whole_a, whole_b
    of_a, of_b = (_of_whole_groups(node, each, anchor) for each in (whole_a, whole_b))
    return replace(anchor, scale_a=of_a, scale_b=of_b)


def _of_whole_groups(node: fx.Node, scale: fx.Node, anchor: Anchor) -> LoadView:
    """The scale of an operand of all groups, one number, or one for each group, (G,)."""
    tensor = fake(scale)
    if tensor.dtype is not torch.float32:
        raise Refused(Reason.SCALE_DTYPE, operand=user_label(scale), dtype=tensor.dtype)
    if known(tensor.numel() == 1):
        return classify_vector(scale, LoadKind.COLVEC, anchor.device)
    if not has_shape(tensor.shape, (fake(anchor.b).shape[0],)):
        raise _other_scales(node, "for the second level of NVFP4's scales, one number or (G,)")
    return classify_group_scalar(scale, anchor.device)


def _groups_scaled_by_mma(node: fx.Node, scaling: Scaling, scale_a: fx.Node, scale_b: fx.Node) -> Anchor:
    """Reads a product of rows in groups, (M, K) by (G, K, N), whose blocks the MMA scales."""
    args = arguments(node)
    a, b = args["self"], args["mat2"]
    _check_bias(node)
    if (fake(a).dim(), fake(b).dim()) != (2, 3) or args["offs"] is None:
        raise _other_form(node, "in MXFP8, MXFP4 and NVFP4, (M, K) by (G, K, N) with offsets")
    a_dtype, b_dtype = scaled_dtypes(a, b, scaling)
    groups, k, n = fake(b).shape
    values = k * a_dtype.values
    a_blocks = scales_of_groups(scale_a, values, scaling)
    b_blocks = scales_of_each_group(scale_b, groups, n, values, scaling)
    if a_blocks is None or b_blocks is None:
        taken = "(padded rows of all groups, padded K / b) and (G, padded N * padded K / b) for blocks of b"
        raise _other_scales(node, f"{taken}, in {SWIZZLE}")
    check_devices((scale_a, scale_b), fake(node).device)
    acc = accumulator_of(node, a, b, a_dtype, b_dtype, fast_accum=True)
    return Anchor(
        node=node,
        a=a,
        b=b,
        accumulator=replace(acc, a_scaling=scaling, b_scaling=scaling),
        out_dtype=out_dtype(fake(node).dtype),
        a_vectors=(a_blocks,),
        b_vectors=(b_blocks,),
        offsets=args["offs"],
    )


def _scaled_groups(node: fx.Node, scale_a: fx.Node, scale_b: fx.Node) -> Anchor:
    """Reads a product of fp8 rows or columns in groups, or of K. The operand in groups has a scale for each
    of its rows or columns; the other operand has one for each column or row of every group. Where K is in
    groups, both have one for each row or column of every group, in one vector."""
    args = arguments(node)
    a, b, offsets = args["self"], args["mat2"], args["offs"]
    shape_a, shape_b = fake(a).shape, fake(b).shape
    form = (len(shape_a), len(shape_b))
    _check_bias(node)
    if offsets is None or form == (3, 3):
        raise _other_form(node, f"in fp8, {_FORMS}")
    of_a: tuple[Size, ...] = shape_a[:-1]
    of_b: tuple[Size, ...] = (*shape_b[:-2], shape_b[-1])
    groups = fake(offsets).shape[0]
    if form == (2, 2):
        of_a, of_b = (groups * of_a[0],), (groups * of_b[0],)
    taken = f"{describe(of_a)} and {describe(of_b)} in float32, a scale for each row and column"
    if not has_shape(fake(scale_a).shape, of_a) or not has_shape(fake(scale_b).shape, of_b):
        raise _other_scales(node, taken)
    anchor = fp8(node, a, b, (scale_a, scale_b), None, args["use_fast_accum"])
    vector, table = (scale_b, scale_a) if form == (3, 2) else (scale_a, scale_b)
    if form == (2, 2):
        of_columns = classify_pieces(table, groups, anchor.device)
    else:
        of_columns = classify_table(table, anchor.device)
    if of_columns is None:
        raise _other_scales(node, f"{taken}, contiguous in each group")
    of_rows = classify_vector(vector, LoadKind.COLVEC, anchor.device)
    return _in_rows(replace(anchor, scale_a=of_rows, scale_b=of_columns, offsets=offsets))


def _check_bias(node: fx.Node) -> None:
    if arguments(node)["bias"] is not None:
        raise _refused(node, "has a bias, which no kernel of groups adds")


def _other_form(node: fx.Node, taken: str) -> Refused:
    """The refusal of operands whose axes are those of no form."""
    args = arguments(node)
    form = " by ".join(describe(fake(args[name]).shape) for name in ("self", "mat2"))
    offsets = "with" if args["offs"] is not None else "without"
    return _refused(node, f"multiplies {form} {offsets} offsets; supported: {taken}")


def _other_recipe(node: fx.Node, a: tuple[str, ...], b: tuple[str, ...]) -> Refused:
    given = " by ".join("+".join(each) for each in (a, b))
    taken = ", ".join("+".join(each) for each in TILED)
    supported = f"the same for A and B, RowWise or, in {SWIZZLE}, {taken}"
    return _refused(node, f"has scales of the recipe {given}; supported: {supported}")


def _other_scales(node: fx.Node, taken: str) -> Refused:
    """The refusal of scales whose shapes or strides are not those of the product's form."""
    args, given = arguments(node), []
    for name in ("scale_a", "scale_b"):
        scales = args[name]
        for each in map(fake, scales if isinstance(scales, (list, tuple)) else [scales]):
            given.append(f"{name} {str(each.dtype).removeprefix('torch.')} {describe(each.shape)}")
    return _refused(node, f"has {', '.join(given)}; supported: {taken}")


def _refused(node: fx.Node, why: str) -> Refused:
    return Refused(Reason.GROUPED, target=target_name(node), why=why)
