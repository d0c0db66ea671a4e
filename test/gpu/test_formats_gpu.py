"""Operand and output formats on a real GPU: every dtype and layout that a kernel can be asked for, in the
largest and the smallest tile, which differ in their schedule."""

from __future__ import annotations

import pytest

from cute_backend.kinds.results import WholePlane
from cute_backend.planning import tile_table
from cute_backend.runtime.arguments.device import device_at
from cute_backend.spec import (
    Accumulator,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Major,
    Op,
    Order,
    Store,
    Stride,
)
from support.kernel_check import check_kernels

pytestmark = pytest.mark.gpu

SHAPES = [(256, 256, 256), (200, 336, 144), (1000, 272, 528)]

FP8 = Accumulator("acc", DType.E4M3, DType.E4M3)
ONE, OTHER, ZERO = Stride.ONE, Stride.OTHER, Stride.ZERO


def exact(name: str, dtype: DType, stride_m: Stride = OTHER, stride_n: Stride = ONE) -> Load:
    return Load(name, LoadKind.EXACT, dtype, stride_m, stride_n)


def added(*loads: Load, acc: Accumulator = FP8, store: DType = DType.BF16) -> EpilogueSpec:
    """The accumulator, scaled down, plus every load."""
    ops = [Op("t", "mul", ("acc", Const(0.25)), DType.F32)]
    for load in loads:
        ops.append(Op(f"{load.name}_sum", "add", (ops[-1].name, load.name), DType.F32))
    return EpilogueSpec((acc,), loads, tuple(ops), (Store("out0", ops[-1].name, store),))


def check(spec: EpilogueSpec) -> None:
    largest, *_, smallest = tile_table(device_at(0).arch, spec)
    check_kernels(spec, SHAPES, [largest, smallest])


PRODUCTS = [
    *[
        Accumulator("acc", dtype, dtype, a, b)
        for dtype in (DType.BF16, DType.F16)
        for a in Major
        for b in Major
    ],
    Accumulator("acc", DType.E5M2, DType.E4M3),
    Accumulator("acc", DType.E4M3, DType.E5M2),
    Accumulator("acc", DType.E4M3, DType.E4M3, fast_accum=False),
]


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "acc",
    PRODUCTS,
    ids=lambda acc: f"{acc.a_dtype.value}{acc.a_major.value}-{acc.b_dtype.value}{acc.b_major.value}",
)
def test_products(acc: Accumulator) -> None:
    check(added(exact("exact0", DType.BF16), acc=acc))


STORES = [DType.F32, DType.F16, DType.E4M3, DType.E5M2, DType.I8, DType.U8, DType.I32]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("order", [Order.ROW, Order.COLUMN])
@pytest.mark.parametrize("dtype", STORES)
def test_stores(dtype: DType, order: Order) -> None:
    """Integers are what the accumulator holds, brought into range: fp8 and integer stores must be exact."""
    ops = (
        Op("low", "maximum", ("acc", Const(0.0)), DType.F32),
        Op("high", "minimum", ("low", Const(100.0)), DType.F32),
        Op("value", "cast", ("high",), dtype),
    )
    check(EpilogueSpec((FP8,), (), ops, (Store("out0", "value", dtype, WholePlane(order)),)))


def test_bools_in_and_out() -> None:
    mask = exact("exact0", DType.BOOL)
    ops = (
        Op("kept", "where", ("exact0", "acc", Const(0.0)), DType.F32),
        Op("positive", "gt", ("kept", Const(0.5)), DType.BOOL),
    )
    stores = (Store("out0", "positive", DType.BOOL), Store("out1", "kept", DType.BF16))
    check(EpilogueSpec((FP8,), (mask,), ops, stores))


LAYOUTS = {"row": (OTHER, ONE), "column": (ONE, OTHER), "strided": (OTHER, OTHER)}
LOADS = [DType.F32, DType.F16, DType.BF16, DType.E4M3, DType.E5M2, DType.I8, DType.U8, DType.I32]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", LOADS)
def test_exact_loads(dtype: DType, layout: str) -> None:
    check(added(exact("exact0", dtype, *LAYOUTS[layout])))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16, DType.E4M3, DType.I8, DType.BOOL])
@pytest.mark.parametrize("stride", [ONE, OTHER])
def test_vectors_and_scalars(dtype: DType, stride: Stride) -> None:
    loads = [
        Load("rowvec0", LoadKind.ROWVEC, dtype, ZERO, stride),
        Load("colvec0", LoadKind.COLVEC, dtype, stride, ZERO),
        Load("scalar0", LoadKind.SCALAR, dtype, ZERO, ZERO),
    ]
    check(added(*loads))


def test_more_operands_than_shared_memory_has_room_for() -> None:
    planes = [exact(f"exact{i}", DType.F32) for i in range(4)]
    rows = [Load(f"rowvec{i}", LoadKind.ROWVEC, DType.F32, ZERO, ONE) for i in range(6)]
    columns = [Load(f"colvec{i}", LoadKind.COLVEC, DType.F32, ONE, ZERO) for i in range(6)]
    check(added(*planes, *rows, *columns, store=DType.F32))
