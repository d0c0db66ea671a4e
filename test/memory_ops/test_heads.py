"""Planes that are written as (B, H, S, D), which attention reads: kernels against the replay, exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cute_backend.formula import formula
from cute_backend.kinds.blocks import ROTATE_HALF
from cute_backend.kinds.results import PLANE, Heads
from cute_backend.memory_ops.schedule import kernel_names
from cute_backend.planning import Alignment, Arch, Sizes, TileConfig, choose, offered, plan
from cute_backend.replay import replay
from cute_backend.runtime.arguments.operands import check_operands
from cute_backend.simulator.simulate import Machine
from cute_backend.spec import (
    Accumulator,
    Blocks,
    Const,
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
from support.verdicts import assert_sound, run_sound

ACC = Accumulator("acc", DType.BF16, DType.BF16)
DOUBLED = Op("t0", "mul", ("acc", Const(2.0)), DType.F32)
STORE = Store("out0", "t0", DType.BF16, form=Heads(100, 64))


def single(rows: int, columns: int, dtype: DType = DType.BF16) -> EpilogueSpec:
    """A plane by heads, and the same one by rows."""
    stores = (replace(STORE, dtype=dtype, form=Heads(rows, columns)), Store("out1", "t0", DType.BF16))
    return EpilogueSpec((ACC,), (), (DOUBLED,), stores)


def attention(rows: int, columns: int, *heads: int) -> EpilogueSpec:
    """Segments of these heads. The first is rotated, and all are written by heads."""
    accumulators = tuple(replace(ACC, name=f"acc{i}", width=count * columns) for i, count in enumerate(heads))
    blocks = Blocks(columns, Stride.ZERO, Stride.ONE)
    cos = Load("exact0", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.OTHER, (), blocks)
    ops = (
        Op("t0", ROTATE_HALF.name, ("acc0",), DType.F32, block=columns),
        Op("t1", "mul", ("t0", "exact0"), DType.F32),
    )
    stores = [replace(STORE, value="t1", form=Heads(rows, columns))]
    for acc in accumulators[1:]:
        stores.append(replace(stores[0], name=f"out{len(stores)}", value=acc.name))
    return EpilogueSpec(accumulators, (cos,), ops, tuple(stores))


def at_launch(spec: EpilogueSpec) -> EpilogueSpec:
    """The segments of `attention`, whose batches share the table. A launch tells the rows of the first one's
    heads, and the others have none."""
    loads = tuple(replace(load, m_modes=(Stride.ZERO, Stride.OTHER)) for load in spec.loads)
    first, *others = spec.stores
    assert isinstance(first.form, Heads)
    stores = (
        replace(first, form=replace(first.form, rows=0)),
        *(replace(each, form=PLANE) for each in others),
    )
    return replace(spec, loads=loads, stores=stores)


def check(spec: EpilogueSpec, m: int, n: int, config: TileConfig, seed: int | None = 1) -> None:
    """Simulates a product of small integers, whose results must be right. The simulated machine has no memory
    around the results, so that a write beyond them is an error."""
    generator = torch.Generator().manual_seed(m + n)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator).bfloat16()

    widths = [acc.width or n for acc in spec.accumulators]
    a, b = [integers(m, 64)], [integers(width, 64).t() for width in widths]
    loads = []
    for load in spec.loads:
        assert load.blocks is not None
        modes = (2, m // 2) if load.m_modes else (m,)
        table = integers(modes[-1], 1, load.blocks.columns)
        loads.append(table.expand(*modes, widths[0] // load.blocks.columns, -1))
    results, _ = run_sound(spec, a, b, loads, Machine(config.arch, seed, config, 1))
    for result, right in zip(results, replay(spec, a, b, loads), strict=True):
        assert torch.equal(result, right)


def test_the_replay_writes_heads() -> None:
    a, b = torch.randn(12, 16).bfloat16(), torch.randn(16, 96).bfloat16()
    by_heads, by_rows = replay(single(3, 32), [a], [b], [])
    assert torch.equal(by_heads.view(4, 3, 3, 32), by_rows.view(4, 3, 3, 32).transpose(1, 2))
    assert by_heads.is_contiguous()


CONFIGS = [
    TileConfig(Arch.SM90A, 64, 128, pingpong=True),
    TileConfig(Arch.SM100A, 128, 128),
    TileConfig(Arch.SM90A, 128, 128, 1, 2),
    TileConfig(Arch.SM100A, 256, 128, 2, ctas=2),
    TileConfig(Arch.SM90A, 64, 64, split_k=2),
    TileConfig(Arch.SM100A, 128, 128, 1, 2, column_groups=2),
    TileConfig(Arch.SM90A, 64, 64),
    TileConfig(Arch.SM100A, 128, 64),
]
SIZES = [(2, 7, 64), (3, 70, 32), (100, 2, 64), (127, 3, 128), (2049, 2, 64), (200, 1, 32)]
"""Rows, batches and columns of heads: several batches in a box, boxes that end within a batch, one batch."""


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("rows", "batches", "columns"), SIZES)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda each: f"{each.arch.value}-{each.name}")
def test_kernels_write_heads(config: TileConfig, rows: int, batches: int, columns: int) -> None:
    check(single(rows, columns), rows * batches, 3 * columns, config)


@pytest.mark.exhaustive
@pytest.mark.parametrize("columns", [32, 96, 160, 192])
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
def test_heads_of_any_columns(arch: Arch, columns: int) -> None:
    spec = single(100, columns, DType.F32)
    check(spec, 300, 3 * columns, choose(arch, spec, Sizes(300, 3 * columns, 64), arch.target.sm_count))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "of", [attention, lambda *sizes: at_launch(attention(*sizes))], ids=["", "at launch"]
)
@pytest.mark.parametrize("rows", [50, 127])
@pytest.mark.parametrize("config", CONFIGS[:4], ids=lambda each: f"{each.arch.value}-{each.name}")
def test_kernels_write_heads_of_segments(
    config: TileConfig, rows: int, of: Callable[..., EpilogueSpec]
) -> None:
    check(of(rows, 64, 3, 2, 1), 2 * rows, 0, config)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda each: each.arch.value)
def test_heads_of_128_columns_that_are_rotated(config: TileConfig, seed: int) -> None:
    check(attention(100, 128, 2, 1), 300, 0, replace(config, tile_n=128), seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A], ids=lambda arch: arch.value)
def test_every_tile_of_heads_with_rows_of_a_launch_has_a_sound_rung(arch: Arch, alignment: Alignment) -> None:
    spec = at_launch(attention(100, 64, 32, 8, 8))
    for config in offered(arch, spec):
        assert_sound([plan(spec, config, alignment)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
@pytest.mark.parametrize(
    "spec",
    [single(100, 64), attention(2048, 128, 32, 8, 8), at_launch(attention(2048, 128, 32, 8, 8))],
    ids=["one product", "layer of Llama", "rows of a launch"],
)
def test_kernels_have_a_sound_rung(arch: Arch, spec: EpilogueSpec) -> None:
    n = sum(acc.width for acc in spec.accumulators) or 4096
    config = choose(arch, spec, Sizes(100 if n == 4096 else 2048, n, 4096), arch.target.sm_count)
    assert_sound([plan(spec, config, Alignment.TMA)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("alignment", list(Alignment))
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
def test_every_tile_has_a_sound_rung(arch: Arch, alignment: Alignment) -> None:
    for spec in (single(100, 64), single(2048, 128), attention(2048, 128, 32, 8, 8)):
        for config in offered(arch, spec):
            assert_sound([plan(spec, config, alignment)])


def test_a_subtile_is_within_a_head() -> None:
    for arch in (Arch.SM90A, Arch.SM100A):
        for columns in (64, 96, 160):
            spec = single(100, columns)
            for config in offered(arch, spec):
                assert columns % config.subtile_n == 0
                assert plan(spec, config, Alignment.TMA).shared_stores[0] == "out0"


def test_planes_are_written_by_element_where_a_subtile_has_several_heads() -> None:
    """Blocks of two sizes are reduced in visits that hold the larger ones whole."""
    means = (
        Op("t1", "block_mean", ("acc",), DType.F32, block=32),
        Op("t0", "block_mean", ("t1",), DType.F32, block=64),
    )
    spec = EpilogueSpec((ACC,), (), means, (replace(STORE, form=Heads(100, 32)),))
    config = choose(Arch.SM90A, spec, Sizes(200, 256, 64), 132)
    assert config.subtile_n == 64 and not plan(spec, config, Alignment.TMA).shared_stores
    check(spec, 200, 192, config)


def test_the_form_names_heads() -> None:
    spec = single(100, 64)
    assert EpilogueSpec.from_json(spec.to_json()) == spec and spec.block_columns == 64
    assert "heads" not in replace(spec, stores=spec.stores[1:]).to_json()
    assert formula(spec, kernel_names(spec)).splitlines()[1:] == [
        "out0 = bf16(t0) as (B, H, 100, 64)",
        "out1 = bf16(t0)",
    ]


@pytest.mark.parametrize(
    ("store", "why"),
    [
        (replace(STORE, form=Heads(1, 64)), "rows are 2 or more"),
        (replace(STORE, form=Heads(100, 40)), "columns are a multiple of 16"),
    ],
)
def test_a_spec_refuses_other_heads(store: Store, why: str) -> None:
    with pytest.raises(SpecError, match=f"^out0 has heads of .*{why}"):
        EpilogueSpec((ACC,), (), (DOUBLED,), (store,))


def test_a_product_of_batches_has_no_heads() -> None:
    with pytest.raises(SpecError, match="no plane of a batched product may"):
        EpilogueSpec((replace(ACC, kind=ProductKind.BATCHED),), (), (DOUBLED,), (STORE,))


def test_operands_have_whole_heads() -> None:
    spec = single(100, 64)

    def checked(m: int, n: int) -> None:
        check_operands(spec, [torch.empty(m, 16).bfloat16()], [torch.empty(16, n).bfloat16()], [])

    checked(300, 128)
    with pytest.raises(ValueError, match=r"^out0 has heads of 100 rows, and 150 rows are no multiple$"):
        checked(150, 128)
    with pytest.raises(ValueError, match=r"^out0 has blocks of 64 columns, and 96 columns are no multiple$"):
        checked(300, 96)
    with pytest.raises(SpecError, match=r"^acc1 has 96 columns, and blocks of 64$"):
        layer = attention(100, 64, 2, 1)
        wider = replace(layer.accumulators[1], width=96)
        replace(layer, accumulators=(layer.accumulators[0], wider))
