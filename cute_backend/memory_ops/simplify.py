"""Cheaper ops for the same values: rewrites of a spec before its text is written.

Each is at least as accurate as what it replaces. Activations reach the walker as their single ops. These cost
an exact division or a hyperbolic tangent for each element, although the hardware has a reciprocal:

    y / (1 + exp(-x))    ->  y * sigmoid(x)        silu and sigmoid
    1 + tanh(x)          ->  2 * sigmoid(2 * x)    gelu; nothing cancels where tanh nears -1

The remaining factors are numbers, which move to where they cost nothing. Only powers of two move past another
rounding, so no value changes unless it would have overflowed or left the normal range on the way:

    (x * a) * b        ->  x * (a * b)           one of a and b a power of two
    (x * a) * (y * b)  ->  (x * y) * (a * b)     both powers of two

The device's exponential has base 2, so the argument of a sigmoid is x * log2(e). This factor is a number like
the others, and so the argument is rounded less often:

    sigmoid(x * a)                ->  logistic2(x * a')               a' = a * log2(e)
    sigmoid((x + y * x * b) * a)  ->  logistic2(x * (y * b' + a'))    b' = a' * b > 0, y a square

Nothing moves past a value that passes keep (`spec.block_passes`): what reads it would then read more than it.

A clamp to the range of an fp8 format before a saturating cast to that format is dropped, since the cast does
the same. Casts that round nothing are dropped first, because they lie between the ops of a pattern.
"""

from __future__ import annotations

import math
from dataclasses import replace

from cute_backend.formula import number
from cute_backend.numerics import largest_finite
from cute_backend.ops import effective_dtype
from cute_backend.spec import Const, DType, EpilogueSpec, Op, Operand, Overflow


def simplify(spec: EpilogueSpec, folded: dict[float, str] | None = None) -> EpilogueSpec:
    """Returns a spec with the same stores, computed by cheaper ops, without ops that no store needs.

    `folded` receives the expression of each number that is the product of others, for people to read.
    """
    spec = _with_sigmoids(_without_transparent_casts(spec))
    gathered = _with_numbers_gathered(spec, {} if folded is None else folded)
    return _without_dead_ops(_without_saturating_clamps(gathered))


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
    kept = {segment.kept for segment in spec.segments}
    producers = {op.name: op for op in spec.ops if op.name not in kept}
    ops: list[Op] = []
    for op in spec.ops:
        ops += _silu(op, producers) or _one_plus_tanh(op, producers) or [op]
    return replace(spec, ops=tuple(ops))


def _silu(op: Op, producers: dict[str, Op]) -> list[Op] | None:
    """Rewrites y / (1 + exp(-x)), and 1 / (1 + exp(-x)) as a division or a reciprocal; None for other ops."""
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


def _with_numbers_gathered(spec: EpilogueSpec, folded: dict[float, str]) -> EpilogueSpec:
    """Moves factors that are numbers past other products and into sigmoids."""
    numbers = _Numbers(spec, folded)
    ops: list[Op] = []
    for op in spec.ops:
        gathered = numbers.gathered(op) if op.dtype is DType.F32 else [op]
        for made in gathered:
            numbers.enter(made)
        ops += gathered
    return replace(spec, ops=tuple(ops))


class _Numbers:
    """The values so far that are known to be another fp32 value times a number."""

    def __init__(self, spec: EpilogueSpec, folded: dict[float, str]) -> None:
        self._dtypes = spec.dtypes
        self._kept = {segment.kept for segment in spec.segments}
        self._folded = folded
        self._producers: dict[str, Op] = {}
        self._scaled = {name: (name, 1.0) for name in spec.dtypes}

    def enter(self, op: Op) -> None:
        self._scaled[op.name] = (op.name, 1.0)
        if op.name in self._kept:
            return
        self._producers[op.name] = op
        if op.op == "mul" and op.dtype is DType.F32:
            value, number = op.operands
            if isinstance(value, str) and isinstance(number, Const) and self._is_float(value):
                self._scaled[op.name] = (value, float(number.value))

    def gathered(self, op: Op) -> list[Op]:
        """Returns the ops that compute an fp32 op."""
        if op.op == "sigmoid" and isinstance(op.operands[0], str):
            return self._logistic2(op, *self._scaled[op.operands[0]])
        if op.op != "mul" or not isinstance(op.operands[0], str):
            return [op]
        left, a = self._scaled[op.operands[0]]
        if isinstance(op.operands[1], Const):
            b = float(op.operands[1].value)
            moves = (_is_power_of_two(a) or _is_power_of_two(b)) and _is_normal(a * b)
            return [replace(op, operands=(left, self._product(a, b)))] if moves else [op]
        right, b = self._scaled[op.operands[1]]
        if not (_is_power_of_two(a) and _is_power_of_two(b)):
            return [op]
        if a * b == 1.0:
            return [replace(op, operands=(left, right))]
        product = Op(f"{op.name}_product", "mul", (left, right), DType.F32)
        return [product, replace(op, operands=(product.name, self._product(a, b)))]

    def _logistic2(self, op: Op, value: str, scale: float) -> list[Op]:
        """The ops of the sigmoid of `value` times the number `scale`."""
        self._folded[_LOG2_E] = "log2(e)"
        factor = self._product(scale, _LOG2_E)
        argument = Op(f"{op.name}_argument", "mul", (value, factor), DType.F32)
        logistic = replace(op, op="logistic2", operands=(argument.name,))
        common = self._common_factor(value)
        if common is None:
            return [argument, logistic]
        x, y, b = common
        slope = Op(f"{op.name}_slope", "mul", (y, self._product(float(factor.value), b)), DType.F32)
        line = Op(f"{op.name}_line", "add", (slope.name, factor), DType.F32)
        return [slope, line, replace(argument, operands=(x, line.name)), logistic]

    def _product(self, a: float, b: float) -> Const:
        """Returns a * b, and records its expression."""
        factors = [self._folded.get(factor) or number(factor) for factor in (a, b) if factor != 1.0]
        if factors and len(expression := " * ".join(factors)) <= _LONG:
            self._folded[a * b] = expression
        return Const(a * b)

    def _common_factor(self, name: str) -> tuple[str, str, float] | None:
        """Returns x, y and b if the value is the fp32 sum of x and y * x * b, else None.

        y must be a square and b positive. Both terms then have one sign, so an infinity does not give NaN in
        only one of the two forms.
        """
        total = self._producers.get(name)
        if total is None or total.op != "add" or total.dtype is not DType.F32:
            return None
        for x, term in (total.operands, total.operands[::-1]):
            if not (isinstance(x, str) and isinstance(term, str) and self._is_float(x)):
                continue
            product, b = self._scaled[term]
            op = self._producers.get(product)
            if op is not None and op.op == "mul" and op.dtype is DType.F32 and x in op.operands:
                y = op.operands[op.operands[0] == x]
                if isinstance(y, str) and self._is_square(y) and b > 0:
                    return x, y, b
        return None

    def _is_square(self, name: str) -> bool:
        op = self._producers.get(name)
        return op is not None and op.op == "mul" and op.dtype is DType.F32 and len(set(op.operands)) == 1

    def _is_float(self, name: str) -> bool:
        return self._dtypes.get(name, DType.F32).register is DType.F32


_LOG2_E = math.log2(math.e)

_LONG = 80
"""The most characters of an expression of a number that people are shown."""


def _is_power_of_two(number: float) -> bool:
    return math.isfinite(number) and abs(math.frexp(number)[0]) == 0.5


def _is_normal(number: float) -> bool:
    return 2.0**-126 <= abs(number) < 2.0**128


def _without_saturating_clamps(spec: EpilogueSpec) -> EpilogueSpec:
    producers = {op.name: op for op in spec.ops}

    def unclamped(operand: Operand, largest: float) -> Operand:
        while (op := _made(operand, producers)) is not None and _clamps_beyond(op, largest):
            operand = op.operands[0]
        return operand

    ops = [
        replace(op, operands=(unclamped(op.operands[0], largest_finite(op.dtype)),))
        if op.op == "cast" and op.dtype.is_fp8 and op.overflow is Overflow.SATURATE
        else op
        for op in spec.ops
    ]
    return replace(spec, ops=tuple(ops))


def _clamps_beyond(op: Op, largest: float) -> bool:
    """Whether an fp32 op clamps a value to a range that reaches to `largest`, or below its negative."""
    if op.op not in ("minimum", "maximum") or op.dtype is not DType.F32:
        return False
    value, bound = op.operands
    if not isinstance(bound, Const) or not isinstance(value, str):
        return False
    return bound.value >= largest if op.op == "minimum" else bound.value <= -largest


def _made(operand: Operand | None, producers: dict[str, Op]) -> Op | None:
    return producers.get(operand) if isinstance(operand, str) else None


def _made_by(name: str, operand: Operand | None, producers: dict[str, Op]) -> Operand | None:
    """The operand of the op `name` that made `operand`, if it did."""
    op = _made(operand, producers)
    return op.operands[0] if op is not None and op.op == name else None


def _plus_one(op: Op | None) -> Operand | None:
    """The operand that an fp32 op adds 1 to, or None if it is no such op."""
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
