"""Ops that take several steps of the chain: spellings with attributes (`alpha`, bounds that may be None,
`rounding_mode`), and powers whose exponent is a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cute_backend.fx_walk.graph.static import fake
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.fx_walk.values.numbers import number, round_number
from cute_backend.fx_walk.values.quotient import quotient
from cute_backend.numerics import TORCH_DTYPES
from cute_backend.spec import Const, DType, Operand

Resolve = Callable[[Any], Operand]
"""A function that maps an argument of a call, a node or a number, to a value of the chain."""


@dataclass(frozen=True)
class Call:
    """A call of an op that takes several steps of the `chain`, with its arguments by name.

    `operand` maps an argument to a value of the chain. `rounded_to` is the 16-bit float that the steps are
    rounded to, None if they are not. It follows from the dtype that the op computes in: under EAGER an fp32
    value that was cast from bf16 is the bf16 value of the chain.
    """

    chain: Chain
    operand: Resolve
    args: dict[str, Any]
    rounded_to: DType | None


Composite = Callable[[Call], Operand]


def _scaled_sum(op: str, first: str = "self", second: str = "other") -> Composite:
    """The spelling of `first op alpha * second`."""

    def lower_sum(call: Call) -> Operand:
        chain, alpha = call.chain, call.args["alpha"]
        left, right = call.operand(call.args[first]), call.operand(call.args[second])
        if chain.dtype(left) is chain.dtype(right) is DType.BOOL and isinstance(alpha, int):
            alpha = bool(alpha)  # bools have no other multiples
        if alpha != 1:
            right = chain.emit("mul", right, number(alpha))
        return chain.emit(op, left, right)

    return lower_sum


def _clamp(low: str, high: str) -> Composite:
    """A clamp with bounds that may be None. NaN stays NaN, and if bounds cross, the upper one wins."""

    def lower_clamp(call: Call) -> Operand:
        value = call.operand(call.args["self"])
        if call.args[low] is not None:
            value = call.chain.emit("maximum", value, call.operand(call.args[low]))
        if call.args[high] is not None:
            value = call.chain.emit("minimum", value, call.operand(call.args[high]))
        return value

    return lower_clamp


def _div_mode(call: Call) -> Operand:
    left, right = call.operand(call.args["self"]), call.operand(call.args["other"])
    return quotient(call.chain, left, right, call.args["rounding_mode"], call.rounded_to)


def _power(call: Call) -> Operand:
    """A power whose exponent is a number. aten itself computes these few by products and roots.

    In bf16 and fp16 its kernels round each product, but for fp16 on a CPU, and for other powers the exponent.
    """
    chain, exponent, rounded_to = call.chain, call.args["exponent"], call.rounded_to
    value = call.operand(call.args["self"])
    if exponent in (2, 3):
        square = chain.emit("mul", value, value)
        if exponent == 2:
            return square
        if rounded_to is not None and not _is_by_pow(call):
            square = chain.cast(square, rounded_to)
        return chain.emit("mul", square, value)
    if chain.dtype(value).is_float and exponent in (0.5, -0.5, -1):
        return chain.emit({0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}[exponent], value)
    power = number(exponent)
    if rounded_to is not None:
        power = Const(round_number(float(exponent), TORCH_DTYPES[rounded_to]))
    return chain.emit("pow", value, power)


def _is_by_pow(call: Call) -> bool:
    """Whether eager computes all powers by `pow` in fp32: those of fp16 on a CPU
    (native/cpu/PowKernel.cpp)."""
    return call.rounded_to is DType.F16 and fake(call.args["self"]).device.type == "cpu"


def _addc(op: str) -> Composite:
    """`self + value * (tensor1 op tensor2)`, in the order in which aten's kernels round."""

    def lower_addc(call: Call) -> Operand:
        emit, operand, args = call.chain.emit, call.operand, call.args
        first, second = operand(args["tensor1"]), operand(args["tensor2"])
        if args["value"] != 1:
            first = emit("mul", number(args["value"]), first)
        return emit("add", operand(args["self"]), emit(op, first, second))

    return lower_addc


COMPOSITES: dict[str, Composite] = {
    "aten.add.Tensor": _scaled_sum("add"),
    "aten.add.Scalar": _scaled_sum("add"),
    "aten.sub.Tensor": _scaled_sum("sub"),
    "aten.sub.Scalar": _scaled_sum("sub"),
    "aten.rsub.Tensor": _scaled_sum("sub", "other", "self"),
    "aten.rsub.Scalar": _scaled_sum("sub", "other", "self"),
    "aten.clamp.default": _clamp("min", "max"),
    "aten.clamp.Tensor": _clamp("min", "max"),
    "aten.hardtanh.default": _clamp("min_val", "max_val"),
    "aten.div.Tensor_mode": _div_mode,
    "aten.div.Scalar_mode": _div_mode,
    "aten.pow.Tensor_Scalar": _power,
    "aten.addcmul.default": _addc("mul"),
    "aten.addcdiv.default": _addc("div"),
}
