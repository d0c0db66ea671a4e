"""From aten calls to steps of the chain.

An op with one row in the op table goes through `ops.by_aten`, and one that takes several steps through
`composites.py`. Rounding follows the chain's Precision: casts to fp8 and to integers always round; casts to
bf16 and fp16, and the results of bf16 and fp16 ops that Inductor marks as values that eager would have
stored, round only under EAGER. There the steps of an op are rounded to the dtype that the op computes in, not
to that of the chain's value: a cast to fp32 leaves a value as it is, and so do the steps after it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx

from cute_backend.fx_walk.graph.static import (
    DTYPES,
    arguments,
    fake,
    first_argument,
    known,
    leading_arguments,
    target_name,
    tensor_of,
)
from cute_backend.fx_walk.refusals.reasons import Reason, Refused, user_label
from cute_backend.fx_walk.values.bits import lower_bits, reads_bits
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.fx_walk.values.classify import supported_dtype
from cute_backend.fx_walk.values.composites import COMPOSITES, Call, Resolve
from cute_backend.fx_walk.values.numbers import number, round_number, wrap_number
from cute_backend.ops import OperandError, by_aten
from cute_backend.spec import Const, DType, Operand, Overflow, Precision

CASTS = ("prims.convert_element_type.default", "aten._to_copy.default")

_IDENTITIES = ("aten.clone.default", "aten.alias.default", "aten.detach.default")

_RESHAPES = (
    "aten.reshape.default",
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.unsqueeze.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.flatten.using_ints",
    "aten.expand.default",
    "aten.permute.default",
)
"""Ops that give the same values another shape. They cost nothing if rows and columns of the plane stay apart
(`fx_walk/graph/frame.py`); otherwise they end a region."""

_PUT = "aten.index_put.default"
"""An assignment to indices. It is fused if they are a mask, and the value is one element."""

_FILLS = {
    "aten.full.default": "fill_value",
    "aten.full_like.default": "fill_value",
    "aten.scalar_tensor.default": "s",
}

_CLAMPS = ("aten.clamp.default", "aten.clamp_min.default", "aten.clamp_max.default")
_READ_A_NUMBER_WHOLE = ("aten.mul.Tensor", "aten.div.Tensor", "aten.div.Tensor_mode")
_OF_BITS = tuple(f"aten.bitwise_{name}.Scalar" for name in ("and", "or", "xor"))
"""Ops in which a number beyond int32 keeps its low bits, such as 0xFF800000."""

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_BYTES = (torch.int8, torch.uint8)


def is_reshape(node: fx.Node) -> bool:
    """Whether a call gives all elements of a value another shape. A select from an axis of one element
    does."""
    if node.op != "call_function":
        return False
    name = target_name(node)
    return name in _RESHAPES or (name == "aten.select.int" and _selects_all(node))


def _selects_all(node: fx.Node) -> bool:
    source = tensor_of(first_argument(node))
    return source is not None and known(source.shape[arguments(node)["dim"]] == 1)


def is_pointwise(node: fx.Node) -> bool:
    """Whether a call is elementwise over its broadcast operands, in the op table or not, and gives one
    tensor."""
    if node.op != "call_function":
        return False
    by_name = isinstance(node.target, torch._ops.OpOverload) and _is_pointwise_op(node.target)
    return by_name or _fills_a_mask(node) or reads_bits(node)


def _fills_a_mask(node: fx.Node) -> bool:
    """Whether one value replaces the elements of a tensor that a mask of its shape chooses."""
    if target_name(node) != _PUT:
        return False
    args = arguments(node)
    source, value = tensor_of(args["self"]), tensor_of(args["values"])
    masks = [tensor_of(index) for index in args["indices"]]
    if source is None or value is None or len(masks) != 1 or masks[0] is None or args["accumulate"]:
        return False
    return masks[0].dtype is torch.bool and masks[0].shape == source.shape and known(value.numel() == 1)


@cache
def _is_pointwise_op(op: torch._ops.OpOverload) -> bool:
    name = str(op)
    return (
        name in CASTS
        or name in _IDENTITIES
        or name in COMPOSITES
        or by_aten(name) is not None
        or (torch.Tag.pointwise in op.tags and not _gives_several(op))
    )


def is_pointwise_of_several(node: fx.Node) -> bool:
    """Whether a call is elementwise but does not give one tensor."""
    op = node.target
    return isinstance(op, torch._ops.OpOverload) and torch.Tag.pointwise in op.tags and _gives_several(op)


def _gives_several(op: torch._ops.OpOverload) -> bool:
    """Whether the result of an op is not one tensor: several tensors, as of `frexp`, or a list."""
    return [str(each.type) for each in op._schema.returns] != ["Tensor"]


def filling(node: fx.Node) -> bool | int | float | None:
    """The number that a tensor is filled with; None if it is not filled by one."""
    if node.op != "call_function" or target_name(node) not in _FILLS:
        return None
    value = arguments(node)[_FILLS[target_name(node)]]
    return value if tensor_of(node) is not None and isinstance(value, (bool, int, float)) else None


def constant(node: fx.Node) -> Const | None:
    """The number that fills a tensor, as its dtype holds it; None if the tensor is not filled by one."""
    value, tensor = filling(node), tensor_of(node)
    if value is None or tensor is None:
        return None
    supported_dtype(node, tensor.dtype)
    if tensor.dtype.is_floating_point:
        return Const(round_number(float(value), tensor.dtype))
    if tensor.dtype in _BYTES:
        return Const(wrap_number(int(value), tensor.dtype))
    return number(bool(value) if tensor.dtype is torch.bool else int(value))


def _culprit(node: fx.Node, dtype: torch.dtype) -> fx.Node | str:
    """The user's name for the operand that makes a result float64; for other results, the result."""
    if dtype is torch.float64:
        for operand in node.all_input_nodes:
            if (tensor := tensor_of(operand)) is not None and tensor.dtype is dtype:
                return user_label(operand)
    return node


def lower(node: fx.Node, chain: Chain, resolve: Resolve) -> Operand:
    """Appends a pointwise call to the chain and returns its value. Raises Refused if the chain can't hold
    it."""
    name = target_name(node)
    tensor = fake(node)
    if name in CASTS and tensor.dtype is torch.float8_e8m0fnu:
        return chain.cast(_float_of(chain, resolve(first_argument(node)), wanted=True), DType.E8M0)
    if reads_bits(node):
        return lower_bits(node, chain, resolve(first_argument(node)))
    dtype = supported_dtype(_culprit(node, tensor.dtype), tensor.dtype)
    if name in _IDENTITIES:
        return resolve(first_argument(node))
    if name in CASTS:
        return lower_cast(chain, resolve(first_argument(node)), dtype)
    eager = chain.precision is Precision.EAGER and _is_marked(node)
    common = _common_dtype(node)

    def operand(argument: Any) -> Operand:
        if name in _OF_BITS and common is torch.int32 and isinstance(argument, int):
            argument = wrap_number(argument, common)
        value = resolve(argument)
        if name in _CLAMPS and not isinstance(argument, fx.Node):
            value = _bound(value, common)
        value = _wrapped(chain, value, common)
        return _as_eager_reads(chain, value, argument, node) if eager else value

    rounded_to = _step_dtype(node) if eager else None
    try:
        result = _compute(node, name, chain, operand, rounded_to)
    except OperandError as error:
        raise Refused(Reason.UNSUPPORTED_OP, target=name, why=str(error)) from error
    if dtype.is_fp8:
        # Infinity is a value of e5m2, and an op that selects a value may select infinity.
        return chain.cast(result, dtype, Overflow.NONFINITE if dtype is DType.E5M2 else Overflow.SATURATE)
    if chain.dtype(result).register is not dtype.register or not dtype.is_float:
        return chain.cast(result, dtype)
    stored = eager or (chain.precision is Precision.EAGER and any(map(_is_marked, node.users)))
    return _rounded(chain, result, dtype) if stored else result


def _is_marked(node: fx.Node) -> bool:
    """Whether eager would have called the op of a node, which reads or gives 16-bit floats, itself. Ops that
    torch decomposes a call into are not marked, but what a marked op reads is the result of a call."""
    return bool(node.meta.get("low_precision_pointwise_barrier", False))


def lower_cast(chain: Chain, value: Operand, dtype: DType) -> Operand:
    """A cast under the chain's precision: a round trip through bf16 or fp16 rounds only under EAGER."""
    if dtype.is_fp8:
        return chain.cast(value, dtype, _overflow(chain, value, dtype))
    if dtype.is_float and chain.precision is Precision.FUSED:
        return value if chain.dtype(value).is_float else chain.cast(value, DType.F32)
    if dtype is DType.F32 and chain.dtype(value).is_float:
        return value
    return chain.cast(value, dtype)


def _rounded(chain: Chain, value: Operand, dtype: DType) -> Operand:
    """A value rounded to a 16-bit float; unchanged for any other dtype."""
    return chain.cast(value, dtype) if dtype in (DType.BF16, DType.F16) else value


def _common_dtype(node: fx.Node) -> torch.dtype:
    """The dtype that aten promotes an op's operands to: that of its result, or for a comparison theirs."""
    dtype = fake(node).dtype
    values = [tensor_of(each) if isinstance(each, fx.Node) else each for each in arguments(node).values()]
    known_values = [each for each in values if isinstance(each, (torch.Tensor, bool, int, float))]
    if dtype is not torch.bool or not 0 < len(known_values) <= 2:
        return dtype
    return torch.result_type(known_values[0], known_values[-1])


def _wrapped(chain: Chain, value: Operand, common: torch.dtype) -> Operand:
    """An integer as an op that computes in int8 or uint8 reads it.

    Numbers and 0-d tensors do not promote an integer tensor: `uint8_tensor > -2` compares with 254.
    """
    if common not in _BYTES:
        return value
    if isinstance(value, Const):
        return value if isinstance(value.value, (bool, float)) else Const(wrap_number(value.value, common))
    own = chain.dtype(value)
    return value if own.is_float or own is DType.BOOL else chain.cast(value, DTYPES[common])


def _bound(value: Operand, common: torch.dtype) -> Operand:
    """A number that bounds a clamp in int8 or uint8, clipped to their range where eager does not wrap it."""
    if common not in _BYTES or not isinstance(value, Const) or _eager_wraps_bounds():
        return value
    low, high = torch.iinfo(common).min, torch.iinfo(common).max
    return Const(min(max(value.value, low), high))


@cache
def _eager_wraps_bounds() -> bool:
    """Whether `clamp_min(uint8_tensor, -2)` means 254 in the installed torch.

    It does up to torch 2.14. From 2.15 on the bound is -2, below every value.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return bool(torch.zeros((), dtype=torch.uint8, device="cpu").clamp_min(-2).item())


def _as_eager_reads(chain: Chain, value: Operand, argument: Any, node: fx.Node) -> Operand:
    """An operand rounded to its own dtype and to the one that `node` computes in.

    Numbers are rounded only in comparisons; other kernels take them in fp32.
    """
    common = _common_dtype(node)
    if not isinstance(argument, fx.Node):
        compared = common in _LOW_PRECISION and fake(node).dtype is torch.bool
        return Const(round_number(float(argument), common)) if compared else value
    own = fake(argument).dtype
    if own in _LOW_PRECISION:
        value = chain.cast(value, DTYPES[own])
    if _is_read_whole(argument, node):
        return chain.cast(value, DType.F32) if target_name(node) == "aten.div.Tensor_mode" else value
    exact = own is common or own.itemsize == 1 or common not in _LOW_PRECISION
    return value if exact else chain.cast(value, DTYPES[common])


def _is_read_whole(argument: fx.Node, node: fx.Node) -> bool:
    """Whether eager reads a second operand of one element in fp32, as ATen's CPU kernels of products and
    quotients do (`original_scalar_value` in native/cpu/BinaryOpsKernel.cpp). A GPU's convert it first."""
    if fake(node).device.type != "cpu" or target_name(node) not in _READ_A_NUMBER_WHOLE:
        return False
    return arguments(node)["other"] is argument and known(fake(argument).numel() == 1)


def _overflow(chain: Chain, value: Operand, dtype: DType) -> Overflow:
    """The overflow of a cast: saturating, unless eager does not saturate and the range of the value is
    unknown."""
    largest = torch.finfo(torch.float8_e4m3fn if dtype is DType.E4M3 else torch.float8_e5m2).max
    low, high = chain.bounds(value)
    if chain.precision is Precision.FUSED or (-largest <= low and high <= largest):
        return Overflow.SATURATE
    return eager_overflow(dtype)


@cache
def eager_overflow(dtype: DType) -> Overflow:
    """How a cast to `dtype` overflows in eager, as the installed torch does it."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    target = torch.float8_e4m3fn if dtype is DType.E4M3 else torch.float8_e5m2
    with unset_fake_temporarily():
        saturates = torch.full((), 1e6, device="cpu").to(target).to(torch.float32).isfinite().item()
    return Overflow.SATURATE if saturates else Overflow.NONFINITE


def _step_dtype(node: fx.Node) -> DType | None:
    """The 16-bit float that eager's kernel of a call rounds each of its steps to. None if it computes in
    another dtype, or with a number that it reads in fp32."""
    common = _common_dtype(node)
    if common not in _LOW_PRECISION:
        return None
    other = arguments(node).get("other")
    is_number = other is not None and (tensor_of(other) is None or _is_read_whole(other, node))
    return None if is_number else DTYPES[common]


def _compute(node: fx.Node, name: str, chain: Chain, operand: Resolve, rounded_to: DType | None) -> Operand:
    if name == _PUT:
        args = arguments(node)
        chosen = [args["indices"][0], args["values"], args["self"]]
        return chain.emit("where", *map(operand, chosen))
    composite = COMPOSITES.get(name)
    if composite is not None:
        floats = fake(node).dtype.is_floating_point
        return composite(
            Call(
                chain=chain,
                operand=lambda argument: _float_of(chain, operand(argument), floats),
                args=arguments(node),
                rounded_to=rounded_to,
            )
        )
    row = by_aten(name)
    if row is None:
        raise Refused(Reason.UNSUPPORTED_OP, target=name, why="has no row in the op table")
    operands = leading_arguments(node, row.arity)
    if operands is None:
        raise Refused(
            Reason.UNSUPPORTED_OP, target=name, why="is called with arguments that its row does not have"
        )
    return chain.emit(row.name, *map(operand, operands))


def _float_of(chain: Chain, value: Operand, wanted: bool) -> Operand:
    """An integer converted to a float if the op computes in floats. aten converts operands first, so its
    steps do not wrap."""
    keep = not wanted or isinstance(value, Const) or chain.dtype(value).is_float
    return value if keep else chain.cast(value, DType.F32)
