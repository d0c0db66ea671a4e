"""Block-scaled products on the simulated Hopper, right to the bit in every tile, recipe and at every edge."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cute_backend
from cute_backend.errors import BuildError
from cute_backend.kinds import reductions
from cute_backend.planning import Alignment, Arch, TileConfig, offered, plan
from cute_backend.replay import replay
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.kernels.kernel import Kernel
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
from support.simulator.exact import (
    RESIDUAL,
    block_scales,
    check_exact,
    integers,
    machine,
    op,
    operands,
    sm90,
    wrong,
)

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
    sm90(128, 128, 2),
    sm90(64, 128, 2, pingpong=True),
    sm90(64, 64),
    sm90(128, 64, 1, 2),
    sm90(128, 64, pingpong=True),
    sm90(64, 64, split_k=4),
    sm90(128, 64, split_k=2),
    sm90(128, 192, 1, 2),
    sm90(64, 192, 2, pingpong=True),
    sm90(128, 256, 1, 2),
    sm90(64, 224, pingpong=True),
    sm90(64, 32),
]


@pytest.mark.sweep(1)
@of_each_recipe
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_edges_in_every_direction(config: TileConfig, a: Scaling, b: Scaling) -> None:
    """Rows and columns beyond the last block, and 16 of K in the last one."""
    launch = check_exact(
        residual(a, b), (config.tile_m + 133, config.tile_n + 72, 5 * 128 + 16), machine(config)
    )
    assert build(launch.kernel).spill_bytes == 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("columns", [72, 69])
def test_blocks_of_rows_share_the_scales_of_columns(columns: int) -> None:
    """A warpgroup has two blocks of 64 rows, and multiplies one after the other. 69 columns are stored by
    element."""
    problem = (256 + 133, 128 + columns, 3 * 128 + 16)
    launch = check_exact(residual(LINE, LINE), problem, machine(sm90(256, 128, 1, 2)))
    assert build(launch.kernel).spill_bytes == 0


def test_scales_of_columns_are_read_once_for_both_blocks_of_rows() -> None:
    """Of 16 pairs of columns, a thread keeps the scales of 8. There are steps of two k tiles and of one."""
    ptx = build(Kernel(plan(residual(LINE, LINE), sm90(256, 128, 1, 2), Alignment.TMA))).ptx
    assert ptx.count("ld.shared.v2") == (2 + 1) * (16 + 16 - 8)


@pytest.mark.sweep(1)
@of_each_recipe
@pytest.mark.parametrize("problem", [(1, 16, 16), (3, 136, 400), (192, 72, 144), (131, 69, 272)], ids=str)
def test_few_rows_and_empty_tiles(problem: tuple[int, int, int], a: Scaling, b: Scaling) -> None:
    """Of M = 192 the second CTA of the last cluster has no row; 69 columns are stored by element."""
    launch = check_exact(residual(a, b), problem, machine(sm90(64, 128, 2, pingpong=True)))
    assert launch.kernel.plan.alignment is (Alignment.PLAIN if problem[1] == 69 else Alignment.TMA)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_every_ring_wraps_around(seed: int | None) -> None:
    """One cluster works through all tiles, under several orders of completion."""
    check_exact(residual(), (3 * 64, 128, 13 * 128), machine(sm90(64, 128, pingpong=True), seed))


def test_scales_lie_anywhere() -> None:
    """By rows, by columns, two apart, repeated by a stride of 0, and at addresses that 16 doesn't divide."""
    m, n, k = 69, 136, 272
    spec = residual()
    [a, of_a], [b, of_b], loads = operands(spec, m, n, k)
    blocks = of_b.shape[0]
    wide_a, wide_b = torch.zeros(m + 3, 2 * blocks + 1), torch.zeros(blocks + 1, 2 * of_b.shape[1] + 1)
    layouts = [
        (of_a.contiguous(), of_b.contiguous()),
        (wide_a[3:, 1::2].copy_(of_a), wide_b[1:, 1::2].copy_(of_b)),
        (of_a[:1].expand(m, -1), of_b[:, :1].expand(-1, of_b.shape[1])),
    ]
    for scales_a, scales_b in layouts:
        given = [a, scales_a], [b, scales_b], loads
        [actual], _ = run_region(spec, *given, machine(sm90(64, 64)))
        [expected] = replay(spec, *given)
        assert torch.equal(actual, expected), wrong(actual, expected)


def test_infinite_scales_of_the_last_block_stay_in_it() -> None:
    """Four parts of K share five blocks by twos: one has the last, and one none, which would be 0 * inf."""
    m, n, k = 64, 64, 5 * 128
    spec = replace(residual(), loads=(), ops=(), stores=(Store("out0", "acc", DType.F32),))
    a, b = torch.ones(m, k).to(torch.float8_e4m3fn), torch.ones(n, k).to(torch.float8_e4m3fn).t()
    of_a, of_b = torch.ones(m, 5), torch.ones(5, 1)
    of_a[7, 4] = float("inf")
    [actual], _ = run_region(spec, [a, of_a], [b, of_b], [], machine(sm90(64, 64, split_k=4)))
    assert actual[7].isposinf().all()
    assert (actual[torch.arange(m) != 7] == k).all()


PAIRS = [(Columns.ALL, Columns.ALL), (Columns.EVEN, Columns.ODD)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("columns", PAIRS, ids=["two", "neighbours"])
@pytest.mark.parametrize("b", [SQUARE, LINE], ids=lambda scaling: scaling.value)
def test_pairs(columns: tuple[Columns, Columns], b: Scaling) -> None:
    """acc0 - acc1, and the largest of each row."""
    gate, up = (product(LINE, b, f"acc{i}", each) for i, each in enumerate(columns))
    spec = EpilogueSpec(
        (gate, up),
        (),
        (op("t0", "sub", "acc0", "acc1"),),
        (
            Store("out0", "t0", DType.F32),
            Store("out1", "t0", DType.F32, form=Reduction(Axis.ROW, reductions.MAX)),
        ),
    )
    m, n, k = 72, 136, 400
    wide = 2 * n if spec.b_columns is BColumns.INTERLEAVED else n
    generator = torch.Generator().manual_seed(7)
    [of_a], [of_b] = block_scales(gate, m, wide, k)
    a = [integers((m, k), DType.E4M3, generator), of_a]
    bs = [integers((wide, k), DType.E4M3, generator).t() for _ in range(spec.b_count)]
    bs += [of_b + i for i in range(spec.b_count)]
    config = offered(Arch.SM90A, spec)[0 if b is SQUARE else -1]
    assert config.products == 2
    outputs, _ = run_region(spec, a, bs, [], machine(config))
    for actual, expected in zip(outputs, replay(spec, a, bs, []), strict=True):
        assert torch.equal(actual, expected)


def check_program(name: str, seed: int) -> None:
    program = BLOCKWISE[name]
    inputs = program.inputs(Problem(72, 136, 272))
    results = as_tuple(cute_backend.simulate(program.fn, *inputs, arch="sm_90a", async_seed=seed))
    for result, expected in zip(results, in_float64(program, inputs), strict=True):
        assert relative_error(result, expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", BLOCKWISE)
def test_programs_are_simulated_from_torch_to_their_results(name: str) -> None:
    check_program(name, 1)


@pytest.mark.sim
@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("seed", range(2, 9))
def test_programs_are_simulated_with_every_seed(name: str, seed: int) -> None:
    check_program(name, seed)


@pytest.mark.exhaustive
def test_an_mlp_is_simulated_from_torch_to_its_result() -> None:
    """Both kernels of DeepSeek's MLP: the first quantises its result by the blocks of the second."""

    def mlp(x: Tensor, of_x: Tensor, wide: Tensor, of_wide: Tensor, down: Tensor, of_down: Tensor) -> Tensor:
        gate, up = torch._scaled_mm(x, wide.t(), of_x, of_wide.t(), out_dtype=torch.bfloat16).chunk(2, -1)
        blocks = (torch.nn.functional.silu(gate) * up).float().unflatten(-1, (-1, 128))
        scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
        h, of_h = (blocks / scale).flatten(-2).to(torch.float8_e4m3fn), scale.squeeze(-1)
        return torch._scaled_mm(h, down.t(), of_h, of_down.t(), out_dtype=torch.bfloat16).relu()

    m, d, inner, generator = 131, 384, 256, torch.Generator().manual_seed(0)

    def fp8(rows: int, k: int) -> tuple[Tensor, Tensor]:
        values = torch.randn(rows, k, generator=generator).to(torch.float8_e4m3fn)
        return values, torch.rand(-(-rows // 128), k // 128, generator=generator) / 8 + 0.02

    x, _ = fp8(m, d)
    of_x = torch.rand(m, d // 128, generator=generator) + 0.1
    inputs = (x, of_x, *fp8(2 * inner, d), *fp8(d, inner))
    explained = cute_backend.explain(mlp, *inputs, arch="sm_90a")
    explained.assert_fused(regions=2)
    assert not explained.rejections
    result = cute_backend.simulate(mlp, *inputs, arch="sm_90a", async_seed=1)

    def wide(values: Tensor, scales: Tensor) -> Tensor:
        lines = 1 if scales.shape[0] == m else 128
        return values.double() * scales.double().repeat_interleave(lines, 0).repeat_interleave(128, 1)

    gate, up = (wide(x, of_x) @ wide(*inputs[2:4]).t()).chunk(2, -1)
    h = (torch.nn.functional.silu(gate) * up).unflatten(-1, (-1, 128))
    scale = h.abs().amax(-1, keepdim=True) / 448
    h = ((h / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)
    assert relative_error(result, (h @ wide(*inputs[4:]).t()).relu()) < 1e-2


def test_another_architecture_says_that_it_has_no_mainloop_for_it() -> None:
    config = TileConfig(Arch.SM120A, 128, 64)
    with pytest.raises(BuildError, match="no mainloop of sm_120a scales blocks of 1x128 by 128x128"):
        build(Kernel(plan(residual(), config, Alignment.TMA)))
