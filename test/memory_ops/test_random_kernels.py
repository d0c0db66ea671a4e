"""Kernels of random specs, compiled and run on the simulator, against the replay: bit for bit.

Only ops that the device computes exactly are drawn, and no products: the compiler may contract one and a sum
after it into a single rounding.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cute_backend import numerics
from cute_backend.planning import Arch, TileConfig
from cute_backend.replay import replay
from cute_backend.simulator import simulate
from cute_backend.spec import (
    Accumulator,
    BColumns,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Major,
    Op,
    Precision,
    Scaling,
    Store,
    Stride,
)
from support.independent import EXACT_OPS
from support.modes import with_modes
from support.random_specs import specs

N, K = 48, 32
ROWS = tuple(name for name in EXACT_OPS if name not in ("mul", "div", "reciprocal"))


def values(shape: tuple[int, ...], dtype: DType, generator: torch.Generator) -> Tensor:
    """Small halves and thirds, a few special values, all bytes, truth values."""
    if dtype is DType.BOOL:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_float:
        return torch.randint(-300, 300, shape, generator=generator).to(numerics.TORCH_DTYPES[dtype])
    numbers = torch.randint(-900, 900, shape, generator=generator) / 3
    special = torch.tensor([0.0, -0.0, 464.0, 70000.0, torch.inf, -torch.inf, torch.nan])
    picked = special[torch.randint(0, len(special), shape, generator=generator)]
    mixed = torch.where(torch.rand(shape, generator=generator) < 0.1, picked, numbers)
    return numerics.store(mixed, dtype)


def operand(load: Load, m: int, generator: torch.Generator) -> Tensor:
    """A tensor of the load's kind, with the strides that it is classed by."""
    if load.kind is LoadKind.SCALAR:
        return values((1,), load.dtype, generator)
    if load.is_split:
        return with_modes(load, m, N, lambda shape: values(shape, load.dtype, generator))
    if load.kind is not LoadKind.EXACT:
        length = N if load.kind is LoadKind.ROWVEC else m
        stride = load.stride_n if load.kind is LoadKind.ROWVEC else load.stride_m
        return (
            values((length,), load.dtype, generator)
            if stride is Stride.ONE
            else (values((length, 3), load.dtype, generator)[:, 1])
        )
    if load.stride_n is Stride.ONE:
        return values((m, N), load.dtype, generator)
    if load.stride_m is Stride.ONE:
        return values((N, m), load.dtype, generator).t()
    return values((m, N, 2), load.dtype, generator)[:, :, 1]


def product_operand(rows: int, k: int, dtype: DType, major: Major, generator: torch.Generator) -> Tensor:
    """(rows, k), contiguous along k or along its rows."""
    unit = 1 if dtype is DType.I8 else 8
    made = (torch.randint(-7, 8, (rows, k), generator=generator) / unit).to(numerics.TORCH_DTYPES[dtype])
    return made if major is Major.K else made.t().contiguous().t()


def scales(lines: int, generator: torch.Generator) -> Tensor:
    """(lines, 2) powers of two, so that sums of scaled products are exact."""
    return torch.exp2(torch.randint(-2, 3, (lines, 2), generator=generator))


def unscaled(acc: Accumulator) -> Accumulator:
    return replace(acc, a_scaling=Scaling.NONE, b_scaling=Scaling.NONE)


def _has_two_unit_strides(spec: EpilogueSpec) -> bool:
    return any(load.stride_m is load.stride_n is Stride.ONE for load in spec.loads)


DRAWN = {"spec": specs(ROWS), "m": st.sampled_from([1, 40, 48]), "seed": st.integers(0, 2**16)}
HOW = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
@settings(max_examples=2, **HOW)
@given(**DRAWN)
def test_a_random_spec(arch: Arch, spec: EpilogueSpec, m: int, seed: int) -> None:
    check(arch, spec, m, seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
@settings(max_examples=20, **HOW)
@given(**DRAWN)
def test_many_random_specs(arch: Arch, spec: EpilogueSpec, m: int, seed: int) -> None:
    check(arch, spec, m, seed)


def check(arch: Arch, spec: EpilogueSpec, m: int, seed: int) -> None:
    assume(not _has_two_unit_strides(spec))
    if spec.product.is_block_scaled and arch is not Arch.SM90A:
        spec = replace(spec, accumulators=tuple(unscaled(acc) for acc in spec.accumulators))
    acc, columns = spec.product, 2 * N if spec.b_columns is BColumns.INTERLEAVED else N
    generator = torch.Generator().manual_seed(seed)
    k = 5 * K if acc.is_block_scaled else K
    of_a = [product_operand(m, k, acc.a_dtype, acc.a_major, generator)]
    bs = [product_operand(columns, k, acc.b_dtype, acc.b_major, generator).t() for _ in range(spec.b_count)]
    if acc.is_block_scaled:
        of_a.append(scales(acc.a_scaling.blocks(m), generator))
        bs += [scales(acc.b_scaling.blocks(columns), generator).t() for _ in range(spec.b_count)]
    loads = [operand(load, m, generator) for load in spec.loads]
    outputs, _ = simulate.run_region(spec, of_a, bs, loads, simulate.Machine(arch))
    for got, expected in zip(outputs, replay(spec, of_a, bs, loads), strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=0, equal_nan=True)


CAST_TO = (DType.BF16, DType.F16, DType.E4M3, DType.E5M2, DType.I8, DType.U8, DType.I32)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
@pytest.mark.parametrize("number", [-65296, 300.7, 16777217, -0.0])
def test_a_cast_number_is_rounded(number: float, arch: Arch) -> None:
    """The DSL computes with Python's numbers where it can, and those have more bits."""
    acc = Accumulator("acc", DType.BF16, DType.BF16)
    casts = tuple(Op(f"t{i}", "cast", (Const(number),), dtype) for i, dtype in enumerate(CAST_TO))
    stores = tuple(
        Store(f"out{i}", op.name, DType.I32 if op.dtype.register is DType.I32 else DType.F32)
        for i, op in enumerate(casts)
    )
    spec = EpilogueSpec((acc,), (), casts, stores, Precision.EAGER)
    a = torch.ones(8, 16, dtype=torch.bfloat16)
    results, _ = simulate.run_region(spec, [a], [a.t()], [], simulate.Machine(arch))
    for dtype, got, expected in zip(CAST_TO, results, replay(spec, [a], [a.t()], []), strict=True):
        assert torch.equal(got, expected) and torch.equal(got.signbit(), expected.signbit()), dtype


@pytest.mark.parametrize(
    "config",
    [TileConfig(Arch.SM90A, 64, 64), TileConfig(Arch.SM100A, 128, 64, unrolled=True)],
    ids=lambda config: config.arch.value,
)
def test_bytes_that_are_held_in_registers_have_no_sign(config: TileConfig) -> None:
    acc = Accumulator("acc", DType.BF16, DType.BF16)
    row = Load("rowvec0", LoadKind.ROWVEC, DType.U8, Stride.ZERO, Stride.ONE)
    spec = EpilogueSpec((acc,), (row,), (), (Store("out0", row.name, DType.F32),))
    values = torch.arange(192, 256, dtype=torch.uint8)
    a, b = torch.zeros(8, 64).bfloat16(), torch.zeros(64, 64).bfloat16().t()
    (out,), launched = simulate.run_region(
        spec, [a], [b], [values], simulate.Machine(config.arch, config=config)
    )
    assert launched.kernel.plan.placements[row.name].name == "register_hoist"
    assert torch.equal(out, values.float().expand(8, 64))
