"""Evaluates specs a second time, in numpy, for comparison with `replay`.

Only ops whose results are determined to the bit are here (not sqrt: MKL is off by an ulp at times), so that
the two must agree exactly. It uses neither torch nor the package's own numerics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cute_backend.spec import (
    Blocks,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Op,
    Operand,
    Overflow,
    Precision,
    Stride,
)
from support.float_formats import FORMATS

Array = npt.NDArray[Any]

NUMPY = {DType.F32: np.float32, DType.I32: np.int32, DType.BOOL: np.bool_}
_SHAPES = {LoadKind.SCALAR: (1, 1), LoadKind.ROWVEC: (1, -1), LoadKind.COLVEC: (-1, 1)}
_FLOAT_OPS: dict[str, Callable[..., Any]] = {
    "div": np.divide,
    "reciprocal": lambda x: np.float32(1) / x,
    "copysign": np.copysign,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "isfinite": np.isfinite,
    "signbit": np.signbit,
}
_NUMBER_OPS: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_BOOL_OPS: dict[str, Callable[..., Any]] = {
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "logical_not": np.logical_not,
}
_ANY_OPS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "abs": np.abs,
    "sign": lambda x: (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype),
    "relu": lambda x: np.maximum(x, x.dtype.type(0)),
    "floor": lambda x: np.floor(x).astype(x.dtype),
    "ceil": lambda x: np.ceil(x).astype(x.dtype),
    "round": lambda x: np.rint(x).astype(x.dtype),
    "trunc": lambda x: np.trunc(x).astype(x.dtype),
    "maximum": np.maximum,
    "minimum": np.minimum,
    "fmax": np.fmax,
    "fmin": np.fmin,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "bitwise_not": np.invert,
}

EXACT_OPS = (*_FLOAT_OPS, *_NUMBER_OPS, *_BOOL_OPS, *_ANY_OPS, "where", "cast")


def evaluate(spec: EpilogueSpec, products: dict[str, Array], loads: dict[str, Array]) -> list[Array]:
    """Every store's values, still in fp32, int32 or bool, over the whole plane.

    `products` has each accumulator (M, N), `loads` each operand in its canonical shape, both already exact in
    their register dtypes.
    """
    values = dict(products)
    for load in spec.loads:
        array = loads[load.name] if not load.m_modes else _one_m(load, loads[load.name])
        array = array if load.blocks is None else _one_n(load.blocks, array)
        values[load.name] = array if load.kind is LoadKind.EXACT else array.reshape(_SHAPES[load.kind])
    with np.errstate(all="ignore"):
        for op in spec.ops:
            values[op.name] = _step(spec, op, values)
        plane = next(iter(products.values())).shape
        return [
            np.broadcast_to(_stored(spec, store.value, store.dtype, values), plane) for store in spec.stores
        ]


def _one_m(load: Load, array: Array) -> Array:
    """(*modes, ...) as (M, ...). Along a mode that does not vary, the elements at index 0 count."""
    first = tuple(slice(1) if mode is Stride.ZERO else slice(None) for mode in load.m_modes)
    return np.broadcast_to(array[first], array.shape).reshape(-1, *array.shape[len(load.m_modes) :])


def _one_n(blocks: Blocks, array: Array) -> Array:
    """(..., N / b, b) as (..., N), column by column."""
    columns = []
    for column in range(array.shape[-2] * array.shape[-1]):
        outer, inner = divmod(column, blocks.columns)
        outer = 0 if blocks.outer is Stride.ZERO else outer
        columns.append(array[..., outer, 0 if blocks.inner is Stride.ZERO else inner])
    return np.stack(columns, -1)


def cast(value: Array, dtype: DType, overflow: Overflow) -> Array:
    """The value rounded or wrapped to a dtype, in its register dtype."""
    register = NUMPY[dtype.register]
    if dtype in FORMATS:
        return FORMATS[dtype].round(value.astype(np.float32), overflow if dtype.is_fp8 else None)
    if dtype.register is DType.I32 and value.dtype == np.float32:
        wide = np.nan_to_num(np.trunc(value.astype(np.float64)), nan=0.0, posinf=2.0**40, neginf=-(2.0**40))
        value = np.clip(wide, -(2**31), 2**31 - 1).astype(np.int32)
    if dtype is DType.I8:
        return value.astype(np.int32).astype(np.int8).astype(np.int32)
    if dtype is DType.U8:
        return value.astype(np.int32).astype(np.uint8).astype(np.int32)
    return value != 0 if dtype is DType.BOOL else value.astype(register)


def _stored(spec: EpilogueSpec, name: str, dtype: DType, values: dict[str, Array]) -> Array:
    keeps = spec.dtypes[name] is dtype
    return cast(values[name], dtype, Overflow.NONFINITE if keeps else Overflow.SATURATE)


def _step(spec: EpilogueSpec, op: Op, values: dict[str, Array]) -> Array:
    operands = [_fetch(operand, values) for operand in op.operands]
    if op.op == "cast":
        if spec.precision is Precision.FUSED and op.dtype in (DType.BF16, DType.F16):
            return operands[0].astype(np.float32)
        return cast(operands[0], op.dtype, op.overflow)
    if op.op == "where":
        return np.where(operands[0] != 0, *_together(operands[1:]))
    if op.op in _FLOAT_OPS:
        return np.asarray(_FLOAT_OPS[op.op](*(operand.astype(np.float32) for operand in operands)))
    if op.op in _BOOL_OPS:
        return np.asarray(_BOOL_OPS[op.op](*(operand != 0 for operand in operands)))
    if op.op in _NUMBER_OPS:
        return np.asarray(_NUMBER_OPS[op.op](*_together(operands)))
    return np.asarray(_ANY_OPS[op.op](*_together(operands)))


def _fetch(operand: Operand, values: dict[str, Array]) -> Array:
    if not isinstance(operand, Const):
        return values[operand]
    return np.asarray(operand.value, dtype=NUMPY[operand.dtype])


def _together(operands: list[Array]) -> list[Array]:
    """Operands in the widest of their dtypes: bool, then int32, then fp32."""
    kinds = [np.bool_, np.int32, np.float32]
    widest = max(kinds.index(operand.dtype.type) for operand in operands)
    return [operand.astype(kinds[widest]) for operand in operands]
