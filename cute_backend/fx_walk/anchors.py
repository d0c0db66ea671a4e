"""The matrix products that a region can grow from, and what each op's own arguments mean for its epilogue.

`_scaled_mm` (both versions), `mm`, `addmm` and `_addmm_activation`, `bmm` and `baddbmm`, and `_grouped_mm` of
groups of rows or of a batch are read into one form, an Anchor: two operands, an accumulator, and what the op
itself does to the accumulator (scales, bias, the addend of `addmm`, an activation, its result dtype), which
become ordinary loads and ops. Other grouped products and those of integers are refused under reasons of their
own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from cute_backend.fx_walk.activation import Activation
from cute_backend.fx_walk.block_scales import (
    SCALINGS,
    SWIZZLE,
    TAKEN,
    TILED,
    BlockScale,
    block_scaling,
    blocks_of_v2,
    has_shape,
    inferred,
    recipe_names,
    swizzle_names,
    tiled_scale,
)
from cute_backend.fx_walk.classify import ColumnSlice, LoadView, classify, classify_table, classify_vector
from cute_backend.fx_walk.reasons import Reason, Refused, user_label
from cute_backend.fx_walk.static import (
    DTYPES,
    Size,
    arguments,
    describe,
    fake,
    first_argument,
    known,
    product,
    target_name,
    tensor_of,
)
from cute_backend.numerics import TORCH_DTYPES
from cute_backend.spec import SCALE_TILE, Accumulator, DType, LoadKind, Major, ProductKind, Scaling

Number = float | int | bool


@dataclass(frozen=True)
class Addend:
    """`beta * input` of `addmm`, or the bias of `_scaled_mm` with a `beta` of 1."""

    view: LoadView
    beta: Number


@dataclass(frozen=True)
class Anchor:
    """A matrix product (M, K) x (K, N): result = out_dtype(acc * scale_a * scale_b * alpha + addend), or of
    `activation` of that.

    In a batched product, (B, M, K) x (B, K, N), the plane has the rows of all batches, and M is their number.
    In a grouped one, (M, K) x (G, K, N), `offsets` (G,) has for each group the row after its last.

    With `columns` it is about that slice of them alone, which N then counts.
    """

    node: fx.Node
    a: fx.Node
    b: fx.Node
    accumulator: Accumulator
    out_dtype: torch.dtype
    scale_a: LoadView | None = None
    scale_b: LoadView | None = None
    alpha: Number = 1
    addend: Addend | None = None
    activation: Activation | None = None
    columns: ColumnSlice | None = None
    a_blocks: BlockScale | None = None
    b_blocks: BlockScale | None = None
    offsets: fx.Node | None = None

    def of_slice(self, columns: ColumnSlice, accumulator: Accumulator) -> Anchor:
        """The product with a slice of the columns of B."""
        return replace(
            self,
            accumulator=accumulator,
            scale_b=self.scale_b and self.scale_b.of_slice(columns),
            addend=self.addend and Addend(self.addend.view.of_slice(columns), self.addend.beta),
            columns=columns,
            b_blocks=self.b_blocks and replace(self.b_blocks, columns=self._blocks_of(columns)),
        )

    def _blocks_of(self, columns: ColumnSlice) -> ColumnSlice | None:
        """The blocks of columns that a slice has; None stands for all blocks, as for every other column."""
        lines = self.accumulator.b_scaling.lines
        if not known(columns.step == 1):
            return None
        scaling = self.accumulator.b_scaling
        if scaling.by_mma:
            # Tiles of the same columns follow each other, so those of a slice are one piece.
            values = self.k * self.accumulator.a_dtype.values
            first, count = (scaling.tiled(size, values) for size in (columns.start, columns.count))
            return ColumnSlice(first, 1, count)
        return ColumnSlice(columns.start // lines, 1, self.accumulator.b_scaling.blocks(columns.count))

    def splits_blocks(self, columns: ColumnSlice) -> bool:
        """Whether a slice begins within a block that has one scale."""
        scaling = self.accumulator.b_scaling
        lines = SCALE_TILE[0] if scaling.by_mma else scaling.lines if self.b_blocks is not None else 1
        return not (known(columns.step == 2) or known(columns.start % lines == 0))

    def with_a(self, other: dict[fx.Node, fx.Node]) -> Anchor:
        """The product with nodes of the same value for A, its scale and its offsets."""
        scale = self.scale_a and replace(self.scale_a, node=other[self.scale_a.node])
        blocks = self.a_blocks and replace(self.a_blocks, node=other[self.a_blocks.node])
        offsets = self.offsets and other[self.offsets]
        return replace(self, a=other[self.a], scale_a=scale, a_blocks=blocks, offsets=offsets)

    @property
    def a_side(self) -> list[fx.Node]:
        """The op's argument `a`: A, and the offsets of its groups if it has groups."""
        return [self.a] if self.offsets is None else [self.a, self.offsets]

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes that the op reads."""
        addend = None if self.addend is None else self.addend.view
        views = (self.scale_a, self.scale_b, addend, self.a_blocks, self.b_blocks)
        return [*self.a_side, self.b, *(view.node for view in views if view is not None)]

    @property
    def device(self) -> torch.device:
        return fake(self.node).device

    @property
    def m(self) -> Size:
        return product(fake(self.a).shape[:-1])

    @property
    def n(self) -> Size:
        return fake(self.b).shape[-1] if self.columns is None else self.columns.count

    @property
    def k(self) -> Size:
        return fake(self.a).shape[-1]

    @property
    def stands_alone(self) -> bool:
        """Whether a region is worth having with nothing after the product, since the op itself has an
        epilogue."""
        scaled = self.scale_a is not None or self.a_blocks is not None
        return scaled or self.activation is not None


def is_anchor(node: fx.Node) -> bool:
    """Whether the walker has to decide about this node: fuse it, or refuse it under a reason."""
    return node.op == "call_function" and (target_name(node) in _READERS or _is_matrix_vector(node))


def read_anchor(node: fx.Node) -> Anchor:
    """The anchor behind a node for which `is_anchor` holds. Raises Refused where it is not taken."""
    reader = _READERS.get(target_name(node))
    if reader is None:
        raise Refused(Reason.MATRIX_VECTOR)
    return reader(node)


def _read_mm(node: fx.Node) -> Anchor:
    args = arguments(node)
    return _dense(node, args["self"], args["mat2"])


def _read_addmm_activation(node: fx.Node) -> Anchor:
    gelu = Activation.TANH_GELU if fake(node).device.type == "cuda" else Activation.GELU
    activation = gelu if arguments(node)["use_gelu"] else Activation.RELU
    return replace(_read_sum("mat")(node), activation=activation)


def _read_sum(name: str) -> Callable[[fx.Node], Anchor]:
    """`addmm` and `baddbmm`, which call the first operand of their product by this name and a number."""

    def read(node: fx.Node) -> Anchor:
        args = arguments(node)
        a, b = args[f"{name}1"], args[f"{name}2"]
        alpha, beta = _number(args["alpha"]), _number(args["beta"])
        anchor = _dense(node, a, b, alpha)
        if beta == 0:
            return anchor
        view = classify(args["self"], fake(node).shape, anchor.device)
        return _dense(node, a, b, alpha, Addend(view, beta))

    return read


def _dense(node: fx.Node, a: fx.Node, b: fx.Node, alpha: Number = 1, addend: Addend | None = None) -> Anchor:
    a_dtype, b_dtype = _operand_dtypes(a, b, (DType.BF16, DType.F16))
    if a_dtype is not b_dtype:
        raise _unmultiplied(a, b)
    accumulator = _accumulator(node, a, b, a_dtype, b_dtype, fast_accum=True)
    return Anchor(node, a, b, accumulator, _out_dtype(fake(node).dtype), alpha=alpha, addend=addend)


def _read_scaled_mm(node: fx.Node) -> Anchor:
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
            return _block_scaled(node, a, b, scaling, BlockScale(scale_a), BlockScale(scale_b), args["bias"])
        raise _mixed(node, a, b, scale_a, scale_b)
    return _scaled(node, a, b, scale_a, scale_b, args["bias"], args["use_fast_accum"])


def _read_scaled_mm_v2(node: fx.Node) -> Anchor:
    args = arguments(node)
    recipes = (recipe_names(args["recipe_a"]), recipe_names(args["recipe_b"]))
    a, b = args["self"], args["mat2"]
    if recipes[0] in SCALINGS and recipes[1] in SCALINGS:
        scaling = (SCALINGS[recipes[0]], SCALINGS[recipes[1]])
        of_a = blocks_of_v2(args["scale_a"][0], fake(a).shape[0], fake(a).shape[1], scaling[0])
        of_b = blocks_of_v2(args["scale_b"][0], fake(b).shape[1], fake(a).shape[1], scaling[1])
        if of_a is not None and of_b is not None:
            # The op takes scales of A as (rows, k), and those of B as the transpose of (columns, k).
            of_b = replace(of_b, transposed=not of_b.transposed)
            return _block_scaled(node, a, b, scaling, of_a, of_b, args["bias"])
        raise _mixed(node, a, b, args["scale_a"][0], args["scale_b"][0])
    if recipes[0] in TILED and recipes[0] == recipes[1]:
        return _tiled_v2(node, args, recipes[0])
    if recipes not in ((("TensorWise",), ("TensorWise",)), (("RowWise",), ("RowWise",))):
        recipe = " by ".join("+".join(names) for names in recipes)
        raise Refused(Reason.RECIPE, recipe=recipe, taken=TAKEN)
    (scale_a,), (scale_b,) = args["scale_a"], args["scale_b"]
    expected = (1, 1) if recipes[0] == ("TensorWise",) else (fake(a).shape[0], fake(b).shape[1])
    for scale, count in zip((scale_a, scale_b), expected, strict=True):
        if not known(fake(scale).numel() == count):
            raise _mixed(node, a, b, scale_a, scale_b)
    return _scaled(node, a, b, scale_a, scale_b, args["bias"], args["use_fast_accum"])


def _mixed(node: fx.Node, a: fx.Node, b: fx.Node, scale_a: fx.Node, scale_b: fx.Node) -> Refused:
    facts = {"scale_a": describe(fake(scale_a).shape), "scale_b": describe(fake(scale_b).shape)}
    return Refused(Reason.MIXED_SCALES, **facts, m=fake(a).shape[0], n=fake(b).shape[1])


def _scaled(
    node: fx.Node,
    a: fx.Node,
    b: fx.Node,
    scale_a: fx.Node,
    scale_b: fx.Node,
    bias: fx.Node | None,
    fast_accum: bool,
) -> Anchor:
    anchor = _fp8(node, a, b, (scale_a, scale_b), bias, fast_accum)
    return replace(
        anchor,
        scale_a=classify_vector(scale_a, LoadKind.COLVEC, anchor.device),
        scale_b=classify_vector(scale_b, LoadKind.ROWVEC, anchor.device),
    )


def _block_scaled(
    node: fx.Node,
    a: fx.Node,
    b: fx.Node,
    scaling: tuple[Scaling, Scaling],
    a_blocks: BlockScale,
    b_blocks: BlockScale,
    bias: fx.Node | None,
) -> Anchor:
    anchor = _fp8(node, a, b, (a_blocks.node, b_blocks.node), bias, fast_accum=False)
    _check_devices((a_blocks.node, b_blocks.node), anchor.device)
    accumulator = replace(anchor.accumulator, a_scaling=scaling[0], b_scaling=scaling[1])
    return replace(anchor, accumulator=accumulator, a_blocks=a_blocks, b_blocks=b_blocks)


def _tiled_v2(node: fx.Node, args: dict[str, Any], recipe: tuple[str, ...]) -> Anchor:
    """Reads a product of `_scaled_mm_v2` whose scales of blocks lie in tiles, and those of whole operands
    where the recipe has any."""
    swizzles = [swizzle_names(args[name])[:1] for name in ("swizzle_a", "swizzle_b")]
    if swizzles != [SWIZZLE, SWIZZLE]:
        swizzle = " by ".join("".join(names) for names in swizzles)
        raise Refused(Reason.RECIPE, recipe=f"{'+'.join(recipe)} in {swizzle}", taken=TAKEN)
    (of_a, *whole_a), (of_b, *whole_b) = args["scale_a"], args["scale_b"]
    anchor = _scaled_by_mma(node, args["self"], args["mat2"], TILED[recipe], (of_a, of_b), args["bias"])
    if len(recipe) == 1:
        return anchor
    (scale_a,), (scale_b,) = whole_a, whole_b
    for scale in (scale_a, scale_b):
        if fake(scale).dtype is not torch.float32:
            raise Refused(Reason.SCALE_DTYPE, operand=user_label(scale), dtype=fake(scale).dtype)
        if not known(fake(scale).numel() == 1):
            raise _mixed(node, args["self"], args["mat2"], scale_a, scale_b)
    return replace(
        anchor,
        scale_a=classify_vector(scale_a, LoadKind.COLVEC, anchor.device),
        scale_b=classify_vector(scale_b, LoadKind.ROWVEC, anchor.device),
    )


def _scaled_by_mma(
    node: fx.Node,
    a: fx.Node,
    b: fx.Node,
    scaling: Scaling,
    scales: tuple[fx.Node, fx.Node],
    bias: fx.Node | None,
) -> Anchor:
    """The product whose blocks the MMA scales, with its bias."""
    dtypes = {TORCH_DTYPES[dtype]: dtype for dtype in scaling.facts.operands}
    a_dtype, b_dtype = dtypes.get(fake(a).dtype), dtypes.get(fake(b).dtype)
    if a_dtype is None or b_dtype is None or a_dtype.is_fp8 != b_dtype.is_fp8:
        raise _unmultiplied(a, b)
    if a_dtype is b_dtype is DType.E5M2:
        raise _unmultiplied(a, b)
    values = fake(a).shape[1] * a_dtype.values
    of_a = tiled_scale(scales[0], fake(a).shape[0], values, scaling)
    of_b = tiled_scale(scales[1], fake(b).shape[1], values, scaling)
    accumulator = _accumulator(node, a, b, a_dtype, b_dtype, fast_accum=True)
    _check_devices(scales, fake(node).device)
    return Anchor(
        node=node,
        a=a,
        b=b,
        accumulator=replace(accumulator, a_scaling=scaling, b_scaling=scaling),
        out_dtype=_out_dtype(fake(node).dtype),
        addend=_bias(node, bias),
        a_blocks=of_a,
        b_blocks=of_b,
    )


def _check_devices(scales: tuple[fx.Node, fx.Node], anchor: torch.device) -> None:
    for scale in scales:
        if (device := fake(scale).device) != anchor:
            raise Refused(Reason.OPERAND_DEVICE, operand=user_label(scale), device=device, anchor=anchor)


def _bias(node: fx.Node, bias: fx.Node | None) -> Addend | None:
    return None if bias is None else Addend(classify(bias, fake(node).shape, fake(node).device), 1)


def _fp8(
    node: fx.Node,
    a: fx.Node,
    b: fx.Node,
    scales: tuple[fx.Node, fx.Node],
    bias: fx.Node | None,
    fast_accum: bool,
) -> Anchor:
    """The product without its scales, and with its bias."""
    a_dtype, b_dtype = _operand_dtypes(a, b, (DType.E4M3, DType.E5M2))
    if a_dtype is DType.E5M2 and b_dtype is DType.E5M2:
        raise _unmultiplied(a, b)
    for scale in scales:
        if fake(scale).dtype is not torch.float32:
            raise Refused(Reason.SCALE_DTYPE, operand=user_label(scale), dtype=fake(scale).dtype)
    return Anchor(
        node=node,
        a=a,
        b=b,
        accumulator=_accumulator(node, a, b, a_dtype, b_dtype, fast_accum),
        out_dtype=_out_dtype(fake(node).dtype),
        addend=_bias(node, bias),
    )


def _read_grouped_mm(node: fx.Node) -> Anchor:
    """Reads a `grouped_mm`: one with groups of rows by their offsets, or one of a batch, without offsets."""
    args = arguments(node)
    a, b = args["self"], args["mat2"]
    if args["bias"] is not None or fake(b).dim() != 3 or fake(a).dim() != (3 if args["offs"] is None else 2):
        return _read_grouped(node)
    return replace(_dense(node, a, b), offsets=args["offs"])


def _read_scaled_grouped_mm(node: fx.Node) -> Anchor:
    args = arguments(node)
    if args["scale_result"] is not None:
        return _read_grouped(node)
    return _scaled_groups(node, args["scale_a"], args["scale_b"])


def _read_scaled_grouped_mm_v2(node: fx.Node) -> Anchor:
    args = arguments(node)
    rowwise = [("RowWise",), ("RowWise",)]
    if [recipe_names(args[name]) for name in ("recipe_a", "recipe_b")] != rowwise:
        return _read_grouped(node)
    (scale_a,), (scale_b,) = args["scale_a"], args["scale_b"]
    return _scaled_groups(node, scale_a, scale_b)


def _scaled_groups(node: fx.Node, scale_a: fx.Node, scale_b: fx.Node) -> Anchor:
    """Reads a product of fp8 rows in groups: A has a scale for each row, B for each column of each group."""
    args = arguments(node)
    a, b = args["self"], args["mat2"]
    shape_a, shape_b = fake(a).shape, fake(b).shape
    further = args["bias"] is not None
    if args["offs"] is None or (len(shape_a), len(shape_b)) != (2, 3) or further:
        return _read_grouped(node)
    rowwise = has_shape(fake(scale_a).shape, (shape_a[0],))
    if not rowwise or not has_shape(fake(scale_b).shape, (shape_b[0], shape_b[2])):
        return _read_grouped(node)
    anchor = _fp8(node, a, b, (scale_a, scale_b), None, args["use_fast_accum"])
    of_columns = classify_table(scale_b, anchor.device)
    if of_columns is None:
        return _read_grouped(node)
    of_rows = classify_vector(scale_a, LoadKind.COLVEC, anchor.device)
    return replace(anchor, scale_a=of_rows, scale_b=of_columns, offsets=args["offs"])


def _read_grouped(node: fx.Node) -> Anchor:
    args = arguments(node)
    further = [name for name in ("scale_a", "bias") if args.get(name) is not None]
    raise Refused(
        Reason.GROUPED,
        target=target_name(node),
        form=" by ".join(describe(fake(args[name]).shape) for name in ("self", "mat2"))
        + "".join(f" with {name}" for name in further),
    )


def _read_integers(node: fx.Node) -> Anchor:
    raise Refused(Reason.INTEGER_PRODUCT, target=target_name(node))


_READERS: dict[str, Callable[[fx.Node], Anchor]] = {
    "aten.mm.default": _read_mm,
    "aten.addmm.default": _read_sum("mat"),
    "aten._addmm_activation.default": _read_addmm_activation,
    "aten.bmm.default": _read_mm,
    "aten.baddbmm.default": _read_sum("batch"),
    "aten._int_mm.default": _read_integers,
    "aten._grouped_mm.default": _read_grouped_mm,
    "aten._scaled_grouped_mm.default": _read_scaled_grouped_mm,
    "aten._scaled_grouped_mm_v2.default": _read_scaled_grouped_mm_v2,
    "aten._scaled_mm.default": _read_scaled_mm,
    "aten._scaled_mm_v2.default": _read_scaled_mm_v2,
}


def _number(value: Any) -> Number:
    if not isinstance(value, (bool, int, float)):
        raise Refused(Reason.SYMBOLIC_SCALAR, value=value)
    return value


def _unmultiplied(a: fx.Node, b: fx.Node) -> Refused:
    """The refusal of operands that no target multiplies."""
    taken = "bf16, fp16 and fp8, and fp4 with scales of blocks"
    return Refused(Reason.OPERAND_DTYPE, where="here", a=fake(a).dtype, b=fake(b).dtype, taken=taken)


def _operand_dtypes(a: fx.Node, b: fx.Node, accepted: tuple[DType, ...]) -> tuple[DType, DType]:
    a_dtype, b_dtype = DTYPES.get(fake(a).dtype), DTYPES.get(fake(b).dtype)
    if a_dtype not in accepted or b_dtype not in accepted:
        raise _unmultiplied(a, b)
    return a_dtype, b_dtype


def _out_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in DTYPES or not DTYPES[dtype].is_float:
        raise Refused(Reason.OUT_DTYPE, dtype=dtype)
    return dtype


def _accumulator(
    node: fx.Node, a: fx.Node, b: fx.Node, a_dtype: DType, b_dtype: DType, fast_accum: bool
) -> Accumulator:
    (m, k), n = fake(a).shape[-2:], fake(b).shape[-1]
    if any(known(size == 0) for size in (*fake(a).shape, n)):
        raise Refused(Reason.EMPTY, m=m, n=n, k=k)
    for operand in (a, b):
        if fake(operand).device != fake(node).device:
            raise Refused(
                Reason.OPERAND_DEVICE,
                operand=user_label(operand),
                device=fake(operand).device,
                anchor=fake(node).device,
            )
    k_major_only = a_dtype.bits == 8
    kinds = {(2, 2): ProductKind.DENSE, (3, 3): ProductKind.BATCHED, (2, 3): ProductKind.GROUPED}
    return Accumulator(
        name="acc",
        a_dtype=a_dtype,
        b_dtype=b_dtype,
        a_major=_major(a, -1, k_major_only),
        b_major=_major(b, -2, k_major_only),
        fast_accum=fast_accum,
        kind=kinds[fake(a).dim(), fake(b).dim()],
    )


def _major(operand: fx.Node, k_axis: int, k_major_only: bool) -> Major:
    """Which mode of a 2-D operand is contiguous, or of each of a batch of them. K is preferred where both
    could be, as one has size 1."""
    tensor = fake(operand)
    if tensor.dim() == 3:
        _check_step(operand, tensor)
    for major, axis in ((Major.K, k_axis), (Major.MN, -3 - k_axis)):
        if major is Major.MN and k_major_only:
            break
        if known(tensor.stride(axis) == 1) or known(tensor.shape[axis] == 1):
            leading = tensor.stride(-3 - axis)
            if known(tensor.shape[-3 - axis] == 1):
                return major
            if known(leading == 0):
                continue
            if known((leading * tensor.element_size()) % 16 != 0):
                raise Refused(
                    Reason.OPERAND_ALIGNMENT,
                    operand=user_label(operand),
                    bytes=leading * tensor.element_size(),
                )
            return major
    accepted = "one of its two modes has to be contiguous"
    if k_major_only:
        form = "weight.t() of a row-major (N, K) weight" if k_axis == -2 else "a row-major (M, K) tensor"
        accepted = f"fp8 and fp4 want K contiguous, as in {form}"
    raise Refused(
        Reason.OPERAND_LAYOUT,
        operand=user_label(operand),
        strides=describe(tensor.stride()),
        accepted=accepted,
    )


def _check_step(operand: fx.Node, tensor: torch.Tensor) -> None:
    """Refuse a batch whose matrices overlap, or can't be reached, for TMA."""
    step = tensor.stride(0)
    if known(tensor.shape[0] == 1) or not (known(step == 0) or known(step * tensor.element_size() % 16 != 0)):
        return
    raise Refused(
        Reason.OPERAND_LAYOUT,
        operand=user_label(operand),
        strides=describe(tensor.stride()),
        accepted="TMA takes steps from batch to batch of multiples of 16 bytes, and not of 0, as of a weight "
        "where torch writes a linear as a bmm because its input's leading axes do not collapse",
    )


def _is_matrix_vector(node: fx.Node) -> bool:
    """Whether this is `(a.unsqueeze(2) * b.unsqueeze(0)).sum(1)`, Inductor's `mm` with M or N of 1.

    Seen under max-autotune on a GPU, where the decomposition runs before any post-grad pass. It reads the
    weights once at full bandwidth and fuses its own epilogue, so it is left alone, and counted.
    """
    if target_name(node) != "aten.sum.dim_IntList" or list(arguments(node)["dim"] or ()) != [1]:
        return False
    value = _behind_casts(first_argument(node))
    if (
        not isinstance(value, fx.Node)
        or value.op != "call_function"
        or target_name(value) != "aten.mul.Tensor"
    ):
        return False
    factors = arguments(value)
    return (_unsqueezed(factors["self"]), _unsqueezed(factors["other"])) == (2, 0)


def _unsqueezed(value: Any) -> int | None:
    """The axis that an operand was unsqueezed at, seen through casts; None if it was not."""
    value, result = _behind_casts(value), tensor_of(_behind_casts(value))
    if result is None or value.op != "call_function" or target_name(value) != "aten.unsqueeze.default":
        return None
    return arguments(value)["dim"] % result.dim()


def _behind_casts(value: Any) -> Any:
    while isinstance(value, fx.Node) and target_name(value) == "prims.convert_element_type.default":
        value = first_argument(value)
    return value
