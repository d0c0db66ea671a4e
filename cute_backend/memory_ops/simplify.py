"""Cheaper ops for the same values: rewrites of a spec before its text is written.

Each is at least as accurate as what it replaces. Activations reach the walker taken apart, and taken apart
they cost an exact division or a hyperbolic tangent for each element, where the hardware has a reciprocal:

    y / (1 + exp(-x))   ->  y * sigmoid(x)        silu and sigmoid
    1 + tanh(x)         ->  2 * sigmoid(2 * x)    gelu; nothing cancels where tanh nears -1

Casts that round nothing are dropped first, since they stand between the ops of a pattern.
"""

from __future__ import annotations

from dataclasses import replace

from ..ops import effective_dtype
from ..spec import Const, DType, EpilogueSpec, Op, Operand


def simplify(spec: EpilogueSpec) -> EpilogueSpec:
    """The same stores by cheaper ops, and no op that no store needs."""
    return _without_dead_ops(_with_sigmoids(_without_transparent_casts(spec)))


def _without_transparent_casts(spec: EpilogueSpec) -> EpilogueSpec:
    source: dict[str, str] = {}
    ops = []
    for op in spec.ops:
        op = replace(op, operands=tuple(_renamed(operand, source) for operand in op.operands))
        operand = op.operands[0] if op.operands else None
        if op.op == "cast" and isinstance(operand, str) and _keeps(op, spec.dtypes[operand], spec):
            source[op.name] = operand
        else:
            ops.append(op)
    stores = tuple(replace(store, value=source.get(store.value, store.value)) for store in spec.stores)
    return replace(spec, ops=tuple(ops), stores=stores)


def _keeps(cast: Op, source: DType, spec: EpilogueSpec) -> bool:
    return effective_dtype(cast, spec.precision) is source.register


def _renamed(operand: Operand, source: dict[str, str]) -> Operand:
    return source.get(operand, operand) if isinstance(operand, str) else operand


def _with_sigmoids(spec: EpilogueSpec) -> EpilogueSpec:
    producers = {op.name: op for op in spec.ops}
    ops: list[Op] = []
    for op in spec.ops:
        ops += _silu(op, producers) or _one_plus_tanh(op, producers) or [op]
    return replace(spec, ops=tuple(ops))


def _silu(op: Op, producers: dict[str, Op]) -> list[Op] | None:
    """y / (1 + exp(-x)), and 1 / (1 + exp(-x)) where y is 1 or the op a reciprocal."""
    if op.op not in ("div", "reciprocal"):
        return None
    negated = _made_by("exp", _plus_one(_made(op.operands[-1], producers)), producers)
    if negated is None:
        return None
    minus = _made(negated, producers)
    if minus is None or minus.op != "neg" or minus.dtype is not DType.F32:  # an integer's negation may wrap
        return None
    sigmoid = Op(f"{op.name}_sigmoid", "sigmoid", minus.operands, DType.F32)
    if op.op == "reciprocal" or _is_one(op.operands[0]):
        return [replace(sigmoid, name=op.name)]
    return [sigmoid, Op(op.name, "mul", (op.operands[0], sigmoid.name), DType.F32)]


def _one_plus_tanh(op: Op, producers: dict[str, Op]) -> list[Op] | None:
    argument = _made_by("tanh", _plus_one(op), producers)
    if argument is None:
        return None
    doubled = Op(f"{op.name}_twice", "mul", (argument, Const(2.0)), DType.F32)
    sigmoid = Op(f"{op.name}_sigmoid", "sigmoid", (doubled.name,), DType.F32)
    return [doubled, sigmoid, Op(op.name, "mul", (sigmoid.name, Const(2.0)), DType.F32)]


def _made(operand: Operand | None, producers: dict[str, Op]) -> Op | None:
    return producers.get(operand) if isinstance(operand, str) else None


def _made_by(name: str, operand: Operand | None, producers: dict[str, Op]) -> Operand | None:
    """The operand of the op `name` that made `operand`, if it did."""
    op = _made(operand, producers)
    return op.operands[0] if op is not None and op.op == name else None


def _plus_one(op: Op | None) -> Operand | None:
    """What an fp32 op adds 1 to, if it does."""
    if op is None or op.op != "add" or op.dtype is not DType.F32:
        return None
    left, right = op.operands
    if _is_one(right):
        return left
    return right if _is_one(left) else None


def _is_one(operand: Operand) -> bool:
    return isinstance(operand, Const) and operand.value == 1


def _without_dead_ops(spec: EpilogueSpec) -> EpilogueSpec:
    needed = {store.value for store in spec.stores}
    for op in reversed(spec.ops):
        if op.name in needed:
            needed.update(operand for operand in op.operands if isinstance(operand, str))
    return replace(spec, ops=tuple(op for op in spec.ops if op.name in needed))
