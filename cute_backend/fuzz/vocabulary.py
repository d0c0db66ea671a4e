"""The vocabulary of random programs: spellings of operands, pointwise ops, reductions, views and casts.

It includes the whole op table: a row that is added to `ops` is drawn without further changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from cute_backend.fuzz.drawn_program import NOT_TAKEN, Rule, evaluate
from cute_backend.kinds import reductions
from cute_backend.kinds.loads import LoadKind
from cute_backend.ops import OPS


@dataclass(frozen=True)
class Spelling:
    """An operand of the plane (M, N), or (B, S, N): the shape of a dense tensor, and a view of it."""

    shape: tuple[str, ...]
    view: str = ""

    @staticmethod
    def parse(text: str) -> Spelling:
        """The spelling that a kind of load has as a text."""
        shape, view = text.removeprefix("(").split(")", 1)
        return Spelling(tuple(shape.split(", ")) if shape else (), view)


FLAT = tuple(Spelling.parse(text) for kind in LoadKind for text in kind.flat)
DEEP = tuple(Spelling.parse(text) for kind in LoadKind for text in kind.deep)
"""The spellings of every kind of load."""


@dataclass(frozen=True)
class Gather:
    """A text over a table and indices into it, from -7 to 7; `#` stands for the plane's leading sizes."""

    text: str
    table: tuple[str, ...]
    places: tuple[str, ...]


GATHERS = (
    Gather("{0}[{1}]", ("8", "N"), ("#",)),
    Gather("F.embedding({1} % 8, {0})", ("8", "N"), ("#",)),
    Gather("{0}[{1}]", ("8", "1"), ("#",)),
    Gather("{0}[{1}]", ("8", "N"), ("1",)),
    Gather("{0}[..., {1} % N]", ("#", "N"), ("N",)),
    Gather("{0}.gather(-1, {1} % N)", ("#", "N"), ("#", "N")),
)


@dataclass(frozen=True)
class Pointwise:
    """A text over `arity` operands. `#` stands for a number. If `has_truth`, the first operand is a bool. If
    `in_steps`, eager's roundings of its steps decide the result to the bit."""

    text: str
    arity: int
    rule: Rule
    has_truth: bool = False
    in_steps: bool = False

    @property
    def is_determined(self) -> bool:
        """Whether a program of exact ops may have it: such a program gives eager's bits under eager's
        roundings."""
        return self.in_steps or self.rule in (Rule.EXACT, Rule.CHOICE)


_EXACT_ROWS = (
    *("add", "sub", "mul", "div", "neg", "abs", "sign", "relu", "copysign", "sqrt", "reciprocal"),
    *("floor", "ceil", "round", "trunc", "maximum", "minimum", "fmax", "fmin", "where"),
    *("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "signbit"),
    *("logical_and", "logical_or", "logical_xor", "logical_not"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
    *("bitwise_left_shift", "bitwise_right_shift"),
)

_WAVES = ("sin", "cos")
_SIGNS = ("copysign", "signbit")
_ROOTS = ("pow.Tensor_Tensor", "pow.Scalar")
"""Powers whose exponents are not known exactly, and whose bases may be negative. `WRITTEN` has other
powers."""


@cache
def table_ops() -> tuple[Pointwise, ...]:
    """Every aten spelling of every row of the op table."""
    found = []
    for row in OPS.values():
        for target in row.aten:
            library, name, overload = target.split(".")
            if library != "aten" or f"{name}.{overload}" in _ROOTS:
                continue
            op = getattr(getattr(torch.ops.aten, name), overload)
            arguments, arity = [], 0
            for argument in op._schema.arguments[: row.arity]:
                if str(argument.type) in ("Tensor", "Optional[Tensor]"):
                    arguments.append(f"{{{arity}}}")
                    arity += 1
                else:
                    arguments.append("#")
            exact = Rule.EXACT if row.name in _EXACT_ROWS else Rule.FUNCTION
            rule = Rule.WAVE if row.name in _WAVES else Rule.SIGN if row.name in _SIGNS else exact
            text = f"torch.ops.{target}({', '.join(arguments)})"
            found.append(Pointwise(text, arity, rule, has_truth=row.name == "where"))
    return tuple(found)


WRITTEN = (
    *(
        Pointwise(text, 1, Rule.EXACT)
        for text in (
            "F.relu({0})", "-{0}", "{0} * #", "{0} + #", "# - {0}", "{0} / #", "# / {0}",
            "{0}.clamp(-1.5, 2)", "{0}.clamp(min=#)", "{0}.clamp(max=#)",
            "F.threshold({0}, 0.5, -1.0)", "F.leaky_relu({0}, 0.3)",
            "F.relu6({0})", "F.hardtanh({0})",
            "{0}.nan_to_num(0.0, 1.0, -1.0)",
        )
    ),
    *(
        Pointwise(text, 2, Rule.EXACT)
        for text in (
            "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / {1}", "torch.maximum({0}, {1})",
            "torch.clamp({0}, min={1})",
            "torch.clamp({0}, max={1})",
        )
    ),
    Pointwise("torch.pow({0}.abs(), {1})", 2, Rule.COMPOSITE),
    Pointwise("torch.pow(2.5, {0})", 1, Rule.FUNCTION),
    Pointwise("torch.where({0} > 0, {0}, 0.25)", 1, Rule.CHOICE),
    Pointwise("{0}.masked_fill({0} < 0, #)", 1, Rule.CHOICE),
    Pointwise("torch.where({0} > {1}, {0}, {1})", 2, Rule.CHOICE),
    Pointwise("{0}.masked_fill({1} > 0, #)", 2, Rule.CHOICE),
    Pointwise("torch.where({0} > {1}, {2}, {0})", 3, Rule.CHOICE),
    Pointwise("torch.clamp({0}, {1}, {2})", 3, Rule.EXACT),
    *(
        Pointwise(text, 1, Rule.COMPOSITE)
        for text in (
            "F.gelu({0})", "F.gelu({0}, approximate='tanh')", "F.silu({0})", "F.mish({0})", "F.elu({0})",
            "F.selu({0})", "F.celu({0}, 1.3)", "F.softplus({0})", "F.softsign({0})", "F.tanhshrink({0})",
            "F.logsigmoid({0})", "F.hardswish({0})", "F.hardsigmoid({0})",
            "({0}.abs() + 1) ** 0.5", "({0}.abs() + 1) ** -0.5", "({0}.abs() + 1) ** 0.7", "torch.atan({0})",
            "{0}.abs() ** 2.3",
            "{0} * torch.sigmoid(1.702 * {0})", "torch.exp(-{0}.abs())", "torch.log({0}.abs() + 1)",
        )
    ),
    *(Pointwise(f"{{0}} ** {power}", 1, Rule.COMPOSITE, in_steps=True) for power in (2, 3)),
    *(
        Pointwise(text, 2, Rule.COMPOSITE)
        for text in (
            "torch.add({0}, {1}, alpha=2)", "torch.sub({0}, {1}, alpha=0.5)", "torch.rsub({0}, {1}, alpha=3)",
            "torch.lerp({0}, {1}, 0.25)", "F.silu({0}) * {1}", "torch.tanh({0}) * {1}",
        )
    ),
    *(Pointwise(f"torch.addc{op}({{0}}, {{1}}, {{2}}, value=2)", 3, Rule.COMPOSITE) for op in ("mul", "div")),
    *(
        Pointwise(f"torch.div({{0}}, {{1}}, rounding_mode='{mode}')", 2, Rule.STEPPED, in_steps=True)
        for mode in ("trunc", "floor")
    ),
)  # fmt: skip

IN_STEPS = tuple(op for op in WRITTEN if op.in_steps)

DYADIC = ("0", "1", "-1", "2", "3", "0.5", "-0.5", "7", "100", "True")
"""Numbers that every float dtype holds: eager on CPU rounds others in `add` and `sub`, and not in `mul`."""

NUMBERS = (*DYADIC, "0.3", "-1.7")

CASTS = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32, torch.bool),
)

KEEPING = (
    ".clone()",
    ".contiguous()",
    ".unsqueeze(0).squeeze(0)",
    ".transpose(-1, -2).contiguous().transpose(-1, -2)",
    ".flip(-1)",
    ".roll(1, 0)",
)
"""Views and copies that give a plane its shape again."""

CHANGING = (".transpose(-1, -2)", ".flatten()", "[..., 1:]", "[..., ::2]", "[:1]", "[-1]", ".unsqueeze(1)")
"""Views that give a plane another shape. Their values are results, and end a region."""

PARTS = (
    ("{0}.chunk(2, -1)[0]", "{0}.chunk(2, -1)[1]"),
    ("{0}.split(N, -1)[0]", "{0}.split(N, -1)[1]"),
    ("{0}[..., :N]", "{0}[..., N:]"),
    ("{0}[..., ::2]", "{0}[..., 1::2]"),
    ("{0}.unflatten(-1, (N, 2))[..., 0]", "{0}.unflatten(-1, (N, 2)).unbind(-1)[1]"),
    ("{0}.unflatten(-1, (2, N))[..., 0, :]", "{0}.unflatten(-1, (2, N))[..., 1, :]"),
    ("{0}[..., 1 : N + 1]", "{0}[..., :N]"),
)
"""Ways to take two parts of 2 N columns."""


@dataclass(frozen=True)
class Reduce:
    """A reduction as a text with `@` for its axes; `extremum` is the reduction whose index this one
    returns."""

    text: str
    rule: Rule
    extremum: str = ""


@cache
def takes(spelling: Reduce, axes: str) -> bool:
    """Whether torch accepts these arguments of a reduction in this spelling, for a tensor of three axes."""
    try:
        result = evaluate(spelling.text.replace("@", axes), [torch.zeros(2, 2, 2)], {})
    except (*NOT_TAKEN, AttributeError, SyntaxError):
        return False
    return isinstance(result, torch.Tensor)


def _rule(kind: reductions.ReductionKind) -> Rule:
    if kind.is_place:
        (key, _) = kind.element(None, 1.0, 0)
        return Rule.GREATEST if key > 0 else Rule.LEAST
    if kind.is_element:
        return Rule.EXTREMUM
    return Rule.SUM if kind.result is reductions.ReductionKind.result else Rule.SUM_IN_STEPS


REDUCTIONS = (
    *(Reduce(text, _rule(kind), kind.drawn_element) for kind in reductions.REDUCTIONS for text in kind.drawn),
    Reduce("{0}.cumsum(@)", Rule.SUM),
)
"""The spellings of every kind of reduction, and a sum that no kernel computes."""
