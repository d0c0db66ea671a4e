"""Stores of kernels, on the simulator against the replay: dtypes, overflow rules, special values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_backend import numerics
from cute_backend.kinds import reductions
from cute_backend.kinds.results import OfBlocks, PartOf, WholePlane
from cute_backend.memory_ops.statements import EmittedChain
from cute_backend.planning import Arch
from cute_backend.replay import replay
from cute_backend.simulator import simulate
from cute_backend.spec import (
    Accumulator,
    Axis,
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
    SpecError,
    Store,
    Stride,
)

M, N, K = 32, 48, 32
ACC = Accumulator("acc", DType.BF16, DType.BF16)
F32, BOOL, E4M3, E5M2 = DType.F32, DType.BOOL, DType.E4M3, DType.E5M2


def plane(dtype: DType) -> Load:
    return Load("exact0", LoadKind.EXACT, dtype, Stride.OTHER, Stride.ONE)


def cast(name: str, value: str, dtype: DType, overflow: Overflow = Overflow.SATURATE) -> Op:
    return Op(name, "cast", (value,), dtype, overflow)


NOISE = (
    Op("t1", "row_index", (), DType.I32),
    Op("t2", "column_index", (), DType.I32),
    Op("t3", "gumbel", ("scalar0", "scalar0", "t2", "t1", Const(3)), F32),
    Op("t4", "gt", ("t3", Const(0.5)), BOOL),
)

SMALL = Op("t0", "mul", ("acc", Const(2.0**-10)), F32)
LARGE = Op("t0", "mul", ("acc", Const(1000.0)), F32)

CASES: dict[str, tuple[tuple[Load, ...], tuple[Op, ...], tuple[tuple[str, DType], ...]]] = {
    "fractions to truth values": ((), (SMALL, cast("t1", "t0", BOOL)), (("t1", BOOL),)),
    "fractions stored as truth values": ((), (SMALL,), (("t0", BOOL),)),
    "integers to truth values": (
        (),
        (LARGE, cast("t1", "t0", DType.I32), cast("t2", "t1", BOOL)),
        (("t2", BOOL), ("t1", DType.I32)),
    ),
    "truth values as numbers": (
        (plane(BOOL),),
        (Op("t0", "gt", ("acc", Const(0.0)), BOOL), Op("t1", "logical_xor", ("t0", "exact0"), BOOL)),
        (("t1", DType.U8), ("exact0", BOOL), ("t1", DType.BF16)),
    ),
    "places and noise": (
        (Load("scalar0", LoadKind.SCALAR, DType.I32, Stride.ZERO, Stride.ZERO),),
        NOISE,
        (("t1", DType.I32), ("t2", DType.I32), ("t4", DType.U8)),
    ),
    "integers wrap": (
        (),
        (
            LARGE,
            cast("t1", "t0", DType.I8),
            cast("t2", "t0", DType.U8),
            Op("t3", "add", ("t1", "t2"), DType.I32),
        ),
        (("t1", DType.I8), ("t2", DType.U8), ("t3", DType.F16)),
    ),
    "zeros of both signs as numbers": (
        (),
        (
            Op("t0", "copysign", ("acc", Const(0.0)), F32),
            Op("t1", "copysign", ("acc", Const(-0.0)), F32),
            Op("t2", "signbit", (Const(-0.0),), BOOL),
        ),
        (("t0", F32), ("t1", F32), ("t2", BOOL)),
    ),
    "fp8 saturates": ((), (LARGE,), (("t0", E4M3), ("t0", E5M2))),
    "fp8 overflows": (
        (),
        (LARGE, cast("t1", "t0", E4M3, Overflow.NONFINITE), cast("t2", "t0", E5M2, Overflow.NONFINITE)),
        (("t1", E4M3), ("t2", E5M2)),
    ),
    "an overflow that the chain reads": (
        (),
        (
            LARGE,
            cast("t1", "t0", E5M2, Overflow.NONFINITE),
            cast("t2", "t0", E4M3, Overflow.NONFINITE),
            Op("t3", "isfinite", ("t1",), BOOL),
            Op("t4", "isnan", ("t2",), BOOL),
        ),
        (("t1", F32), ("t3", BOOL), ("t4", BOOL)),
    ),
    "infinities of e5m2 as they were loaded": ((plane(E5M2),), (), (("exact0", E5M2), ("acc", F32))),
    "nans of e4m3 as they were loaded": ((plane(E4M3),), (), (("exact0", E4M3), ("exact0", F32))),
}


def codes(dtype: DType) -> Tensor:
    """(M, N) with every code of an 8-bit dtype."""
    raw = torch.arange(M * N, dtype=torch.int32).reshape(M, N)
    if dtype is BOOL:
        return raw % 3 == 0
    return (raw & 255).to(torch.uint8).view(numerics.TORCH_DTYPES[dtype])


def test_what_is_reduced_is_rounded_first_where_the_spec_says_so() -> None:
    """A plane leaves its last cast to the store, which would come too late for a sum."""
    ops = (SMALL, cast("t1", "t0", DType.BF16), Op("t2", "gt", ("t0", Const(0.0)), BOOL))
    row_sum = Reduction(Axis.ROW, reductions.SUM)
    rounded, plane = Store("out0", "t1", DType.BF16, form=row_sum), Store("out1", "t1", DType.BF16)
    count = Store("out2", "t2", F32, form=row_sum)
    chain = EmittedChain(
        EpilogueSpec((ACC,), (), ops, (rounded, plane, count), Precision.EAGER), {"acc": "acc[e]"}
    )
    assert chain.stored(rounded)[:2] == ("t1", F32) and chain.stored(plane)[:2] == ("t0", F32)
    assert chain.stored(count)[:2] == ("math.to_f32(t2)", F32)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
@pytest.mark.parametrize("name", CASES)
def test_stores(name: str, arch: Arch) -> None:
    loads, ops, stored = CASES[name]
    stores = tuple(Store(f"out{index}", value, dtype) for index, (value, dtype) in enumerate(stored))
    spec = EpilogueSpec((ACC,), loads, ops, stores, Precision.EAGER)
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-4, 5, (M, K), generator=generator).to(torch.bfloat16)
    b = torch.randint(-4, 5, (N, K), generator=generator).to(torch.bfloat16).t()
    seed = torch.tensor([12345], dtype=torch.int32)
    operands = [codes(load.dtype) if load.kind is LoadKind.EXACT else seed for load in loads]
    outputs, _ = simulate.run_region(spec, [a], [b], operands, simulate.Machine(arch))
    for got, expected in zip(outputs, replay(spec, [a], [b], operands), strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("n", [N, N - 3])
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A, Arch.SM80])
def test_parts_of_one_result(arch: Arch, n: int) -> None:
    """Three planes side by side in one tensor, by TMA and, where rows are unaligned, by element."""
    ops = (Op("t0", "mul", ("acc", Const(0.5)), F32), Op("t1", "neg", ("acc",), F32))
    values = enumerate(("t0", "acc", "t1"))
    parts = tuple(Store(f"out{i + 1}", value, DType.BF16, form=PartOf(i, 3)) for i, value in values)
    spec = EpilogueSpec((ACC,), (), ops, (Store("out0", "acc", F32), *parts))
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-4, 5, (M, K), generator=generator).to(torch.bfloat16)
    b = torch.randint(-4, 5, (n, K), generator=generator).to(torch.bfloat16).t()
    (whole, joined), _ = simulate.run_region(spec, [a], [b], [], simulate.Machine(arch))
    plane = a.float() @ b.float()
    assert torch.equal(whole, plane)
    assert torch.equal(joined, torch.cat((plane * 0.5, plane, -plane), 1).to(torch.bfloat16))
    assert all(map(torch.equal, replay(spec, [a], [b], []), (whole, joined)))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A, Arch.SM80])
@pytest.mark.parametrize("n", [N, N - 3], ids=["by tma", "by element"])
@pytest.mark.parametrize(
    "columns", [(Columns.EVEN, Columns.ODD), (Columns.ALL,)], ids=["pair", "one product"]
)
def test_pairs_of_columns(arch: Arch, n: int, columns: tuple[Columns, ...]) -> None:
    """Every element of 32 bits has two neighbours, in order: a result of twice the columns."""
    accumulators = tuple(replace(ACC, name=f"acc{i}", columns=each) for i, each in enumerate(columns))
    ops = (
        Op("t0", "mul", (accumulators[-1].name, Const(0.5)), F32),
        Op("t1", "pair_f16", ("acc0", "t0"), DType.I32),
        Op("t2", "pair_bf16", ("t0", "acc0"), DType.I32),
    )
    stores = (Store("out0", "t1", DType.F16X2), Store("out1", "t2", DType.BF16X2), Store("out2", "t0", F32))
    spec = EpilogueSpec(accumulators, (), ops, stores)
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-4, 5, (M + 1, K), generator=generator).to(torch.bfloat16)
    b = torch.randint(-4, 5, (n * len(columns), K), generator=generator).to(torch.bfloat16).t()
    both = a.float() @ b.float()
    first, second = (both[:, ::2], both[:, 1::2]) if len(columns) > 1 else (both, both)
    second = second / 2
    outputs, _ = simulate.run_region(spec, [a], [b], [], simulate.Machine(arch))
    expected = [torch.stack((first, second), -1), torch.stack((second, first), -1)]
    for got, right, dtype in zip(outputs, expected, (torch.float16, torch.bfloat16), strict=False):
        assert got.dtype is dtype and got.is_contiguous()
        torch.testing.assert_close(got.float(), right.flatten(-2).to(dtype).float(), rtol=0, atol=0)
    torch.testing.assert_close(outputs[2], second, rtol=0, atol=0)


PAIRED_WRONGLY = {
    "of floats": (Store("out0", "acc", DType.BF16X2), "out0 stores f32 as bf16x2; pairs are i32"),
    "in columns": (
        Store("out0", "t0", DType.BF16X2, WholePlane(Order.COLUMN)),
        "out0 is stored as bf16x2; pairs are a whole plane by rows",
    ),
    "of blocks": (Store("out0", "t0", DType.F16X2, OfBlocks(8)), "out0 is stored as f16x2; pairs are a"),
    "as a part": (Store("out0", "t0", DType.F16X2, PartOf(0, 2)), "out0 is stored as f16x2; pairs are a"),
}


@pytest.mark.parametrize("name", PAIRED_WRONGLY)
def test_pairs_that_no_kernel_writes(name: str) -> None:
    store, message = PAIRED_WRONGLY[name]
    with pytest.raises(SpecError, match=f"^{message}"):
        EpilogueSpec((ACC,), (), (Op("t0", "pair_bf16", ("acc", "acc"), DType.I32),), (store,))


def test_a_value_is_no_pair() -> None:
    load = Load("exact0", LoadKind.EXACT, DType.BF16X2, Stride.OTHER, Stride.ONE)
    with pytest.raises(SpecError, match=r"^exact0 is bf16x2, which only stores are"):
        EpilogueSpec((ACC,), (load,), (), (Store("out0", "acc", DType.F32),))
