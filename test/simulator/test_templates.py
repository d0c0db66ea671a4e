"""Our kernels, compiled for real and run on the simulated machine, compared with the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_backend.kinds import reductions
from cute_backend.planning import Alignment
from cute_backend.replay import replay
from cute_backend.runtime.compiling.build import build
from cute_backend.simulator.simulate import Machine, reference, run, run_region
from cute_backend.spec import (
    Accumulator,
    Axis,
    Blocks,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Major,
    Reduction,
    Store,
    Stride,
)
from support.epilogues import BLOCKS, EPILOGUES, Problem
from support.heavy import HEAVY, heavy_inputs
from support.reference import TOLERANCE, as_tuple, relative_error
from support.simulator.exact import (
    RESIDUAL,
    SCALE_A,
    SCALE_B,
    SM80,
    SM90,
    SM100,
    batched,
    batches,
    check_exact,
    integers,
    machine,
    op,
    operands,
    scaled_residual,
    sm90,
    sm100,
    wrong,
)
from support.sweeps import EXHAUSTIVE

SHARED = EPILOGUES | BLOCKS


def each_on_an_architecture():
    """Every shared epilogue on every architecture that has it. `make test` has some of those that
    take one of these each, in rotation: the text in which epilogues differ does not depend on the GPU."""
    for i, (name, epilogue) in enumerate(SHARED.items()):
        found = (SM100, SM90) if name in BLOCKS else (SM100, SM90, SM80)
        architectures = [arch for arch in found if epilogue.runs_on(arch)]
        for arch in architectures:
            marks = () if arch is architectures[i % len(architectures)] else (EXHAUSTIVE,)
            yield pytest.param(name, arch, id=f"{name}-{arch.value}", marks=marks)


@pytest.mark.sweep(2)
@pytest.mark.settings(block_reductions="always", rotary_embeddings="always")
@pytest.mark.parametrize(("name", "arch"), each_on_an_architecture())
def test_every_shared_epilogue_is_right(name, arch):
    epilogue = SHARED[name]
    m, n, k = 144 if epilogue.square else 200, 384 if name in BLOCKS else 144, 256
    inputs = epilogue.inputs(Problem(m, n, k))
    simulation = run(epilogue.fn, inputs, Machine(arch, async_seed=1, clusters=1))
    expected = as_tuple(reference(epilogue.fn, inputs))
    for actual, right, eager in zip(
        as_tuple(simulation.outputs), expected, as_tuple(epilogue.fn(*inputs)), strict=True
    ):
        assert (actual.shape, actual.stride(), actual.dtype) == (eager.shape, eager.stride(), eager.dtype)
        assert relative_error(actual, right) < TOLERANCE[actual.dtype]
    [launch] = simulation.launches
    assert launch.problem == (m, n, k)
    assert launch.kernel.arch is arch
    if set(epilogue.loads.values()) <= {"scalar", "colvec", "rowvec"}:
        assert launch.report.exposed_loads, "no tile's stores were seen"
        assert max(launch.report.exposed_loads) == 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("arch", "n"), [(SM90, 141), (SM100, 141), (SM100, 144)], ids=["sm_90a", "sm_100a", "sm_100a-tma"]
)
@pytest.mark.parametrize("name", HEAVY)
def test_many_planes_are_right(name, arch, n):
    """In visits of a few columns; read by element, on sm_100a by TMA too."""
    inputs = heavy_inputs(72, n, 64)
    simulation = run(HEAVY[name], inputs, Machine(arch, async_seed=1, clusters=1))
    for actual, right in zip(
        as_tuple(simulation.outputs), as_tuple(reference(HEAVY[name], inputs)), strict=True
    ):
        assert relative_error(actual, right) < TOLERANCE[actual.dtype]
    [launch] = simulation.launches
    assert launch.kernel.plan.alignment is (Alignment.TMA if n % 16 == 0 else Alignment.PLAIN)
    assert build(launch.kernel).spill_bytes == 0


# Exact arithmetic: small integers and powers of two, so that a kernel has to be right to the bit.


def per_batch() -> EpilogueSpec:
    """(acc * scale_a + exact0) * scale_b + exact1 + colvec0: of a batch, place, column, batch and place."""
    z, s = Stride.ZERO, Stride.OTHER
    return EpilogueSpec(
        (Accumulator("acc", DType.E4M3, DType.E4M3),),
        (
            replace(SCALE_A, stride_m=s, m_modes=(s, z)),
            SCALE_B,
            replace(RESIDUAL, m_modes=(z, s)),
            replace(RESIDUAL, name="exact1", m_modes=(s, z)),
            Load("colvec0", LoadKind.COLVEC, DType.F32, s, z, (z, s, z)),
        ),
        (
            op("t0", "mul", "acc", "scale_a"),
            op("t1", "add", "t0", "exact0"),
            op("t2", "mul", "t1", "scale_b"),
            op("t3", "add", "t2", "exact1"),
            op("t4", "add", "t3", "colvec0"),
        ),
        (Store("out0", "t4", DType.BF16),),
    )


CONFIGS = [
    sm100(128, 64),
    sm100(128, 256),
    sm100(128, 128, 2, 1),
    sm100(128, 64, 1, 2),
    sm100(128, 64, 2, 2),
    sm100(256, 128, 2, 1, ctas=2),
    sm100(256, 256, 2, 1, ctas=2),
    sm100(256, 64, 4, 1, ctas=2),
    sm100(256, 64, 2, 2, ctas=2),
    sm100(128, 128, column_groups=2),
    sm100(256, 256, 2, ctas=2, column_groups=2),
    sm100(128, 64, split_k=4),
    sm90(128, 128),
    sm90(64, 128, pingpong=True),
    sm90(128, 128, 2, 1),
    sm90(128, 64, 1, 2),
    sm90(64, 64, 1, 2),
    sm90(128, 128, 2, 1, pingpong=True, subtile_n=64),
    sm90(64, 64, split_k=4),  # two k tiles: of half of the parts there is nothing
    sm90(128, 64, split_k=2),
    sm90(128, 128, split_k=3),
    sm90(128, 160, 2, transposed=True),
]
by_name = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.arch.value}-{config.name}")


@pytest.mark.sweep(2)
@by_name
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
def test_edges_in_every_direction(config, alignment):
    problem = (2 * config.tile_m + 40, config.tile_n + 24, 208)  # k: one tile and a part of one
    if alignment is Alignment.PLAIN:
        problem = (config.tile_m + 3, config.tile_n + 5, 160)
    launch = check_exact(scaled_residual(), problem, machine(config))
    assert launch.kernel.plan.alignment is alignment


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "config",
    [
        sm90(64, 128, split_k=6),
        sm90(128, 128, split_k=8),
        sm90(128, 160, split_k=6, transposed=True),
        sm90(128, 192, 2, split_k=2),
        sm90(256, 128, 1, 2, split_k=4),
        sm90(128, 160, 2, split_k=3, transposed=True),
    ],
    ids=lambda config: config.name,
)
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
def test_sums_of_parts_of_k_through_memory(config, alignment):
    """Of 7 k tiles, the last one not full: with 6 parts the last two have nothing, with 8 the last one."""
    problem = (136, 168, 7 * 128 - 48) if alignment is Alignment.TMA else (131, 165, 7 * 128 - 48)
    launch = check_exact(scaled_residual(), problem, machine(config))
    assert launch.kernel.plan.alignment is alignment


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "config",
    [
        sm90(128, 128, split_k=6),
        sm90(128, 160, 2, transposed=True),
        sm90(128, 160, split_k=6, transposed=True),
    ],
    ids=lambda config: config.name,
)
def test_partials_of_rows_and_columns(config):
    """Beside sums of parts of K, and of the transposed product, whose columns are D's rows."""
    spec = scaled_residual()
    row_max = Store("out1", "t2", DType.F32, form=Reduction(Axis.ROW, reductions.MAX))
    column_min = Store("out2", "t1", DType.F32, form=Reduction(Axis.COLUMN, reductions.MIN))
    spec = replace(spec, stores=(*spec.stores, row_max, column_min))
    check_exact(spec, (131, 168, 400), machine(config))


def test_ctas_without_a_row():
    """M in whole tiles of 64 rows, up to two clusters of them: the last CTAs of a cluster may have no row."""
    config = sm90(64, 128, 2)
    for tiles in range(1, 5):
        check_exact(scaled_residual(), (64 * tiles, 72, 144), machine(config))


@pytest.mark.parametrize("tiles", [pytest.param(1, marks=EXHAUSTIVE), 4, pytest.param(5, marks=EXHAUSTIVE)])
def test_ctas_without_a_row_of_a_batch(tiles):
    """Of four tiles of rows, two of the last three have no row."""
    config, spec = sm90(64, 192, 3, pingpong=True), batched(Major.K, Major.K)
    a, b, loads = batches(spec, 2, 64 * tiles, 72, 80)
    outputs, _ = run_region(spec, a, b, loads, machine(config))
    for actual, expected in zip(outputs, replay(spec, a, b, loads), strict=True):
        assert torch.equal(actual, expected)


SMALL = [sm100(128, 64), sm100(256, 64, 2, ctas=2), sm90(64, 128, pingpong=True), sm90(128, 128)]
small = pytest.mark.parametrize("config", SMALL, ids=lambda config: f"{config.arch.value}-{config.name}")


@pytest.mark.sweep(2)
@small
@pytest.mark.parametrize("problem", [(1, 128, 128), (1, 16, 16), (3, 72, 400)], ids=str)
def test_very_few_rows(config, problem):
    check_exact(scaled_residual(), problem, machine(config))


@pytest.mark.sweep(1)
@small
@pytest.mark.parametrize(("rows", "n"), [(1, 149), (17, 152), (68, 149), (204, 152)], ids=str)
def test_batches_that_tiles_straddle(config, rows, n):
    """204 rows in all, in batches of some, one and all: each tile has parts of many batches, or of one."""
    m, k, spec = 204, 160, per_batch()
    acc = scaled_residual()
    a, b, (_, scale_b, _) = operands(acc, m, n, k)
    generator = torch.Generator().manual_seed(rows)

    def small(*shape: int) -> Tensor:
        return torch.randint(-9, 10, shape, generator=generator).float()

    batches = m // rows
    loads = [
        (torch.arange(batches) % 61 + 1.0)[:, None].expand(-1, rows),
        scale_b,
        small(1, rows, n).bfloat16().expand(batches, -1, -1),
        small(batches, 1, n).bfloat16().expand(-1, rows, -1),
        small(102, 1).expand(2, 102, 1),
    ]
    outputs, launch = run_region(spec, a, b, loads, machine(config))
    for actual, expected in zip(outputs, replay(spec, a, b, loads), strict=True):
        assert torch.equal(actual, expected), wrong(actual, expected)
    assert launch.kernel.plan.alignment is (Alignment.TMA if n % 8 == 0 else Alignment.PLAIN)


def of_blocks(columns: int) -> EpilogueSpec:
    """acc * rowvec0 + exact0 + rowvec1 * exact1: of a column of all blocks, a place and such a column, a
    block, a batch and a block."""
    z, one, s = Stride.ZERO, Stride.ONE, Stride.OTHER
    within, each = Blocks(columns, z, one), Blocks(columns, s, z)
    return EpilogueSpec(
        (Accumulator("acc", DType.E4M3, DType.E4M3),),
        (
            Load("rowvec0", LoadKind.ROWVEC, DType.F32, z, s, blocks=within),
            Load("exact0", LoadKind.EXACT, DType.BF16, s, s, (z, s), within),
            Load("rowvec1", LoadKind.ROWVEC, DType.BF16, z, s, blocks=each),
            Load("exact1", LoadKind.EXACT, DType.F32, s, s, (s, z), each),
        ),
        (
            op("t0", "mul", "acc", "rowvec0"),
            op("t1", "add", "t0", "exact0"),
            op("t2", "mul", "rowvec1", "exact1"),
            op("t3", "add", "t1", "t2"),
        ),
        (Store("out0", "t3", DType.BF16),),
    )


@pytest.mark.sweep(1)
@small
@pytest.mark.parametrize(("columns", "n"), [(64, 192), (24, 144), (5, 85), (256, 256)], ids=str)
def test_blocks_that_tiles_straddle(config, columns, n):
    """Blocks that divide a tile, that don't, that lie crosswise to vectors, that are wider than it."""
    m, k, blocks, spec = 140, 160, n // columns, of_blocks(columns)
    a, b, _ = operands(scaled_residual(), m, n, k)
    generator = torch.Generator().manual_seed(columns)

    def small(*shape: int) -> Tensor:
        return torch.randint(-9, 10, shape, generator=generator).float()

    loads = [
        small(columns).expand(blocks, columns),
        small(70, 1, columns).bfloat16().expand(2, 70, blocks, columns),
        small(blocks, 1).bfloat16().expand(blocks, columns),
        small(2, 1, blocks, 1).expand(2, 70, blocks, columns),
    ]
    outputs, launch = run_region(spec, a, b, loads, machine(config))
    for actual, expected in zip(outputs, replay(spec, a, b, loads), strict=True):
        assert torch.equal(actual, expected), wrong(actual, expected)
    product = (a[0].double() @ b[0].double()).unflatten(-1, (blocks, columns)).unflatten(0, (2, 70))
    whole = product * loads[0] + loads[1] + loads[2].double() * loads[3]
    assert torch.equal(outputs[0], whole.to(torch.bfloat16).reshape(m, n))
    assert launch.kernel.plan.alignment is (Alignment.TMA if n % 8 == 0 else Alignment.PLAIN)


@pytest.mark.sweep(1)
@small
@pytest.mark.parametrize(
    ("count", "problem", "majors"),
    [
        (3, (200, 152, 160), (Major.K, Major.K)),
        (5, (40, 72, 96), (Major.MN, Major.MN)),
        (2, (130, 149, 64), (Major.K, Major.K)),
        (1, (7, 136, 72), (Major.K, Major.MN)),
    ],
    ids=["tiles", "less_than_a_tile", "masked", "one_batch"],
)
def test_a_product_for_each_batch(config, count, problem, majors):
    spec = batched(*majors)
    a, b, loads = batches(spec, count, *problem)
    outputs, launch = run_region(spec, a, b, loads, machine(config, clusters=2))
    for actual, expected in zip(outputs, replay(spec, a, b, loads), strict=True):
        assert torch.equal(actual, expected)
    assert launch.kernel.plan.alignment is (Alignment.TMA if problem[1] % 8 == 0 else Alignment.PLAIN)


def packed_halves(a, b):
    gate, up = torch.bmm(a, b).chunk(2, -1)
    return torch.relu(gate) * up


def packed_neighbours(a, b):
    y = torch.bmm(a, b)
    gated = torch.relu(y[..., ::2]) * y[..., 1::2]
    return gated, gated.float().amax(-1)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("arch", "fn"),
    [(SM90, packed_halves), (SM90, packed_neighbours), (SM100, packed_halves)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_gate_and_up_of_each_batch(arch, fn):
    """Experts: each multiplies its rows by a packed weight of its own, contiguous along N."""
    generator = torch.Generator().manual_seed(0)
    count, m, n, k = 3, 70, 72, 96
    a = integers((count, m, k), DType.BF16, generator)
    b = integers((count, k, 2 * n), DType.BF16, generator)
    simulation = run(fn, (a, b), Machine(arch, async_seed=1, clusters=2))
    for actual, right in zip(as_tuple(simulation.outputs), as_tuple(reference(fn, (a, b))), strict=True):
        assert torch.equal(actual, right)
    [launch] = simulation.launches
    assert launch.problem == (count * m, n, k)
    assert build(launch.kernel).spill_bytes == 0


@pytest.mark.sweep(1)
@small
def test_every_pipeline_wraps_around(config):
    """One cluster works through all tiles: accumulators, operands and outputs use their stages many times."""
    m, n, k = 3 * config.tile_m, 3 * config.tile_n, 7 * 128
    launch = check_exact(scaled_residual(), (m, n, k), machine(config))
    assert launch.report.grid[2] == 1


@pytest.mark.sweep(1)
@small
@pytest.mark.parametrize("clusters", [2, 3, 100])
def test_tiles_are_shared_out_among_clusters(config, clusters):
    m, n, k = 2 * config.tile_m, 2 * config.tile_n, 128
    launch = check_exact(scaled_residual(), (m, n, k), machine(config, clusters=clusters))
    assert launch.report.grid[2] == min(clusters, 4)


@pytest.mark.sweep(1)
@small
@pytest.mark.parametrize(("rows", "clusters"), [(4, 1), (5, 1), (5, 3)])
def test_tiles_are_visited_in_groups_of_rows(config, rows, clusters):
    """Full groups, and a last one that is not."""
    config = replace(config, raster_m=2)
    problem = (rows * config.tile_m, 3 * config.tile_n, 128)
    check_exact(scaled_residual(), problem, machine(config, clusters=clusters))


@pytest.mark.sweep(2)
@small
@pytest.mark.parametrize(
    ("a", "b", "a_major", "b_major"),
    [
        (DType.E5M2, DType.E4M3, Major.K, Major.K),
        (DType.E4M3, DType.E5M2, Major.K, Major.K),
        (DType.BF16, DType.BF16, Major.K, Major.K),
        (DType.F16, DType.F16, Major.K, Major.MN),
        (DType.BF16, DType.BF16, Major.MN, Major.K),
        (DType.F16, DType.F16, Major.MN, Major.MN),
    ],
    ids=lambda value: value.value,
)
def test_operand_dtypes_and_majors(config, a, b, a_major, b_major):
    spec = scaled_residual(a, b, a_major, b_major)
    check_exact(spec, (config.tile_m + 40, config.tile_n + 24, 208), machine(config))


@pytest.mark.sweep(1)
@small
@pytest.mark.parametrize("seeds", [(None, 2), pytest.param(range(3, 9), marks=EXHAUSTIVE)], ids=str)
def test_no_seed_changes_a_bit(config, seeds):
    """Eight orders of completion: 4 of 21 planted faults were seen by some seeds only."""
    for seed in seeds:
        check_exact(
            scaled_residual(), (config.tile_m + 40, 2 * config.tile_n, 5 * 128), machine(config, seed)
        )


@pytest.mark.parametrize("config", [sm90(128, 128), pytest.param(sm100(128, 64), marks=EXHAUSTIVE)])
def test_slow_accumulation_is_promoted(config):
    """Blackwell adds in fp32 whatever is asked for."""
    fast = scaled_residual()
    slow = replace(fast, accumulators=(replace(fast.accumulators[0], fast_accum=False),))
    check_exact(slow, (200, 144, 1040), machine(config))
