"""Reads `_grouped_mm`, `_scaled_grouped_mm` and its second version: products of groups of rows or of K."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from cute_backend.fx_walk.anchor import Anchor
from cute_backend.fx_walk.block_scales import has_shape, recipe_names
from cute_backend.fx_walk.classify import classify_table, classify_vector
from cute_backend.fx_walk.dense_products import dense
from cute_backend.fx_walk.reasons import Reason, Refused
from cute_backend.fx_walk.scaled_products import fp8
from cute_backend.fx_walk.static import arguments, describe, fake, target_name
from cute_backend.spec import LoadKind


def read_grouped_mm(node: fx.Node) -> Anchor:
    """Reads a `grouped_mm`: one with groups of rows or of K by their offsets, or one of a batch, without
    offsets."""
    args = arguments(node)
    a, b, offsets = args["self"], args["mat2"], args["offs"]
    taken = ((3, 3),) if offsets is None else ((2, 3), (2, 2))
    if args["bias"] is not None or (fake(a).dim(), fake(b).dim()) not in taken:
        return _refused(node)
    return replace(dense(node, a, b), offsets=offsets)


def read_scaled_grouped_mm(node: fx.Node) -> Anchor:
    args = arguments(node)
    if args["scale_result"] is not None:
        return _refused(node)
    return _scaled_groups(node, args["scale_a"], args["scale_b"])


def read_scaled_grouped_mm_v2(node: fx.Node) -> Anchor:
    args = arguments(node)
    rowwise = [("RowWise",), ("RowWise",)]
    if [recipe_names(args[name]) for name in ("recipe_a", "recipe_b")] != rowwise:
        return _refused(node)
    (scale_a,), (scale_b,) = args["scale_a"], args["scale_b"]
    return _scaled_groups(node, scale_a, scale_b)


def _scaled_groups(node: fx.Node, scale_a: fx.Node, scale_b: fx.Node) -> Anchor:
    """Reads a product of fp8 rows in groups: A has a scale for each row, B for each column of each group."""
    args = arguments(node)
    a, b = args["self"], args["mat2"]
    shape_a, shape_b = fake(a).shape, fake(b).shape
    further = args["bias"] is not None
    if args["offs"] is None or (len(shape_a), len(shape_b)) != (2, 3) or further:
        return _refused(node)
    rowwise = has_shape(fake(scale_a).shape, (shape_a[0],))
    if not rowwise or not has_shape(fake(scale_b).shape, (shape_b[0], shape_b[2])):
        return _refused(node)
    anchor = fp8(node, a, b, (scale_a, scale_b), None, args["use_fast_accum"])
    of_columns = classify_table(scale_b, anchor.device)
    if of_columns is None:
        return _refused(node)
    of_rows = classify_vector(scale_a, LoadKind.COLVEC, anchor.device)
    return replace(anchor, scale_a=of_rows, scale_b=of_columns, offsets=args["offs"])


def _refused(node: fx.Node) -> Anchor:
    args = arguments(node)
    further = [name for name in ("scale_a", "bias") if args.get(name) is not None]
    raise Refused(
        Reason.GROUPED,
        target=target_name(node),
        form=" by ".join(describe(fake(args[name]).shape) for name in ("self", "mat2"))
        + "".join(f" with {name}" for name in further),
    )
