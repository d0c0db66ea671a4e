"""A spec as text that a person reads: kernel headers and `explain` print it.

Besides the ops of the op table, a formula has these words: `row_max(x)`, `column_max(x)` and `all_max(x)`
reduce each row, each column and the plane; `column_max128(x)` reduces each column of every 128 rows;
`block32_max(x)` reduces each 32 neighbouring columns; `x[:, ::32]` is one value for each 32 columns, and `in
tiles` is the layout of the MMA's scales; `x as (B, H, S, D)` is written in memory of this shape;
`nan_if_infinite(x)` is `x + x * 0`, which a softmax's row with an infinite element is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from cute_backend.ops import OPS, effective_dtype
from cute_backend.spec import PAIRED_DTYPES, REDUCED, Const, DType, EpilogueSpec, Op, Operand, Store

_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
_INFIX_LEVELS = (_COMPARISONS, ("|",), ("^",), ("&",), ("<<", ">>"), ("+", "-"), ("*", "/"))
_LEVEL = {symbol: level for level, symbols in enumerate(_INFIX_LEVELS) for symbol in symbols}
_PREFIX = len(_INFIX_LEVELS)
_ATOM = _PREFIX + 1


_LONG = 90
"""The characters of an expression beyond which its value has a line of its own, if an op reads it."""


def formula(spec: EpilogueSpec, names: Mapping[str, str]) -> str:
    """The region as assignments, one a line: first the values that are read more than once and those behind
    long expressions, by the names that `names` gives their ops, then the outputs with their dtypes.

    Casts that do not round under the spec's precision are left out.
    """
    return "\n".join(_Formula(spec, names).lines())


def number(value: bool | int | float) -> str:
    """A constant in seven digits, the precision of fp32."""
    return f"{value:.7g}" if isinstance(value, float) else str(value)


class _Formula:
    def __init__(self, spec: EpilogueSpec, names: Mapping[str, str]) -> None:
        self.spec, self.names = spec, names
        self.sources: dict[str, str] = {}
        """The value behind each cast that leaves it as it is."""
        for op in spec.ops:
            operand = op.operands[0] if op.operands else None
            if isinstance(operand, str) and self._is_transparent(op, operand):
                self.sources[op.name] = self._source(operand)
        ops = [op for op in spec.ops if op.name not in self.sources]
        read = Counter(self._source(name) for op in ops for name in op.values)
        uses = read + Counter(self._source(store.value) for store in spec.stores)
        self.named = {op.name for op in ops if uses[op.name] > 1}
        self.expressions: dict[str, tuple[str, int]] = {}
        """The expression of each op, with how tightly it binds."""
        for op in ops:
            text, binds = self._expression(op)
            self.expressions[op.name] = text, binds
            if len(text) > _LONG and op.name in read:
                self.named.add(op.name)

    def lines(self) -> list[str]:
        named = [(name, text) for name, (text, _) in self.expressions.items() if name in self.named]
        shared = [f"{self.names[name]} = {text}" for name, text in named]
        return shared + [line for store in self.spec.stores for line in self._lines_of(store)]

    def _lines_of(self, store: Store) -> list[str]:
        if not store.after:
            return [f"{store.name} = {self._stored(store)}"]
        names = {op.name: f"{store.name}_{op.name}" for op in store.after} | {REDUCED: self._elements(store)}
        return _Formula(self.spec.finishing(store), names).lines()

    def _stored(self, store: Store) -> str:
        text = self._elements(store)
        rounded = self.spec.dtypes[self._source(store.value)] is store.dtype and store.dtype is not DType.F32
        rounded = rounded or store.dtype in PAIRED_DTYPES.values()
        as_it_is = (store.form.is_plane and store.value not in self.named) or store.dtype is DType.E8M0
        stored = text if rounded and as_it_is else f"{store.dtype.value}({text})"
        return f"{stored}{store.form.words()}"

    def _elements(self, store: Store) -> str:
        """The elements that a store writes, before they are rounded."""
        return store.form.spelled(self._text(store.value)[0])

    def _is_transparent(self, op: Op, operand: str) -> bool:
        """Whether the op is a cast that leaves this operand as it is."""
        source = self.spec.dtypes[operand].register
        return op.op == "cast" and effective_dtype(op, self.spec.precision) is source

    def _source(self, name: str) -> str:
        return self.sources.get(name, name)

    def _text(self, operand: Operand) -> tuple[str, int]:
        """An operand and how tightly it binds."""
        if isinstance(operand, Const):
            text = number(operand.value)
            return text, _PREFIX if text.startswith("-") else _ATOM
        operand = self._source(operand)
        if operand in self.expressions and operand not in self.named:
            return self.expressions[operand]
        return self.names.get(operand, operand), _ATOM

    def _expression(self, op: Op) -> tuple[str, int]:
        operands = [self._text(operand) for operand in op.operands]
        if op.op == "cast":
            return f"{op.dtype.value}({operands[0][0]})", _ATOM
        template = OPS[op.op].formula if op.over_blocks is None else op.over_blocks.words(op.block)
        if not operands:
            return template, _ATOM
        infix = re.fullmatch(r"\{0\} (\S+) \{1\}", template)
        if infix:
            level = _LEVEL[infix[1]]
            left, right = operands
            if op.op == "add" and right[0] == f"{_bind(left, _LEVEL['*'])} * 0":
                return f"nan_if_infinite({left[0]})", _ATOM
            texts = [_bind(left, level), _bind(right, level + 1)]
            return template.format(*texts), level
        if re.fullmatch(r"\w+\(\{0\}(, \{\d\})*\)", template):
            return template.format(*(text for text, _ in operands)), _ATOM
        text = template.format(*(_bind(operand, _ATOM) for operand in operands))
        return text, _ATOM if text.endswith(")") and text[0].isalpha() else _PREFIX


def _bind(operand: tuple[str, int], level: int) -> str:
    text, binds = operand
    return text if binds >= level else f"({text})"
