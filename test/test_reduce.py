"""Results of reductions: against torch on special values, and by the rules that torch leaves open."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cute_backend.kinds import reductions
from cute_backend.kinds.results import PLANE
from cute_backend.replay import replay
from cute_backend.runtime.arguments.operands import output_like
from cute_backend.runtime.calls.op import gemm_epilogue
from cute_backend.spec import (
    Accumulator,
    Axis,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Op,
    Overflow,
    Precision,
    Reduction,
    Store,
    Stride,
)
from support.small_specs import reducing, taken

INF, NAN = float("inf"), float("nan")
VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 88.0, -1e30, 3e38, 1e-45, INF, -INF, NAN])
TORCH = {
    reductions.SUM: torch.sum,
    reductions.MEAN: torch.mean,
    reductions.PROD: torch.prod,
    reductions.MAX: torch.amax,
    reductions.MIN: torch.amin,
    reductions.ARGMAX: torch.argmax,
    reductions.ARGMIN: torch.argmin,
    reductions.LOGSUMEXP: torch.logsumexp,
}
DIMS = {Axis.ROW: 1, Axis.COLUMN: 0}


@st.composite
def planes(draw: st.DrawFn) -> Tensor:
    m, n = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return torch.tensor(draw(st.lists(VALUES, min_size=m * n, max_size=m * n))).reshape(m, n)


def eager(plane: Tensor, reduction: Reduction) -> Tensor:
    if reduction.axis is Axis.ALL:
        return TORCH[reduction.kind](plane.flatten(), 0)
    return TORCH[reduction.kind](plane, DIMS[reduction.axis])


@pytest.mark.parametrize("kind", reductions.REDUCTIONS)
@pytest.mark.parametrize("axis", Axis)
@settings(max_examples=60, deadline=None)
@given(plane=planes())
def test_it_is_torchs(axis: Axis, kind: reductions.ReductionKind, plane: Tensor) -> None:
    """To the bit where no sum is rounded: zeros, infinities, NaN and ties among them.

    Factors are near 1 or 0: whether a product of others overflows on the way depends on the order.
    """
    if kind is reductions.PROD:
        plane = torch.where(plane == 0, plane, plane.abs().clamp(0.5, 2.0) * plane.sign())
    plane = taken(kind, plane)
    got, expected = Reduction(axis, kind).reference(plane, torch.float32), eager(plane, Reduction(axis, kind))
    assert got.dtype == expected.dtype
    exact = kind.is_place or kind.is_element
    rtol = 0 if exact else 1e-6
    torch.testing.assert_close(got, expected, rtol=rtol, atol=0 if exact else 1e-45, equal_nan=True)


@pytest.mark.parametrize("kind", [kind for kind in reductions.REDUCTIONS if kind.is_place or kind.is_element])
@given(plane=planes(), seed=st.integers(0, 99))
def test_extrema_do_not_depend_on_the_order(kind: reductions.ReductionKind, plane: Tensor, seed: int) -> None:
    """Not the sign of a zero either; and an index is the lowest of those that have the extremum."""
    order = torch.randperm(plane.shape[1], generator=torch.Generator().manual_seed(seed))
    got = Reduction(Axis.ROW, kind).reference(plane[:, order], torch.float32)
    if kind.is_place:
        extremum = reductions.MAX if kind is reductions.ARGMAX else reductions.MIN
        wanted = Reduction(Axis.ROW, extremum).reference(plane, torch.float32)[:, None]
        found = plane[:, order].gather(1, got[:, None])
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        same = (plane[:, order] == wanted) | (plane[:, order].isnan() & wanted.isnan())
        assert torch.equal(got, same.int().argmax(1))
    else:
        expected = Reduction(Axis.ROW, kind).reference(plane, torch.float32)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.signbit() & ~got.isnan(), expected.signbit() & ~expected.isnan())


def test_zeros_have_an_order_as_extrema_and_none_as_arguments() -> None:
    zeros = torch.tensor([[-0.0, 0.0], [0.0, -0.0]])
    assert not Reduction(Axis.ROW, reductions.MAX).reference(zeros, torch.float32).signbit().any()
    assert Reduction(Axis.ROW, reductions.MIN).reference(zeros, torch.float32).signbit().all()
    assert Reduction(Axis.ROW, reductions.ARGMAX).reference(zeros, torch.float32).tolist() == [0, 0]
    assert Reduction(Axis.ROW, reductions.ARGMIN).reference(zeros, torch.float32).tolist() == [0, 0]


@pytest.mark.parametrize("accumulate, expected", [(torch.float32, 2.0**24), (torch.float64, 2.0**24 + 2.0)])
def test_sums_are_formed_in_the_dtype_that_is_asked_for(accumulate: torch.dtype, expected: float) -> None:
    row = torch.tensor([[2.0**24, 1.0, 1.0]])
    assert Reduction(Axis.ROW, reductions.SUM).reference(row, accumulate).item() == expected


# As stores of a spec

ACC = Accumulator("acc", DType.BF16, DType.BF16)
M, N, K = 5, 7, 16


def operands(seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-3, 4, (M, K), generator=generator).to(torch.bfloat16)
    b = torch.randint(-3, 4, (K, N), generator=generator).to(torch.bfloat16)
    return [a], [b]


def stores(*items: tuple[str, DType, Reduction | None]) -> tuple[Store, ...]:
    return tuple(
        Store(f"out{i}", value, dtype, reduction or PLANE)
        for i, (value, dtype, reduction) in enumerate(items)
    )


def test_every_shape_and_dtype_beside_the_plane() -> None:
    pairs = enumerate(itertools.product(Axis, reductions.REDUCTIONS), 1)
    ops, reducing_stores = zip(*(reducing(f"out{i}", "t0", *each) for i, each in pairs), strict=True)
    made = (*stores(("t0", DType.BF16, None)), *reducing_stores)
    quarter = Op("t0", "mul", ("acc", Const(0.25)), DType.F32)
    spec = EpilogueSpec((ACC,), (), (quarter, *itertools.chain(*ops)), made)
    a, b = operands()
    plane = (a[0].float() @ b[0].float()) * 0.25
    results = replay(spec, a, b, [])
    assert torch.equal(results[0], plane.to(torch.bfloat16))
    for store, result in zip(made[1:], results[1:], strict=True):
        reduction = store.form.reduction
        assert reduction is not None
        torch.testing.assert_close(result, eager(taken(reduction.kind, plane), reduction))
        like = output_like((store,), a[0], M, N)
        assert (result.shape, result.dtype, result.stride()) == (like.shape, like.dtype, like.stride())


def test_what_does_not_vary_is_counted_for_each_element() -> None:
    bias = Load("bias", LoadKind.ROWVEC, DType.F32, Stride.ZERO, Stride.ONE)
    scalar = Load("scalar0", LoadKind.SCALAR, DType.I8, Stride.ZERO, Stride.ZERO)
    column_sum = Reduction(Axis.COLUMN, reductions.SUM)
    spec = EpilogueSpec(
        (ACC,),
        (bias, scalar),
        (),
        stores(("bias", DType.F32, column_sum), ("scalar0", DType.F32, column_sum)),
    )
    vector = torch.arange(N, dtype=torch.float32)
    sums, counts = replay(spec, *operands(), [vector, torch.tensor([3], dtype=torch.int8)])
    assert torch.equal(sums, vector * M) and torch.equal(counts, torch.full((N,), 3.0 * M))


def test_the_result_is_rounded_once_and_the_value_where_the_spec_says_so() -> None:
    ops = (Op("t0", "add", ("acc", Const(256.5)), DType.F32), Op("t1", "cast", ("t0",), DType.BF16))
    reduction = Reduction(Axis.ROW, reductions.SUM)
    made = stores(("t1", DType.F32, reduction), ("t1", DType.BF16, reduction))
    a, b = [torch.zeros(M, K, dtype=torch.bfloat16)], [torch.zeros(K, N, dtype=torch.bfloat16)]
    fused = replay(EpilogueSpec((ACC,), (), ops, made), a, b, [])
    assert (fused[0] == 256.5 * N).all() and (fused[1] == torch.tensor(256.5 * N).to(torch.bfloat16)).all()
    rounded = replay(EpilogueSpec((ACC,), (), ops, made, Precision.EAGER), a, b, [])
    assert (rounded[0] == 256.0 * N).all()


def test_extrema_keep_integers_and_infinities() -> None:
    ops = (
        Op("t0", "cast", ("acc",), DType.I8),
        Op("t1", "mul", ("acc", Const(1e6)), DType.F32),
        Op("t2", "cast", ("t1",), DType.E5M2, Overflow.NONFINITE),
    )
    largest = Reduction(Axis.ALL, reductions.MAX)
    spec = EpilogueSpec(
        (ACC,),
        (),
        ops,
        stores(("t0", DType.I8, largest), ("t2", DType.E5M2, largest), ("t2", DType.F32, largest)),
    )
    a, b = operands()
    integer, infinity, wide = replay(spec, a, b, [])
    assert integer.dtype is torch.int8 and integer == (a[0].float() @ b[0].float()).max()
    assert infinity.float() == INF == wide


def test_the_place_of_an_element_is_a_value() -> None:
    ops = (
        Op("t0", "row_index", (), DType.I32),
        Op("t1", "column_index", (), DType.I32),
        Op("t2", "mul", ("t0", Const(100)), DType.I32),
        Op("t3", "add", ("t2", "t1"), DType.I32),
    )
    (result,) = replay(EpilogueSpec((ACC,), (), ops, stores(("t3", DType.I32, None))), *operands(), [])
    assert torch.equal(result, (torch.arange(M)[:, None] * 100 + torch.arange(N)).int())


def test_nothing_is_reduced_as_torch_does() -> None:
    empty = [torch.zeros(0, K, dtype=torch.bfloat16)], [torch.zeros(K, N, dtype=torch.bfloat16)]
    sums = stores(*(("acc", DType.F32, Reduction(axis, reductions.SUM)) for axis in Axis))
    row, column, total = replay(EpilogueSpec((ACC,), (), (), sums), *empty, [])
    assert row.shape == (0,) and torch.equal(column, torch.zeros(N)) and total == 0
    largest = stores(("acc", DType.F32, Reduction(Axis.COLUMN, reductions.MAX)))
    with pytest.raises(IndexError):
        replay(EpilogueSpec((ACC,), (), (), largest), *empty, [])


def test_the_op_has_reductions_for_fakes_too() -> None:
    both = (Reduction(Axis.ROW, reductions.ARGMAX), Reduction(Axis.ALL, reductions.MEAN))
    spec = EpilogueSpec((ACC,), (), (), stores(("acc", DType.I64, both[0]), ("acc", DType.BF16, both[1])))
    a, b = operands()
    torch.library.opcheck(gemm_epilogue, (a, b, [], spec.to_json()))
