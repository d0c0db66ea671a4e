"""Work on a part of each block of columns, such as rotations of the first columns of heads: to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_backend import ops
from cute_backend.kinds.blocks import PART, ROTATE_HALF
from cute_backend.kinds.results import PLANE, Heads
from cute_backend.memory_ops.schedule import kernel_formula
from cute_backend.planning import Alignment, Arch, TileConfig, offered, plan, tile_table
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
    Operand,
    SpecError,
    Store,
    Stride,
)
from support.verdicts import assert_sound, run_sound

ACC = Accumulator("acc", DType.BF16, DType.BF16)


def op(name: str, kind: str, *operands: Operand, block: int = 0, dtype: DType = DType.F32) -> Op:
    return Op(name, kind, operands, dtype, block=block)


def partial(count: int, columns: int, start: int = 0, rows: int = 0, pairs: bool = False) -> EpilogueSpec:
    """Of each block of `columns` columns, rotates `count` columns from `start` on, by cosines and sines of
    positions. With `rows`, writes (B, H, rows, columns)."""
    blocks = Blocks(count, Stride.ZERO, Stride.ONE)
    cos = Load("exact0", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.OTHER, (), blocks)
    chain = (
        op("t0", "mul", "acc", "exact0"),
        op("t1", ROTATE_HALF.name, "acc", block=2 if pairs else count),
        op("t2", "mul", "t1", "exact1"),
        op("t3", "add", "t0", "t2"),
        op("t4", PART.name, Const(count), block=columns, dtype=DType.I32),
        op("t5", "eq", "t4", Const(start // count), dtype=DType.BOOL),
        op("t6", "where", "t5", "t3", "acc"),
    )
    store = Store("out0", "t6", DType.BF16, form=Heads(rows, columns) if rows else PLANE)
    return EpilogueSpec((ACC,), (cos, replace(cos, name="exact1")), chain, (store,))


def operands(spec: EpilogueSpec, m: int, n: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Small integers, of which every sum is exact."""
    generator = torch.Generator().manual_seed(m + n)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).bfloat16()

    assert spec.loads[0].blocks is not None
    count = spec.loads[0].blocks.columns
    tables = [integers(m, 1, count).expand(-1, n // count, -1) for _ in range(2)]
    return [integers(m, 64)], [integers(n, 64).t()], tables


def expected(spec: EpilogueSpec, start: int, a: Tensor, b: Tensor, tables: list[Tensor]) -> Tensor:
    """In float64, as a program spells it."""
    (columns,) = (each.block for each in spec.ops if each.op == PART.name)
    cos, sin = (each[:, :1].double() for each in tables)
    x = (a.double() @ b.double()).unflatten(1, (-1, columns))
    part = x[..., start : start + cos.shape[-1]]
    if spec.halved_columns == 2:
        turned = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
    else:
        first, second = part.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    x = torch.cat((x[..., :start], part * cos + turned * sin, x[..., start + cos.shape[-1] :]), -1)
    if isinstance(heads := spec.stores[0].form, Heads):
        x = x.unflatten(0, (-1, heads.rows)).transpose(1, 2)
    return x.reshape(a.shape[0], -1).bfloat16()


@pytest.mark.parametrize(("start", "pairs"), [(0, False), (48, False), (16, True)])
def test_the_replay_selects_a_part(start: int, pairs: bool) -> None:
    spec = partial(16, 64, start, 4, pairs)
    a, b, tables = operands(spec, 8, 192)
    (result,) = replay(spec, a, b, tables)
    assert torch.equal(result, expected(spec, start, *a, *b, tables))


CASES = [
    (TileConfig(Arch.SM90A, 128, 128, 2), partial(64, 128, rows=100), 0, 2),
    (TileConfig(Arch.SM100A, 128, 128), partial(32, 64, rows=127), 0, 2),
    (TileConfig(Arch.SM90A, 64, 128), partial(16, 64, rows=100), 0, 2),
    (TileConfig(Arch.SM100A, 128, 64), partial(16, 64), 0, 3),
    (TileConfig(Arch.SM90A, 64, 192), partial(64, 192, start=128, rows=100), 128, 2),
    (TileConfig(Arch.SM100A, 256, 128, 2, ctas=2), partial(64, 128, rows=100), 0, 4),
    (TileConfig(Arch.SM90A, 128, 128, 1, 2, pingpong=True), partial(32, 128, 32), 32, 3),
    (TileConfig(Arch.SM90A, 64, 64), partial(24, 96, pairs=True, rows=2), 0, 50),
    (TileConfig(Arch.SM80, 64, 64), partial(32, 64, pairs=True), 0, 2),
    (TileConfig(Arch.SM100A, 128, 128, 2), partial(24, 72, 24, pairs=True), 24, 2),
]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("config", "spec", "start", "batches"), CASES, ids=lambda each: getattr(each, "name", "")
)
def test_kernels_select_a_part(config: TileConfig, spec: EpilogueSpec, start: int, batches: int) -> None:
    """Several tiles and heads; boxes that end within a batch, and many batches in one."""
    columns = spec.block_columns
    m = batches * (spec.stores[0].form.batch_rows or 70)
    a, b, tables = operands(spec, m, 3 * columns)
    (result,), _ = run_sound(spec, a, b, tables, Machine(config.arch, 1, config, 1))
    assert torch.equal(result, expected(spec, start, *a, *b, tables))


RESIDUAL = Load("exact2", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.ONE)


def known_at_launch(spec: EpilogueSpec, batches: int) -> EpilogueSpec:
    """The spec, plus a plane, with heads of any S: M by the batches that share the tables, or all of M."""
    modes = (Stride.ZERO, Stride.OTHER) if batches > 1 else ()
    loads = (*(replace(load, m_modes=modes) for load in spec.loads), RESIDUAL)
    store = Store("out0", "t7", DType.BF16, form=Heads(0, spec.block_columns))
    return replace(spec, loads=loads, ops=(*spec.ops, op("t7", "add", "t6", "exact2")), stores=(store,))


def of_batches(
    rows: int, batches: int, n: int, pitch: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """Operands with tables that all batches share and a plane of zeros, and the result."""
    spec = partial(32, 64, rows=rows if rows > 1 else 0)
    a, b, _ = operands(spec, rows * batches, n)
    *_, tables = operands(spec, rows, n)
    right = expected(spec, 0, *a, *b, [each.repeat(batches, 1, 1) for each in tables])
    if batches > 1:
        tables = [each.expand(batches, -1, -1, -1) for each in tables]
    return a, b, [*tables, torch.zeros(rows * batches, pitch).bfloat16()[:, :n]], right


AT_LAUNCH = [
    (TileConfig(Arch.SM90A, 64, 128), 128, 2),
    (TileConfig(Arch.SM90A, 128, 128, 1, 2, pingpong=True), 100, 3),
    (TileConfig(Arch.SM90A, 64, 64), 1, 70),
    (TileConfig(Arch.SM90A, 64, 64, split_k=2), 127, 1),
    (TileConfig(Arch.SM100A, 128, 64), 127, 1),
    (TileConfig(Arch.SM100A, 256, 128, 2, ctas=2), 128, 3),
]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize(
    ("config", "rows", "batches"), AT_LAUNCH, ids=lambda each: getattr(each, "name", str(each))
)
def test_kernels_write_heads_of_as_many_rows_as_a_launch_has(
    config: TileConfig, rows: int, batches: int, alignment: Alignment
) -> None:
    """One kernel serves every S, and writes what that of a number does."""
    spec, n = known_at_launch(partial(32, 64), batches), 192
    for count in (rows, rows + 1):
        a, b, loads, right = of_batches(count, batches, n, n if alignment is Alignment.TMA else n + 1)
        check_operands(spec, a, b, loads)
        assert torch.equal(replay(spec, a, b, loads)[0], right)
        (result,), launch = run_sound(spec, a, b, loads, Machine(config.arch, 1, config, 1))
        assert launch.kernel.plan.alignment is alignment
        assert torch.equal(result, right)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A], ids=lambda arch: arch.value)
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize(("count", "columns"), [(32, 64), (64, 128), (2, 64)])
def test_every_kernel_that_is_told_the_rows_of_heads_has_a_sound_rung(
    arch: Arch, count: int, columns: int, alignment: Alignment
) -> None:
    spec = known_at_launch(partial(max(count, 32), columns, pairs=count == 2), 2)
    for config in (offered(arch, spec)[0], tile_table(arch, spec)[-1]):
        assert_sound([plan(spec, config, alignment)])


def test_tables_agree_on_the_rows_of_heads() -> None:
    spec = known_at_launch(partial(32, 64), 2)
    a, b, (cos, sin, plane), _ = of_batches(4, 2, 192, 192)
    with pytest.raises(ValueError, match=r"out0 has heads .* differ: exact0 has 2, exact1 has 4"):
        check_operands(spec, a, b, [cos, sin[:, :2].repeat(2, 1, 1, 1), plane])
    assert EpilogueSpec.from_json(spec.to_json()) == spec
    assert str(spec.stores[0].form) == "(B, H, S, 64)"


SPILLS = [(Arch.SM90A, 64, 128), (Arch.SM90A, 16, 64), (Arch.SM100A, 64, 128), (Arch.SM100A, 16, 64)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("arch", "count", "columns"), SPILLS)
def test_every_kernel_that_selects_a_part_has_a_sound_rung(
    arch: Arch, count: int, columns: int, pairs: bool, alignment: Alignment
) -> None:
    spec = partial(count, columns, rows=100, pairs=pairs)
    for config in (offered(arch, spec)[0], tile_table(arch, spec)[-1]):
        assert_sound([plan(spec, config, alignment)])


def test_tma_writes_heads_of_at_most_five_axes() -> None:
    """A head of two blocks whose halves have two runs each has four axes, beside rows and heads."""
    for count, columns, in_boxes in ((32, 128, True), (64, 128, True), (128, 256, False)):
        spec = partial(count, columns, rows=100)
        config = TileConfig(Arch.SM90A, 128, columns, 2, subtile_n=32)
        assert (plan(spec, config, Alignment.TMA).shared_stores == ("out0",)) is in_boxes


def test_blocks_of_which_parts_are_selected_divide_the_columns() -> None:
    spec = partial(16, 64)
    a, b, tables = operands(spec, 4, 96)
    with pytest.raises(ValueError, match="t4 has blocks of 64 columns, and 96 columns are no multiple"):
        check_operands(spec, a, b, tables)


@pytest.mark.parametrize("part", [0, 24, 128, "acc"])
def test_a_part_divides_its_block(part: int | str) -> None:
    operand = part if isinstance(part, str) else Const(part)
    chain = (op("t0", PART.name, operand, block=64, dtype=DType.I32),)
    spec = EpilogueSpec((ACC,), (), chain, (Store("out0", "t0", DType.I32),))
    with pytest.raises(SpecError, match=f"t0 = {PART.name} of .* has blocks of 64 columns"):
        ops.check(spec)


def test_rotated_blocks_lie_within_parts() -> None:
    """Kernels order the columns of rotated blocks anew, which would put them into another part."""
    spec = partial(32, 64)
    narrow = replace(spec.ops[4], operands=(Const(16),))
    with pytest.raises(ValueError, match="no tile of sm_90a holds blocks of 64 columns"):
        tile_table(Arch.SM90A, replace(spec, ops=(*spec.ops[:4], narrow, *spec.ops[5:])))


def test_a_formula_says_which_part() -> None:
    assert "where(column % 64 // 16 == 3" in kernel_formula(partial(16, 64, 48))
    assert EpilogueSpec.from_json(partial(16, 64).to_json()) == partial(16, 64)
