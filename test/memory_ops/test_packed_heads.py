"""Segments whose B is blocks of columns, as queries, keys and values packed head by head: to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_backend.kinds.blocks import ROTATE_HALF
from cute_backend.kinds.results import PLANE, Heads
from cute_backend.planning import (
    Alignment,
    Arch,
    Rung,
    TileConfig,
    offered,
    plan,
    serves,
    tile_table,
)
from cute_backend.planning.served import unserved
from cute_backend.replay import replay
from cute_backend.runtime.arguments.operands import check_operands
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.simulator.simulate import Machine
from cute_backend.spec import (
    Accumulator,
    Blocks,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Major,
    Op,
    SpecError,
    Store,
    Stride,
)
from support.sweeps import in_parts, of_part
from support.verdicts import assert_sound, run_sound


def packed(
    columns: int, heads: int, groups: tuple[int, ...] = (1, 1, 1), rows: int = 0, rotates: bool = False
) -> EpilogueSpec:
    """Of `heads` heads, segments of `groups` of `columns` columns each, with biases: Falcon has several
    queries in a head, and GPT-NeoX one. With `rotates`, all but the last one are rotated instead."""
    accumulators, loads, ops, stores = [], [], [], []
    for i, count in enumerate(groups):
        width = count * columns
        acc = Accumulator(f"acc{i}", DType.BF16, DType.BF16, width=heads * width, b_block=width)
        accumulators.append(acc)
        if rotates and i < len(groups) - 1:
            ops.append(Op(f"t{i}", ROTATE_HALF.name, (acc.name,), DType.F32, block=columns))
        else:
            blocks = Blocks(width, Stride.OTHER, Stride.ONE)
            bias = Load(f"bias{i}", LoadKind.ROWVEC, DType.BF16, Stride.ZERO, Stride.OTHER, (), blocks)
            loads.append(bias)
            ops.append(Op(f"t{i}", "add", (acc.name, bias.name), DType.F32))
        stores.append(Store(f"out{i}", f"t{i}", DType.BF16, form=Heads(rows, columns) if rows else PLANE))
    return EpilogueSpec(tuple(accumulators), tuple(loads), tuple(ops), tuple(stores))


def operands(spec: EpilogueSpec, m: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Small integers, of which every sum is exact. The blocks of all B and of all biases are views of one
    weight and of one vector."""
    generator = torch.Generator().manual_seed(m)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).bfloat16()

    widths = [acc.b_block for acc in spec.accumulators]
    heads = spec.product.width // spec.product.b_block
    weight, vector = integers(heads, sum(widths), 64), integers(heads, sum(widths))
    b = [each.permute(2, 0, 1) for each in weight.split(widths, 1)]
    biases = dict(zip((f"bias{i}" for i in range(len(widths))), vector.split(widths, 1), strict=True))
    return [integers(m, 64)], b, [biases[load.name] for load in spec.loads]


def test_the_replay_multiplies_by_blocks() -> None:
    spec = packed(32, 3, (2, 1, 1), rows=4)
    (a,), b, biases = operands(spec, 8)
    for result, right, bias in zip(replay(spec, [a], b, biases), b, biases, strict=True):
        y = torch.einsum("mk,khd->mhd", a.double(), right.double()) + bias.double()
        heads = y.unflatten(-1, (-1, 32)).flatten(1, 2).unflatten(0, (2, 4)).transpose(1, 2)
        assert torch.equal(result.flatten().double(), heads.flatten())


CASES = [
    (TileConfig(Arch.SM90A, 128, 128, 1, 2, pingpong=True), packed(64, 3), 137),
    (TileConfig(Arch.SM100A, 128, 128), packed(64, 3, rows=100), 200),
    (TileConfig(Arch.SM90A, 64, 128), packed(64, 3, rows=127, rotates=True), 254),
    (TileConfig(Arch.SM90A, 128, 128, 2), packed(128, 2, (3, 1, 1), rotates=True), 100),
    (TileConfig(Arch.SM100A, 256, 128, 2, ctas=2), packed(128, 2, (3, 1, 1), rows=50), 300),
    (TileConfig(Arch.SM100A, 128, 64), packed(128, 3), 1),
    (TileConfig(Arch.SM90A, 64, 64), packed(192, 2, (1, 1)), 70),
    (TileConfig(Arch.SM90A, 128, 192, 2), packed(96, 3, rotates=True), 137),
    (TileConfig(Arch.SM90A, 64, 192, 1, 2, pingpong=True), packed(96, 5, rows=50, rotates=True), 100),
    (TileConfig(Arch.SM90A, 128, 160, 2), packed(80, 3), 137),
    (TileConfig(Arch.SM90A, 64, 160), packed(80, 3, (2, 1, 1)), 70),
    (TileConfig(Arch.SM100A, 256, 192, 2, ctas=2), packed(96, 3, rows=100, rotates=True), 300),
    (TileConfig(Arch.SM100A, 256, 160, 2, ctas=2, subtile_n=16), packed(80, 3, rotates=True), 300),
    (TileConfig(Arch.SM100A, 128, 160, subtile_n=16), packed(80, 3, rotates=True), 130),
]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("config", "spec", "m"), CASES, ids=lambda each: getattr(each, "name", ""))
def test_kernels_read_blocks_of_columns(config: TileConfig, spec: EpilogueSpec, m: int) -> None:
    """Several heads in a tile, and several tiles in a head; the last tiles of rows and columns cut off."""
    a, b, biases = operands(spec, m)
    results, launch = run_sound(spec, a, b, biases, Machine(config.arch, 1, config, 1))
    assert launch.kernel.plan.alignment is Alignment.TMA
    for result, right in zip(results, replay(spec, a, b, biases), strict=True):
        assert torch.equal(result, right)


def rotary(columns: int, *heads: int, apart: bool = False) -> EpilogueSpec:
    """Queries, keys and values of `heads` heads, all with biases, and all but the values with rotary
    embeddings by row. Heads are packed side by side, or each product has a weight of its own."""
    spec = packed(columns, 1, (1,) * len(heads))
    accumulators, loads, ops = [], list(spec.loads), list(spec.ops)
    for acc, count in zip(spec.accumulators, heads, strict=True):
        block = 0 if apart else columns
        accumulators.append(replace(acc, width=count * columns, b_block=block))
    if apart:
        loads = [replace(load, stride_n=Stride.ONE, blocks=None) for load in loads]
    blocks, values = Blocks(columns, Stride.ZERO, Stride.ONE), [op.name for op in ops]
    for i in range(len(heads) - 1):
        cos, sin = f"exact{2 * i}", f"exact{2 * i + 1}"
        for name in (cos, sin):
            loads.append(Load(name, LoadKind.EXACT, DType.F32, Stride.OTHER, Stride.OTHER, (), blocks))
        ops.append(Op(f"cos{i}", "mul", (values[i], cos), DType.F32))
        ops.append(Op(f"half{i}", ROTATE_HALF.name, (values[i],), DType.F32, block=columns))
        ops.append(Op(f"sin{i}", "mul", (f"half{i}", sin), DType.F32))
        values[i] = f"rotated{i}"
        ops.append(Op(values[i], "add", (f"cos{i}", f"sin{i}"), DType.F32))
    stores = [replace(out, value=value) for out, value in zip(spec.stores, values, strict=True)]
    return EpilogueSpec(tuple(accumulators), tuple(loads), tuple(ops), tuple(stores))


ROTARY = {
    "32": rotary(32, 8, 8, 8),
    "64": rotary(64, 3, 3, 3),
    "96": rotary(96, 3, 3, 3),
    "many 96": rotary(96, 8, 8, 8),
    "few keys": rotary(64, 32, 3, 3, apart=True),
    "apart": rotary(96, 8, 3, 3, apart=True),
    "one cluster": rotary(64, 3, 3, 3, apart=True),
}


def in_16_bits(spec: EpilogueSpec) -> EpilogueSpec:
    return replace(spec, loads=tuple(replace(load, dtype=DType.BF16) for load in spec.loads))


def test_two_warpgroups_rotate_in_narrow_subtiles_by_element() -> None:
    """Queries, keys and values of Qwen2 spilled 32 bytes in subtiles of 32 columns."""
    spec = in_16_bits(rotary(128, 28, 4, 4, apart=True))
    config = offered(Arch.SM100A, spec)[0]
    assert config.column_groups == 2
    for alignment, columns in ((Alignment.TMA, 32), (Alignment.PLAIN, 16)):
        kernel = Kernel(plan(spec, config, alignment))
        assert Rung.of(spec, config, alignment).tile.subtile_n == columns
        assert build(kernel).spill_bytes == 0


ON_BLACKWELL = {
    **{f"{columns}": rotary(columns, 8, 8, 8) for columns in (48, 80, 96, 160)},
    **{f"{columns} apart": rotary(columns, 8, 2, 2, apart=True) for columns in (80, 96)},
    **{f"{columns} alone": packed(columns, 8) for columns in (80, 96)},
}
ON_HOPPER = {
    **ROTARY,
    "160": rotary(160, 4, 4, 4),
    "80 alone": packed(80, 8),
}
SPILLS = [
    pytest.param(arch, spec, id=name)
    for arch, specs in ((Arch.SM90A, ON_HOPPER), (Arch.SM100A, ON_BLACKWELL))
    for name, spec in ((f"{arch.value}-{each}", specs[each]) for each in specs)
]


@pytest.mark.exhaustive
@in_parts(16)
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize(("arch", "spec"), SPILLS)
def test_every_tile_of_heads_has_a_sound_rung(
    arch: Arch, spec: EpilogueSpec, alignment: Alignment, part: slice
) -> None:
    assert_sound([plan(spec, config, alignment) for config in of_part(offered(arch, spec), part)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize(
    ("arch", "columns", "rotates"),
    [
        (arch, columns, rotates)
        for arch in (Arch.SM90A, Arch.SM100A)
        for columns in (64, 80, 96, 128)
        for rotates in (False, True)
        if not rotates or serves(arch, packed(columns, 8, rotates=True).segments[0])
    ],
)
def test_every_kernel_of_blocks_has_a_sound_rung(
    arch: Arch, columns: int, rotates: bool, alignment: Alignment
) -> None:
    spec = packed(columns, 8, rows=0 if columns == 80 else 100, rotates=rotates)
    for config in (offered(arch, spec)[0], tile_table(arch, spec)[-1]):
        assert_sound([plan(spec, config, alignment)])


@pytest.mark.parametrize(
    ("columns", "held"), [(32, True), (64, True), (80, True), (96, True), (192, True), (112, False)]
)
def test_tiles_consist_of_blocks_or_lie_within_one(columns: int, held: bool) -> None:
    for arch in (Arch.SM90A, Arch.SM100A):
        if not held:
            with pytest.raises(ValueError, match=f"no tile of {arch.value} .*{columns}"):
                tile_table(arch, packed(columns, 4).segments[0])
            continue
        for config in tile_table(arch, packed(columns, 4)):
            share = config.tile_n // config.cluster_m
            assert min(share % columns, columns % share) == 0


def test_a_spec_says_what_is_wrong_with_its_blocks() -> None:
    acc = packed(64, 3).product
    wrong = (replace(acc, b_block=80), replace(acc, b_major=Major.MN), replace(acc, b_block=-1))
    for each in wrong:
        with pytest.raises(SpecError, match="acc0 has columns of B in blocks of"):
            EpilogueSpec((each,), (), (), (Store("out0", "acc0", DType.BF16),))
    assert EpilogueSpec.from_json(packed(64, 3).to_json()) == packed(64, 3)
    assert "reads blocks of columns of B" in str(unserved(packed(64, 3).segments[0], Arch.SM80.target))


def test_other_operands_are_refused() -> None:
    spec = packed(64, 3)
    a, b, biases = operands(spec, 8)
    flat = b[0].flatten(1)
    for wrong in (flat, b[0].reshape(64, 6, 32)):
        with pytest.raises(ValueError, match=r"acc0 wants .* with columns in blocks of 64, not"):
            check_operands(spec, a, [wrong, *b[1:]], biases)
    with pytest.raises(ValueError, match="acc1 has a segment of 192 columns, and its B is"):
        check_operands(spec, a, [b[0], b[1][:, :2], b[2]], biases)
