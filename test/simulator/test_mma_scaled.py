"""Products whose blocks the MMA scales, on the simulated Blackwell: right to the bit in every format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cute_backend
from cute_backend.kinds import reductions
from cute_backend.kinds.results import TiledScales
from cute_backend.planning import Arch, TileConfig, offered, unserved
from cute_backend.replay import replay
from cute_backend.runtime.compiling.build import build
from cute_backend.simulator.simulate import run_region
from cute_backend.spec import (
    Axis,
    BColumns,
    Columns,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Reduction,
    Store,
    Stride,
)
from support.epilogues import MMA_SCALED, TILED, Problem
from support.reference import TOLERANCE, as_tuple, in_float64, relative_error
from support.simulator.exact import check_exact, fp4, integers, machine, op, operands, sm100, tiled
from support.simulator.mutants import BLACKWELL_SCALED, WRITES_SCALES

FORMATS = list(BLACKWELL_SCALED)
CONFIGS = [
    sm100(256, 192, 2, ctas=2),
    sm100(256, 128, 2, ctas=2),
    sm100(128, 128),
    sm100(128, 64),
    sm100(128, 64, 2, 2),
    sm100(256, 128, 4, ctas=2),
    replace(sm100(128, 128), arch=Arch.SM103A),
]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.arch.value} {config.name}")
def test_edges_in_every_direction(config: TileConfig, name: str) -> None:
    """Rows, columns and K beyond the last tile; scales that are padded with the largest finite ones."""
    problem = (config.tile_m + 133, config.tile_n + 72, 3 * 256 + 32)
    launch = check_exact(BLACKWELL_SCALED[name], problem, machine(config))
    assert build(launch.kernel).spill_bytes == 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("problem", [(1, 16, 32), (3, 136, 416), (192, 72, 160), (131, 69, 288)], ids=str)
def test_few_rows_and_empty_tiles(problem: tuple[int, int, int], name: str) -> None:
    check_exact(BLACKWELL_SCALED[name], problem, machine(sm100(128, 64, 2)))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_every_ring_wraps_around(seed: int | None) -> None:
    check_exact(BLACKWELL_SCALED["nvfp4"], (128, 400, 13 * 256), machine(sm100(128, 64), seed))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "columns", [(Columns.ALL,) * 2, (Columns.EVEN, Columns.ODD)], ids=["two", "neighbours"]
)
def test_pairs(columns: tuple[Columns, Columns]) -> None:
    """acc0 - acc1, and the largest of each row. Of two Bs each has 128 columns of the MMA."""
    (acc,) = BLACKWELL_SCALED["nvfp4"].accumulators
    gate, up = (replace(acc, name=f"acc{i}", columns=each) for i, each in enumerate(columns))
    row_max = Store("out1", "t0", DType.F32, form=Reduction(Axis.ROW, reductions.MAX))
    spec = EpilogueSpec(
        (gate, up), (), (op("t0", "sub", "acc0", "acc1"),), (Store("out0", "t0", DType.F32), row_max)
    )
    m, n, k = 136, 264, 544
    wide = 2 * n if spec.b_columns is BColumns.INTERLEAVED else n
    generator = torch.Generator().manual_seed(7)
    a = [integers((m, k), DType.E2M1X2, generator), tiled(acc.a_scaling, m, k, 5)]
    bs = [integers((wide, k), DType.E2M1X2, generator).t() for _ in range(spec.b_count)]
    bs += [tiled(acc.b_scaling, wide, k, 3 + i) for i in range(spec.b_count)]
    for config in offered(Arch.SM100A, spec):
        assert config.products == 2
        outputs, _ = run_region(spec, a, bs, [], machine(config))
        for actual, expected in zip(outputs, replay(spec, a, bs, []), strict=True):
            assert torch.equal(actual, expected)


def test_mixed_fp8() -> None:
    spec = BLACKWELL_SCALED["mxfp8"]
    mixed = replace(spec, accumulators=(replace(spec.product, b_dtype=DType.E5M2),))
    check_exact(mixed, (136, 72, 288), machine(sm100(128, 64)))


def test_numbers_that_are_none_stay_in_their_rows() -> None:
    """A scale of NaN, and the largest and the least powers of two."""
    spec = replace(BLACKWELL_SCALED["mxfp8"], loads=(), ops=(), stores=(Store("out0", "acc", DType.F32),))
    m, n, k = 128, 64, 128
    a, b = torch.ones(m, k).to(torch.float8_e4m3fn), torch.ones(n, k).to(torch.float8_e4m3fn).t()
    of_a, of_b = (torch.full((512,), 127, dtype=torch.uint8) for _ in range(2))
    of_a[5 * 16 + 2], of_a[6 * 16 + 1], of_a[7 * 16] = 0xFF, 254, 0
    scales = [each.view(torch.float8_e8m0fnu) for each in (of_a, of_b)]
    [actual], _ = run_region(spec, [a, scales[0]], [b, scales[1]], [], machine(sm100(128, 64)))
    assert actual[5].isnan().all() and actual[6].isposinf().all()
    assert (actual[7] == 3 * 32 + 32 * 2.0**-127).all()
    assert (torch.cat([actual[:5], actual[8:]]) == k).sum() == (m - 3) * n


def check_program(name: str, seed: int) -> None:
    program = MMA_SCALED[name]
    inputs = program.inputs(Problem(136, 208, 288))
    results = cute_backend.simulate(program.fn, *inputs, arch="sm_100a", async_seed=seed)
    for result, expected in zip(as_tuple(results), in_float64(program, inputs), strict=True):
        assert relative_error(result, expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", MMA_SCALED)
def test_programs_are_simulated_from_torch_to_their_results(name: str) -> None:
    check_program(name, 1)


@pytest.mark.sim
@pytest.mark.parametrize("name", MMA_SCALED)
@pytest.mark.parametrize("seed", range(2, 9))
def test_programs_are_simulated_with_every_seed(name: str, seed: int) -> None:
    check_program(name, seed)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "config", [sm100(256, 192, 2, ctas=2), sm100(256, 128, 2, ctas=2, column_groups=2), sm100(128, 64)]
)
@pytest.mark.parametrize("problem", [(1, 32, 64), (131, 96, 160), (256, 288, 96), (300, 416, 64)], ids=str)
def test_scales_in_tiles(problem: tuple[int, int, int], config: TileConfig) -> None:
    """Rows and scales that are padded, and tiles without a row or a column of the plane."""
    spec = WRITES_SCALES.spec
    a, bs, loads = operands(spec, *problem)
    [actual], launch = run_region(spec, a, bs, loads, machine(config))
    [expected] = replay(spec, a, bs, loads)
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
    assert build(launch.kernel).spill_bytes == 0


def test_scales_are_rounded_as_the_replay_rounds() -> None:
    """Powers of two, halves between them, neighbours of both, subnormals, infinities and NaN."""
    plane = Load("exact0", LoadKind.EXACT, DType.F32, Stride.OTHER, Stride.ONE)
    store = Store("out0", "exact0", DType.E8M0, TiledScales(32))
    spec = replace(WRITES_SCALES.spec, loads=(plane,), ops=(), stores=(store,))
    m, n, k = 128, 448, 64
    exponents = torch.arange(256, dtype=torch.int32) << 23
    bits = torch.cat([base + step for base in (exponents, exponents | 1 << 22) for step in (-1, 0, 1)])
    bits = torch.cat([bits, torch.arange(m * n // 32 - len(bits), dtype=torch.int32) - (1 << 31)])
    a, bs, _ = operands(WRITES_SCALES.spec, m, n, k)
    loads = [bits.view(m, n // 32).repeat_interleave(32, 1).view(torch.float32)]
    [actual], _ = run_region(spec, a, bs, loads, machine(sm100(128, 64)))
    [expected] = replay(spec, a, bs, loads)
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("problem", [(128, 128, 64), (200, 160, 288)], ids=str)
def test_an_mlp_is_simulated_from_torch_to_its_result(problem: tuple[int, int, int]) -> None:
    """Two kernels, of which the first quantises its result by the blocks of the second."""
    first, (m, n, k) = TILED["mxfp8_swiglu_quantised"], problem

    def mlp(*args: Tensor) -> Tensor:
        values, scales = first.fn(*args[:-2])
        down, of_down = args[-2:]
        return torch._scaled_mm(values, down.t(), scales, of_down, out_dtype=torch.bfloat16)

    second = Problem(m, k, n)
    down = second.operand(k, n, dtype=torch.float8_e4m3fn, generator=torch.Generator().manual_seed(1))
    inputs = (*first.inputs(Problem(m, n, k)), down, second.tiles(k, 32, torch.float8_e8m0fnu))
    cute_backend.explain(mlp, *inputs, arch="sm_100a").assert_fused(regions=2)
    result = cute_backend.simulate(mlp, *inputs, arch="sm_100a", async_seed=1)
    [expected] = in_float64(replace(first, fn=mlp), inputs)
    assert relative_error(result, expected) < TOLERANCE[torch.bfloat16]


def test_other_architectures_have_no_mainloop_for_them() -> None:
    nvfp4, mxfp8 = BLACKWELL_SCALED["nvfp4"], BLACKWELL_SCALED["mxfp8"]
    assert "no MMA of sm_90a multiplies e2m1x2 by e2m1x2" in (unserved(nvfp4, Arch.SM90A.target) or "")
    assert "no mainloop of sm_90a scales blocks of 1x32 by 1x32" in (unserved(mxfp8, Arch.SM90A.target) or "")
    assert "no mainloop of sm_120a" in (unserved(mxfp8, Arch.SM120A.target) or "")
    assert unserved(nvfp4, Arch.SM103A.target) is None


def test_values_of_fp4_by_their_codes() -> None:
    packed = fp4(torch.tensor([[-2, -1, 0, 1, 2, 4]]))
    assert packed.view(torch.uint8).tolist() == [[0xAC, 0x20, 0x64]]
