"""Pairs of accumulators: two products of one A, and even and odd columns of one, on the simulated machine.

Small integers and powers of two, so that a kernel has to be right to the bit. The two products have scales of
their own and are subtracted, so that neither one read for the other, nor a column for its neighbour, goes by.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_templates import integers, machine, op, wrong
from torch import Tensor

from cute_backend.planning import Arch, TileConfig, table
from cute_backend.replay import replay
from cute_backend.simulator.api import run_region
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
    ReduceKind,
    Reduction,
    Store,
    Stride,
)

TWO, NEIGHBOURS = (Columns.ALL, Columns.ALL), (Columns.EVEN, Columns.ODD)
COLUMNS = pytest.mark.parametrize("columns", [TWO, NEIGHBOURS], ids=["two", "neighbours"])


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
        Store("out1", "t5", DType.F32, reduce=Reduction(Axis.ROW, ReduceKind.MAX)),
        Store("out2", "t4", DType.F32, reduce=Reduction(Axis.COLUMN, ReduceKind.MIN)),
    )
    return EpilogueSpec(accumulators, loads, ops, stores)


def operands(spec: EpilogueSpec, m: int, n: int, k: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Every column of every B has a scale of its own; those of one vector lie two apart."""
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


COUNTS = {Arch.SM90A: 5, Arch.SM100A: 4}
CONFIGS = [(arch, index) for arch in COUNTS for index in range(COUNTS[arch])]


@pytest.mark.sweep
@COLUMNS
@pytest.mark.parametrize(("arch", "index"), CONFIGS, ids=lambda value: str(getattr(value, "value", value)))
def test_every_configuration_at_edges_in_every_direction(arch, index, columns):
    spec = difference(columns)
    configs = table(arch, spec)
    assert len(configs) == COUNTS[arch] and all(config.products == 2 for config in configs)
    config = configs[index]
    check(spec, config, 2 * config.tile_m + 40, config.tile_n + 24, 208)


@pytest.mark.sweep
@COLUMNS
@pytest.mark.parametrize("arch", COUNTS)
def test_the_masked_store_and_few_rows(arch, columns):
    spec = difference(columns)
    for m in (1, 133):
        check(spec, table(arch, spec)[-2], m, 69, 160)


@pytest.mark.sweep
@COLUMNS
@pytest.mark.parametrize("arch", COUNTS)
@pytest.mark.parametrize("majors", [(Major.K, Major.MN), (Major.MN, Major.K)], ids=["b", "a"])
@pytest.mark.parametrize("index", [0, -1], ids=["largest", "smallest"])
def test_operands_that_are_contiguous_along_m_or_n(arch, majors, columns, index):
    spec = difference(columns, DType.BF16, *majors)
    config = table(arch, spec)[index]
    check(spec, config, config.tile_m + 40, config.tile_n + 24, 104)


@pytest.mark.sweep
@COLUMNS
@pytest.mark.parametrize("arch", COUNTS)
def test_no_seed_changes_a_bit(arch, columns):
    """One cluster works through all tiles, and every ring of stages wraps around."""
    spec = difference(columns)
    config = table(arch, spec)[2 if arch is Arch.SM100A else 0]
    for seed in (2, 3):
        check(spec, config, 2 * config.tile_m, 2 * config.tile_n, 7 * 128, seed)


PROMOTED = len(table(Arch.SM90A, difference(TWO, fast_accum=False)))
"""Configurations of pairs whose sums are promoted."""


@pytest.mark.sweep
@COLUMNS
@pytest.mark.parametrize("index", range(PROMOTED))
def test_slow_accumulation_is_promoted(columns, index):
    spec = difference(columns, fast_accum=False)
    configs = table(Arch.SM90A, spec)
    assert len(configs) == PROMOTED
    check(spec, configs[index], configs[index].tile_m + 40, configs[index].tile_n + 24, 1040)


def test_tiles_as_wide_as_an_mma_can_be():
    """128 x 128 of each product, in two warpgroups."""
    config = TileConfig(Arch.SM90A, 128, 128, 2, products=2)
    for columns in (TWO, NEIGHBOURS):
        spec = difference(columns)
        check(spec, replace(config, b_columns=spec.b_columns), 296, 152, 208)
