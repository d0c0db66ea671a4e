"""Sums of k tiles that are scaled by blocks, on the simulated Blackwell: right to the bit in every recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from _pytest.mark import ParameterSet

import cute_backend
from cute_backend.kinds import reductions
from cute_backend.planning import Arch, TileConfig, offered
from cute_backend.planning.search import tunable
from cute_backend.replay import replay
from cute_backend.runtime.compiling.build import build
from cute_backend.simulator.simulate import run_region
from cute_backend.spec import (
    Accumulator,
    Axis,
    BColumns,
    Columns,
    DType,
    EpilogueSpec,
    Reduction,
    Scaling,
    Store,
)
from support.epilogues import BLOCKWISE, Problem
from support.reference import TOLERANCE, as_tuple, in_float64, relative_error
from support.simulator.exact import RESIDUAL, block_scales, check_exact, integers, machine, op, sm100

LINE, SQUARE = Scaling.LINE, Scaling.SQUARE
RECIPES = [(LINE, SQUARE), (LINE, LINE), (SQUARE, LINE)]
of_each_recipe = pytest.mark.parametrize(("a", "b"), RECIPES, ids=lambda scaling: scaling.value)


def product(a: Scaling, b: Scaling, name: str = "acc", columns: Columns = Columns.ALL) -> Accumulator:
    return Accumulator(
        name, DType.E4M3, DType.E4M3, fast_accum=False, columns=columns, a_scaling=a, b_scaling=b
    )


def residual(a: Scaling = LINE, b: Scaling = SQUARE) -> EpilogueSpec:
    """acc + exact0."""
    return EpilogueSpec(
        (product(a, b),), (RESIDUAL,), (op("t0", "add", "acc", "exact0"),), (Store("out0", "t0", DType.BF16),)
    )


CONFIGS = [
    sm100(256, 256, 2, ctas=2, column_groups=2),
    sm100(256, 128, 2, ctas=2),
    sm100(128, 128),
    sm100(128, 64),
    sm100(128, 64, split_k=4),
    sm100(128, 256, column_groups=2),
    sm100(128, 64, 2, 2),
    sm100(256, 128, 4, ctas=2, column_groups=2),
    replace(sm100(128, 128), arch=Arch.SM103A),
]


@pytest.mark.sweep(1)
@of_each_recipe
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.arch.value} {config.name}")
def test_edges_in_every_direction(config: TileConfig, a: Scaling, b: Scaling) -> None:
    """Rows and columns beyond the last block, and 16 of K in the last one."""
    problem = (config.tile_m + 133, config.tile_n + 72, 5 * 128 + 16)
    launch = check_exact(residual(a, b), problem, machine(config))
    assert build(launch.kernel).spill_bytes == 0


@pytest.mark.exhaustive
@of_each_recipe
@pytest.mark.parametrize("problem", [(1, 16, 16), (3, 136, 400), (192, 72, 144), (131, 69, 272)], ids=str)
def test_few_rows_and_empty_tiles(problem: tuple[int, int, int], a: Scaling, b: Scaling) -> None:
    check_exact(residual(a, b), problem, machine(sm100(128, 64, 2)))


@pytest.mark.exhaustive
def test_every_ring_wraps_around() -> None:
    """One cluster works through all tiles, under several orders of completion."""
    for seed in (None, 1, 2):
        check_exact(residual(LINE, LINE), (256, 128, 13 * 128), machine(sm100(128, 64), seed))


@pytest.mark.exhaustive
def test_infinite_scales_of_the_last_block_stay_in_it() -> None:
    """Four parts of K share five blocks by twos: one has the last, and one none, which would be 0 * inf."""
    m, n, k = 128, 64, 5 * 128
    spec = replace(residual(), loads=(), ops=(), stores=(Store("out0", "acc", DType.F32),))
    a, b = torch.ones(m, k).to(torch.float8_e4m3fn), torch.ones(n, k).to(torch.float8_e4m3fn).t()
    of_a, of_b = torch.ones(m, 5), torch.ones(5, 1)
    of_a[7, 4] = float("inf")
    [actual], _ = run_region(spec, [a, of_a], [b, of_b], [], machine(sm100(128, 64, split_k=4)))
    assert actual[7].isposinf().all()
    assert (actual[torch.arange(m) != 7] == k).all()


PAIRS = [(Columns.ALL, Columns.ALL), (Columns.EVEN, Columns.ODD)]


def pair(columns: tuple[Columns, Columns], b: Scaling) -> EpilogueSpec:
    """acc0 - acc1, and the largest of each row."""
    return EpilogueSpec(
        tuple(product(LINE, b, f"acc{i}", each) for i, each in enumerate(columns)),
        (),
        (op("t0", "sub", "acc0", "acc1"),),
        (
            Store("out0", "t0", DType.F32),
            Store("out1", "t0", DType.F32, form=Reduction(Axis.ROW, reductions.MAX)),
        ),
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("columns", PAIRS, ids=["two", "neighbours"])
@pytest.mark.parametrize("b", [SQUARE, LINE], ids=lambda scaling: scaling.value)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_pairs(columns: tuple[Columns, Columns], b: Scaling, place: int) -> None:
    spec = pair(columns, b)
    m, n, k = 136, 200, 400
    wide = 2 * n if spec.b_columns is BColumns.INTERLEAVED else n
    generator = torch.Generator().manual_seed(7)
    [of_a], [of_b] = block_scales(spec.product, m, wide, k)
    a = [integers((m, k), DType.E4M3, generator), of_a]
    bs = [integers((wide, k), DType.E4M3, generator).t() for _ in range(spec.b_count)]
    bs += [of_b + i for i in range(spec.b_count)]
    config = offered(Arch.SM100A, spec)[place]
    assert config.products == 2
    outputs, launch = run_region(spec, a, bs, [], machine(config))
    for actual, expected in zip(outputs, replay(spec, a, bs, []), strict=True):
        assert torch.equal(actual, expected)
    assert build(launch.kernel).spill_bytes == 0


def test_a_thread_adds_up_128_columns_at_most() -> None:
    """Of one product or two; a second warpgroup has the other half of more."""
    sums = replace(
        residual(), stores=(Store("out0", "t0", DType.F32, form=Reduction(Axis.COLUMN, reductions.SUM)),)
    )
    for spec in (residual(), sums, *(pair(columns, LINE) for columns in PAIRS)):
        configs = tunable(Arch.SM100A, spec)
        assert configs
        assert all(config.products * config.group_n <= 128 for config in configs)
    assert offered(Arch.SM100A, residual())[0].name == "256x256_2x1_2cta_halves"
    assert offered(Arch.SM100A, pair(PAIRS[0], LINE))[0].name == "256x64x2_2x1_2cta"
    assert offered(Arch.SM100A, sums)[0].name == "256x256_2x1_2cta_halves"


def programs() -> Iterator[ParameterSet]:
    """Every golden module with eight seeds, and one of them with one seed in `make test`."""
    for name in BLOCKWISE:
        for seed in range(1, 9):
            every_day = (name, seed) == ("blockwise_squares_amax", 1)
            yield pytest.param(name, seed, marks=() if every_day else pytest.mark.sim)


@pytest.mark.parametrize(("name", "seed"), list(programs()))
def test_programs_are_simulated_from_torch_to_their_results(name: str, seed: int) -> None:
    program = BLOCKWISE[name]
    inputs = program.inputs(Problem(136, 200, 272))
    results = as_tuple(cute_backend.simulate(program.fn, *inputs, arch="sm_100a", async_seed=seed))
    for result, expected in zip(results, in_float64(program, inputs), strict=True):
        assert relative_error(result, expected) < TOLERANCE[torch.bfloat16]
