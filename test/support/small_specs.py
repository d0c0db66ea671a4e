"""Small specs for the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cute_backend import numerics
from cute_backend.kinds import reductions
from cute_backend.kinds.blocks import ROTATE_FIRST, ROTATE_HALF
from cute_backend.kinds.results import Heads
from cute_backend.runtime.calls.sample_op import _spec
from cute_backend.spec import (
    VALUE_DTYPES,
    Accumulator,
    Axis,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Major,
    Op,
    Overflow,
    Reduction,
    Store,
    Stride,
)


def exact(name: str, dtype: DType = DType.F32, **strides: Any) -> Load:
    """A row-major (M, N) plane."""
    return Load(name, LoadKind.EXACT, dtype, **{"stride_m": Stride.OTHER, "stride_n": Stride.ONE, **strides})


def by_element(name: str, dtype: DType = DType.F32) -> Load:
    """A plane whose M has two modes, so that kernels of every alignment read it by element."""
    return exact(name, dtype, m_modes=(Stride.OTHER, Stride.ZERO))


def rowvec(name: str, dtype: DType = DType.F32) -> Load:
    return Load(name, LoadKind.ROWVEC, dtype, Stride.ZERO, Stride.ONE)


def colvec(name: str, dtype: DType = DType.F32) -> Load:
    return Load(name, LoadKind.COLVEC, dtype, Stride.ONE, Stride.ZERO)


def spec_of(
    *loads: Load, products: int = 1, dtype: DType = DType.E4M3, b_major: Major = Major.K, **product: Any
) -> EpilogueSpec:
    """The sum of some products of one A and of loads, in bf16."""
    names = ["acc"] if products == 1 else [f"acc{i}" for i in range(products)]
    accumulators = tuple(Accumulator(name, dtype, dtype, b_major=b_major, **product) for name in names)
    terms = [*names, *(load.name for load in loads)]
    ops: list[Op] = []
    for i, term in enumerate(terms[1:]):
        ops.append(Op(f"t{i}", "add", (ops[-1].name if ops else terms[0], term), DType.F32))
    value = ops[-1].name if ops else terms[0]
    return EpilogueSpec(accumulators, loads, tuple(ops), (Store("out0", value, DType.BF16),))


def block_mean(columns: int) -> EpilogueSpec:
    """The difference of a product from the mean of each block of `columns` columns."""
    bare = spec_of(dtype=DType.BF16)
    mean = Op("t0", "block_mean", ("acc",), DType.F32, block=columns)
    return replace(
        bare,
        ops=(mean, Op("t1", "sub", ("acc", "t0"), DType.F32)),
        stores=(replace(bare.stores[0], value="t1"),),
    )


def block_softmax(columns: int) -> EpilogueSpec:
    """The softmax of each block of `columns` columns of a product."""
    bare = spec_of(dtype=DType.BF16)
    chain = (
        Op("t0", "block_max", ("acc",), DType.F32, block=columns),
        Op("t1", "sub", ("acc", "t0"), DType.F32),
        Op("t2", "exp", ("t1",), DType.F32),
        Op("t3", "block_sum", ("t2",), DType.F32, block=columns),
        Op("t4", "div", ("t2", "t3"), DType.F32),
    )
    return replace(bare, ops=chain, stores=(replace(bare.stores[0], value="t4"),))


def rotated(columns: int) -> EpilogueSpec:
    """A product whose blocks of `columns` columns are rotated, each with its two halves."""
    bare = spec_of(dtype=DType.BF16)
    turned = Op("t0", ROTATE_HALF.name, ("acc",), DType.F32, block=columns)
    return replace(bare, ops=(turned,), stores=(replace(bare.stores[0], value="t0"),))


def rotated_first(columns: int, block: int) -> EpilogueSpec:
    """A product of which the first `columns` columns of each block are rotated, by halves."""
    bare = spec_of(dtype=DType.BF16)
    turned = Op("t0", ROTATE_FIRST.name, ("acc", Const(columns)), DType.F32, block=block)
    return replace(bare, ops=(turned,), stores=(replace(bare.stores[0], value="t0"),))


def by_heads(columns: int) -> EpilogueSpec:
    """A product that is written as (B, H, 100, `columns`)."""
    bare = spec_of(dtype=DType.BF16)
    return replace(bare, stores=(replace(bare.stores[0], form=Heads(100, columns)),))


def row_maximum() -> Store:
    """The largest element of each row of a product."""
    return Store("out1", "acc", DType.F32, form=Reduction(Axis.ROW, reductions.MAX))


def reducing(
    name: str, value: str, axis: Axis, kind: reductions.ReductionKind
) -> tuple[tuple[Op, ...], Store]:
    """A store of the reduction of an fp32 value. A kind that takes no fp32 reduces the value in the first
    dtype that it takes, to which an op converts it."""
    taken = ((each, stored) for each in VALUE_DTYPES for stored in kind.stored_as(each)[:1])
    own, stored = next(taken)
    ops = () if own is DType.F32 else (Op(f"{name}_of", "cast", (value,), own),)
    return ops, Store(name, ops[0].name if ops else value, stored, form=Reduction(axis, kind))


def taken(kind: reductions.ReductionKind, values: torch.Tensor) -> torch.Tensor:
    """fp32 values as `reducing` has them for a kind."""
    own = next(each for each in VALUE_DTYPES if kind.stored_as(each))
    return numerics.convert(numerics.cast(values, own, Overflow.SATURATE), DType.F32)


def sampling_spec(draws: int) -> EpilogueSpec:
    """The last pass of `cute_backend.sample` for `draws` tokens of bf16 logits at a temperature."""
    operand = (torch.bfloat16, Major.K)
    numbers = {"temperature": torch.float32, "seed_low": torch.int32, "seed_high": torch.int32}
    signature = tuple((name, dtype, True) for name, dtype in numbers.items())
    return EpilogueSpec.from_json(_spec(operand, operand, signature, draws, False))
