"""Rotations of the first columns of blocks, whose partners may be in other threads, by tables of those
columns alone: to the bit."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import pytest
import torch
from torch import Tensor

from cute_backend import ops
from cute_backend.kinds.blocks import PART, ROTATE_FIRST
from cute_backend.kinds.results import PLANE, Cache, Heads
from cute_backend.memory_ops.schedule import kernel_formula
from cute_backend.planning import Alignment, Arch, TileConfig, offered, plan, planes_written, tile_table
from cute_backend.planning.search import serves
from cute_backend.replay import replay
from cute_backend.runtime.arguments.operands import check_operands
from cute_backend.simulator.simulate import Machine
from cute_backend.spec import (
    Accumulator,
    Blocks,
    Columns,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Op,
    Operand,
    SpecError,
    Store,
    Stride,
)
from support.sweeps import in_parts, of_part
from support.verdicts import assert_sound, run_sound

ACC = Accumulator("acc", DType.BF16, DType.BF16)


def op(name: str, kind: str, *operands: Operand, block: int = 0, dtype: DType = DType.F32) -> Op:
    return Op(name, kind, operands, dtype, block=block)


def first(
    count: int, columns: int, dtype: DType = DType.BF16, batches: bool = False, rows: int = 0
) -> EpilogueSpec:
    """Of each block of `columns` columns, rotates the first `count` by cosines and sines of positions, which
    `batches` share. With `rows`, writes (B, H, rows, columns)."""
    blocks = Blocks(count, Stride.ZERO, Stride.ONE, columns if count < columns else 0)
    modes = (Stride.ZERO, Stride.OTHER) if batches else ()
    cos = Load("exact0", LoadKind.EXACT, dtype, Stride.OTHER, Stride.OTHER, modes, blocks)
    part = gcd(count, columns)
    chain = (
        op("t0", "mul", "acc", "exact0"),
        op("t1", ROTATE_FIRST.name, "acc", Const(count), block=columns),
        op("t2", "mul", "t1", "exact1"),
        op("t3", "add", "t0", "t2"),
        op("t4", PART.name, Const(part), block=columns, dtype=DType.I32),
        op("t5", "lt", "t4", Const(count // part), dtype=DType.BOOL),
        op("t6", "where", "t5", "t3", "acc"),
    )
    store = Store("out0", "t6", DType.BF16, form=Heads(rows, columns) if rows else PLANE)
    return EpilogueSpec((ACC,), (cos, replace(cos, name="exact1")), chain, (store,))


def operands(spec: EpilogueSpec, m: int, n: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Small integers, of which every sum is exact."""
    generator = torch.Generator().manual_seed(m + n)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).bfloat16()

    tables = []
    for load in spec.loads:
        assert load.blocks is not None
        batches, heads = 2 if load.m_modes else 1, n // load.blocks.step
        values = integers(m // batches, 1, load.blocks.columns)
        values = values.to(torch.float32 if load.dtype is DType.F32 else torch.bfloat16)
        values = values.expand(batches, -1, heads, -1)
        tables.append(values if load.m_modes else values[0])
    return [integers(m, 64)], [integers(n, 64).t()], tables


def expected(spec: EpilogueSpec, a: Tensor, b: Tensor, tables: list[Tensor]) -> Tensor:
    """In float64, as a program spells it."""
    (columns,) = (each.block for each in spec.ops if each.op == PART.name)
    x = (a.double() @ b.double()).unflatten(1, (-1, columns))
    cos, sin = (each.double().reshape(-1, *each.shape[-2:]) for each in tables)
    count = cos.shape[-1]
    half, other = x[..., :count].chunk(2, -1)
    turned = x[..., :count] * cos + torch.cat((-other, half), -1) * sin
    x = torch.cat((turned, x[..., count:]), -1)
    if isinstance(heads := spec.stores[0].form, Heads):
        x = x.unflatten(0, (-1, heads.rows)).transpose(1, 2)
    return x.reshape(a.shape[0], -1).bfloat16()


@pytest.mark.parametrize(("count", "columns"), [(32, 80), (24, 96), (20, 80), (4, 10), (8, 8)])
@pytest.mark.parametrize("batches", [False, True])
def test_the_replay_rotates_first_columns(count: int, columns: int, batches: bool) -> None:
    spec = first(count, columns, batches=batches, rows=4 if columns % 16 == 0 else 0)
    ops.check(spec)
    a, b, tables = operands(spec, 8, 3 * columns)
    (result,) = replay(spec, a, b, tables)
    assert torch.equal(result, expected(spec, *a, *b, tables))


CASES = [
    (TileConfig(Arch.SM90A, 128, 80, 2, subtile_n=80), first(32, 80)),
    (TileConfig(Arch.SM90A, 64, 96, subtile_n=96), first(24, 96, rows=70)),
    (TileConfig(Arch.SM90A, 64, 80, subtile_n=80), first(20, 80, DType.F32)),
    (TileConfig(Arch.SM90A, 64, 96, subtile_n=96, split_k=2), first(24, 96, DType.F32)),
    (TileConfig(Arch.SM90A, 64, 80, subtile_n=80), first(80, 80, rows=35)),
    (TileConfig(Arch.SM90A, 128, 128, 2, subtile_n=64), first(24, 64)),
    (TileConfig(Arch.SM90A, 64, 64), first(12, 32)),
    (TileConfig(Arch.SM80, 64, 64), first(12, 32)),
    (TileConfig(Arch.SM90A, 128, 128, cluster_n=2, pingpong=True, subtile_n=32), first(24, 96)),
    (TileConfig(Arch.SM90A, 64, 192, subtile_n=32), first(20, 96, DType.F32, rows=70)),
    (TileConfig(Arch.SM100A, 128, 128), first(24, 96)),
    (TileConfig(Arch.SM100A, 128, 64), first(28, 64, DType.F32, rows=70)),
    (TileConfig(Arch.SM90A, 128, 192, cluster_n=2, subtile_n=64), first(64, 128, rows=70)),
    (TileConfig(Arch.SM90A, 64, 64, pingpong=True, subtile_n=64), first(36, 128, rows=35)),
    (TileConfig(Arch.SM100A, 128, 160, subtile_n=40), first(32, 80, rows=70)),
    (TileConfig(Arch.SM100A, 256, 160, 2, ctas=2, subtile_n=40), first(20, 80, DType.F32)),
    (TileConfig(Arch.SM80, 64, 64), first(24, 96)),
    (TileConfig(Arch.SM90A, 64, 128, pingpong=True, subtile_n=128), first(96, 128, rows=70)),
]


def by_element(spec: EpilogueSpec) -> EpilogueSpec:
    """The spec with tables whose columns have no known stride, which no kernel reads by TMA."""

    def strided(blocks: Blocks | None) -> Blocks | None:
        return None if blocks is None else replace(blocks, inner=Stride.OTHER)

    return replace(spec, loads=tuple(replace(load, blocks=strided(load.blocks)) for load in spec.loads))


BY_ELEMENT = [(config, by_element(spec)) for config, spec in CASES]


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("config", "spec"),
    # Two such tables leave no registers for blocks of 80 and more columns in one visit.
    [*CASES, *(case for case in BY_ELEMENT if serves(case[0].arch, case[1]))],
    ids=lambda each: getattr(each, "name", ""),
)
def test_kernels_rotate_first_columns(config: TileConfig, spec: EpilogueSpec) -> None:
    """Several tiles, the last of each row and column cut off."""
    columns = spec.block_columns
    m = 140 if isinstance(spec.stores[0].form, Heads) else config.tile_m + 9
    a, b, tables = operands(spec, m, (config.tile_n // columns + 1) * columns)
    results, launch = run_sound(spec, a, b, tables, Machine(config.arch, 1, config, 1))
    assert torch.equal(results[0], expected(spec, *a, *b, tables))
    assert spec.fits_visit(launch.kernel.plan.tile.subtile_n)


@pytest.mark.sim
@pytest.mark.sweep(1)
@pytest.mark.parametrize("m", [1, 100, 127, 2049])
@pytest.mark.parametrize(
    ("arch", "count", "columns", "visit"),
    [
        (Arch.SM90A, 24, 96, 32),
        (Arch.SM90A, 32, 80, 80),
        (Arch.SM90A, 64, 128, 64),
        (Arch.SM100A, 24, 96, 32),
        (Arch.SM100A, 32, 80, 40),
        (Arch.SM100A, 64, 128, 64),
    ],
)
def test_first_columns_at_edges(arch: Arch, count: int, columns: int, visit: int, m: int) -> None:
    spec = first(count, columns)
    a, b, tables = operands(spec, m, 2 * columns)
    results, launch = run_sound(spec, a, b, tables, Machine(arch, m, None, 4))
    assert launch.kernel.plan.tile.subtile_n == visit
    assert launch.kernel.plan.alignment is Alignment.TMA
    assert torch.equal(results[0], expected(spec, *a, *b, tables))


@pytest.mark.sim
def test_batches_share_tables_of_first_columns() -> None:
    spec = first(24, 96, batches=True)
    a, b, tables = operands(spec, 256, 192)
    results, launch = run_sound(spec, a, b, tables, Machine(Arch.SM90A, 1, None, 4))
    assert launch.kernel.plan.alignment is Alignment.TMA
    assert torch.equal(results[0], expected(spec, *a, *b, tables))


def test_tables_come_by_tma_where_a_visit_is_a_block() -> None:
    """A row of 20 columns in bf16 is no multiple of 16 bytes."""
    for spec, alignment, way in (
        (first(24, 96), Alignment.TMA, "tma"),
        (first(24, 96), Alignment.PLAIN, "first_columns"),
        (first(20, 80), Alignment.TMA, "first_columns"),
        (first(20, 80, DType.F32), Alignment.TMA, "tma"),
        (first(80, 80), Alignment.PLAIN, "runs"),
    ):
        for config in tile_table(Arch.SM90A, spec):
            placed = plan(spec, config, alignment).placements
            assert placed["exact0"].name == placed["exact1"].name == way


SPILLS = {
    **{f"{count} of {columns}": first(count, columns) for count, columns in ((24, 96), (32, 80), (24, 64))},
    "fp32": first(24, 96, DType.F32),
    "wide visits": first(64, 128, DType.F32),
    "wide visits by heads": first(64, 128, rows=100),
    "batches": first(24, 96, batches=True),
    "heads": first(20, 80, DType.F32, rows=100),
    "whole": first(80, 80),
}


@pytest.mark.sweep(1)
@in_parts(16)
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize(
    ("arch", "name"),
    # Data center Blackwell orders the columns of whole heads by TMA.
    [
        (arch, name)
        for arch in (Arch.SM90A, Arch.SM100A)
        for name in SPILLS
        if (arch, name) != (Arch.SM100A, "whole")
    ],
)
def test_every_kernel_that_rotates_first_columns_has_a_sound_rung(
    arch: Arch, name: str, alignment: Alignment, part: slice
) -> None:
    assert_sound(
        [plan(SPILLS[name], config, alignment) for config in of_part(offered(arch, SPILLS[name]), part)]
    )


def packed(count: int, columns: int, heads: int, rows: int = 0, apart: bool = False) -> EpilogueSpec:
    """Queries, keys and values of `heads` heads, all with biases, of which the first two are rotated. Heads
    are packed side by side, as in GPT-NeoX, or each product has a weight of its own, as in Phi-2."""
    rotated, width = first(count, columns, rows=rows), heads * columns
    accumulators, loads, chain, stores = [], [], [], []
    for i in range(3):
        acc = replace(ACC, name=f"acc{i}", width=width, b_block=0 if apart else columns)
        blocks = None if apart else Blocks(columns, Stride.OTHER, Stride.ONE)
        stride = Stride.ONE if apart else Stride.OTHER
        bias = Load(f"bias{i}", LoadKind.ROWVEC, DType.BF16, Stride.ZERO, stride, (), blocks)
        accumulators.append(acc)
        loads.append(bias)
        chain.append(op(f"b{i}", "add", acc.name, bias.name))
        if i == 2:
            stores.append(Store("out2", "b2", DType.BF16))
            continue
        names = {"acc": f"b{i}"} | {load.name: f"exact{2 * i + j}" for j, load in enumerate(rotated.loads)}
        names |= {each.name: f"{each.name}_{i}" for each in rotated.ops}
        loads += [replace(load, name=names[load.name]) for load in rotated.loads]
        for each in rotated.ops:
            given = tuple(names.get(of, of) if isinstance(of, str) else of for of in each.operands)
            chain.append(replace(each, name=names[each.name], operands=given))
        stores.append(replace(rotated.stores[0], name=f"out{i}", value=names["t6"]))
    return EpilogueSpec(tuple(accumulators), tuple(loads), tuple(chain), tuple(stores))


def operands_of_heads(spec: EpilogueSpec, m: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Small integers, of which every sum is exact."""
    generator = torch.Generator().manual_seed(m)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).bfloat16()

    product, loads = spec.product, []
    columns = spec.segments[0].block_columns
    heads = product.width // columns
    for load in spec.loads:
        if load.kind is LoadKind.ROWVEC:
            loads.append(integers(heads, columns) if load.blocks else integers(product.width))
        elif load.blocks is not None:
            loads.append(integers(m, 1, load.blocks.columns).expand(-1, heads, -1))
    shape = (heads, columns, 64) if product.b_block else (product.width, 64)
    weights = [integers(*shape) for _ in spec.accumulators]
    return (
        [integers(m, 64)],
        [each.permute(2, 0, 1) if product.b_block else each.t() for each in weights],
        loads,
    )


@pytest.mark.sim
@pytest.mark.sweep(1)
@pytest.mark.parametrize("m", [140, 1])
@pytest.mark.parametrize(
    ("config", "spec"),
    [
        (TileConfig(Arch.SM90A, 64, 192, cluster_n=2, pingpong=True, subtile_n=32), packed(24, 96, 4)),
        (TileConfig(Arch.SM90A, 128, 128, 2, pingpong=True, subtile_n=64), packed(64, 128, 3, apart=True)),
        (TileConfig(Arch.SM90A, 128, 80, 2, subtile_n=80), packed(32, 80, 3, apart=True)),
        (TileConfig(Arch.SM90A, 64, 80, subtile_n=80), packed(20, 80, 2)),
        (TileConfig(Arch.SM90A, 64, 96), packed(24, 96, 3)),
        (TileConfig(Arch.SM100A, 128, 160, subtile_n=40), packed(32, 80, 4)),
        (TileConfig(Arch.SM100A, 256, 192, 2, ctas=2, column_groups=2), packed(24, 96, 4)),
        (TileConfig(Arch.SM100A, 256, 128, 2, ctas=2, subtile_n=64), packed(64, 128, 4, apart=True)),
    ],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_projections_share_a_launch(config: TileConfig, spec: EpilogueSpec, m: int) -> None:
    """Also the values, whose columns need not be whole heads in a visit."""
    assert config.name in [each.name for each in offered(config.arch, spec)]
    if m % 70 == 0:
        heads = Heads(70, spec.segments[0].block_columns)
        spec = replace(
            spec, stores=(*(replace(each, form=heads) for each in spec.stores[:2]), spec.stores[2])
        )
    a, b, loads = operands_of_heads(spec, m)
    results, launch = run_sound(spec, a, b, loads, Machine(config.arch, 1, config, 1))
    assert launch.kernel.plan.alignment is Alignment.TMA
    for result, right in zip(results, replay(spec, a, b, loads), strict=True):
        assert torch.equal(result, right)


SHARED = {
    "24 of 96": packed(24, 96, 8),
    "24 of 96 by heads": packed(24, 96, 8, rows=100),
    "32 of 80 apart": packed(32, 80, 8, rows=100, apart=True),
    "20 of 80": packed(20, 80, 8),
    "24 of 96 apart": packed(24, 96, 8, apart=True),
    "64 of 128": packed(64, 128, 8, rows=100, apart=True),
}


@pytest.mark.exhaustive
@in_parts(16)
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
def test_every_kernel_of_projections_has_a_sound_rung(
    arch: Arch, name: str, alignment: Alignment, part: slice
) -> None:
    assert_sound(
        [plan(SHARED[name], config, alignment) for config in of_part(offered(arch, SHARED[name]), part)]
    )


def cached(spec: EpilogueSpec, columns: int) -> EpilogueSpec:
    """The second and third results in caches, from a position on."""
    position = Load("scalar0", LoadKind.SCALAR, DType.I64, Stride.ZERO, Stride.ZERO)
    cache = Cache(192, 64, columns, position.name)
    kept = tuple(replace(store, form=cache) for store in spec.stores[1:])
    return replace(spec, loads=(*spec.loads, position), stores=(*spec.stores[:1], *kept))


@pytest.mark.exhaustive
@pytest.mark.sweep(1)
@in_parts(24)
def test_wide_visits_leave_registers_for_places_in_a_cache(part: slice) -> None:
    """As in Nemotron."""
    spec = cached(packed(64, 128, 8, rows=64, apart=True), 128)
    configs = offered(Arch.SM100A, spec)
    assert {config.subtile_n for config in configs} == {64}
    plans = [plan(spec, config, alignment) for alignment in Alignment for config in configs]
    assert_sound(of_part(plans, part))


def test_values_keep_to_the_planes_that_wide_visits_leave_room_for() -> None:
    """Where the values are added to two residuals, no tile serves all three."""
    spec = packed(32, 80, 8)
    planes = [Load(f"exact{i}", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.ONE) for i in (4, 5)]
    chain = (op("r0", "add", "b2", "exact4"), op("r1", "add", "r0", "exact5"))
    stores = (*spec.stores[:2], Store("out2", "r1", DType.BF16), Store("out3", "b2", DType.BF16))
    with pytest.raises(ValueError, match="no tile of sm_90a serves these 3 products in one launch"):
        longer = replace(spec, loads=(*spec.loads, *planes), ops=(*spec.ops, *chain), stores=stores)
        tile_table(Arch.SM90A, longer)


def test_two_tables_leave_room_for_one_result() -> None:
    spec = first(32, 80)
    for columns in (80, 96, 128):
        assert [planes_written(columns, read=2, tables=each) for each in range(3)] == [0, 1, 1]
    assert planes_written(64, read=2, tables=2) == 4
    second = replace(spec, stores=(*spec.stores, Store("out1", "acc", DType.BF16)))
    with pytest.raises(ValueError, match="no tile of sm_90a holds blocks of 80 columns"):
        tile_table(Arch.SM90A, second)


@pytest.mark.parametrize("columns", [16, 24, 40, 48])
def test_a_visit_is_one_block_of_which_first_columns_are_rotated(columns: int) -> None:
    """Of two blocks in a visit, tables are read by element, which spilled 24 bytes."""
    with pytest.raises(ValueError, match="no tile of sm_90a"):
        tile_table(Arch.SM90A, first(8, columns))


def test_even_and_odd_columns_are_in_other_threads() -> None:
    even, odd = (replace(ACC, name=each, columns=Columns(each)) for each in ("even", "odd"))
    chain = (op("t0", ROTATE_FIRST.name, "even", Const(12), block=32), op("t1", "add", "t0", "odd"))
    with pytest.raises(ValueError, match="no tile of sm_90a"):
        tile_table(Arch.SM90A, EpilogueSpec((even, odd), (), chain, (Store("out0", "t1", DType.F32),)))


@pytest.mark.parametrize("count", [0, 22, 84, 24.0, "acc"])
def test_first_columns_are_pairs_in_halves(count: int | float | str) -> None:
    operand = count if isinstance(count, str) else Const(count)
    chain = (op("t0", ROTATE_FIRST.name, "acc", operand, block=80),)
    spec = EpilogueSpec((ACC,), (), chain, (Store("out0", "t0", DType.F32),))
    with pytest.raises(SpecError, match=f"t0 = {ROTATE_FIRST.name} of .* has blocks of 80 columns"):
        ops.check(spec)


@pytest.mark.parametrize(
    "change",
    [{"period": 24}, {"period": 96, "outer": Stride.OTHER}, {"period": 16}, {"period": -1}],
    ids=str,
)
def test_a_load_of_first_columns_is_a_table(change: dict[str, object]) -> None:
    spec = first(24, 96)
    cos = spec.loads[0]
    assert cos.blocks is not None
    with pytest.raises(SpecError, match="exact0 has blocks of 24 columns at the beginning of every"):
        replace(spec, loads=(replace(cos, blocks=replace(cos.blocks, **change)), *spec.loads[1:]))


def test_other_tables_are_refused() -> None:
    spec = first(24, 96)
    a, b, tables = operands(spec, 8, 192)
    with pytest.raises(ValueError, match="exact0"):
        check_operands(spec, a, b, [tables[0].repeat(1, 2, 1), tables[1]])


def test_a_formula_counts_the_first_columns() -> None:
    assert "block96_rotate_first(acc, 24) * exact1" in kernel_formula(first(24, 96))
    assert EpilogueSpec.from_json(first(24, 96).to_json()) == first(24, 96)
