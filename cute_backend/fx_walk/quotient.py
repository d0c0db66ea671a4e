"""Quotients with a rounding mode, in the steps in which eager's kernels of 16-bit floats round them."""

from __future__ import annotations

from cute_backend.fx_walk.chain import Chain
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
    """c10::div_floor_floating (c10/util/generic_math.h) in `dtype`: fmod is exact, and what follows rounds.

    The sign is put on last but one, since rounding to nearest is the same on both sides of 0.
    """
    emit = chain.emit

    def rounded(op: str, left: Operand, right: Operand) -> Operand:
        return chain.cast(emit(op, left, right), dtype)

    above, below = emit("abs", a), emit("abs", b)
    whole = emit("div_floor", above, below)
    multiple = emit("where", emit("eq", whole, Const(0.0)), whole, emit("mul", whole, below))
    size = rounded("div", chain.cast(multiple, dtype), below)
    opposite = emit("logical_xor", emit("lt", a, Const(0.0)), emit("lt", b, Const(0.0)))
    has_rest = emit("ne", multiple, above)
    beyond = emit("where", has_rest, rounded("add", size, Const(1.0)), size)
    value = emit("where", opposite, emit("neg", beyond), size)
    floor = emit("floor", value)
    far = emit("gt", emit("sub", value, floor), Const(0.5))
    result = emit("where", far, rounded("add", floor, Const(1.0)), floor)
    plain = rounded("div", a, b)
    zero = emit("copysign", Const(0.0), plain)
    result = emit("where", emit("eq", value, Const(0.0)), zero, result)
    return emit("where", emit("eq", b, Const(0.0)), plain, result)
