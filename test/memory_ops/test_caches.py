"""Planes that are written to rows of a cache (B, H, L, D): kernels against the replay, exactly."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from cute_backend.formula import formula
from cute_backend.kinds.blocks import ROTATE_HALF
from cute_backend.kinds.results import PLANE, Cache, Heads
from cute_backend.memory_ops.emit import emit
from cute_backend.memory_ops.schedule import kernel_names
from cute_backend.planning import Alignment, Arch, Sizes, TileConfig, choose, plan
from cute_backend.planning.transposing import can_transpose
from cute_backend.replay import replay
from cute_backend.runtime.arguments.operands import check_operands
from cute_backend.runtime.calls.op import gemm_epilogue_into
from cute_backend.runtime.compiling.compile import SYMBOL, compile_kernel
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.simulator import simulate
from cute_backend.simulator.host import HostProgram
from cute_backend.simulator.simulate import Machine, run_region
from cute_backend.simulator.simulation_errors import IllegalAccess
from cute_backend.spec import (
    Accumulator,
    Blocks,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Op,
    ProductKind,
    SpecError,
    Store,
    Stride,
)
from support.verdicts import assert_sound

ACC = Accumulator("acc", DType.BF16, DType.BF16)
BY_ROW = Load("colvec0", LoadKind.COLVEC, DType.I64, Stride.OTHER, Stride.ZERO)
FIRST = Load("scalar0", LoadKind.SCALAR, DType.I64, Stride.ZERO, Stride.ZERO)
CACHE = Cache(128, 3, 64, "scalar0")


def single(cache: Cache, *loads: Load) -> EpilogueSpec:
    return EpilogueSpec((ACC,), loads, (), (Store("out0", "acc", DType.BF16, form=cache),))


def attention(rows: int, length: int, load: Load, columns: int = 64) -> EpilogueSpec:
    """Queries by heads, keys that are rotated, and values, of which the last two go to caches."""
    accumulators = tuple(replace(ACC, name=f"acc{i}", width=n * columns) for i, n in enumerate((2, 2, 1)))
    blocks = Blocks(columns, Stride.ZERO, Stride.ONE)
    cos = Load("exact0", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.OTHER, (), blocks)
    ops = (
        Op("t0", ROTATE_HALF.name, ("acc1",), DType.F32, block=columns),
        Op("t1", "mul", ("t0", "exact0"), DType.F32),
    )
    cache = Cache(length, rows, columns, load.name)
    stores = (
        Store("out0", "acc0", DType.BF16, form=Heads(rows, columns) if rows > 1 else PLANE),
        Store("out1", "t1", DType.BF16, form=cache),
        Store("out2", "acc2", DType.BF16, form=cache),
    )
    return EpilogueSpec(accumulators, (cos, load), ops, stores)


def integers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-3, 4, shape, generator=generator).bfloat16()


def check(spec: EpilogueSpec, m: int, at: Tensor | None, config: TileConfig, n: int = 0) -> None:
    """Simulates a product of small integers. The simulated machine fills the caches with set bits, which the
    rows that are not written have in the replay too, and has no memory around them."""
    a = [integers(m, 64)]
    b = [integers(acc.width or n, 64).t() for acc in spec.accumulators]
    loads = [
        integers(m, 1, 64).expand(m, spec.width_of(each.name) // 64, -1) for each in spec.loads if each.blocks
    ]
    loads += [] if at is None else [at]
    results, _ = run_region(spec, a, b, loads, Machine(config.arch, 1, config, 1))
    for result, right in zip(results, replay(spec, a, b, loads), strict=True):
        assert torch.equal(result.contiguous().view(torch.int16), right.contiguous().view(torch.int16))


def by_row(*positions: int, batches: int = 1) -> Tensor:
    return torch.tensor(positions).repeat(batches)


CONFIGS = [
    TileConfig(Arch.SM90A, 64, 64),
    TileConfig(Arch.SM100A, 128, 64),
    TileConfig(Arch.SM90A, 128, 128, 1, 2),
    TileConfig(Arch.SM100A, 128, 128, 1, 2, column_groups=2),
    TileConfig(Arch.SM90A, 64, 128, pingpong=True),
    TileConfig(Arch.SM90A, 64, 64, split_k=2),
]


def test_the_replay_writes_positions() -> None:
    a, b = torch.randn(6, 16).bfloat16(), torch.randn(16, 128).bfloat16()
    (plane,) = replay(EpilogueSpec((ACC,), (), (), (Store("out0", "acc", DType.BF16),)), [a], [b], [])
    rows = plane.view(2, 3, 2, 64).transpose(1, 2)
    for load, at, places in [
        (FIRST, torch.tensor(4), [4, 5, 6]),
        (FIRST, torch.tensor(-1), [7, 0, 1]),
        (BY_ROW, by_row(5, -8, 2, batches=2), [5, 0, 2]),
    ]:
        (cache,) = replay(single(Cache(8, 3, 64, load.name), load), [a], [b], [at])
        cache = cache.view(2, 2, 8, 64)
        assert torch.equal(cache[:, :, places], rows)
        assert cache.isnan().any(-1).sum() == 2 * 2 * 5


def test_the_replay_leaves_out_rows_beyond_a_cache() -> None:
    a, b = torch.randn(3, 16).bfloat16(), torch.randn(16, 64).bfloat16()
    for load, at, written in [
        (FIRST, torch.tensor(6), 2),
        (FIRST, torch.tensor(2**40), 0),
        (BY_ROW, by_row(8, -9, 3), 1),
    ]:
        (cache,) = replay(single(Cache(8, 3, 64, load.name), load), [a], [b], [at])
        assert (~cache.isnan()).any(-1).sum() == written


@pytest.mark.sweep(1)
@pytest.mark.parametrize("rows", [1, 100, 127])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda each: f"{each.arch.value}-{each.name}")
def test_kernels_write_rows_from_a_position(config: TileConfig, rows: int) -> None:
    check(attention(rows, 128, FIRST), 2 * rows, torch.tensor(1), config)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("rows", [1, 100, 127])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda each: f"{each.arch.value}-{each.name}")
def test_kernels_write_rows_at_positions(config: TileConfig, rows: int) -> None:
    positions = torch.randperm(128, generator=torch.Generator().manual_seed(1))[: 2 * rows]
    check(attention(rows, 128, BY_ROW), 2 * rows, torch.cat([positions, positions])[: 2 * rows], config)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda each: each.arch.value)
def test_positions_beyond_a_cache_are_not_written(config: TileConfig) -> None:
    for load, at in [
        (FIRST, torch.tensor(126)),
        (FIRST, torch.tensor(-2)),
        (FIRST, torch.tensor(2**40)),
        (FIRST, torch.tensor(-(2**40))),
        (BY_ROW, torch.tensor([2**32, 128, -129, -1, 0, 127])),
    ]:
        check(attention(3, 128, load), 6, at, config)


EVERYWHERE = [*CONFIGS, *(TileConfig(arch, 64, 64) for arch in (Arch.SM80, Arch.SM89, Arch.SM120A))]
"""Tiles of every template."""


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [DType.I64, DType.I32])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("config", EVERYWHERE, ids=lambda each: f"{each.arch.value}-{each.name}")
def test_one_position_counts_from_the_end_of_a_cache(config: TileConfig, rows: int, dtype: DType) -> None:
    """A position below 0 stands for one that is as many rows before the end. The simulated machine has no
    memory before the cache, nor between its batches that is not compared."""
    spec = single(Cache(136, rows, 32, "scalar0"), replace(FIRST, dtype=dtype))
    held = torch.int64 if dtype is DType.I64 else torch.int32
    for at in (-3, -1, -136, -137, -(2**31), 135, 136):
        check(spec, 2 * rows, torch.tensor(at, dtype=held), config, n=128)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", EVERYWHERE, ids=lambda each: f"{each.arch.value}-{each.name}")
def test_a_position_of_each_single_row_counts_from_the_end(config: TileConfig) -> None:
    spec = single(Cache(136, 1, 32, "colvec0"), BY_ROW)
    check(spec, 6, torch.tensor([-3, -136, -137, 135, 136, 0]), config, n=128)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda each: each.arch.value)
def test_the_compiler_drops_signs_of_sums_with_constant_coordinates(
    config: TileConfig, tmp_path: Path
) -> None:
    """A planted fault: `follow_in_cache` without its detour through i64. If nothing is caught, the compiler
    no longer needs that."""
    spec, call = single(Cache(136, 1, 32, "scalar0"), FIRST), "follow_in_cache(held.scalar0[0], row, 1, 136)"
    text, path = emit(plan(spec, config, Alignment.TMA)), tmp_path / "faulty.py"
    assert text.count(call) == 1 and text.count("import follow_in_cache") == 1
    direct = "place_in_cache(cutlass.min(held.scalar0[0], Int32(136)) + row % 1, row, 1, 136)"
    text = text.replace(call, direct).replace("import follow_in_cache", "import place_in_cache")
    path.write_text(text)
    built = compile_kernel(Kernel(plan(spec, config, Alignment.TMA)), text, path)
    program = HostProgram(built.ptx, built.host_object, SYMBOL)
    with patch.object(simulate, "_program", lambda kernel: program):
        check(spec, 2, torch.tensor(5), config, n=128)
        with pytest.raises(IllegalAccess, match="before the start of argument 3"):
            check(spec, 2, torch.tensor(-3), config, n=128)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("first", "rows"), [(28, 100), (0, 128), (127, 1)])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda each: f"{each.arch.value}-{each.name}")
def test_kernels_write_slices(config: TileConfig, first: int, rows: int) -> None:
    check(single(Cache(128, rows, 64, first)), 2 * rows, None, config, n=192)


def test_a_kernel_reads_the_position_once_and_asks_for_each_row() -> None:
    config = choose(Arch.SM90A, attention(100, 128, FIRST), Sizes(200, 320, 64), 132)
    text = emit(plan(attention(100, 128, FIRST), config, Alignment.TMA))
    assert "scalar0 = saturated(scalar0_i64)" in text and text.count("glob.scalar0[") == 2
    for result in ("out1", "out2"):
        lines = [
            "            row, column, inside = sub.target(e)",
            "            place, kept = follow_in_cache(held.scalar0[0], row, 100, 128)",
            "            if inside & kept:",
            f"                {result}_glob[place, column] = {result}_rmem[e]",
        ]
        assert "\n".join(lines) in text
    assert "by_heads(out2, 128, 64)" in text


def test_the_formula_names_the_cache() -> None:
    spec = single(CACHE, FIRST)
    assert formula(spec, kernel_names(spec)) == "out0 = bf16(acc) to rows of (B, H, 128, 64) at scalar0"


@pytest.mark.sweep(1)
@pytest.mark.parametrize("rows", [1, 2048])
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
def test_every_kernel_that_writes_a_cache_has_a_sound_rung(arch: Arch, rows: int) -> None:
    spec = attention(rows, 4096, FIRST, columns=128)
    config = choose(arch, spec, Sizes(16 * rows, 640, 4096), arch.target.sm_count)
    assert_sound([plan(spec, config, Alignment.TMA)])


@pytest.mark.parametrize(
    ("store", "loads", "why"),
    [
        (replace(CACHE, rows=129), [FIRST], "129 rows of a cache of 128; heads have 64 columns"),
        (replace(CACHE, columns=0), [FIRST], "heads have 0 columns"),
        (CACHE, [], "at 'scalar0'; expected a scalar or a colvec of i32 or i64"),
        (CACHE, [replace(FIRST, dtype=DType.F32)], "expected a scalar or a colvec of i32 or i64"),
        (replace(CACHE, at=126), [], "3 rows of a cache of 128; it begins at row 126"),
        (
            replace(CACHE, at=0),
            [FIRST],
            "scalar0 is i64, which only places in a row or in a cache are loaded as",
        ),
    ],
)
def test_a_cache_that_contradicts_itself_is_refused(store: Cache, loads: list[Load], why: str) -> None:
    with pytest.raises(SpecError, match=re.escape(why)):
        single(store, *loads)


def test_a_cache_takes_planes_of_dense_products() -> None:
    spec = single(CACHE, FIRST)
    batched = replace(ACC, kind=ProductKind.BATCHED)
    with pytest.raises(SpecError, match="no plane of a batched product may"):
        replace(spec, accumulators=(batched,))
    doubled = Op("t0", "mul", ("acc", "scalar0"), DType.F32)
    with pytest.raises(SpecError, match="t0 reads 'scalar0', which is i64"):
        replace(spec, ops=(doubled,))


def test_a_spec_with_a_cache_survives_json_and_is_not_transposed() -> None:
    spec = attention(3, 128, FIRST)
    assert EpilogueSpec.from_json(spec.to_json()) == spec
    assert can_transpose(single(replace(CACHE, at=5))) is False


def test_results_that_are_given_are_checked() -> None:
    spec, a, b = single(CACHE, FIRST), torch.randn(6, 16).bfloat16(), torch.randn(16, 128).bfloat16()
    given = torch.zeros(2, 2, 128, 64, dtype=torch.bfloat16)
    gemm_epilogue_into([a], [b], [torch.tensor(-1)], spec.to_json(), results=[given])
    assert given.any(-1).nonzero()[:, 2].unique().tolist() == [0, 1, 127]
    for wrong in (given.float(), given[:1], given.transpose(2, 3)):
        with pytest.raises(ValueError, match=r"expected torch\.bfloat16, contiguous, with 32768 elements"):
            gemm_epilogue_into([a], [b], [torch.tensor(-1)], spec.to_json(), results=[wrong])


def test_rows_and_columns_that_are_not_those_of_a_cache_are_refused() -> None:
    spec, b, at = single(CACHE, FIRST), torch.randn(16, 128).bfloat16(), torch.tensor(0)
    with pytest.raises(
        ValueError, match="writes 3 rows of each batch to a cache, and 7 rows are no multiple"
    ):
        check_operands(spec, [torch.randn(7, 16).bfloat16()], [b], [at])
    with pytest.raises(ValueError, match="out0 has blocks of 64 columns, and 96 columns are no multiple"):
        check_operands(spec, [torch.randn(6, 16).bfloat16()], [b[:, :96]], [at])


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda each: each.arch.value)
def test_many_rows(config: TileConfig) -> None:
    check(attention(2049, 4096, FIRST), 2049, torch.tensor(2000), config)
