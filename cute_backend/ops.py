"""The table of pointwise ops: what the walker may fuse, what the emitter writes, what the replay computes.

To add an op, add a row to `_ROWS`. If its device expression needs a function that `memory_ops/device_math.py`
lacks, add the function there and to its `__all__`. `pytest test/ops` runs every row of the table: it compares
the row with torch's eager op on special values, compiles it for sm_90a and sm_100a, and runs it on the
simulator. There, the row has to match to the bit, unless `MAX_ULP` in `test/support/device_check.py` allows
it an error.

A row's operands are register values: fp32, int32 or truth values (see `spec`). Before the op they are
converted to the dtype that `promote` returns. It promotes types as torch does if every float is fp32 and
every integer int32. The walker decomposes ops that have attributes in aten (`alpha`, clamp bounds that may be
None, `rounding_mode`) into rows of this table.

Accuracy of the device expressions: arithmetic, roundings, comparisons and selections are exact or correctly
rounded (a product and a sum may be contracted to one fused multiply-add, as in any fused CUDA kernel). The
bounds of all other functions are in `MAX_ULP` of `test/support/device_check.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch

from cute_backend import philox
from cute_backend.kinds.blocks import BLOCK_OPS, BlockOp
from cute_backend.numerics import e8m0_value
from cute_backend.spec import PAIRED_DTYPES, Const, DType, EpilogueSpec, Op, Overflow, Precision, SpecError


class OperandError(ValueError):
    """An op was given operands that its row has no expression for."""


class OperandRule(Enum):
    """The register dtype that the operands are converted to."""

    PROMOTE = "promote"
    """One dtype for all operands: fp32 if any is a float, else int32 if any is an integer, else bool."""
    NUMBER = "number"
    """As PROMOTE, but truth values count as integers."""
    FLOAT = "float"
    """fp32, for operands of any dtype."""
    BOOL = "bool"
    """Truth values: whether they differ from zero."""
    WHERE = "where"
    """The first as BOOL, the others as PROMOTE."""


class ResultRule(Enum):
    """The register dtype of the result."""

    SAME = "same"
    """The dtype that the operands promote to (for WHERE, that of the two choices)."""
    BOOL = "bool"
    FLOAT = "float"
    """fp32, for operands of any dtype."""
    INT = "int"
    """int32, for operands of any dtype."""


PAIRINGS = {part: f"pair_{part.value}" for part in PAIRED_DTYPES}
"""The ops whose results are stored in pairs, by the dtype of each value."""


@dataclass(frozen=True)
class PointwiseOp:
    """One row.

    `aten` lists the targets whose positional operands are this row's, one to one. `cute`, `cute_int` and
    `cute_bool` are CuTe DSL expressions on Float32, Int32 and Boolean scalars, None if the op is not
    defined; `math` and `noise` stand for `memory_ops.device_math` and `device_noise`. `reference` is the same
    on tensors of the register dtypes.
    """

    name: str
    aten: tuple[str, ...]
    arity: int
    operands: OperandRule
    result: ResultRule
    cute: str | None
    formula: str
    reference: Callable[..., torch.Tensor]
    cute_int: str | None = None
    cute_bool: str | None = None
    is_long: bool = False
    """Whether it takes some thirty instructions, so that planning allows only a few of them in one visit."""
    is_transcendental: bool = False
    """Whether it is computed in several steps, which take a register until the last."""

    def expression(self, dtype: DType) -> str | None:
        """The device expression on operands of a register dtype."""
        return {DType.F32: self.cute, DType.I32: self.cute_int, DType.BOOL: self.cute_bool}[dtype]


def _aten(name: str, overloads: Sequence[str] = ("default",)) -> tuple[str, ...]:
    return tuple(f"aten.{name}.{overload}" for overload in overloads)


def _targets(name: str, overloads: Sequence[str] = ("default",)) -> tuple[str, ...]:
    """The aten op and the prim of the same name."""
    return (*_aten(name, overloads), f"prims.{name}.default")


_BINARY = ("Tensor", "Scalar")


def _call(
    name: str,
    arity: int = 1,
    aten: tuple[str, ...] = (),
    operands: OperandRule = OperandRule.FLOAT,
    result: ResultRule = ResultRule.SAME,
    **more: Any,
) -> PointwiseOp:
    """torch's function of this name: `math.name` on the device, for fp32 alone unless `more` says so."""
    arguments = ", ".join(f"{{{index}}}" for index in range(arity))
    cute, formula, aten = f"math.{name}({arguments})", f"{name}({arguments})", aten or _targets(name)
    return PointwiseOp(name, aten, arity, operands, result, cute, formula, getattr(torch, name), **more)


_elementary = partial(_call, is_transcendental=True)

_rounding = partial(_call, operands=OperandRule.PROMOTE, cute_int="{0}")
"""fp32 to an integral fp32; an integer is itself."""


def _extremum(name: str, aten: tuple[str, ...], cute_bool: str) -> PointwiseOp:
    cute_int = f"math.{name}_int({{0}}, {{1}})"
    return _call(name, 2, aten, OperandRule.PROMOTE, cute_int=cute_int, cute_bool=cute_bool)


def _predicate(name: str) -> PointwiseOp:
    """A predicate of an fp32 value, to which integers are converted first."""
    return _call(name, aten=_aten(name), result=ResultRule.BOOL)


def _infix(
    name: str,
    symbol: str,
    aten: tuple[str, ...],
    operands: OperandRule,
    result: ResultRule,
    *registers: DType,
) -> PointwiseOp:
    """torch's function of this name: a symbol between two operands of these register dtypes."""
    text = f"{{0}} {symbol} {{1}}"
    on = dict.fromkeys(registers, text).get
    reference, of_int, of_bool = getattr(torch, name), on(DType.I32), on(DType.BOOL)
    return PointwiseOp(name, aten, 2, operands, result, on(DType.F32), text, reference, of_int, of_bool)


def _comparison(name: str, symbol: str) -> PointwiseOp:
    aten = _targets(name, _BINARY)
    return _infix(name, symbol, aten, OperandRule.NUMBER, ResultRule.BOOL, DType.F32, DType.I32)


def _logical(name: str, symbol: str) -> PointwiseOp:
    return _infix(name, symbol, _aten(name), OperandRule.BOOL, ResultRule.BOOL, DType.BOOL)


def _bitwise(name: str, symbol: str) -> PointwiseOp:
    aten = _targets(name, (*_BINARY, "Scalar_Tensor"))
    return _infix(name, symbol, aten, OperandRule.PROMOTE, ResultRule.SAME, DType.I32, DType.BOOL)


def _shift(direction: str) -> PointwiseOp:
    """A shift of int32 by a number of bits. If that is negative or 32 and more, no bit is left but copies of
    the sign."""
    name, symbol = f"bitwise_{direction}_shift", "<<" if direction == "left" else ">>"
    overloads = _aten(name, ("Tensor", "Tensor_Scalar", "Scalar_Tensor"))
    aten = (*overloads, *_aten(f"__{direction[0]}shift__", _BINARY))
    row = _infix(name, symbol, aten, OperandRule.PROMOTE, ResultRule.SAME)
    return replace(row, cute_int=f"math.shift_{direction}({{0}}, {{1}})")


def _narrowing(name: str, dtype: torch.dtype) -> PointwiseOp:
    """fp32 rounded to a dtype of 16 bits, as fp32."""
    return PointwiseOp(
        name=f"round_to_{name}",
        aten=(),
        arity=1,
        operands=OperandRule.FLOAT,
        result=ResultRule.SAME,
        cute=f"math.round_to_{name}({{0}})",
        formula=f"{name}({{0}})",
        reference=lambda x: x.to(dtype).to(torch.float32),
    )


_NAN_16 = 0x7FFF
"""The NaN of bf16 and of fp16 that conversions make (PTX `cvt`)."""


def _pairing(dtype: DType) -> PointwiseOp:
    """Two fp32 values rounded to a dtype of 16 bits, side by side in an int32, the first in the low bits."""
    narrow = {DType.BF16: torch.bfloat16, DType.F16: torch.float16}[dtype]

    def code(x: torch.Tensor) -> torch.Tensor:
        bits = x.to(narrow).view(torch.int16).to(torch.int32) & 0xFFFF
        return torch.where(x.isnan(), _NAN_16, bits)

    return PointwiseOp(
        name=PAIRINGS[dtype],
        aten=(),
        arity=2,
        operands=OperandRule.FLOAT,
        result=ResultRule.INT,
        cute=f"math.pair_{dtype.value}({{0}}, {{1}})",
        formula="pair({0}, {1})",
        reference=lambda x, y: code(x) | (code(y) << 16),
    )


def _div_trunc(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def _div_floor(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="floor")


def _logistic2(x: torch.Tensor) -> torch.Tensor:
    return torch.reciprocal(1 + torch.exp2(-x))


def _no_reference(*_: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("its result depends on more than its operands; replay.py computes it")


_P, _N = OperandRule.PROMOTE, OperandRule.NUMBER
_SAME, _BOOL = ResultRule.SAME, ResultRule.BOOL

_ROWS: tuple[PointwiseOp, ...] = (
    # Arithmetic. On truth values torch adds with `or` and multiplies with `and`.
    PointwiseOp("add", _targets("add", _BINARY), 2, _P, _SAME, "{0} + {1}", "{0} + {1}", torch.add,
                cute_int="{0} + {1}", cute_bool="{0} | {1}"),
    _infix("sub", "-", _targets("sub", _BINARY), _P, _SAME, DType.F32, DType.I32),
    PointwiseOp("mul", _targets("mul", _BINARY), 2, _P, _SAME, "{0} * {1}", "{0} * {1}", torch.mul,
                cute_int="{0} * {1}", cute_bool="{0} & {1}"),
    PointwiseOp("div", ("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor"), 2,
                OperandRule.FLOAT, _SAME, "math.div({0}, {1})", "{0} / {1}", torch.div),
    PointwiseOp("div_trunc", (), 2, _P, _SAME, "math.trunc(math.div({0}, {1}))", "trunc({0} / {1})",
                _div_trunc),
    PointwiseOp("div_floor", (), 2, _P, _SAME, "math.div_floor({0}, {1})", "floor({0} / {1})", _div_floor),
    PointwiseOp("neg", _targets("neg"), 1, _P, _SAME, "-{0}", "-{0}", torch.neg, cute_int="-{0}"),
    _call("abs", operands=_P, cute_int="math.abs_int({0})"),
    _call("sign", operands=_P, cute_int="math.sign_int({0})"),
    PointwiseOp("relu", _aten("relu"), 1, _P, _SAME, "math.maximum({0}, 0.0)", "relu({0})",
                torch.relu, cute_int="math.maximum_int({0}, 0)"),
    _call("copysign", arity=2, aten=_aten("copysign", _BINARY)),
    # Powers and roots.
    _elementary("pow", 2, _targets("pow", ("Tensor_Tensor", "Tensor_Scalar", "Scalar")), _P),
    _call("sqrt"),
    _call("rsqrt"),
    _call("reciprocal"),
    # Exponentials, logarithms and the rest of the elementary functions.
    _elementary("exp"),
    _elementary("exp2"),
    _elementary("expm1"),
    _elementary("log"),
    _elementary("log2"),
    _elementary("log10"),
    _elementary("log1p"),
    _elementary("sin"),
    _elementary("cos"),
    _elementary("tanh"),
    _elementary("sigmoid", aten=_aten("sigmoid")),
    PointwiseOp("logistic2", (), 1, OperandRule.FLOAT, _SAME, "math.logistic2({0})", "1 / (1 + exp2(-{0}))",
                _logistic2, is_transcendental=True),
    _elementary("erf"),
    # Rounding to 16 bits under every precision, for values that another kernel reads as 16 bits.
    _narrowing("bf16", torch.bfloat16),
    _narrowing("f16", torch.float16),
    # Two neighbouring columns in 32 bits, for stores of pairs.
    _pairing(DType.BF16),
    _pairing(DType.F16),
    # To integral values; `round` takes halves to even.
    _rounding("floor"),
    _rounding("ceil"),
    _rounding("round"),
    _rounding("trunc"),
    # Extrema return NaN where either operand is NaN; fmax and fmin return the other operand.
    _extremum("maximum", ("aten.maximum.default", "aten.clamp_min.default", "aten.clamp_min.Tensor",
                          "aten.max.other", "prims.maximum.default"), "{0} | {1}"),
    _extremum("minimum", ("aten.minimum.default", "aten.clamp_max.default", "aten.clamp_max.Tensor",
                          "aten.min.other", "prims.minimum.default"), "{0} & {1}"),
    _call("fmax", 2, operands=_P),
    _call("fmin", 2, operands=_P),
    # Selection, comparisons and predicates.
    _call("where", 3, _targets("where", ("self", "ScalarOther", "ScalarSelf", "Scalar")), OperandRule.WHERE,
          cute_int="math.where({0}, {1}, {2})", cute_bool="math.where({0}, {1}, {2})"),
    _comparison("eq", "=="),
    _comparison("ne", "!="),
    _comparison("lt", "<"),
    _comparison("le", "<="),
    _comparison("gt", ">"),
    _comparison("ge", ">="),
    _predicate("isnan"),
    _predicate("isinf"),
    _predicate("isfinite"),
    _predicate("signbit"),
    # Truth values and bits.
    _logical("logical_and", "&"),
    _logical("logical_or", "|"),
    _logical("logical_xor", "^"),
    PointwiseOp("logical_not", _aten("logical_not"), 1, OperandRule.BOOL, _BOOL, None, "not {0}",
                torch.logical_not, cute_bool="math.logical_not({0})"),
    _bitwise("bitwise_and", "&"),
    _bitwise("bitwise_or", "|"),
    _bitwise("bitwise_xor", "^"),
    PointwiseOp("bitwise_not", _targets("bitwise_not"), 1, _P, _SAME, None, "~{0}", torch.bitwise_not,
                cute_int="~{0}", cute_bool="math.logical_not({0})"),
    _shift("left"),
    _shift("right"),
    # The bits of a value read as one of another dtype. The code of a scale in E8M0 stands for a power of two.
    PointwiseOp("bits", (), 1, OperandRule.FLOAT, ResultRule.INT, "math.bits({0})", "bits({0})",
                lambda x: x.contiguous().view(torch.int32)),
    PointwiseOp("of_bits", (), 1, _P, ResultRule.FLOAT, None, "f32({0} as bits)",
                lambda x: x.contiguous().view(torch.float32), cute_int="math.of_bits({0})"),
    PointwiseOp("of_e8m0", (), 1, _P, ResultRule.FLOAT, None, "e8m0({0} as bits)", e8m0_value,
                cute_int="math.of_e8m0({0})"),
    # Noise, from seed low, seed high, index, row, sample: see `philox`.
    PointwiseOp("gumbel", (), 5, _P, ResultRule.FLOAT, None, "gumbel({0}, {1}, {2}, {3}, {4})",
                philox.gumbel, cute_int="noise.gumbel({0}, {1}, {2}, {3}, {4})", is_long=True),
)  # fmt: skip

CAST = PointwiseOp("cast", (), 1, _P, _SAME, None, "cast({0})", _no_reference)
"""To the dtype of the spec's op, under its overflow rule. The device expression is `cast_expression`."""

GUMBEL = next(row for row in _ROWS if row.name == "gumbel")

ROW_INDEX = PointwiseOp("row_index", (), 0, _P, _SAME, None, "row", _no_reference)
"""The row of the plane that an element lies in, as int32."""

COLUMN_INDEX = PointwiseOp("column_index", (), 0, _P, _SAME, None, "column", _no_reference)
"""The column of the plane that an element lies in, as int32."""

INDEX_EXPRESSIONS = {ROW_INDEX.name: "sub.row(e)", COLUMN_INDEX.name: "sub.column(e)"}
"""The device expressions of an element's row and column, for element `e` of subtile `sub`. They are clamped
to the last row and column, as the values of elements beyond are never used."""


def _over_blocks(kind: BlockOp) -> PointwiseOp:
    """The row of an op over blocks, whose spelling in formulas depends on the size of the blocks."""
    result = ResultRule.FLOAT if kind.reads else ResultRule.INT
    arity = kind.reads + kind.has_part
    return PointwiseOp(kind.name, (), arity, OperandRule.FLOAT, result, None, "", _no_reference)


SPECIAL = (CAST, ROW_INDEX, COLUMN_INDEX, *map(_over_blocks, BLOCK_OPS.values()))
"""Rows whose results depend on more than their operands. The replay and the emitter know the first three by
name, and ask the kinds of the others."""

OPS: dict[str, PointwiseOp] = {row.name: row for row in (*_ROWS, *SPECIAL)}

_BY_ATEN = {target: row for row in _ROWS for target in row.aten}


def by_aten(target: str) -> PointwiseOp | None:
    """The row whose operands are those of an aten or prims target such as "aten.add.Tensor"."""
    return _BY_ATEN.get(target)


def promote(row: PointwiseOp, dtypes: Sequence[DType]) -> tuple[DType, ...]:
    """The register dtype that each operand is converted to, from the operands' dtypes.

    Raises OperandError if the row has no expression on them, or takes another number of operands.
    """
    if len(dtypes) != row.arity:
        raise OperandError(f"{row.name} takes {row.arity} operands, not {len(dtypes)}")
    registers = [dtype.register for dtype in dtypes]
    if row.name in BLOCK_OPS and BLOCK_OPS[row.name].reads:
        return (DType.F32, *registers[1:])
    if row in SPECIAL:
        return tuple(registers)
    common = _common(row.operands, registers[1:] if row.operands is OperandRule.WHERE else registers)
    if row.expression(common) is None:
        given = ", ".join(dtype.value for dtype in dtypes)
        raise OperandError(f"{row.name} is not defined on ({given})")
    if row.operands is OperandRule.WHERE:
        return (DType.BOOL, common, common)
    return (common,) * row.arity


def _common(rule: OperandRule, registers: Sequence[DType]) -> DType:
    if rule is OperandRule.FLOAT or (rule is not OperandRule.BOOL and DType.F32 in registers):
        return DType.F32
    if rule is OperandRule.NUMBER or (rule is not OperandRule.BOOL and DType.I32 in registers):
        return DType.I32
    return DType.BOOL


def result_dtype(row: PointwiseOp, dtypes: Sequence[DType]) -> DType:
    """The register dtype of the result on operands of these dtypes. A cast's dtype is its spec op's.

    Raises OperandError as `promote` does.
    """
    operands = promote(row, dtypes)
    if row in (ROW_INDEX, COLUMN_INDEX):
        return DType.I32
    fixed = {ResultRule.BOOL: DType.BOOL, ResultRule.FLOAT: DType.F32, ResultRule.INT: DType.I32}
    return fixed.get(row.result) or operands[-1]


def operand_dtypes(spec: EpilogueSpec, op: Op) -> list[DType]:
    """The dtypes of an op's operands: of the spec's values and of numbers."""
    return [operand.dtype if isinstance(operand, Const) else spec.dtypes[operand] for operand in op.operands]


_BLOCK_SIZES = f"two or more have {', '.join(BLOCK_OPS)}, and 0 all other ops"


def check(spec: EpilogueSpec) -> None:
    """Raises SpecError if an op is not in the table or contradicts its row."""
    for op in spec.ops:
        row = OPS.get(op.op)
        if row is None:
            raise SpecError(f"{op.name} = {op.op}: there is no such op; the table has {', '.join(OPS)}")
        try:
            result = result_dtype(row, operand_dtypes(spec, op))
        except OperandError as error:
            raise SpecError(f"{op.name}: {error}") from error
        _check_blocks(op)
        if row is not CAST and result is not op.dtype:
            raise SpecError(f"{op.name} = {op.op} gives {result.value}, but the spec says {op.dtype.value}")
    for store in spec.stores:
        if store.after:
            _check_after(spec.finishing(store))


def _check_after(spec: EpilogueSpec) -> None:
    """Raises SpecError if ops after a reduction need more than its result."""
    for op in spec.ops:
        if op.block or op.op in INDEX_EXPRESSIONS or op.op == GUMBEL.name:
            raise SpecError(f"{op.name} = {op.op} is after a reduction, whose result is on no plane")
    check(spec)


def _check_blocks(op: Op) -> None:
    """Raises SpecError if the size of an op's blocks contradicts its kind."""
    kind = op.over_blocks
    if (kind is not None) != (op.block > 1):
        raise SpecError(f"{op.name} = {op.op} has blocks of {op.block} columns; {_BLOCK_SIZES}")
    if kind is not None and (rule := kind.contradiction(op.block, op.part_columns)):
        part = f" of {op.operands[-1]}" if kind.has_part else ""
        raise SpecError(f"{op.name} = {op.op}{part} has blocks of {op.block} columns; {rule}")


def effective_dtype(op: Op, precision: Precision) -> DType:
    """The dtype that a cast really rounds to: under FUSED a cast to bf16 or fp16 leaves the value in fp32."""
    if precision is Precision.FUSED and op.dtype in (DType.BF16, DType.F16):
        return DType.F32
    return op.dtype


_CONVERSIONS = {DType.F32: "math.to_f32({0})", DType.I32: "math.to_i32({0})", DType.BOOL: "math.to_bool({0})"}


def conversion_expression(text: str, source: DType, target: DType) -> str:
    """The device expression that converts a register value from one register dtype to another."""
    return text if source is target else _CONVERSIONS[target].format(text)


def cast_expression(text: str, source: DType, target: DType, overflow: Overflow = Overflow.SATURATE) -> str:
    """The device expression that rounds or wraps a register value to `target`, kept in `target.register`."""
    value = conversion_expression(text, source.register, target.register)
    if target is target.register:
        return value
    if target.is_fp8 and overflow is Overflow.NONFINITE:
        return f"math.round_to_{target.value}({value}, saturate=False)"
    rounds = target.register is DType.F32
    return f"math.{'round' if rounds else 'wrap'}_to_{target.value}({value})"
