"""Blocks of columns wider than a subtile, which passes over the accumulators reduce ahead of the visits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_backend.kinds.results import PLANE, Heads, OfBlocks
from cute_backend.memory_ops.emit import emit
from cute_backend.planning import (
    Alignment,
    Arch,
    Rung,
    TileConfig,
    offered,
    plan,
    rungs,
    subtiles,
    tile_table,
)
from cute_backend.replay import replay
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.simulator.simulate import Machine, run_region
from cute_backend.spec import (
    Accumulator,
    Blocks,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Op,
    Operand,
    Store,
    Stride,
)
from support.sweeps import in_parts, of_part
from support.verdicts import assert_sound, run_sound

ACC = Accumulator("acc", DType.BF16, DType.BF16)


def op(name: str, kind: str, *operands: Operand, block: int = 0) -> Op:
    return Op(name, kind, operands, DType.F32, block=block)


def weight(columns: int) -> Load:
    blocks = Blocks(columns, Stride.ZERO, Stride.ONE)
    return Load("rowvec0", LoadKind.ROWVEC, DType.BF16, Stride.ZERO, Stride.OTHER, blocks=blocks)


def rms_norm(columns: int) -> EpilogueSpec:
    chain = (
        op("t0", "mul", "acc", "acc"),
        op("t1", "block_mean", "t0", block=columns),
        op("t2", "add", "t1", Const(0.5)),
        op("t3", "rsqrt", "t2"),
        op("t4", "mul", "acc", "t3"),
        op("t5", "mul", "t4", "rowvec0"),
    )
    return EpilogueSpec((ACC,), (weight(columns),), chain, (Store("out0", "t5", DType.BF16),))


def layer_norm(columns: int) -> EpilogueSpec:
    """Two passes: the second reads the means of the first. Also the logarithms of the variances."""
    chain = (
        op("t0", "block_mean", "acc", block=columns),
        op("t1", "sub", "acc", "t0"),
        op("t2", "mul", "t1", "t1"),
        op("t3", "block_mean", "t2", block=columns),
        op("t4", "add", "t3", Const(1e-2)),
        op("t5", "rsqrt", "t4"),
        op("t6", "mul", "t1", "t5"),
        op("t7", "mul", "t6", "rowvec0"),
        op("t8", "log", "t4"),
    )
    stores = (Store("out0", "t7", DType.BF16), Store("out1", "t8", DType.F32))
    return EpilogueSpec((ACC,), (weight(columns),), chain, stores)


def softmax(columns: int) -> EpilogueSpec:
    """Over groups, in two passes; and how far each group's smallest element lies below its largest."""
    chain = (
        op("t0", "mul", "acc", Const(0.25)),
        op("t1", "block_max", "t0", block=columns),
        op("t2", "sub", "t0", "t1"),
        op("t3", "exp", "t2"),
        op("t4", "block_sum", "t3", block=columns),
        op("t5", "div", "t3", "t4"),
        op("t6", "block_min", "t2", block=columns),
    )
    stores = (Store("out0", "t5", DType.F32), Store("out1", "t6", DType.BF16))
    return EpilogueSpec((ACC,), (), chain, stores)


def silu_quantised(columns: int, products: int = 1) -> EpilogueSpec:
    """silu, or a gated pair, in fp8 with a scale for each block."""
    gated = op("t1", "mul", "t0", "acc1") if products > 1 else op("t1", "mul", "t0", "acc")
    chain = (
        op("t0", "sigmoid", "acc"),
        gated,
        op("t2", "abs", "t1"),
        op("t3", "block_max", "t2", block=columns),
        op("t4", "add", "t3", Const(0.5)),
        op("t5", "div", "t1", "t4"),
    )
    stores = (Store("out0", "t5", DType.E4M3), Store("out1", "t4", DType.F32, OfBlocks(columns)))
    return EpilogueSpec((ACC, replace(ACC, name="acc1"))[:products], (), chain, stores)


def norm_and_rotation(columns: int, heads: bool = True) -> EpilogueSpec:
    """As queries and keys of Qwen3 are: normed by head, then rotated by halves with tables (S, columns), and
    stored as (B, H, S, D)."""
    spec = rms_norm(columns)
    blocks = Blocks(columns, Stride.ZERO, Stride.ONE)
    modes = (Stride.ZERO, Stride.OTHER)
    cos = Load("exact0", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.OTHER, modes, blocks)
    chain = (
        *spec.ops,
        op("t6", "mul", "t5", "exact0"),
        op("t7", "block_rotate_half", "t5", block=columns),
        op("t8", "mul", "t7", "exact1"),
        op("t9", "add", "t6", "t8"),
    )
    store = Store("out0", "t9", DType.BF16, form=Heads(0, columns) if heads else PLANE)
    return EpilogueSpec((ACC,), (*spec.loads, cos, replace(cos, name="exact1")), chain, (store,))


SPECS = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "softmax": softmax,
    "silu_quantised": silu_quantised,
    "norm_and_rotation": norm_and_rotation,
}


def operands(
    spec: EpilogueSpec, m: int, n: int, batches: int = 1
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(m + n)
    a = torch.randint(-3, 4, (m, 144), generator=generator).bfloat16() / 4
    bs = [torch.randint(-3, 4, (n, 144), generator=generator).bfloat16().t() / 4 for _ in range(spec.b_count)]
    loads = []
    for load in spec.loads:
        assert load.blocks is not None
        columns, count = load.blocks.columns, n // load.blocks.columns
        if load.kind is LoadKind.ROWVEC:
            loads.append((torch.rand(columns, generator=generator) + 1).bfloat16().expand(count, columns))
        else:
            table = torch.randn(m // batches, 1, columns, generator=generator).bfloat16()
            loads.append(table.expand(batches, m // batches, count, columns))
    return [a], bs, loads


def check(spec: EpilogueSpec, config: TileConfig, m: int, n: int, batches: int = 1, seed: int = 1) -> Kernel:
    a, bs, loads = operands(spec, m, n, batches)
    results, launch = run_sound(spec, a, bs, loads, Machine(config.arch, m, config, seed))
    for result, right in zip(results, replay(spec, a, bs, loads), strict=True):
        tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3}.get(result.dtype, 0.07)
        torch.testing.assert_close(result.float(), right.float(), rtol=tolerance, atol=tolerance)
    return launch.kernel


CONFIGS = [
    ("rms_norm", TileConfig(Arch.SM90A, 128, 128, 2, pingpong=True), 128),
    ("layer_norm", TileConfig(Arch.SM90A, 128, 128, cluster_n=2, pingpong=True, subtile_n=64), 128),
    ("softmax", TileConfig(Arch.SM90A, 128, 256, cluster_n=2), 256),
    ("silu_quantised", TileConfig(Arch.SM90A, 64, 192, pingpong=True), 96),
    ("norm_and_rotation", TileConfig(Arch.SM90A, 128, 128, 2, pingpong=True), 128),
    ("layer_norm", TileConfig(Arch.SM90A, 256, 128, cluster_n=2), 64),
    ("rms_norm", TileConfig(Arch.SM90A, 64, 160, subtile_n=16), 80),
    ("softmax", TileConfig(Arch.SM90A, 64, 128, split_k=2), 128),
    ("rms_norm", TileConfig(Arch.SM100A, 256, 256, 2, ctas=2, column_groups=2), 128),
    ("layer_norm", TileConfig(Arch.SM100A, 128, 128), 128),
    ("softmax", TileConfig(Arch.SM100A, 128, 192), 192),
    ("silu_quantised", TileConfig(Arch.SM100A, 128, 160, subtile_n=16), 80),
    ("norm_and_rotation", TileConfig(Arch.SM100A, 256, 128, 2, ctas=2), 128),
    ("norm_and_rotation", TileConfig(Arch.SM100A, 128, 256), 256),
    ("softmax", TileConfig(Arch.SM80, 64, 128), 128),
    ("layer_norm", TileConfig(Arch.SM120A, 128, 64), 64),
]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("name", "config", "columns"), CONFIGS, ids=lambda each: getattr(each, "name", str(each))
)
def test_kernels_reduce_blocks_in_passes(name: str, config: TileConfig, columns: int) -> None:
    """Several tiles, the last of each row and column cut off; and one row."""
    spec = SPECS[name](columns)
    for m in (config.tile_m + 9, 1):
        kernel = check(spec, config, m, config.tile_n + columns)
        assert columns % kernel.plan.tile.subtile_n == 0 and kernel.plan.tile.subtile_n < columns


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize("m", [1, 100, 127, 2049])
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
@pytest.mark.parametrize("name", SPECS)
def test_passes_at_edges(name: str, arch: Arch, m: int) -> None:
    spec = SPECS[name](128)
    check(spec, tile_table(arch, spec)[0], m, 384)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
def test_a_pair_is_reduced_in_passes(arch: Arch) -> None:
    spec = silu_quantised(128, products=2)
    config = tile_table(arch, spec)[0]
    kernel = check(spec, config, 9, 256)
    assert kernel.plan.tile.subtile_n < 128 and build(kernel).spill_bytes == 0


def test_heads_of_several_batches_are_normalised_and_rotated() -> None:
    """Batches of 100 rows end in the middle of a tile; each has the same tables."""
    spec = norm_and_rotation(128)
    config = TileConfig(Arch.SM90A, 128, 128, 2, pingpong=True)
    check(spec, config, 200, 256, batches=2)


def with_residual(columns: int) -> EpilogueSpec:
    """The norm by head, and a plane added to it."""
    spec = rms_norm(columns)
    plane = Load("exact0", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.ONE)
    chain = (*spec.ops, op("t6", "add", "t5", "exact0"))
    return replace(spec, loads=(*spec.loads, plane), ops=chain, stores=(Store("out0", "t6", DType.BF16),))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("columns", [128, 256])
def test_blocks_are_reduced_in_loops_if_planes_move_by_element(columns: int) -> None:
    """Visits are then the iterations of loops, over blocks and within each. The last rows have no visits."""
    spec, config = with_residual(columns), TileConfig(Arch.SM90A, 128, 256, cluster_n=2)
    a, bs, (row,) = operands(rms_norm(columns), 140, 512)
    odd = torch.zeros(140, 513, dtype=torch.bfloat16)[:, 1:].copy_(torch.randn(140, 512))
    results, launch = run_region(spec, a, bs, [row, odd], Machine(Arch.SM90A, 140, config, 1))
    assert launch.kernel.plan.alignment is Alignment.PLAIN
    assert Rung.of(spec, launch.kernel.plan.tile, Alignment.PLAIN).tile.rolled
    torch.testing.assert_close(results[0], replay(spec, a, bs, [row, odd])[0], rtol=8e-3, atol=8e-3)


def test_blocks_are_reduced_in_unrolled_visits_if_loops_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rung of a tile whose planes move by element, which its rules make a loop."""
    spec, rolled = with_residual(128), TileConfig(Arch.SM90A, 64, 128, 2, subtile_n=16)
    rung = rungs(plan(spec, rolled, Alignment.PLAIN))[-1].tile
    assert rung == replace(rolled, unrolled=True)
    monkeypatch.setattr(subtiles, "SUBTILE_RULES", ())
    plan.cache_clear()
    a, bs, (row,) = operands(rms_norm(128), 73, 384)
    odd = torch.zeros(73, 385, dtype=torch.bfloat16)[:, 1:].copy_(torch.randn(73, 384))
    results, launch = run_region(spec, a, bs, [row, odd], Machine(Arch.SM90A, 73, rung, 1))
    assert (launch.kernel.plan.alignment, launch.kernel.plan.tile) == (Alignment.PLAIN, rung)
    torch.testing.assert_close(results[0], replay(spec, a, bs, [row, odd])[0], rtol=8e-3, atol=8e-3)
    plan.cache_clear()  # it has the tile without its rules


@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
def test_what_passes_and_visits_compute(arch: Arch) -> None:
    """A pass has what its reduction needs, and a visit the rest, with the results by row."""
    spec = layer_norm(128)
    text = emit(plan(spec, tile_table(arch, spec)[0], Alignment.TMA))
    passes, visit = text.split("def reduce_blocks(")[1].split("def visit(")
    assert passes.count("for i in cutlass.range_constexpr(blocks.subtiles):") == 2
    assert passes.count("_parts.take(") == passes.count("_parts.results(") == 2
    assert "rsqrt" not in passes and "rowvec0" not in passes
    assert "acc[e] - t0[r]" in passes and "acc[e] - held.t0[r]" in visit and "reduce." not in visit


@pytest.mark.parametrize(("columns", "ahead"), [(128, True), (48, True), (24, False), (16, True), (8, False)])
def test_blocks_of_whole_subtiles_are_reduced_in_passes(columns: int, ahead: bool) -> None:
    spec = rms_norm(columns)
    assert (spec.pass_columns == columns) is ahead and not spec.by_visits
    assert spec.visit_columns == (1 if ahead else columns)


def test_a_plane_that_is_read_before_a_reduction_is_held_by_a_visit() -> None:
    spec, behind = rms_norm(128), with_residual(128)
    assert behind.pass_columns == 128
    first = op("a0", "add", "acc", "exact0")
    ahead = replace(behind, ops=(first, replace(spec.ops[0], operands=("a0", "a0")), *behind.ops[1:]))
    assert ahead.by_visits and ahead.visit_columns == 128
    for each, narrow in ((behind, True), (ahead, False)):
        cut = Rung.of(each, tile_table(Arch.SM90A, each)[0], Alignment.TMA).tile
        assert (cut.subtile_n < 128) is narrow


def test_blocks_of_two_sizes_are_held_by_a_visit() -> None:
    spec = rms_norm(128)
    scale = Store("out1", "t3", DType.F32, OfBlocks(64))
    assert replace(spec, stores=(*spec.stores, scale)).by_visits
    other = op("t6", "block_max", "t5", block=32)
    two = replace(spec, ops=(*spec.ops, other), stores=(Store("out0", "t6", DType.BF16),))
    assert two.by_visits and two.visit_columns == 128


@pytest.mark.exhaustive
@in_parts(8)
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize("columns", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
@pytest.mark.parametrize("name", SPECS)
def test_every_kernel_with_passes_has_a_sound_rung(
    name: str, arch: Arch, columns: int, alignment: Alignment, part: slice
) -> None:
    spec = SPECS[name](columns)
    if (name, arch, columns) == ("norm_and_rotation", Arch.SM90A, 80):
        pytest.skip("no tile of sm_90a rotates halves of 40 columns")
    assert_sound([plan(spec, config, alignment) for config in of_part(offered(arch, spec), part)])


@pytest.mark.sweep(1)
@in_parts(4)
def test_passes_by_element_keep_no_values_for_later_ones(part: slice) -> None:
    """A softmax scaled its elements in the first of two passes, and 128 scaled ones were kept for the second,
    beside the accumulators: 128 bytes were spilled."""
    spec = softmax(256)
    configs = of_part(offered(Arch.SM90A, spec), part)
    assert_sound([plan(spec, config, Alignment.PLAIN) for config in configs])


@pytest.mark.sweep(1)
@in_parts(3)
def test_exponentials_of_passes_have_registers(part: slice) -> None:
    spec = softmax(64)
    spec = replace(spec, ops=spec.ops[:-1], stores=(Store("out0", "t5", DType.BF16),))
    assert_sound([plan(spec, config, Alignment.TMA) for config in tile_table(Arch.SM90A, spec)][part])


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("name", "columns"), [("layer_norm", 80), ("rms_norm", 96)])
def test_each_warpgroup_may_have_one_block(name: str, columns: int) -> None:
    spec = SPECS[name](columns)
    configs = [each for each in offered(Arch.SM100A, spec) if each.tile_n == 2 * columns]
    assert {each.column_groups for each in configs} == {2}
    for config in configs:
        assert_sound([plan(spec, config, Alignment.PLAIN)])
