"""Reads products of 16-bit operands, `mm`, `addmm`, `_addmm_activation`, `bmm` and `baddbmm`, and of int8
operands, `_int_mm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from cute_backend.fx_walk.graph.static import arguments, fake, known, target_name
from cute_backend.fx_walk.products.anchor import Addend, Anchor, Number
from cute_backend.fx_walk.products.product_operands import (
    accumulator_of,
    operand_dtypes,
    out_dtype,
    unmultiplied,
)
from cute_backend.fx_walk.products.stored_weights import with_stored_weight
from cute_backend.fx_walk.refusals.reasons import Reason, Refused, user_label
from cute_backend.fx_walk.values.activation import Activation
from cute_backend.fx_walk.values.classify import classify
from cute_backend.spec import DType

_MOST_INT8 = (2**31 - 1) // 128**2
"""The values of K up to which no sum of products of int8 leaves int32."""


def read_mm(node: fx.Node) -> Anchor:
    args = arguments(node)
    return dense(node, args["self"], args["mat2"])


def read_int_mm(node: fx.Node) -> Anchor:
    args = arguments(node)
    a, b = args["self"], args["mat2"]
    dtypes = operand_dtypes(a, b, (DType.I8,))
    accumulator = accumulator_of(node, a, b, *dtypes, fast_accum=True)
    if known((k := fake(a).shape[1]) > _MOST_INT8):
        raise Refused(Reason.INT32_RANGE, k=k, most=_MOST_INT8)
    return Anchor(node, a, b, accumulator, fake(node).dtype)


def read_addmm_activation(node: fx.Node) -> Anchor:
    gelu = Activation.TANH_GELU if fake(node).device.type == "cuda" else Activation.GELU
    activation = gelu if arguments(node)["use_gelu"] else Activation.RELU
    return replace(read_sum("mat")(node), activation=activation)


def read_sum(name: str) -> Callable[[fx.Node], Anchor]:
    """Returns a reader of `addmm` or `baddbmm`. In the op's schema, the operands of the product are called
    `name` and 1 or 2, such as `mat1` and `mat2`."""

    def read(node: fx.Node) -> Anchor:
        args = arguments(node)
        a, b = args[f"{name}1"], args[f"{name}2"]
        alpha, beta = number(args["alpha"]), number(args["beta"])
        anchor = dense(node, a, b, alpha)
        _check_addend(node, args["self"], (fake(a).dtype, args.get("out_dtype")))
        if beta == 0:
            return anchor
        view = classify(args["self"], fake(node).shape, anchor.device)
        return dense(node, a, b, alpha, Addend(view, beta))

    return read


def dense(node: fx.Node, a: fx.Node, b: fx.Node, alpha: Number = 1, addend: Addend | None = None) -> Anchor:
    a_dtype, b_dtype = operand_dtypes(a, b, (DType.BF16, DType.F16))
    if a_dtype is not b_dtype:
        raise unmultiplied(a, b)
    accumulator = accumulator_of(node, a, b, a_dtype, b_dtype, fast_accum=True)
    anchor = Anchor(node, a, b, accumulator, out_dtype(fake(node).dtype), alpha=alpha, addend=addend)
    return replace(anchor, stored=with_stored_weight(anchor))


def _check_addend(node: fx.Node, addend: fx.Node, taken: Sequence[torch.dtype | None]) -> None:
    """Refuses a product and an addend for which torch raises an error, which would be lost in a kernel."""
    if (dtype := fake(addend).dtype) not in taken:
        accepted = " or ".join(dict.fromkeys(str(each) for each in taken if each is not None))
        raise Refused(
            Reason.ADDEND_DTYPE,
            target=target_name(node),
            operand=user_label(addend),
            dtype=dtype,
            multiplied=taken[0],
            taken=accepted,
        )


def number(value: Any) -> Number:
    if not isinstance(value, (bool, int, float)):
        raise Refused(Reason.SYMBOLIC_SCALAR, value=value)
    return value
