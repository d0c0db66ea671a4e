"""Names of kernels in PTX, profilers, logs and files: words for what a kernel does, and a digest.

    cute_scaled_mm_bias_gelu_residual_128x128_1a2b3c4d

The words describe the spec for people, and several kernels may share them. The digest covers only the spec,
the tile, the alignment and the target, so a kernel keeps its name across versions of this package. PTX and
profilers append "_cutlass_0", or another number (`templates.entry`).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cute_backend.kinds.kind import Kind
from cute_backend.kinds.results import Form
from cute_backend.spec import Const, DType, EpilogueSpec, Op, Order, ProductKind, Store

if TYPE_CHECKING:
    from cute_backend.planning.kernel_plan import Plan

MAX_WORDS = 48
"""The most characters of the words together."""

FINISH = "_finish"
"""The suffix of the kernel that finishes a region's reductions."""

PARTS = "_parts"
"""The suffix of the kernel that computes sums over parts of K. The kernel without the suffix adds them up."""

DIGEST = re.compile(r"(?:^|_)([0-9a-f]{8})(?:_finish|_parts)?(?:_cutlass_\d+)?(?:_[0-9a-f]{16})?$")
"""Matches the digest alone, or in the name of a kernel in a profiler, a log or a cache file."""


def entry_name(plan: Plan) -> str:
    """The name of a kernel: letters, digits and underscores."""
    return f"cute_{words(plan.spec)}_{plan.tile.tile_m}x{plan.tile.tile_n}_{digest(plan)}"


def digest(plan: Plan) -> str:
    """Eight hexadecimal digits for a spec, a tile with its architecture, and an alignment."""
    identity = json.dumps([_given(plan.spec), _given(plan.tile), plan.alignment.value], sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:8]


def _given(value: Any) -> Any:
    """Converts a dataclass to plain values and omits fields that have their defaults, so that a field that is
    added later does not change existing names."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Kind):
        return value.name
    if isinstance(value, tuple):
        return [_given(each) for each in value]
    if not is_dataclass(value):
        return value
    every = ((each.name, getattr(value, each.name), each.default) for each in fields(value))
    given = {name: _given(has) for name, has, default in every if has != default}
    if isinstance(value, Store):
        given |= _of_form(value.form, given.pop("form", {}))
    return given


def _of_form(form: Form, given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a store for its form, as in JSON (`Form.field`). Planes by rows have none."""
    if form.field:
        return {form.field: given}
    return given if form.order is Order.ROW else {**given, "order": form.order.value}


def words(spec: EpilogueSpec) -> str:
    """Returns words for the steps of a region, such as "scaled_mm_bias_gelu_residual".

    They have at most MAX_WORDS characters, and end in "etc" if steps are left out. The product comes first,
    then the steps that a person would name, in order. A formula is recognised by its marks (gelu by erf or
    tanh and a number); other steps are named after their functions.
    """
    product = _PRODUCTS[spec.product.kind]
    if spec.product.dtype is DType.I32:
        product = f"int_{product}"
    scaled = [scales.word for _, scales in spec.scaled if scales.word]
    scaled += ["scaled" for load in spec.loads if load.name.startswith(_SCALES)]
    product = "_".join([*scaled[:1], product])
    if len(spec.segments) > 1:
        product = f"{product}_by_{len(spec.segments)}"
    text = product
    for word in _Steps(spec).words():
        if len(text) + len(word) + len("_etc") >= MAX_WORDS:
            return f"{text}_etc"
        text = f"{text}_{word}"
    return text


_PRODUCTS = {
    ProductKind.DENSE: "mm",
    ProductKind.BATCHED: "bmm",
    ProductKind.GROUPED: "grouped_mm",
    ProductKind.K_GROUPED: "grouped_k_mm",
}

_UNSAID = frozenset((
    "add", "sub", "mul", "div", "neg", "cast", "row_index", "column_index", "logistic2", "gumbel",
    "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "signbit",
    "logical_and", "logical_or", "logical_xor", "logical_not",
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift",
    "bits", "of_bits", "of_e8m0", "pair_bf16", "pair_f16",
))  # fmt: skip
"""Ops that add no word of their own. Any other op that belongs to no formula adds its name."""

_GELU = {"erf": math.sqrt(0.5), "tanh": 0.044715}
"""The number that identifies each form of gelu: the exact form divides x by the root of 2, and the tanh form
multiplies the cube of x by 0.044715 (Hendrycks and Gimpel, 2016)."""

_GATED = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu", "sigmoid": "glu"}
"""The name of a gated product of two accumulators, by the activation of one of them (Shazeer, 2020)."""

_SCALES = ("scale_a", "scale_b")
"""Prefixes of the roles of `_scaled_mm`'s own scales. A product with them is named "scaled"."""

_NARROW = (DType.E4M3, DType.E5M2, DType.I8, DType.U8)


@dataclass(frozen=True)
class _Value:
    """How a value was computed: it is a function, by the ops `by`, of the value `of`.

    `accumulators` are those that it depends on. If there are none, `plane` says whether the value depends on
    a load that varies over both M and N.
    """

    of: str
    by: frozenset[str] = frozenset()
    accumulators: frozenset[str] = frozenset()
    plane: bool = False
    noise: bool = False


class _Steps:
    """The words of a spec, each under the op that it describes. The word of a formula replaces the words of
    the ops in it."""

    def __init__(self, spec: EpilogueSpec) -> None:
        self._spec = spec
        self._ops = {op.name: op for op in spec.ops}
        self._said: dict[str, str] = {}
        self._values: dict[str, _Value] = {}
        for acc in spec.accumulators:
            self._values[acc.name] = _Value(acc.name, accumulators=frozenset([acc.name]))
        for load in spec.loads:
            self._values[load.name] = _Value(load.name, plane=load.kind.is_plane)

    def words(self) -> list[str]:
        """Returns the words in order, each once."""
        for op in self._spec.ops:
            self._values[op.name] = self._enter(op)
        results = [self._result(store) for store in self._spec.stores]
        said = list(dict.fromkeys([*self._said.values(), *(word for word in results if word)]))
        for part in ("clamp", "scale"):  # A quantisation implies both.
            said = [word for word, after in pairwise([*said, ""]) if (word, after) != (part, "quant")]
        return said

    def _enter(self, op: Op) -> _Value:
        """Records the word of an op, if it has one, and returns the facts about its result."""
        names = [operand for operand in op.operands if isinstance(operand, str)]
        operands = [self._values[name] for name in names]
        accumulators = frozenset[str]().union(*(value.accumulators for value in operands))
        result = _Value(
            op.name,
            accumulators=accumulators,
            plane=any(value.plane for value in operands),
            noise=op.op == "gumbel" or any(value.noise for value in operands),
        )
        if result.noise or not accumulators:
            self._say(op, "sample" if op.op == "gumbel" else None)
            return result
        if len({value.of for value in operands}) > 1:
            self._say(op, self._joined(op, names))
            return result
        by = frozenset([op.name]).union(*(value.by for value in operands))
        step = self._step(op, by)
        if step is None:
            self._say(op, _function(op))
            return replace(result, of=operands[0].of, by=by)
        parts: Iterable[str] = ()
        if step in ("gelu", "silu"):  # a formula of several ops
            parts = by
        elif step == "clamp":  # by both bounds
            parts = [name for name in names if self._said.get(name) in ("relu", "clamp")]
        for part in parts:
            self._said.pop(part, None)
        self._say(op, step)
        return result

    def _say(self, op: Op, word: str | None) -> None:
        if word is not None:
            self._said[op.name] = word

    def _step(self, op: Op, by: frozenset[str]) -> str | None:
        """Returns the word of an op that ends a formula of one value, or None. `by` are all ops of the
        formula."""
        if op.op == "cast":
            return "quant" if op.dtype in _NARROW else None
        if op.op in ("maximum", "minimum") and _number(op) is not None:
            return "relu" if (op.op, _number(op)) == ("maximum", 0) else "clamp"
        if op.op == "relu":
            return op.op
        if op.op not in ("mul", "div") or _number(op) is not None or len(set(op.operands)) == 1:
            return None
        # A value, perhaps times a number, is multiplied or divided by a function of itself.
        said = {self._said[name] for name in by if name in self._said}
        numbers = [number for name in by if (number := _number(self._ops[name])) is not None]
        for form, mark in _GELU.items():
            if form in said and any(math.isclose(each, mark, rel_tol=1e-4) for each in numbers):
                return "gelu"
        if "sigmoid" in said or (op.op == "div" and said == {"exp"} and 1 in numbers):
            return "silu"
        return None

    def _joined(self, op: Op, names: list[str]) -> str | None:
        """Returns the word of an op on several values, at least one of which depends on the product."""
        others = [name for name in names if not self._values[name].accumulators]
        plane = any(self._values[name].plane for name in others)
        if not others:
            return self._gated(op, names)
        if op.op in ("add", "sub"):
            return "residual" if plane else "bias"
        if op.op in ("mul", "div"):
            if any(name.startswith(_SCALES) for name in others):
                return None
            return "mul" if plane else "scale"
        return _function(op)

    def _gated(self, op: Op, names: list[str]) -> str | None:
        """Returns the word of an op whose operands all depend on the product."""
        parts = [self._values[name] for name in names]
        if op.op == "mul" and not frozenset.intersection(*(part.accumulators for part in parts)):
            for ender in frozenset[str]().union(*(part.by | {part.of} for part in parts)):
                if (activation := self._said.get(ender)) in _GATED:
                    del self._said[ender]
                    return _GATED[activation]
        return op.op if op.op in ("add", "sub", "mul", "div") else _function(op)

    def _result(self, store: Store) -> str | None:
        """Returns the word for what a store does with its value, if it has one."""
        value = self._spec.producers[store.value]
        if store.form.reduction is None:
            narrowed = store.dtype in _NARROW and self._spec.dtypes[store.value].is_float
            return "quant" if narrowed else None
        kind = store.form.reduction.kind
        if not isinstance(value, Op):
            return kind.name
        noise = ["noise"] if self._values[value.name].noise else []
        of = [value.op, *(["picked"] if self._picks(value) else []), *noise]
        word = next((kind.words_of[each] for each in of if each in kind.words_of), kind.name)
        if word not in (None, kind.name):
            self._said.pop(value.name, None)
        return word

    def _picks(self, op: Op) -> bool:
        """Whether an op leaves one element of each row: that of a column."""
        condition = self._ops.get(str(op.operands[0])) if op.op == "where" else None
        compared = () if condition is None or condition.op != "eq" else condition.values
        return any(name in self._ops and self._ops[name].op == "column_index" for name in compared)


def _number(op: Op) -> float | None:
    """Returns the constant operand of an op, or None."""
    return next((float(each.value) for each in op.operands if isinstance(each, Const)), None)


def _function(op: Op) -> str | None:
    """Returns the word of an op that does not complete a formula."""
    if op.op == "mul" and len(set(op.operands)) == 1:
        return "square"
    if op.op == "reciprocal" or (op.op == "div" and isinstance(op.operands[0], Const)):
        return "reciprocal"
    return None if op.op in _UNSAID else op.op
