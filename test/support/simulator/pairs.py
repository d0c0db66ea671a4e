"""Pairs of accumulators with different scales, which are subtracted, so that a swap of the two is noticed."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_backend.kinds import reductions
from cute_backend.planning import TileConfig
from cute_backend.replay import replay
from cute_backend.simulator.simulate import run_region
from cute_backend.spec import (
    Accumulator,
    Axis,
    BColumns,
    Columns,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Major,
    Reduction,
    Store,
    Stride,
)
from support.simulator.exact import integers, machine, op, wrong

TWO, NEIGHBOURS = (Columns.ALL, Columns.ALL), (Columns.EVEN, Columns.ODD)


def difference(
    columns: tuple[Columns, ...],
    dtype: DType = DType.E4M3,
    a_major: Major = Major.K,
    b_major: Major = Major.K,
    fast_accum: bool = True,
) -> EpilogueSpec:
    """acc0 * scale_a * scale_b0 - acc1 * scale_b1 + exact0, and its largest absolute value in each row."""
    accumulators = tuple(
        Accumulator(f"acc{i}", dtype, dtype, a_major, b_major, fast_accum, each)
        for i, each in enumerate(columns)
    )
    loads = (
        Load("scale_a", LoadKind.COLVEC, DType.F32, Stride.ONE, Stride.ZERO),
        Load("scale_b0", LoadKind.ROWVEC, DType.F32, Stride.ZERO, Stride.OTHER),
        Load("scale_b1", LoadKind.ROWVEC, DType.BF16, Stride.ZERO, Stride.OTHER),
        Load("exact0", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.ONE),
    )
    ops = (
        op("t0", "mul", "acc0", "scale_a"),
        op("t1", "mul", "t0", "scale_b0"),
        op("t2", "mul", "acc1", "scale_b1"),
        op("t3", "sub", "t1", "t2"),
        op("t4", "add", "t3", "exact0"),
        op("t5", "abs", "t4"),
    )
    stores = (
        Store("out0", "t4", DType.BF16),
        Store("out1", "t5", DType.F32, form=Reduction(Axis.ROW, reductions.MAX)),
        Store("out2", "t4", DType.F32, form=Reduction(Axis.COLUMN, reductions.MIN)),
    )
    return EpilogueSpec(accumulators, loads, ops, stores)


def operands(spec: EpilogueSpec, m: int, n: int, k: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Operands in which every column of every B has its own scale. Scales of one vector are two elements
    apart."""
    generator = torch.Generator().manual_seed(m + n + k)
    acc, columns = spec.product, 2 * n if spec.b_columns is BColumns.INTERLEAVED else n

    def product(rows: int, dtype: DType, major: Major) -> Tensor:
        return (
            integers((rows, k), dtype, generator)
            if major is Major.K
            else integers((k, rows), dtype, generator).t()
        )

    scales = torch.arange(2 * n) % 67 + 1.0
    loads = [
        torch.arange(m) % 61 + 1.0,
        scales[::2],
        scales.to(torch.bfloat16)[1::2],
        torch.randint(-99, 100, (m, n), generator=generator).to(torch.bfloat16),
    ]
    bs = [product(columns, acc.b_dtype, acc.b_major).t() for _ in range(spec.b_count)]
    return [product(m, acc.a_dtype, acc.a_major)], bs, loads


def check(
    spec: EpilogueSpec, config: TileConfig, m: int, n: int, k: int, seed: int = 1, clusters: int = 1
) -> None:
    a, bs, loads = operands(spec, m, n, k)
    outputs, _ = run_region(spec, a, bs, loads, machine(config, seed, clusters))
    for actual, expected in zip(outputs, replay(spec, a, bs, loads), strict=True):
        plane = actual if actual.dim() == 2 else actual[:, None]
        assert torch.equal(actual, expected), wrong(plane, expected.reshape(plane.shape))
