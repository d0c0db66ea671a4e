"""Grouped products on the simulated machine: groups of rows whose edges lie anywhere."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from pytest import param
from torch import Tensor

from cute_backend.errors import BuildError
from cute_backend.planning import Alignment, TileConfig, plan, tile_table
from cute_backend.replay import replay
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.simulator.simulate import run_region
from cute_backend.spec import (
    Accumulator,
    Columns,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Major,
    ProductKind,
    Store,
    Stride,
)
from support.simulator.exact import (
    SCALE_A,
    SM90,
    SM100,
    grouped,
    grouped_columns,
    grouped_k,
    groups,
    groups_of_k,
    integers,
    machine,
    op,
    promoted,
    scaled_groups,
    sm90,
    sm100,
    wrong,
)
from support.simulator.mutants import GROUPED_FP4, GROUPED_MX
from support.verdicts import assert_sound

M = 200
ENDS = {
    "edges": (0, 3, 3, 67, 131, 190),  # none, 3, none, 64, 64 and 59 rows; 10 belong to no group
    "one_row_each": (1, 2, 3, M),
    "many": (*[0] * 33, 1, M),  # more than a warp looks at at once
    "all_in_one": (0, M, M),
    "no_rows": (0, 0),
}


def product(a: Tensor, b: Tensor, ends: tuple[int, ...]) -> Tensor:
    """The rows of each group by its B, exactly; those beyond the last are zeros."""
    whole = torch.zeros(a.shape[0], b.shape[-1], dtype=torch.float64)
    for group, (first, end) in enumerate(pairwise((0, *ends))):
        whole[first:end] = a[first:end].double() @ b[group].double()
    return whole


def epilogue(products: Tensor, loads: list[Tensor], ends: tuple[int, ...]) -> Tensor:
    """The epilogue of `grouped`; rows of no group have no bias."""
    scale_a, scale_b, residual, bias = loads
    whole = products * scale_a[:, None] * scale_b + residual
    for group, (first, end) in enumerate(pairwise((0, *ends))):
        whole[first:end] += bias[group]
    return whole.float()


def rounded(ends: tuple[int, ...]) -> tuple[int, ...]:
    """The ends as a kernel takes them whose operand of 16 bits is contiguous along the rows of groups."""
    return (*(end // 8 * 8 for end in ends[:-1]), ends[-1])


def check(config: TileConfig, ends: tuple[int, ...], n: int, spec: EpilogueSpec, clusters: int = 2) -> None:
    """Every group's rows are right, and what lies beyond the last group is as it was: all bits are set."""
    a, b, loads = groups(spec, ends, M, n, 96)
    outputs, launch = run_region(spec, a, b, loads, machine(config, clusters=clusters))
    exact = epilogue(product(a[0], b[0], ends), loads, ends)
    for actual, expected in zip(outputs, (exact.bfloat16(), exact.amax(1)), strict=True):
        rows, right = (torch.atleast_2d(each[: ends[-1]]) for each in (actual, expected))
        assert torch.equal(rows, right), wrong(rows, right)
        assert (actual[ends[-1] :].contiguous().view(torch.uint8) == 0xFF).all()
    assert launch.kernel.plan.alignment is (Alignment.TMA if n % 8 == 0 else Alignment.PLAIN)
    assert build(launch.kernel).spill_bytes == 0


CONFIGS = [
    sm90(64, 128, 2),  # tiles of A in boxes, the last of which have no rows, and CTAs that have none
    sm90(128, 128, 2, 1, pingpong=True, subtile_n=64),
    sm90(128, 64, 1, 2),
    sm90(128, 128),
    sm100(128, 64),
    sm100(256, 64, 2, 1, ctas=2),
    sm100(128, 64, 2, 2),
    sm100(256, 128, 2, 1, ctas=2, column_groups=2),
]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("n", [152, 149])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.arch.value}-{config.name}")
def test_groups_begin_and_end_anywhere(config, ends, n):
    check(config, ENDS[ends], n, grouped())


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", [sm90(64, 128), sm100(128, 64)], ids=lambda config: config.arch.value)
def test_rows_that_are_columns_of_memory(config):
    """If A and B are contiguous along M and N, a group begins at a multiple of 16 bytes of a row."""
    check(config, rounded(ENDS["edges"]), 152, grouped(Major.MN, Major.MN), clusters=1)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", [sm90(64, 128), sm100(128, 64)], ids=lambda config: config.arch.value)
def test_other_ends_of_rows_that_are_columns_of_memory_are_rounded_down(config):
    """TMA would trap at them, and torch asserts on the device that there are none."""
    spec, ends = grouped(Major.MN, Major.MN), ENDS["edges"]
    a, b, loads = groups(spec, ends, M, 72, 96)
    outputs, _ = run_region(spec, a, b, loads, machine(config))
    exact = epilogue(product(a[0], b[0], rounded(ends)), loads, rounded(ends))
    assert torch.equal(outputs[0][: ends[-1]], exact.bfloat16()[: ends[-1]])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("m", [200, 203])
@pytest.mark.parametrize("ends", ["edges", "one_row_each", "all_in_one"])
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[1], *CONFIGS[4:6]], ids=lambda config: config.name)
def test_groups_of_columns_are_those_of_the_transposed_product(config, ends, m):
    """The planes of (M, N) are contiguous along M, as those of (N, M) whose columns lie in groups. A row of
    memory has several groups, which begin at multiples of 16 bytes."""
    spec = grouped_columns()
    inside = rounded(tuple(min(end, 200) for end in ENDS[ends]))
    a, b, loads = groups(spec, inside, m, 72, 96)
    a[0] = _padded(a[0].t()).t()
    outputs, launch = run_region(spec, a, b, loads, machine(config, clusters=2))
    exact = epilogue(product(a[0], b[0], inside), loads, inside)
    for actual, expected in zip(outputs, (exact.bfloat16(), exact.amax(1)), strict=True):
        rows, right = (torch.atleast_2d(each[: inside[-1]]) for each in (actual, expected))
        assert torch.equal(rows, right), wrong(rows, right)
        beyond = actual[inside[-1] :].clone(memory_format=torch.contiguous_format)
        assert (beyond.view(torch.uint8) == 0xFF).all()
    assert outputs[0].stride() == (1, m)
    assert launch.kernel.plan.alignment is (Alignment.TMA if m % 8 == 0 else Alignment.PLAIN)
    assert build(launch.kernel).spill_bytes == 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("ends", ["edges", "one_row_each", "all_in_one"])
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[1], *CONFIGS[4:6]], ids=lambda config: config.name)
def test_groups_of_columns_begin_anywhere(config, ends):
    """A is contiguous along K, so groups begin at any row. In planes by columns, that is at any byte of
    contiguous memory, where TMA would trap."""
    spec = grouped_columns(Major.K)
    inside = tuple(min(end, 200) for end in ENDS[ends])
    a, b, loads = groups(spec, inside, 200, 72, 96)
    outputs, launch = run_region(spec, a, b, loads, machine(config, clusters=2))
    exact = epilogue(product(a[0], b[0], inside), loads, inside)
    for actual, expected in zip(outputs, (exact.bfloat16(), exact.amax(1)), strict=True):
        rows, right = (torch.atleast_2d(each[: inside[-1]]) for each in (actual, expected))
        assert torch.equal(rows, right), wrong(rows, right)
    assert launch.kernel.plan.alignment is Alignment.TMA
    assert build(launch.kernel).spill_bytes == 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", [sm90(64, 128), sm100(128, 64)], ids=lambda config: config.arch.value)
def test_groups_of_columns_begin_anywhere_in_a_plane_of_bytes(config):
    """Groups that begin at multiples of 16 bytes of A, in 16 bits, begin at multiples of 8 in 8 bits."""
    spec, ends = grouped_columns(dtype=DType.E4M3), (8, 24, 40, 104)
    a, b, loads = groups(spec, ends, 208, 72, 96)
    outputs, _ = run_region(spec, a, b, loads, machine(config))
    exact = epilogue(product(a[0], b[0], ends), loads, ends).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(outputs[0][:104].float(), exact[:104].float())


def _padded(rows: Tensor) -> Tensor:
    """A matrix whose rows lie 16 elements further apart, so that TMA reads it whatever its columns."""
    lines, columns = rows.shape
    step = (columns + 31) // 16 * 16
    return rows.new_zeros(lines, step).as_strided(rows.shape, (step, 1)).copy_(rows)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", [sm90(64, 128), sm100(128, 64)], ids=lambda config: config.arch.value)
def test_whatever_offsets_hold_nothing_else_is_touched(config):
    """They fall, lie below 0 and beyond the rows: each group is cut to the rows that are there."""
    spec = grouped()
    ends = (-5, 3, 2**31 - 1, 7, -(2**31))
    a, b, loads = groups(spec, ends, M, 72, 96)
    outputs, _ = run_region(spec, a, b, loads, machine(config))
    exact = epilogue(product(a[0], b[0], (0, 3, M)), loads, (0, 3, M))
    assert torch.equal(outputs[0], exact.bfloat16())


@pytest.mark.sweep(1)
@pytest.mark.parametrize("columns", [Columns.ALL, Columns.EVEN], ids=["halves", "neighbours"])
@pytest.mark.parametrize("arch", [SM90, SM100], ids=lambda arch: arch.value)
def test_gate_and_up_of_each_group(arch, columns):
    """acc0 * acc1: two B, or the even and the odd columns of one."""
    second = Columns.ALL if columns is Columns.ALL else Columns.ODD
    first = Accumulator("acc0", DType.BF16, DType.BF16, columns=columns, kind=ProductKind.GROUPED)
    spec = EpilogueSpec(
        (first, replace(first, name="acc1", columns=second)),
        (),
        (op("t0", "mul", "acc0", "acc1"),),
        (Store("out0", "t0", DType.BF16),),
    )
    ends, n, k, generator = ENDS["edges"], 72, 96, torch.Generator().manual_seed(0)
    a = integers((M, k), DType.BF16, generator)
    packed = integers((len(ends), 2 * n, k), DType.BF16, generator).transpose(1, 2)
    halves = [packed[..., :n], packed[..., n:]]
    bs = halves if columns is Columns.ALL else [packed]
    gate, up = halves if columns is Columns.ALL else (packed[..., ::2], packed[..., 1::2])
    config = tile_table(arch, spec)[-1]
    offsets = torch.tensor(ends, dtype=torch.int32)
    [actual], launch = run_region(spec, [a, offsets], bs, [], machine(config))
    expected = (product(a, gate, ends) * product(a, up, ends)).bfloat16()
    assert torch.equal(actual[: ends[-1]], expected[: ends[-1]])
    assert build(launch.kernel).spill_bytes == 0


def test_no_grouped_product_has_k_in_parts():
    with pytest.raises(BuildError, match="has split-K, which a grouped product does not support"):
        build(Kernel(plan(grouped(), sm90(64, 64, split_k=4), Alignment.TMA)))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("arch", [SM90, SM100], ids=lambda arch: arch.value)
def test_scales_of_rows_and_of_columns_of_each_group(arch):
    """acc * scale_a * scale_b of e4m3, as `_scaled_grouped_mm` has it; on Hopper the sums are promoted."""
    acc = Accumulator("acc", DType.E4M3, DType.E4M3, fast_accum=False, kind=ProductKind.GROUPED)
    of_columns = Load("scales", LoadKind.GROUPVEC, DType.F32, Stride.OTHER, Stride.ONE)
    ops = (op("t0", "mul", "acc", "scale_a"), op("t1", "mul", "t0", "scales"))
    spec = EpilogueSpec((acc,), (SCALE_A, of_columns), ops, (Store("out0", "t1", DType.BF16),))
    ends = ENDS["edges"]
    a, b, (scale_a, scales) = groups(spec, ends, M, 72, 160)
    [actual], launch = run_region(spec, a, b, [scale_a, scales], machine(tile_table(arch, spec)[0]))
    expected = product(a[0], b[0], ends) * scale_a[:, None]
    for group, (first, end) in enumerate(pairwise((0, *ends))):
        expected[first:end] *= scales[group]
    assert torch.equal(actual[: ends[-1]], expected[: ends[-1]].float().bfloat16())
    assert build(launch.kernel).spill_bytes == 0


MX_ENDS = {
    "edges": (0, 3, 3, 67, 131, 190),
    "tiles": (1, 130, 130, 387),  # 1, 2, 0 and 3 tiles of scales
    "many": (*[0] * 33, 1, 140),  # more groups than a warp looks at in one step
}
EACH_WITH_A_TILE = pytest.param((*range(1, 34), 170), id="each_with_a_tile", marks=pytest.mark.exhaustive)
MX_CASES = [*(pytest.param(ends, id=name) for name, ends in MX_ENDS.items()), EACH_WITH_A_TILE]
MX_CONFIGS = [sm100(128, 64), sm100(256, 128, 2, ctas=2), sm100(128, 128, 2, 2, column_groups=2)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("ends", MX_CASES)
@pytest.mark.parametrize("config", MX_CONFIGS, ids=lambda config: config.name)
def test_scales_of_blocks_begin_with_a_tile_of_their_group(config, ends):
    """MXFP8: the scales of a group's rows lie behind those of the groups before it, padded to tiles."""
    inside, spec = ends, GROUPED_MX
    m = inside[-1] + 10
    a, b, loads = scaled_groups(spec, inside, m, 136, 160)
    a[2] = torch.cat([a[2], a[2][: 5 * 8]])  # memory may end within a tile that no group has
    outputs, launch = run_region(spec, a, b, loads, machine(config, clusters=2))
    expected = replay(spec, a, b, loads)
    for actual, right in zip(outputs, expected, strict=True):
        actual, right = (torch.atleast_2d(each[: inside[-1]]) for each in (actual, right))
        assert torch.equal(actual, right), wrong(actual, right)
    assert build(launch.kernel).spill_bytes == 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("ends", MX_CASES)
@pytest.mark.parametrize("config", MX_CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("name", GROUPED_FP4)
def test_fp4_rows_in_groups_have_scales_of_blocks(name, config, ends):
    """MXFP4, and NVFP4 with a number for each group. Two values of K lie in a byte."""
    inside, spec = ends, GROUPED_FP4[name]
    a, b, loads = scaled_groups(spec, inside, inside[-1] + 10, 136, 288)
    outputs, launch = run_region(spec, a, b, loads, machine(config, clusters=2))
    for actual, right in zip(outputs, replay(spec, a, b, loads), strict=True):
        actual, right = (torch.atleast_2d(each[: inside[-1]]) for each in (actual, right))
        assert torch.equal(actual, right), wrong(actual, right)
    assert build(launch.kernel).spill_bytes == 0


def test_whatever_offsets_hold_scales_beyond_the_last_are_not_read():
    """With offsets of more tiles than there are, scales are read as zeros, within their memory."""
    spec = GROUPED_MX
    a, b, loads = scaled_groups(spec, (3, 7, 9), 200, 72, 160)
    a[1] = torch.tensor([1, 2, 200], dtype=torch.int32)
    a[2] = a[2][: a[2].numel() // 3]
    outputs, _ = run_region(spec, a, b, loads, machine(sm100(128, 64)))
    assert torch.equal(
        outputs[0][:1], replay(spec, [a[0], a[1][:1], a[2]], [each[:1] for each in b], loads)[0][:1]
    )


K = 200
K_ENDS = {
    "edges": (0, 3, 3, 67, 131, 190),  # none, 3, none, 64, 64 and 59; 10 belong to no group
    "all_in_one": (0, K, K),
}
K_CONFIGS = [
    sm90(64, 128, pingpong=True),
    sm90(128, 128, 2, 1, pingpong=True),
    sm90(128, 64, 1, 2),
    sm100(128, 64),
    sm100(256, 64, 2, 1, ctas=2),
    sm100(128, 64, 2, 2),
]


def by_groups_of_k(a: Tensor, b: Tensor, ends: tuple[int, ...]) -> Tensor:
    """The product of each group's columns of A and rows of B, exactly: (G * M, N)."""
    parts = (a[:, first:end].double() @ b[first:end].double() for first, end in pairwise((0, *ends)))
    return torch.cat(list(parts))


def epilogue_of_k(products: Tensor, loads: list[Tensor]) -> Tensor:
    """The epilogue of `grouped_k`, whose scale_b is one row, or one of each group."""
    scale_a, scale_b, residual = loads
    of_columns = scale_b if scale_b.dim() == 1 else scale_b.repeat_interleave(72, 0)
    return (products * scale_a[:, None] * of_columns + residual).float()


def check_k(config: TileConfig, ends: tuple[int, ...], n: int, spec: EpilogueSpec, k: int = K) -> None:
    """Every group has its product, with the epilogue, and its rows their largest elements."""
    a, b, loads = groups_of_k(spec, ends, 72, n, k)
    outputs, launch = run_region(spec, a, b, loads, machine(config, clusters=2))
    exact = epilogue_of_k(by_groups_of_k(a[0], b[0], ends), loads)
    for actual, expected in zip(outputs, (exact.bfloat16(), exact.amax(1)), strict=True):
        actual, expected = torch.atleast_2d(actual), torch.atleast_2d(expected)
        assert torch.equal(actual, expected), wrong(actual, expected)
    assert launch.kernel.plan.alignment is (Alignment.TMA if n % 8 == 0 else Alignment.PLAIN)
    assert_sound([launch.kernel.plan])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("n", [136, 133])
@pytest.mark.parametrize("ends", K_ENDS)
@pytest.mark.parametrize("config", K_CONFIGS, ids=lambda config: f"{config.arch.value}-{config.name}")
def test_groups_of_k_begin_and_end_anywhere(config, ends, n):
    """An empty group's product is zeros; beyond the last one lie NaN, which no product has."""
    check_k(config, K_ENDS[ends], n, grouped_k())


FP8_K = 432
FP8_K_ENDS = {
    "edges": (0, 16, 16, 80, 208, 320, 416),  # 128 are one k tile; 16 belong to no group
    "all_in_one": (0, FP8_K, FP8_K),
    "free_end": (16, 16, 160, 203),  # the tail of the last group is 11, after 32 whole ones
    "one_in_the_last": (0, 256, 257),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("n", [144, 133])
@pytest.mark.parametrize("ends", FP8_K_ENDS)
@pytest.mark.parametrize("config", K_CONFIGS, ids=lambda config: f"{config.arch.value}-{config.name}")
def test_groups_of_k_in_fp8_begin_at_multiples_of_16(config, ends, n):
    """Both operands are contiguous along K, and each group has scales of its own for rows and columns. The
    last group ends anywhere."""
    check_k(config, FP8_K_ENDS[ends], n, grouped_k(DType.E4M3), FP8_K)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("ends", [param("edges", marks=pytest.mark.exhaustive), "all_in_one", "free_end"])
def test_sums_of_groups_of_k_in_fp8_are_promoted(ends):
    check_k(K_CONFIGS[0], FP8_K_ENDS[ends], 144, promoted(grouped_k(DType.E4M3)), FP8_K)


FP8_K_TILES = [
    pytest.param(config, spec, id=f"{config.arch.value}-{config.name}-{name}")
    for name, spec in {"fast": grouped_k(DType.E4M3), "promoted": promoted(grouped_k(DType.E4M3))}.items()
    for arch in (SM90, SM100)
    if (arch, name) != (SM100, "promoted")  # the tensor cores of Blackwell add in fp32
    for config in tile_table(arch, spec)
]


@pytest.mark.sim
@pytest.mark.parametrize(("config", "spec"), FP8_K_TILES)
def test_every_tile_of_groups_of_k_in_fp8_ends_anywhere(config, spec):
    check_k(config, FP8_K_ENDS["free_end"], 144, spec, FP8_K)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("behind_a", "behind_b"), [(torch.nan, 2.0), (2.0, torch.nan), (torch.nan, torch.nan)]
)
@pytest.mark.parametrize("tail", range(1, 16))
@pytest.mark.parametrize("config", [sm90(64, 64), sm100(256, 64, 2, 1, ctas=2)], ids=lambda c: c.arch.value)
def test_any_tail_of_the_last_group_of_k_in_fp8(config, tail, behind_a, behind_b):
    """A, B or both hold NaN behind that end."""
    ends = (16, 128 + tail)
    a, b, loads = groups_of_k(grouped_k(DType.E4M3), ends, 72, 144, 160)
    exact = epilogue_of_k(by_groups_of_k(a[0], b[0], ends), loads).bfloat16()
    for operand, behind in ((a[0].t(), behind_a), (b[0], behind_b)):
        operand[ends[-1] :].copy_(torch.full((160 - ends[-1], operand.shape[1]), behind))
    outputs, _ = run_region(grouped_k(DType.E4M3), a, b, loads, machine(config))
    assert torch.equal(outputs[0], exact), wrong(outputs[0], exact)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", [sm90(64, 64), sm100(128, 64)], ids=lambda config: config.arch.value)
def test_other_ends_of_groups_of_k_in_fp8_but_the_last_are_rounded_down(config):
    """Nothing else is read, whatever offsets hold."""
    spec, ends = grouped_k(DType.E4M3), (-5, 3, 40, 2**31 - 1, 7, -(2**31), 1)
    a, b, loads = groups_of_k(spec, (FP8_K,) * len(ends), 72, 72, FP8_K)
    a[1] = torch.tensor(ends, dtype=torch.int32)
    outputs, _ = run_region(spec, a, b, loads, machine(config))
    parts = [(0, 0), (0, 0), (0, 32), (32, FP8_K), (FP8_K, FP8_K), (0, 0), (0, 1)]
    exact = torch.cat([a[0][:, first:end].double() @ b[0][first:end].double() for first, end in parts])
    expected = epilogue_of_k(exact, loads).bfloat16()
    assert torch.equal(outputs[0], expected), wrong(outputs[0], expected)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", [sm90(64, 64, pingpong=True), sm100(128, 64)], ids=lambda c: c.arch.value)
def test_whatever_offsets_of_k_hold_nothing_else_is_read(config):
    """They fall, lie below 0 and beyond K: each group is cut to what is there."""
    spec, ends = grouped_k(), (-5, 3, 2**31 - 1, 7, -(2**31), 1)
    a, b, loads = groups_of_k(spec, (K,) * len(ends), 72, 72, K)
    a[1] = torch.tensor(ends, dtype=torch.int32)
    outputs, _ = run_region(spec, a, b, loads, machine(config))
    parts = [(0, 0), (0, 3), (3, K), (K, K), (7, 7), (0, 1)]
    exact = torch.cat([a[0][:, first:end].double() @ b[0][first:end].double() for first, end in parts])
    expected = (exact * loads[0][:, None] * loads[1] + loads[2]).float().bfloat16()
    assert torch.equal(outputs[0], expected), wrong(outputs[0], expected)
