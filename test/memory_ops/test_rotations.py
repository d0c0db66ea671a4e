"""Blocks of columns whose halves are rotated, as rotary embeddings do: against float64, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_backend import ops
from cute_backend.kinds import reductions
from cute_backend.kinds.blocks import ROTATE_HALF
from cute_backend.kinds.results import OfBlocks, WholePlane
from cute_backend.memory_ops.schedule import kernel_formula
from cute_backend.planning import Alignment, Arch, Rung, TileConfig, held, offered, plan, tile_table
from cute_backend.replay import replay
from cute_backend.runtime.arguments.operands import check_operands
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.signature import TABLE_ROWS
from cute_backend.simulator.simulate import Machine
from cute_backend.spec import (
    Accumulator,
    Axis,
    Blocks,
    Columns,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Major,
    Op,
    Operand,
    Order,
    ProductKind,
    Reduction,
    SpecError,
    Store,
    Stride,
)
from support.verdicts import assert_sound, run_sound

ACC = Accumulator("acc", DType.BF16, DType.BF16)
BIAS = Load("bias", LoadKind.ROWVEC, DType.F32, Stride.ZERO, Stride.ONE)
RESIDUAL = Load("exact2", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.ONE)


def op(name: str, kind: str, *operands: Operand, block: int = 0) -> Op:
    return Op(name, kind, operands, DType.F32, block=block)


def rotary(columns: int, batches: bool = False, head: int = 0) -> EpilogueSpec:
    """x * cos + rotate_half(x) * sin with x = acc + bias, cosines and sines by position; also x + residual.

    With `batches`, M is those and positions, and all batches share the sines. Heads are `head` columns, or
    the blocks whose halves are rotated."""
    blocks = Blocks(head or columns, Stride.ZERO, Stride.ONE)
    cos = Load("exact0", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.OTHER, (), blocks)
    modes = (Stride.ZERO, Stride.OTHER) if batches else ()
    sin = replace(cos, name="exact1", dtype=DType.F32, m_modes=modes)
    chain = (
        op("t0", "add", "acc", "bias"),
        op("t1", "mul", "t0", "exact0"),
        op("t2", ROTATE_HALF.name, "t0", block=columns),
        op("t3", "mul", "t2", "exact1"),
        op("t4", "add", "t1", "t3"),
        op("t5", "add", "t0", "exact2"),
    )
    stores = (Store("out0", "t4", DType.F32), Store("out1", "t5", DType.BF16))
    return EpilogueSpec((ACC,), (BIAS, cos, sin, RESIDUAL), chain, stores)


def of_first_columns(name: str) -> Load:
    """A table of the first 128 columns of heads of 256."""
    blocks = Blocks(128, Stride.ZERO, Stride.ONE, period=256)
    return Load(name, LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.OTHER, (), blocks)


def operands(spec: EpilogueSpec, m: int, n: int, k: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Small integers, of which every sum is exact."""
    generator = torch.Generator().manual_seed(m + n)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).float()

    b = integers(n, k).t()
    _, cos, sin, _ = spec.loads
    assert cos.blocks is not None
    columns = cos.blocks.columns
    tables = []
    for load in (cos, sin):
        batches = 2 if load.m_modes else 1
        table = integers(m // batches, columns).to(torch.bfloat16 if load is cos else torch.float32)
        table = table.expand(batches, -1, -1).unsqueeze(2).expand(-1, -1, n // columns, -1)
        tables.append(table if load.m_modes else table[0])
    return [integers(m, k).bfloat16()], [b.bfloat16()], [integers(n), *tables, integers(m, n).bfloat16()]


def expected(columns: int, a: Tensor, b: Tensor, loads: list[Tensor]) -> list[Tensor]:
    """In float64, column by column: each from itself and from its partner."""
    bias, cos, sin, residual = (load.double() for load in loads)
    x = a.double() @ b.double() + bias
    m, n = x.shape
    turned = torch.empty_like(x)
    for column in range(n):
        first = column % columns < columns // 2
        turned[:, column] = -x[:, column + columns // 2] if first else x[:, column - columns // 2]
    cos, sin = (each.reshape(m, n) for each in (cos, sin))
    return [x * cos + turned * sin, x + residual]


def check(spec: EpilogueSpec, m: int, n: int, k: int, config: TileConfig | None, seed: int = 1) -> Kernel:
    """Simulates a problem, and returns the kernel whose results were right."""
    a, b, loads = operands(spec, m, n, k)
    arch = Arch.SM90A if config is None else config.arch
    results, launch = run_sound(spec, a, b, loads, Machine(arch, seed, config, 1))
    for result, right in zip(results, expected(spec.halved_columns, *a, *b, loads), strict=True):
        assert torch.equal(result.double(), right)
    return launch.kernel


@pytest.mark.parametrize("columns", [2, 6, 64])
def test_the_replay_rotates_halves(columns: int) -> None:
    for spec in (rotary(columns), rotary(columns, batches=True), rotary(columns, head=2 * columns)):
        a, b, loads = operands(spec, 8, 4 * columns, 16)
        results = replay(spec, a, b, loads)
        for result, right in zip(results, expected(columns, *a, *b, loads), strict=True):
            assert torch.equal(result.double(), right)


CONFIGS = [
    (TileConfig(Arch.SM90A, 128, 128, 1, 2, pingpong=True), 64),
    (TileConfig(Arch.SM100A, 256, 128, 2, ctas=2), 128),
    (TileConfig(Arch.SM90A, 128, 256, 2), 128),
    (TileConfig(Arch.SM90A, 64, 64, split_k=2), 128),
    (TileConfig(Arch.SM90A, 64, 192), 96),
    (TileConfig(Arch.SM90A, 64, 128), 256),
    (TileConfig(Arch.SM90A, 64, 64), 32),
    (TileConfig(Arch.SM100A, 128, 64), 64),
    (TileConfig(Arch.SM100A, 128, 128, 2, subtile_n=16), 32),
    (TileConfig(Arch.SM100A, 256, 256, 2, ctas=2), 256),
    (TileConfig(Arch.SM90A, 64, 160), 160),
    (TileConfig(Arch.SM100A, 128, 192), 96),
    (TileConfig(Arch.SM100A, 128, 192, subtile_n=16), 48),
    (TileConfig(Arch.SM100A, 256, 160, 2, ctas=2, subtile_n=16, column_groups=2), 80),
    (TileConfig(Arch.SM100A, 128, 160, subtile_n=16), 80),
    (TileConfig(Arch.SM100A, 256, 192, 2, ctas=2), 96),
]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("config", "columns"), CONFIGS, ids=lambda each: getattr(each, "name", str(each)))
def test_kernels_rotate_halves(config: TileConfig, columns: int) -> None:
    """Several tiles, the last of each row and column cut off; and one row."""
    n = config.tile_n + columns if config.tile_n >= columns else 2 * columns
    kernel = check(rotary(columns), config.tile_m + 9, n, 144, config)
    assert kernel.plan.alignment is Alignment.TMA
    check(rotary(columns), 1, columns, 64, config)


def neighbours(head: int) -> EpilogueSpec:
    """Rotations of neighbouring columns, in heads of `head` columns."""
    return rotary(2, head=head)


NEIGHBOURS = [
    (TileConfig(Arch.SM90A, 128, 128, 1, 2, pingpong=True), 64),
    (TileConfig(Arch.SM100A, 256, 128, 2, ctas=2), 128),
    (TileConfig(Arch.SM80, 128, 64), 64),
    (TileConfig(Arch.SM90A, 64, 192), 6),
    (TileConfig(Arch.SM100A, 128, 64), 24),
    (TileConfig(Arch.SM120A, 64, 64), 32),
]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("config", "head"), NEIGHBOURS, ids=lambda each: getattr(each, "name", str(each)))
def test_kernels_rotate_neighbours(config: TileConfig, head: int) -> None:
    """Several tiles, the last of each row and column cut off; and one row, of columns that TMA can't take."""
    n = (config.tile_n // head + 1) * head
    check(neighbours(head), config.tile_m + 9, n, 144, config)
    check(neighbours(head), 1, head, 64, config)


@pytest.mark.parametrize("arch", [Arch.SM80, Arch.SM90A, Arch.SM100A], ids=lambda arch: arch.value)
def test_neighbours_are_rotated_beside_everything_but_even_and_odd_columns(arch: Arch) -> None:
    """The columns keep their order, so every tile takes them, if TMA reads the cosines."""
    spec = neighbours(64)
    add, out = op("t0", "add", "acc", "exact2"), Store("out0", "t0", DType.F32)
    plain = EpilogueSpec((ACC,), (RESIDUAL,), (add,), (out,))
    (first, *_), (largest, *_) = tile_table(arch, spec), tile_table(arch, plain)
    assert (first.tile_m, first.tile_n) == (largest.tile_m, largest.tile_n) or not arch.target.planes_by_tma
    for case in ("B along N", "a batch", "two products", "a reduction"):
        assert tile_table(arch, replace(spec, **UNSERVED[case])), case
    even, odd = (replace(ACC, name=each, columns=Columns(each)) for each in ("even", "odd"))
    ops = (op("t0", ROTATE_HALF.name, "even", block=2), op("t1", "add", "t0", "odd"))
    with pytest.raises(ValueError, match=f"no tile of {arch.value} rotates"):
        tile_table(arch, EpilogueSpec((even, odd), (), ops, (Store("out0", "t1", DType.F32),)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize("head", [128, 24])
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A, Arch.SM80], ids=lambda arch: arch.value)
def test_every_kernel_that_rotates_neighbours_has_a_sound_rung(
    arch: Arch, head: int, alignment: Alignment
) -> None:
    spec = neighbours(head)
    for config in (offered(arch, spec)[0], tile_table(arch, spec)[-1]):
        assert_sound([plan(spec, config, alignment)])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A], ids=lambda arch: arch.value)
@pytest.mark.parametrize("case", ["batches", "by element", "columns"])
def test_other_layouts_rotate_halves(arch: Arch, case: str) -> None:
    """Sines of a position for all batches; what is not aligned; results by columns."""
    spec = rotary(64, batches=case == "batches")
    if case == "batches":
        kernel = check(spec, 2 * TABLE_ROWS, 192, 64, tile_table(arch, spec)[-1])
        assert kernel.plan.alignment is Alignment.TMA
    if case == "by element":
        spec = replace(spec, loads=(*spec.loads[:3], replace(RESIDUAL, stride_n=Stride.OTHER)))
    if case == "columns":
        spec = replace(spec, stores=(replace(spec.stores[0], form=WholePlane(Order.COLUMN)), spec.stores[1]))
    check(spec, 100 if case != "columns" else 104, 192, 64, tile_table(arch, spec)[-1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize(
    ("arch", "columns"),
    [
        *((Arch.SM90A, columns) for columns in (64, 96, 128, 160)),
        *((Arch.SM100A, columns) for columns in (48, 80, 96, 128)),
    ],
)
def test_every_kernel_that_rotates_has_a_sound_rung(arch: Arch, columns: int, alignment: Alignment) -> None:
    spec = rotary(columns)
    for config in (offered(arch, spec)[0], tile_table(arch, spec)[-1]):
        assert_sound([plan(spec, config, alignment)])


@pytest.mark.parametrize(("alignment", "way"), [(Alignment.TMA, "tma"), (Alignment.PLAIN, "runs")])
def test_tma_brings_cosines_and_sines_where_they_are_aligned(alignment: Alignment, way: str) -> None:
    """Else each thread reads them from one address for each row."""
    for spec in (rotary(128), rotary(128, batches=True), neighbours(64)):
        for config in tile_table(Arch.SM90A, spec) + tile_table(Arch.SM100A, spec):
            placed = plan(spec, config, alignment).placements
            assert placed["exact0"].name == placed["exact1"].name == way


@pytest.mark.parametrize("change", ["a batch", "columns", "along blocks", "across batches"])
def test_tma_brings_no_table_whose_rows_or_columns_end_within_a_box(change: str) -> None:
    """Rows of a batch's products begin anywhere, and so do blocks of 24 columns in a subtile of 32."""
    spec = neighbours(24 if change == "columns" else 64)
    load = spec.loads[1]
    assert load.blocks is not None
    if change == "a batch":
        spec = replace(spec, **UNSERVED[change])
    if change == "along blocks":
        load = replace(load, blocks=replace(load.blocks, outer=Stride.OTHER))
    if change == "across batches":
        load = replace(load, m_modes=(Stride.OTHER, Stride.ZERO))
    spec = replace(spec, loads=(spec.loads[0], load, *spec.loads[2:]))
    for config in tile_table(Arch.SM90A, spec):
        assert plan(spec, config, Alignment.TMA).placements["exact0"].name in ("runs", "vector")


def test_the_blocks_that_tiles_rotate() -> None:
    hopper = 16, 32, 64, 96, 128, 160, 192, 256
    blackwell = *hopper[:2], 48, 64, 80, *hopper[3:]
    rotated = {Arch.SM90A: hopper, Arch.SM100A: blackwell, Arch.SM103A: blackwell}
    assert {arch: held(arch, rotary(64)) for arch in Arch} == {arch: rotated.get(arch, ()) for arch in Arch}
    for arch, sizes in rotated.items():
        for columns in sizes:
            for config in offered(arch, rotary(columns)):
                for alignment in Alignment:
                    cut = Rung.of(rotary(columns), config, alignment).tile
                    whole = cut.subtile_n % columns == 0
                    halves = columns % cut.subtile_n == 0 and columns // 2 % (cut.subtile_n // 2) == 0
                    share = cut.tile_n // cut.cluster_m
                    assert whole or (halves and share % cut.subtile_n == 0)


@pytest.mark.parametrize("columns", [24, 80, 512])
def test_blocks_that_no_tile_rotates_are_refused(columns: int) -> None:
    with pytest.raises(
        ValueError, match=rf"no tile of sm_90a holds blocks of {columns} .* sizes: 16, 32, 64"
    ):
        tile_table(Arch.SM90A, rotary(columns))


UNSERVED = {
    "B along N": {"accumulators": (replace(ACC, b_major=Major.MN),)},
    "a batch": {"accumulators": (replace(ACC, kind=ProductKind.BATCHED),)},
    "two products": {"accumulators": (ACC, replace(ACC, name="acc1"))},
    "a reduction": {"stores": (Store("out0", "t4", DType.F32, form=Reduction(Axis.ROW, reductions.SUM)),)},
    "first columns alone": {"loads": (BIAS, *map(of_first_columns, ("exact0", "exact1")), RESIDUAL)},
    "another size": {"stores": (Store("out0", "t4", DType.F32, OfBlocks(64)),)},
}


@pytest.mark.parametrize("case", UNSERVED)
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A], ids=lambda arch: arch.value)
def test_what_is_served_beside_no_rotation(arch: Arch, case: str) -> None:
    """Where columns may not be in another order, there is no tile."""
    with pytest.raises(ValueError, match=f"no tile of {arch.value} holds blocks of 128 columns whole"):
        tile_table(arch, replace(rotary(128), **UNSERVED[case]))


def test_blocks_that_do_not_divide_the_columns_are_refused() -> None:
    chain, stores = (op("t0", ROTATE_HALF.name, "acc", block=32),), (Store("out0", "t0", DType.F32),)
    spec = EpilogueSpec((ACC,), (), chain, stores)
    a, b = torch.zeros(4, 16).bfloat16(), torch.zeros(48, 16).bfloat16().t()
    for refuse in (check_operands, replay):
        with pytest.raises(ValueError, match="t0 has blocks of 32 columns, and 48 columns are no multiple"):
            refuse(spec, [a], [b], [])


@pytest.mark.parametrize("block", [0, 1, 7])
def test_a_rotated_block_has_halves(block: int) -> None:
    chain = (op("t0", ROTATE_HALF.name, "acc", block=block),)
    spec = EpilogueSpec((ACC,), (), chain, (Store("out0", "t0", DType.F32),))
    with pytest.raises(SpecError, match=f"t0 = {ROTATE_HALF.name} has blocks of {block} columns"):
        ops.check(spec)


def test_a_formula_says_what_is_rotated() -> None:
    assert "block64_rotate_half(t0) * exact1" in kernel_formula(rotary(64))
    assert EpilogueSpec.from_json(rotary(64).to_json()) == rotary(64)


def test_halves_in_a_subtile_are_whole_eights_of_columns() -> None:
    """In 8 columns, with halves of 4, a thread's partner of a column would be in another thread."""
    spec = rotary(64)
    loads = (replace(load, dtype=DType.F32) if load.kind is LoadKind.EXACT else load for load in spec.loads)
    stores = spec.stores[0], replace(spec.stores[1], dtype=DType.F32)
    spec = replace(spec, loads=tuple(loads), stores=stores)
    for config in tile_table(Arch.SM90A, spec):
        assert all(Rung.of(spec, config, each).tile.subtile_n >= 16 for each in Alignment), config.name
