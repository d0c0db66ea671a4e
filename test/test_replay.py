"""The reference interpreter against a second evaluation of the same spec, and on cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cute_backend.kinds import reductions
from cute_backend.kinds.results import WholePlane
from cute_backend.replay import replay
from cute_backend.spec import (
    REDUCED,
    Accumulator,
    Axis,
    BColumns,
    Columns,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Op,
    Order,
    Overflow,
    Precision,
    Reduction,
    Scaling,
    SpecError,
    Store,
    Stride,
)
from support.float_formats import FORMATS
from support.independent import EXACT_OPS, NUMPY, evaluate
from support.modes import shape_of
from support.random_specs import specs

TORCH = {
    DType.F32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.E4M3: torch.float8_e4m3fn,
    DType.E5M2: torch.float8_e5m2,
    DType.I8: torch.int8,
    DType.U8: torch.uint8,
    DType.I32: torch.int32,
    DType.BOOL: torch.bool,
}
M, N, K = 6, 8, 64


SPECIALS = [0.0, -0.0, 0.5, 2.5, -1.5, 3.0, 300.7, -40000.0, 464.0, 61440.0, 1e9, 1e-6, 1e-40, 3e38]
SPECIALS += [float("inf"), float("-inf"), float("nan")]


def _shape(load: Load) -> tuple[int, ...]:
    if load.is_split:
        return shape_of(load, M, N)
    return {LoadKind.SCALAR: (1,), LoadKind.ROWVEC: (N,), LoadKind.COLVEC: (M,), LoadKind.EXACT: (M, N)}[
        load.kind
    ]


def _raw(load: Load, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Bytes of a load, drawn so that special values are frequent. No NaN is negative: nothing is promised of
    a NaN's sign, and conversions to fp32 keep it or not."""
    shape = _shape(load)
    if load.dtype is DType.F32:
        values = np.where(
            rng.random(shape) < 0.5, rng.choice(SPECIALS, shape), rng.standard_normal(shape) * 100
        )
        return values.astype(np.float32)
    if load.dtype is DType.BOOL:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if load.dtype is DType.I32:
        return (rng.integers(-(2**31), 2**31, shape) >> rng.integers(0, 32, shape)).astype(np.int32)
    holder = {8: np.uint8, 16: np.uint16}[load.dtype.bits]
    codes = rng.integers(0, 1 << load.dtype.bits, shape).astype(holder)
    if load.dtype not in FORMATS:
        return codes
    sign = holder(1 << (load.dtype.bits - 1))
    return np.where(np.isnan(FORMATS[load.dtype].decode(codes.astype(np.int64))), codes & ~sign, codes)


def _tensor(load: Load, raw: np.ndarray[Any, Any]) -> Tensor:
    signed = raw.view(np.int16) if raw.dtype == np.uint16 else raw
    return torch.from_numpy(signed.copy()).view(TORCH[load.dtype])


def _register(load: Load, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if load.dtype in FORMATS:
        return FORMATS[load.dtype].decode(raw.astype(np.int64)).astype(np.float32)
    if load.dtype is DType.I8:
        return raw.view(np.int8).astype(np.int32)
    return raw.astype(NUMPY[load.dtype.register])


def _decoded(store: Store, tensor: Tensor) -> np.ndarray[Any, Any]:
    """A replayed output in its register dtype, decoded without torch's conversions."""
    if store.dtype in FORMATS:
        holder = torch.uint8 if store.dtype.bits == 8 else torch.int16
        codes = tensor.contiguous().view(holder).numpy().astype(np.int64) & ((1 << store.dtype.bits) - 1)
        return FORMATS[store.dtype].decode(codes).astype(np.float32)
    return tensor.numpy().astype(NUMPY[store.dtype.register])


def _assert_equal(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if got.dtype != np.float32:
        np.testing.assert_array_equal(got, expected)
        return
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(got[numbers].view(np.int32), expected[numbers].view(np.int32))


@settings(max_examples=80, deadline=None)
@given(spec=specs(EXACT_OPS), seed=st.integers(0, 2**32 - 1))
def test_random_specs(spec: EpilogueSpec, seed: int) -> None:
    check_bits(spec, seed)


@pytest.mark.exhaustive
@settings(max_examples=400, deadline=None)
@given(spec=specs(EXACT_OPS), seed=st.integers(0, 2**32 - 1))
def test_many_random_specs(spec: EpilogueSpec, seed: int) -> None:
    check_bits(spec, seed)


def check_bits(spec: EpilogueSpec, seed: int) -> None:
    """Compares a replay bit for bit, infinities, NaNs and zeros of both signs included.

    The products are exact in fp32 or int32 whatever the order of their sums, and mostly not in bf16.
    """
    rng = np.random.default_rng(seed)
    columns = 2 * N if spec.b_columns is BColumns.INTERLEAVED else N
    unit, sums = (1, np.int32) if spec.product.dtype is DType.I32 else (8, np.float32)
    a = rng.integers(-7, 8, (M, K)) / unit
    bs = [rng.integers(-7, 8, (K, columns)) / unit for _ in range(spec.b_count)]
    planes = [(a @ b).astype(sums) for b in bs]
    scales_of_a, scales_of_bs = [], []
    if spec.product.is_block_scaled:  # K is one block
        of_a, of_b = spec.product.a_scaling, spec.product.b_scaling
        scales_of_a = [2.0 ** rng.integers(-2, 3, (of_a.blocks(M), 1)).astype(np.float32)]
        scales_of_bs = [2.0 ** rng.integers(-2, 3, (1, of_b.blocks(columns))).astype(np.float32) for _ in bs]
        planes = [plane * scales_of_a[0] * scales for plane, scales in zip(planes, scales_of_bs, strict=True)]
    if spec.b_columns is BColumns.INTERLEAVED:
        planes = [planes[0][:, ::2], planes[0][:, 1::2]]
    products = {acc.name: plane for acc, plane in zip(spec.accumulators, planes, strict=True)}
    raws = [_raw(load, rng) for load in spec.loads]
    held = {load.name: _register(load, raw) for load, raw in zip(spec.loads, raws, strict=True)}
    outputs = replay(
        spec,
        [torch.from_numpy(a).to(TORCH[spec.product.a_dtype]), *map(torch.from_numpy, scales_of_a)],
        [
            *(torch.from_numpy(b).to(TORCH[spec.product.b_dtype]) for b in bs),
            *map(torch.from_numpy, scales_of_bs),
        ],
        [_tensor(load, raw) for load, raw in zip(spec.loads, raws, strict=True)],
    )
    for store, output, expected in zip(spec.stores, outputs, evaluate(spec, products, held), strict=True):
        assert output.dtype == TORCH[store.dtype]
        assert output.stride() == ((N, 1) if store.form.order is Order.ROW else (1, M))
        _assert_equal(_decoded(store, output), expected)


ACC = Accumulator("acc", DType.BF16, DType.BF16)
A, B = torch.eye(2, dtype=torch.bfloat16), torch.tensor([[1.0, 300.0], [-0.5, 0.0]], dtype=torch.bfloat16)


def _spec(*ops: Op, dtype: DType = DType.F32, **fields: Any) -> EpilogueSpec:
    value = ops[-1].name if ops else "acc"
    return EpilogueSpec((ACC,), fields.pop("loads", ()), ops, (Store("out0", value, dtype),), **fields)


def test_a_trip_through_bf16_rounds_under_eager_alone() -> None:
    add = Op("t0", "add", ("acc", Const(2.0**-10)), DType.F32)
    trip = Op("t1", "cast", ("t0",), DType.BF16)
    again = Op("t2", "sub", ("t1", "acc"), DType.F32)
    fused = replay(_spec(add, trip, again), [A], [B], [])[0]
    eager = replay(_spec(add, trip, again, precision=Precision.EAGER), [A], [B], [])[0]
    assert fused[0, 0] == 2.0**-10
    assert eager[0, 0] == 0.0


@pytest.mark.parametrize(
    "overflow, expected",
    [(Overflow.SATURATE, [448.0, -448.0]), (Overflow.NONFINITE, [float("nan"), float("nan")])],
)
def test_fp8_overflow_in_the_chain(overflow: Overflow, expected: list[float]) -> None:
    big = Op("t1", "mul", ("acc", Const(2.0)), DType.F32)
    cast = Op("t2", "cast", ("t1",), DType.E4M3, overflow)
    b = torch.tensor([[300.0, -300.0]], dtype=torch.bfloat16)
    got = replay(_spec(big, cast, dtype=DType.E4M3), [A[:1, :1]], [b], [])[0]
    torch.testing.assert_close(got.float(), torch.tensor([expected]), rtol=0, atol=0, equal_nan=True)


def test_an_infinity_of_e5m2_is_stored_as_it_is() -> None:
    """The store of a value that already has its dtype does not saturate; that of any other value does."""
    inf = Op("t0", "add", ("acc", Const(float("inf"))), DType.F32)
    cast = Op("t1", "cast", ("t0",), DType.E5M2, Overflow.NONFINITE)
    kept = replay(_spec(inf, cast, dtype=DType.E5M2), [A], [B], [])[0]
    saturated = replay(_spec(inf, dtype=DType.E5M2), [A], [B], [])[0]
    assert kept.float().isinf().all()
    assert (saturated.float() == 57344.0).all()


def test_loads_broadcast_by_kind_where_m_equals_n() -> None:
    """With M = N only the kind tells a row from a column."""
    row = Load("rowvec0", LoadKind.ROWVEC, DType.F32, Stride.ZERO, Stride.ONE)
    column = Load("colvec0", LoadKind.COLVEC, DType.F32, Stride.OTHER, Stride.ZERO)
    scalar = Load("scalar0", LoadKind.SCALAR, DType.F32, Stride.ZERO, Stride.ZERO)
    ops = (
        Op("t0", "add", ("acc", "rowvec0"), DType.F32),
        Op("t1", "add", ("t0", "colvec0"), DType.F32),
        Op("t2", "add", ("t1", "scalar0"), DType.F32),
    )
    zeros = torch.zeros(2, 2, dtype=torch.bfloat16)
    vectors = [torch.tensor([1.0, 2.0]), torch.tensor([[10.0, 0.0], [20.0, 0.0]])[:, 0], torch.tensor(100.0)]
    got = replay(_spec(*ops, loads=(row, column, scalar)), [zeros], [zeros], vectors)[0]
    assert got.tolist() == [[111.0, 112.0], [121.0, 122.0]]


def test_an_output_is_fresh_memory() -> None:
    """A load stored as it is does not come back as an alias, nor do two stores of one value."""
    plane = Load("exact0", LoadKind.EXACT, DType.F32, Stride.OTHER, Stride.ONE)
    stores = (Store("out0", "exact0", DType.F32), Store("out1", "exact0", DType.F32))
    spec = EpilogueSpec((ACC,), (plane,), (), stores)
    given = torch.ones(2, 2)
    first, second = replay(spec, [A], [B], [given])
    first.zero_()
    assert (given == 1).all() and (second == 1).all()


def test_a_value_of_loads_alone_fills_the_plane() -> None:
    scalar = Load("scalar0", LoadKind.SCALAR, DType.I8, Stride.ZERO, Stride.ZERO)
    store = Store("out0", "scalar0", DType.I8, WholePlane(Order.COLUMN))
    spec = EpilogueSpec((ACC,), (scalar,), (), (store,))
    (out,) = replay(spec, [A[:1]], [B], [torch.tensor(7, dtype=torch.int8)])
    assert out.tolist() == [[7, 7]] and out.stride() == (1, 1)


def test_float64_products_round_once() -> None:
    """1 + 2^-30 summed 2^10 times: fp32 drops the small terms one by one, float64 keeps them."""
    a = torch.cat([torch.ones(1, 1), torch.full((1, 1024), 2.0**-30)], dim=1).to(torch.bfloat16)
    b = torch.ones(1025, 1, dtype=torch.bfloat16)
    (exact,) = replay(_spec(), [a], [b], [], accumulate=torch.float64)
    assert exact.item() == 1.0 + 2.0**-20
    assert exact.dtype == torch.float32


@pytest.mark.parametrize("a_lines, b_lines", [(1, 128), (1, 1), (128, 1)])
def test_blocks_have_scales(a_lines: int, b_lines: int) -> None:
    """Against every element multiplied by its own scale, in float64."""
    m, n, k = 131, 260, 300
    scalings = {1: Scaling.LINE, 128: Scaling.SQUARE}
    acc = Accumulator(
        "acc",
        DType.E4M3,
        DType.E5M2,
        fast_accum=False,
        a_scaling=scalings[a_lines],
        b_scaling=scalings[b_lines],
    )
    rng = np.random.default_rng(a_lines + b_lines)
    a, b = rng.integers(-7, 8, (m, k)) / 4, rng.integers(-3, 4, (k, n)) / 2
    of_a = rng.uniform(0.5, 2, (-(-m // a_lines), 3)).astype(np.float32)
    of_b = rng.uniform(0.5, 2, (3, -(-n // b_lines))).astype(np.float32)
    expected = np.zeros((m, n))
    for row in range(m):
        for block in range(3):
            part = slice(128 * block, 128 * (block + 1))
            columns = np.float64(of_b[block])[np.arange(n) // b_lines]
            left = a[row, part] * np.float64(of_a[row // a_lines, block])
            expected[row] += left @ (b[part] * columns)
    operands = [torch.from_numpy(a).to(torch.float8_e4m3fn), torch.from_numpy(of_a)]
    weights = [torch.from_numpy(b).to(torch.float8_e5m2), torch.from_numpy(of_b)]
    spec = EpilogueSpec((acc,), (), (), (Store("out0", "acc", DType.F32),))
    for accumulate, error in ((torch.float32, 1e-6), (torch.float64, 2.0**-24)):
        (got,) = replay(spec, operands, weights, [], accumulate=accumulate)
        difference = np.abs(np.float64(got.numpy()) - expected).max()
        assert difference <= error * np.abs(expected).max()


def _difference(*columns: Columns) -> EpilogueSpec:
    """gate - up, the columns of each being of these."""
    gate, up = (
        Accumulator(name, DType.BF16, DType.BF16, columns=each)
        for name, each in zip(("gate", "up"), columns, strict=True)
    )
    ops = (Op("t0", "sub", ("gate", "up"), DType.F32),)
    return EpilogueSpec((gate, up), (), ops, (Store("out0", "t0", DType.F32),))


def test_two_products() -> None:
    (out,) = replay(_difference(Columns.ALL, Columns.ALL), [A], [B, 3 * B], [])
    assert out.tolist() == (-2 * B.float()).tolist()


def test_even_and_odd_columns() -> None:
    wide = torch.tensor([[1.0, 2.0, 30.0, 40.0], [5.0, 7.0, 90.0, 100.0]], dtype=torch.bfloat16)
    (out,) = replay(_difference(Columns.EVEN, Columns.ODD), [A], [wide], [])
    assert out.tolist() == [[-1.0, -10.0], [-2.0, -10.0]]


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(SpecError, match="there is no such op"):
        replay(_spec(Op("t0", "softmax", ("acc",), DType.F32)), [A], [B], [])


def test_operands_are_counted() -> None:
    with pytest.raises(ValueError, match=r"got 2 and 1 tensors of A and B; the spec has \(1, 1\)"):
        replay(_spec(), [A, A], [B], [])
    with pytest.raises(ValueError, match="got 1 and 2"):
        replay(_spec(), [A], [B, B], [])


def test_ops_after_a_reduction_work_on_its_result() -> None:
    store = Store("out0", "acc", DType.F32, form=Reduction(Axis.ROW, reductions.MAX))
    root = Op("t0", "sqrt", (REDUCED,), DType.F32)
    spec = EpilogueSpec(
        (Accumulator("acc", DType.BF16, DType.BF16),), (), (), (replace(store, after=(root,)),)
    )
    a, b = torch.full((3, 4), 2.0).bfloat16(), torch.full((4, 5), 0.5).bfloat16()
    assert torch.equal(replay(spec, [a], [b], [])[0], torch.full((3,), 2.0))
    place = Op("t0", "row_index", (), DType.I32)
    with pytest.raises(SpecError, match="t0 = row_index is after a reduction, whose result is on no plane"):
        replay(replace(spec, stores=(replace(store, after=(place,)),)), [a], [b], [])
