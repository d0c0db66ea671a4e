"""The chain of a spec as statements on register scalars, one for each op that is needed.

They run in the loops that `schedule` gives them. Values that a later loop reads from an earlier one are kept
in registers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from cute_backend.memory_ops.schedule import schedule, stored_value
from cute_backend.memory_ops.shared_noise import operands_read, shares_noise, values_read
from cute_backend.ops import (
    INDEX_EXPRESSIONS,
    OPS,
    cast_expression,
    conversion_expression,
    effective_dtype,
    promote,
)
from cute_backend.spec import Const, DType, EpilogueSpec, Op, Operand, Overflow, Store

_PLAIN = 8
"""The most characters of a number that is shown without its expression."""

_REGISTER_TYPES = {DType.F32: "Float32", DType.I32: "Int32", DType.BOOL: "Boolean"}


def register_type(dtype: DType) -> str:
    """The DSL type that holds values of a dtype inside the epilogue."""
    return _REGISTER_TYPES[dtype.register]


@dataclass
class Loop:
    """The statements of one loop over a subtile's elements, the values that later ones read, and the ops that
    reduce blocks when it is done, with the expression of what they reduce."""

    statements: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    """Names of values, with their types."""
    draws: list[str] = field(default_factory=list)
    """Names of noise values whose Philox blocks several elements share."""
    reduced: list[tuple[Op, str]] = field(default_factory=list)


class EmittedChain:
    """A spec's ops, reduced to what its stores need.

    `reads` gives the expression for each accumulator and load, and `folded` that of each number that is a
    product of others, which a comment shows. After construction `loops` has the lines in order and
    `stored(store)` the expression, register dtype and overflow rule of each output, in the loop
    `loop_of(store)`; for an output that reduces, the fp32 expression that is reduced.

    `given` has the expressions of ops that are computed before, in fp32. With `wanted`, the chain computes
    the values of these names, and no output. `operands` are the names of the accumulators and loads that its
    statements read.
    """

    def __init__(
        self,
        spec: EpilogueSpec,
        reads: Mapping[str, str],
        folded: Mapping[float, str] | None = None,
        given: Mapping[str, str] | None = None,
        wanted: Collection[str] = (),
    ) -> None:
        self._spec = spec
        self._folded = folded or {}
        self._ops = {op.name: op for op in spec.ops}
        self._text = dict(reads)
        self._dtype = {name: spec.dtypes[name].register for name in reads}
        scheduled = schedule(spec, given or {}, wanted)
        self._text |= given or {}
        self._dtype |= dict.fromkeys(given or {}, DType.F32)
        self._loop = scheduled.loops
        stored = () if wanted else (stored_value(spec, store)[0] for store in spec.stores)
        values = {name for op in scheduled.ops for name in values_read(spec, op)}.union(stored)
        self.operands = values.intersection(reads)
        self.loops = [Loop() for _ in range(max(self._loop.values()) + 1)]
        for op in scheduled.ops:
            self._place(op)

    @property
    def statements(self) -> list[str]:
        """The statements of all loops."""
        return [statement for loop in self.loops for statement in loop.statements]

    def keep(self, name: str) -> None:
        """Keeps a value of the chain in a fragment, as if a later loop read it."""
        self.loops[self._loop[name]].kept[name] = _REGISTER_TYPES[self._dtype[name]]

    def loop_of(self, store: Store) -> int:
        """The loop that has a store's value."""
        return self._loop[stored_value(self._spec, store)[0]]

    def stored(self, store: Store) -> tuple[str, DType, Overflow]:
        """The expression to store, before its rounding to the store's dtype, and the rule of that rounding.

        A plane of truth values is converted here, since in memory they are bytes, like small integers. Every
        other plane is rounded as it is stored.
        """
        value, overflow = stored_value(self._spec, store)
        text, dtype = self._text[value], self._dtype[value]
        if store.form.reduction is not None:
            return conversion_expression(text, dtype, DType.F32), DType.F32, overflow
        if store.dtype is DType.BOOL:
            return conversion_expression(text, dtype, DType.BOOL), DType.BOOL, overflow
        return text, dtype, overflow

    def _place(self, op: Op) -> None:
        """Appends an op to its loop."""
        here = self._loop[op.name] - op.reads_block
        for name in values_read(self._spec, op):
            if name in self._ops and name == self._text[name] and self._loop[name] < here:
                self.loops[self._loop[name]].kept[name] = _REGISTER_TYPES[self._dtype[name]]
                self._text[name] = f"{name}_kept[e]"
        if op.reads_block:
            text = self._operand(op.operands[0], DType.F32, wrapped=True)
            self.loops[here].reduced.append((op, text))
            self._text[op.name], self._dtype[op.name] = f"{op.name}[e]", DType.F32
        else:
            self._emit(op)

    def _emit(self, op: Op) -> None:
        if op.op == "cast":
            self._emit_cast(op)
            return
        if op.op in INDEX_EXPRESSIONS:
            self._define(op.name, INDEX_EXPRESSIONS[op.op], DType.I32)
            return
        if op.over_blocks is not None:
            self._define(op.name, op.over_blocks.text("", op.block, op.part_columns), DType.I32)
            return
        if shares_noise(self._spec, op):
            operands = operands_read(self._spec, op)
            texts = [self._operand(operand, DType.I32, wrapped=False) for operand in operands]
            self.loops[self._loop[op.name]].draws.append(op.name)
            self._define(op.name, f"{op.name}_draws.gumbel(e, {', '.join(texts)})", DType.F32)
            return
        row = OPS[op.op]
        sources = [self._source(operand) for operand in op.operands]
        targets = promote(row, sources)
        common = targets[-1]
        expression = row.expression(common)
        assert expression is not None, "promote has found an expression"
        texts = [
            self._operand(operand, target, wrapped=all(isinstance(item, Const) for item in op.operands[-2:]))
            for operand, target in zip(op.operands, targets, strict=True)
        ]
        self._define(op.name, expression.format(*texts), op.dtype, self._comment(op))

    def _comment(self, op: Op) -> str:
        """Returns the expressions of the op's folded numbers as a comment, without those of short numbers."""
        numbers = (float(operand.value) for operand in op.operands if isinstance(operand, Const))
        shown = [self._folded[each] for each in numbers if each in self._folded and len(repr(each)) > _PLAIN]
        return f"  # {', '.join(shown)}" if shown else ""

    def _emit_cast(self, op: Op) -> None:
        (operand,) = op.operands
        target = effective_dtype(op, self._spec.precision)
        source = self._source(operand)
        text = self._operand(operand, source, wrapped=True)
        self._define(op.name, cast_expression(text, source, target, op.overflow), target.register)

    def _define(self, name: str, expression: str, dtype: DType, comment: str = "") -> None:
        self.loops[self._loop[name]].statements.append(f"{name} = {expression}{comment}")
        self._text[name], self._dtype[name] = name, dtype

    def _source(self, operand: Operand) -> DType:
        return operand.dtype if isinstance(operand, Const) else self._dtype[operand]

    def _operand(self, operand: Operand, target: DType, *, wrapped: bool) -> str:
        if isinstance(operand, Const):
            text = literal(operand.value, target)
            return f"math.constant({text}, {_REGISTER_TYPES[target]})" if wrapped else text
        return conversion_expression(self._text[operand], self._dtype[operand], target)


def literal(value: bool | int | float, dtype: DType) -> str:
    """A Python literal for a number in a register dtype."""
    if dtype is DType.BOOL:
        return repr(bool(value))
    if dtype is DType.I32:
        return repr(int(value))
    number = float(value)
    if number == 0.0 and math.copysign(1.0, number) < 0.0:
        return "math.negative_zero()"
    return repr(number) if math.isfinite(number) else f'float("{number}")'
