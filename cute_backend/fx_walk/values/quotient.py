"""Quotients with a rounding mode, in the steps in which eager's kernels of 16-bit floats round them."""

from __future__ import annotations

from cute_backend.fx_walk.values.chain import Chain
from cute_backend.spec import Const, DType, Operand


def quotient(chain: Chain, a: Operand, b: Operand, mode: str | None, rounded_to: DType | None) -> Operand:
    """`a / b`, truncated or floored as `mode` says, each step rounded to a dtype if one is given."""
    if mode is None:
        return chain.emit("div", a, b)
    if rounded_to is None:
        return chain.emit({"trunc": "div_trunc", "floor": "div_floor"}[mode], a, b)
    if mode == "trunc":
        return chain.emit("trunc", chain.cast(chain.emit("div", a, b), rounded_to))
    return _floor(chain, a, b, rounded_to)


def _floor(chain: Chain, a: Operand, b: Operand, dtype: DType) -> Operand:
    """c10::div_floor_floating (c10/util/generic_math.h) in `dtype`: fmod is exact, and the next steps round.

    The quotient of the rounded multiple of `b` is rounded to the nearest integer, halves down. If that
    multiple is 0 or NaN, the exact floor is the result.
    """
    emit = chain.emit
    exact = emit("div_floor", a, b)
    has_rest = emit("ne", emit("mul", exact, b), a)
    lowered = emit("logical_and", emit("lt", exact, Const(0.0)), has_rest)
    whole = emit("where", lowered, emit("add", exact, Const(1.0)), exact)
    multiple = chain.cast(emit("mul", whole, b), dtype)
    quotient = chain.cast(emit("div", multiple, b), dtype)
    less = chain.cast(emit("sub", quotient, Const(1.0)), dtype)
    quotient = emit("where", lowered, less, quotient)
    nearest = emit("ceil", emit("sub", quotient, Const(0.5)))
    return emit("where", emit("gt", emit("abs", multiple), Const(0.0)), nearest, exact)
