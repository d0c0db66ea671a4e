"""Planes that are read ahead of passes over blocks of columns, and the value that is kept for these."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_backend.kinds.blocks import ROTATE_HALF
from cute_backend.kinds.results import OfBlocks
from cute_backend.memory_ops.emit import emit
from cute_backend.memory_ops.simplify import simplify
from cute_backend.planning import Alignment, Arch, Rung, TileConfig, offered, plan, tile_table
from cute_backend.replay import replay
from cute_backend.runtime.kernels.kernel import Kernel
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
    Store,
    Stride,
)
from support.sweeps import in_parts, of_part
from support.verdicts import assert_sound, run_sound

ACC = Accumulator("acc", DType.BF16, DType.BF16)
PLANE = Load("exact0", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.ONE)
OTHER = replace(PLANE, name="exact1")


def op(name: str, kind: str, *operands: Operand, block: int = 0, dtype: DType = DType.F32) -> Op:
    return Op(name, kind, operands, dtype, block=block)


def normed(value: str, columns: int) -> tuple[Op, ...]:
    """The RMS norm of blocks of a value, as `n3`."""
    return (
        op("n0", "mul", value, value),
        op("n1", "block_mean", "n0", block=columns),
        op("n2", "rsqrt", "n1"),
        op("n3", "mul", value, "n2"),
    )


def residual_norm(columns: int) -> EpilogueSpec:
    """The norm by head of a product and a residual, and their sum."""
    chain = (op("t0", "add", "acc", "exact0"), *normed("t0", columns))
    stores = (Store("out0", "n3", DType.BF16), Store("out1", "t0", DType.F32))
    return EpilogueSpec((ACC,), (PLANE,), chain, stores)


def silu_quantised(columns: int) -> EpilogueSpec:
    """silu times a plane, in fp8 with a scale for each block."""
    chain = (
        op("t0", "sigmoid", "acc"),
        op("t1", "mul", "t0", "acc"),
        op("t2", "mul", "t1", "exact0"),
        op("t3", "abs", "t2"),
        op("t4", "block_max", "t3", block=columns),
        op("t5", "add", "t4", Const(0.5)),
        op("t6", "div", "t2", "t5"),
    )
    stores = (Store("out0", "t6", DType.E4M3), Store("out1", "t5", DType.F32, OfBlocks(columns)))
    return EpilogueSpec((ACC,), (PLANE,), chain, stores)


def planes_around(columns: int) -> EpilogueSpec:
    """A layer norm, in two passes, with a plane before and another one after it, which come one after the
    other in the same shared memory."""
    chain = (
        op("t0", "add", "acc", "exact0"),
        op("t1", "block_mean", "t0", block=columns),
        op("t2", "sub", "t0", "t1"),
        op("t3", "mul", "t2", "t2"),
        op("t4", "block_mean", "t3", block=columns),
        op("t5", "add", "t4", Const(1e-2)),
        op("t6", "rsqrt", "t5"),
        op("t7", "mul", "t2", "t6"),
        op("t8", "add", "t7", "exact1"),
    )
    return EpilogueSpec((ACC,), (PLANE, OTHER), chain, (Store("out0", "t8", DType.BF16),))


def rotated_norm(columns: int) -> EpilogueSpec:
    """The norm of a product and a residual, rotated by halves with a table (M, columns)."""
    blocks = Blocks(columns, Stride.ZERO, Stride.ONE)
    table = Load("exact1", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.OTHER, blocks=blocks)
    chain = (
        op("t0", "add", "acc", "exact0"),
        *normed("t0", columns),
        op("t1", ROTATE_HALF.name, "n3", block=columns),
        op("t2", "mul", "t1", "exact1"),
    )
    return EpilogueSpec((ACC,), (PLANE, table), chain, (Store("out0", "t2", DType.BF16),))


SPECS: dict[str, Callable[[int], EpilogueSpec]] = {
    "residual_norm": residual_norm,
    "silu_quantised": silu_quantised,
    "planes_around": planes_around,
    "rotated_norm": rotated_norm,
}
KEPT = {"residual_norm": "t0", "silu_quantised": "t2", "planes_around": "t0", "rotated_norm": "t0"}


def expected(name: str, sums: Tensor, loads: list[Tensor], columns: int) -> list[Tensor]:
    """The results by torch alone, in float64."""
    plane = loads[0].double()

    def blocks(value: Tensor) -> Tensor:
        return value.unflatten(-1, (-1, columns))

    if name == "silu_quantised":
        value = blocks(torch.nn.functional.silu(sums) * plane)
        scale = value.abs().amax(-1, keepdim=True) + 0.5
        return [(value / scale).flatten(-2), scale.flatten(-2)]
    value = blocks(sums + plane)
    if name == "planes_around":
        normal = torch.nn.functional.layer_norm(value, (columns,), eps=1e-2)
        return [normal.flatten(-2) + loads[1].double()]
    normal = value * value.square().mean(-1, keepdim=True).rsqrt()
    if name == "residual_norm":
        return [normal.flatten(-2), value.flatten(-2)]
    first, second = normal.chunk(2, -1)
    return [(torch.cat((-second, first), -1) * loads[1].double()).flatten(-2)]


def operands(spec: EpilogueSpec, m: int, n: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A, B and the loads. Products and sums with planes are exact in fp32."""
    generator = torch.Generator().manual_seed(m + n)
    a = torch.randint(-3, 4, (m, 144), generator=generator).bfloat16() / 4
    b = torch.randint(-3, 4, (n, 144), generator=generator).bfloat16().t() / 4
    loads = []
    for load in spec.loads:
        if load.blocks is None:
            loads.append(torch.randint(-9, 10, (m, n), generator=generator).bfloat16() / 8)
        else:
            values = torch.randint(-9, 10, (m, 1, load.blocks.columns), generator=generator).bfloat16()
            loads.append(values.expand(m, n // load.blocks.columns, -1))
    return a, b, loads


def check(
    name: str, config: TileConfig, columns: int, m: int, n: int, by_element: bool = False, seed: int = 1
) -> Kernel:
    """Simulates a problem, whose results must be right."""
    spec = SPECS[name](columns)
    a, b, loads = operands(spec, m, n)
    if by_element:  # planes begin at an odd element
        loads = [torch.zeros(m, n + 1, dtype=each.dtype)[:, 1:].copy_(each.flatten(1)) for each in loads]
    results, launch = run_sound(spec, [a], [b], loads, Machine(config.arch, m, config, seed))
    kernel = launch.kernel
    assert kernel.plan.alignment is (Alignment.PLAIN if by_element else Alignment.TMA)
    cut = Rung.of(spec, kernel.plan.tile, kernel.plan.alignment).tile
    assert columns % cut.subtile_n == 0 and cut.subtile_n < columns
    wanted = expected(name, a.double() @ b.double(), loads, columns)
    for result, right in zip(results, wanted, strict=True):
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3}.get(result.dtype, 0.07)
        torch.testing.assert_close(result.double(), right, rtol=tolerance, atol=tolerance)
    if name == "residual_norm":
        assert torch.equal(results[1].double(), wanted[1])
    return kernel


CONFIGS = {
    Arch.SM90A: TileConfig(Arch.SM90A, 128, 128, 2, pingpong=True),
    Arch.SM100A: TileConfig(Arch.SM100A, 256, 256, 2, ctas=2, column_groups=2),
    Arch.SM80: TileConfig(Arch.SM80, 64, 128),
    Arch.SM120A: TileConfig(Arch.SM120A, 64, 128),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("m", [1, 100, 127, 300])
@pytest.mark.parametrize("arch", CONFIGS)
@pytest.mark.parametrize("name", ["residual_norm", "planes_around"])
def test_planes_are_read_ahead_of_passes(name: str, arch: Arch, m: int) -> None:
    """Planes by TMA or cp.async, at every edge; the last block of columns lies in a tile of its own."""
    check(name, CONFIGS[arch], 128, m, 384)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("m", [1, 100, 127])
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
@pytest.mark.parametrize("name", ["silu_quantised", "rotated_norm"])
def test_every_form_at_edges(name: str, arch: Arch, m: int) -> None:
    check(name, tile_table(arch, SPECS[name](128))[0], 128, m, 384)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("config", "columns"),
    [
        (TileConfig(Arch.SM90A, 128, 128, 2, pingpong=True), 128),
        (TileConfig(Arch.SM90A, 64, 192, 1, 2, pingpong=True), 96),  # turns of three and of two
        (TileConfig(Arch.SM90A, 256, 128, 1, 2), 64),
        (TileConfig(Arch.SM100A, 128, 256), 256),
        (TileConfig(Arch.SM100A, 256, 128, 2, ctas=2), 64),
        (TileConfig(Arch.SM80, 64, 128), 128),
    ],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_planes_are_read_by_element(config: TileConfig, columns: int) -> None:
    """Visits are then the iterations of loops, and so is what comes ahead of passes."""
    kernel = check("residual_norm", config, columns, 100, 2 * max(columns, 192), by_element=True)
    assert Rung.of(residual_norm(columns), kernel.plan.tile, Alignment.PLAIN).tile.rolled


@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
def test_what_is_kept_and_where_it_is_read(arch: Arch) -> None:
    """Passes and visits begin with the kept value, and read no accumulator and no early plane."""
    spec = planes_around(128)
    text = emit(plan(spec, tile_table(arch, spec)[0], Alignment.TMA))
    keep, rest = text.split("def keep(self, sub, acc, glob, held, smem):")[1].split("def reduce_blocks(")
    passes, visit = rest.split("def visit(self, sub, t0, glob, held, smem):")
    assert all(
        f"        {sweep},\n" in text
        for sweep in (
            'Keep(span=128, planes=("exact0",))',
            "Reduce(span=128)",
            'Visit(planes=("exact1",))',
        )
    )
    assert "sub.copy_from(smem.exact0, exact0_bf16)" in keep and "exact1" not in keep
    assert "t0_kept[e] = t0" in keep and "return t0_kept" in keep and keep.count("smem.release()") == 1
    assert passes.count("sub, t0 = blocks.read(i)") == 2 and "smem." not in passes
    assert "exact0" not in passes + visit.split("gemm = ")[0] and not re.search(r"\bacc\b", passes)
    assert "sub.copy_from(smem.exact1, exact1_bf16)" in visit and visit.count("smem.release()") == 1


def test_a_wide_subtile_keeps_nothing() -> None:
    """Blocks that a subtile has whole are reduced in the visit, which reads all planes."""
    spec = residual_norm(32)
    text = emit(plan(spec, TileConfig(Arch.SM90A, 64, 64), Alignment.TMA))
    assert spec.kept == "t0" and "def keep(" not in text and "Keep(" not in text


@pytest.mark.parametrize("name", SPECS)
def test_one_value_is_kept(name: str) -> None:
    spec = SPECS[name](128)
    assert (spec.kept, spec.pass_columns, spec.visit_columns) == (KEPT[name], 128, 1)
    assert spec.early_planes == {"exact0"} and not spec.by_visits


def with_ops(*ops: Op, stored: str = "n3", **changes: object) -> EpilogueSpec:
    spec = residual_norm(128)
    return replace(spec, ops=ops, stores=(Store("out0", stored, DType.BF16),), **changes)


def test_specs_without_one_value_are_held_by_visits() -> None:
    spec = residual_norm(128)
    first, *norm = spec.ops
    # The accumulators, or the plane, are needed again: by the reduction, by a later op, or by a store.
    aside = op("t1", "mul", "acc", "exact0")
    by_both = [replace(norm[0], operands=("t0", "t1")), *norm[1:]]
    again = [
        with_ops(first, aside, *by_both),
        with_ops(*spec.ops, op("t9", "add", "n3", "acc"), stored="t9"),
        with_ops(*spec.ops, op("t9", "add", "n3", "exact0"), stored="t9"),
        replace(spec, stores=(*spec.stores, Store("out2", "acc", DType.BF16))),
    ]
    for each in again:
        assert each.by_visits and each.visit_columns == 128 and not each.kept and not each.early_planes
    # Integers would be rounded on their way through fp32.
    whole = (replace(PLANE, dtype=DType.I32),)
    integers = (
        op("i0", "cast", "acc", dtype=DType.I32),
        op("t0", "add", "i0", "exact0", dtype=DType.I32),
        op("n1", "cast", "t0"),
        op("n2", "block_mean", "n1", block=128),
        op("n3", "mul", "n2", "n1"),
    )
    assert with_ops(*integers, loads=whole).kept == "n1"
    assert with_ops(*integers, op("t9", "mul", "n3", "t0"), stored="t9", loads=whole).by_visits


def test_pairs_keep_no_value() -> None:
    pair = (ACC, replace(ACC, name="acc1"))
    halves = (replace(pair[0], columns=Columns.EVEN), replace(pair[1], columns=Columns.ODD))
    for accumulators in (pair, halves):
        spec = with_ops(op("t", "mul", "acc", "acc1"), *chain_of("t"), accumulators=accumulators)
        assert spec.by_visits and not spec.kept


def chain_of(value: str) -> tuple[Op, ...]:
    return (op("t0", "add", value, "exact0"), *normed("t0", 128))


def test_numbers_do_not_move_past_a_kept_value() -> None:
    """silu's factor would otherwise move from the kept value to what reads it, which then reads more."""
    chain = (
        op("a", "add", "acc", "exact0"),
        op("t0", "mul", "a", Const(2.0)),
        op("n0", "mul", "t0", Const(0.25)),
        op("n1", "block_sum", "n0", block=128),
        op("n3", "mul", "t0", "n1"),
    )
    spec = with_ops(*chain)
    assert spec.kept == "t0"
    simple = simplify(spec)
    assert simple.kept == "t0"
    (factor,) = (each for each in simple.ops if each.name == "n0")
    assert factor.operands == ("t0", Const(0.25))


def test_sums_of_other_ctas_are_not_added_to_kept_values() -> None:
    """Each read of tensor memory would add them again."""
    spec = residual_norm(32)
    assert any(config.split_k > 1 for config in offered(Arch.SM90A, residual_norm(64)))
    assert all(config.split_k == 1 for config in offered(Arch.SM100A, spec))


def in_one_launch(*of_each: Callable[[int], EpilogueSpec]) -> EpilogueSpec:
    """Segments of 256 columns, with the epilogues of other specs, in blocks of 128 columns."""
    accumulators, loads, ops, stores = [], [], [], []
    for index, made in enumerate(of_each):
        spec = made(128)
        names = {name: f"{name}_{index}" for name in spec.dtypes}
        accumulators.append(replace(ACC, name=names["acc"], width=256))
        loads += [replace(load, name=names[load.name]) for load in spec.loads]
        for each in spec.ops:
            operands = tuple(names.get(name, name) for name in each.operands)
            ops.append(replace(each, name=names[each.name], operands=operands))
        first = spec.stores[0]
        stores.append(replace(first, name=f"{first.name}_{index}", value=names[first.value]))
    return EpilogueSpec(tuple(accumulators), tuple(loads), tuple(ops), tuple(stores))


def bare(columns: int) -> EpilogueSpec:
    return EpilogueSpec((ACC,), (), (op("t0", "abs", "acc"),), (Store("out0", "t0", DType.BF16),))


def plane_after(columns: int) -> EpilogueSpec:
    chain = (*normed("acc", columns), op("t1", "add", "n3", "exact0"))
    return EpilogueSpec((ACC,), (PLANE,), chain, (Store("out0", "t1", DType.BF16),))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
def test_segments_take_equally_many_stages(arch: Arch) -> None:
    """A plane ahead of passes, one after them, and none: each takes a stage for each subtile."""
    spec = in_one_launch(residual_norm, plane_after, bare)
    config = offered(arch, spec)[0]
    generator = torch.Generator().manual_seed(3)
    a = torch.randint(-3, 4, (140, 144), generator=generator).bfloat16()
    bs = [torch.randint(-3, 4, (256, 144), generator=generator).bfloat16().t() for _ in range(3)]
    loads = [torch.randint(-9, 10, (140, 256), generator=generator).bfloat16() for _ in spec.loads]
    results, launch = run_sound(spec, [a], bs, loads, Machine(arch, 1, config, 1))
    for result, right in zip(results, replay(spec, [a], bs, loads), strict=True):
        torch.testing.assert_close(result, right, rtol=8e-3, atol=8e-3)
    assert_sound([launch.kernel.plan])


@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
def test_segments_with_different_stages_share_no_launch(arch: Arch) -> None:
    """Planes around a norm come in two stages for each subtile."""
    assert offered(arch, in_one_launch(planes_around, planes_around))
    with pytest.raises(ValueError, match="serves these 2 products in one launch"):
        offered(arch, in_one_launch(planes_around, residual_norm))


@pytest.mark.exhaustive
@in_parts(4)
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize("columns", [48, 64, 96, 128, 256])
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A, Arch.SM80])
@pytest.mark.parametrize("name", SPECS)
def test_every_kernel_that_keeps_values_has_a_sound_rung(
    name: str, arch: Arch, columns: int, alignment: Alignment, part: slice
) -> None:
    spec = SPECS[name](columns)
    try:
        configs = of_part(offered(arch, spec), part)
    except ValueError:
        pytest.skip("no tile holds these blocks")
    if arch is Arch.SM80 and name == "silu_quantised":
        pytest.skip("sm_80 has no fp8")
    assert_sound(plan(spec, config, alignment) for config in configs)
