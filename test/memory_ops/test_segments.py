"""Regions of one A in one launch, each with a segment of the columns: kernels against the replay, exactly."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_backend.formula import formula
from cute_backend.kinds import reductions
from cute_backend.kinds.blocks import ROTATE_HALF
from cute_backend.memory_ops.emit import emit
from cute_backend.memory_ops.schedule import kernel_names
from cute_backend.planning import Alignment, Arch, Sizes, TileConfig, choose, offered, plan
from cute_backend.planning.cost import cost
from cute_backend.planning.naming import words
from cute_backend.replay import replay
from cute_backend.runtime.arguments.operands import check_operands
from cute_backend.signature import signature
from cute_backend.simulator.simulate import Machine
from cute_backend.spec import (
    Accumulator,
    Axis,
    Blocks,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Op,
    Operand,
    Reduction,
    SpecError,
    Store,
    Stride,
)
from support.verdicts import assert_sound, run_sound

WIDTHS = (136, 72, 200)


def op(name: str, kind: str, *operands: Operand, block: int = 0) -> Op:
    return Op(name, kind, operands, DType.F32, block=block)


def segments(*widths: int) -> tuple[Accumulator, ...]:
    return tuple(Accumulator(f"acc{i}", DType.BF16, DType.BF16, width=each) for i, each in enumerate(widths))


COLVEC = Load("colvec0", LoadKind.COLVEC, DType.F32, Stride.OTHER, Stride.ZERO)
ROW = Load("rowvec0", LoadKind.ROWVEC, DType.BF16, Stride.ZERO, Stride.ONE)
PLANE = Load("exact0", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.ONE)

MIXED = EpilogueSpec(
    segments(*WIDTHS),
    (COLVEC, ROW, PLANE),
    (
        op("t0", "add", "acc0", "rowvec0"),
        op("t1", "mul", "t0", "colvec0"),
        op("t2", "mul", "acc1", "colvec0"),
        op("t3", "add", "t2", "exact0"),
    ),
    (
        Store("out0", "t1", DType.BF16),
        Store("out1", "t3", DType.F32),
        Store("out2", "acc2", DType.BF16),
    ),
)

"""A vector and a colvec, the same colvec and a plane, nothing: three epilogues that stage, load and store
unlike things."""


def rotated(head: int, *widths: int) -> EpilogueSpec:
    """q and k rotated by one table, v not."""
    table = Load(
        "exact0",
        LoadKind.EXACT,
        DType.BF16,
        Stride.OTHER,
        Stride.OTHER,
        (),
        Blocks(head, Stride.ZERO, Stride.ONE),
    )
    loads, ops, stores = [], [], []
    for i in range(2):
        loads.append(replace(table, name=f"exact{i}"))
        ops.append(op(f"t{2 * i}", ROTATE_HALF.name, f"acc{i}", block=head))
        ops.append(op(f"t{2 * i + 1}", "mul", f"t{2 * i}", f"exact{i}"))
        stores.append(Store(f"out{i}", f"t{2 * i + 1}", DType.BF16))
    stores.append(Store("out2", "acc2", DType.BF16))
    return EpilogueSpec(segments(*widths), tuple(loads), tuple(ops), tuple(stores))


def operands(
    spec: EpilogueSpec, m: int, k: int, seed: int = 0
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape: int, dtype: DType = DType.BF16) -> Tensor:
        values = torch.randint(-3, 4, shape, generator=generator)
        return values.to(torch.bfloat16 if dtype is DType.BF16 else torch.float32)

    loads = []
    for load in spec.loads:
        width = spec.width_of(load.name)
        if load.blocks is not None:
            table = integers(m, 1, load.blocks.columns, dtype=load.dtype)
            loads.append(table.expand(m, width // load.blocks.columns, -1))
            continue
        shapes = {LoadKind.COLVEC: (m,), LoadKind.ROWVEC: (width,), LoadKind.EXACT: (m, width)}
        loads.append(integers(*shapes[load.kind], dtype=load.dtype))
    bs = [integers(acc.width, k).t() for acc in spec.accumulators]
    return [integers(m, k)], bs, loads


def check(spec: EpilogueSpec, m: int, k: int, config: TileConfig, seed: int | None = 1) -> None:
    """Simulates a problem in a kernel of a tile, whose results must be right."""
    a, b, loads = operands(spec, m, k)
    results, _ = run_sound(spec, a, b, loads, Machine(config.arch, seed, config, 1))
    for result, right in zip(results, replay(spec, a, b, loads), strict=True):
        assert torch.equal(result, right)


CONFIGS = [
    TileConfig(Arch.SM90A, 64, 64),
    TileConfig(Arch.SM90A, 64, 128, pingpong=True),
    TileConfig(Arch.SM90A, 128, 128, 1, 2, pingpong=True),
    TileConfig(Arch.SM90A, 128, 64, 2),
    TileConfig(Arch.SM100A, 128, 64),
    TileConfig(Arch.SM100A, 256, 128, 2, ctas=2),
    TileConfig(Arch.SM100A, 128, 128, 1, 2, column_groups=2),
]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda each: f"{each.arch.value}-{each.name}")
def test_kernels_run_each_epilogue_on_its_segment(config: TileConfig) -> None:
    check(MIXED, 136, 192, config)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "config", [*CONFIGS, replace(CONFIGS[2], subtile_n=64)], ids=lambda each: f"{each.arch.value}-{each.name}"
)
def test_a_segment_may_be_narrower_than_a_subtile(config: TileConfig) -> None:
    """Every later subtile of its tile lies behind its columns, and must not be stored."""
    check(replace(MIXED, accumulators=segments(16, 64, 24)), 72, 64, config)


@pytest.mark.exhaustive
@pytest.mark.parametrize("m", [1, 64, 200])
def test_edges_of_m(m: int) -> None:
    check(MIXED, m, 320, CONFIGS[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "config", [CONFIGS[2], TileConfig(Arch.SM100A, 128, 128)], ids=lambda each: each.arch.value
)
def test_kernels_rotate_in_some_segments(config: TileConfig) -> None:
    check(rotated(64, 256, 128, 72), 128, 128, config)


def test_one_head_is_rotated_only_in_a_subtile_on_hopper() -> None:
    """In narrower subtiles its columns would be reordered, as blocks that TMA counts."""
    assert offered(Arch.SM90A, rotated(64, 192, 128, 72))
    with pytest.raises(ValueError, match="no tile"):
        offered(Arch.SM90A, rotated(64, 192, 64, 72))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("m", [1, 100, 127])
@pytest.mark.parametrize("name", ["128x64_1x1", "128x128_1x1"])
def test_one_head_may_have_several_subtiles(name: str, m: int) -> None:
    """As the keys that all queries share have."""
    spec = rotated(64, 192, 64, 72)
    (config,) = (each for each in offered(Arch.SM100A, spec) if each.name == name)
    assert config.subtile_n == 32
    check(spec, m, 128, config)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
@pytest.mark.parametrize("m", [64, 2048])
def test_kernels_of_llama_have_a_sound_rung(arch: Arch, m: int) -> None:
    spec = rotated(128, 4096, 1024, 1024)
    config = choose(arch, spec, Sizes(m, 6144, 4096), arch.target.sm_count)
    assert_sound([plan(spec, config, Alignment.TMA)])


def test_ping_pong_hides_rotations_of_all_waves_but_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 512 rows, 256 x 128 has one wave, whose epilogue no tile hides."""
    spec = rotated(128, 4096, 1024, 1024)

    able = {config.name: config for config in offered(Arch.SM90A, spec)}

    def times(m: int) -> list[float]:
        names = ("256x128_1x2", "128x128_1x2_pingpong")
        return [cost(able[name], spec, Sizes(m, 6144, 4096), Arch.SM90A.target.sm_count) for name in names]

    few, many = times(512), times(2048)
    assert choose(Arch.SM90A, spec, Sizes(8192, 6144, 4096), Arch.SM90A.target.sm_count).pingpong
    monkeypatch.setattr("cute_backend.planning.cost.ROTATED_US", 0.0)
    assert times(512) == few and times(2048)[1] == many[1] and times(2048)[0] < many[0]


def test_the_replay_computes_each_segment_by_itself() -> None:
    a, (b0, b1, b2), loads = operands(MIXED, 5, 16)
    colvec, row, plane = (load.float() for load in loads)
    x = a[0].float()
    results = replay(MIXED, a, [b0, b1, b2], loads)
    right = [
        ((x @ b0.float() + row) * colvec[:, None]).bfloat16(),
        x @ b1.float() * colvec[:, None] + plane,
        (x @ b2.float()).bfloat16(),
    ]
    assert all(torch.equal(result, each) for result, each in zip(results, right, strict=True))


def test_segments_are_specs_of_one_product() -> None:
    assert [len(each.loads) for each in MIXED.segments] == [2, 2, 0]
    assert all(each.segments == (each,) and not each.product.width for each in MIXED.segments)
    assert [MIXED.width_of(each.name) for each in MIXED.loads] == [0, 136, 72]
    assert EpilogueSpec.from_json(MIXED.to_json()) == MIXED
    assert formula(MIXED, kernel_names(MIXED)).splitlines()[2] == "out2 = bf16(acc2)"
    assert words(MIXED) == "mm_by_3_bias_scale_residual"


def test_the_signature_has_the_columns_of_segments() -> None:
    shapes = {each.name: [dim.width for dim in each.dims] for each in signature(MIXED)}
    assert shapes["b1"] == [0, 72] and shapes["out2"] == [0, 200] and shapes["colvec0"] == [0]


def test_the_text_has_an_epilogue_for_each_segment() -> None:
    config = choose(Arch.SM90A, MIXED, Sizes(2048, sum(WIDTHS), 4096), 132)
    text = emit(plan(MIXED, config, Alignment.TMA))
    assert re.findall(r"^class (\w+):", text, re.MULTILINE) == ["Epilogue0", "Epilogue1", "Epilogue2"]
    assert "Segments([Epilogue0(), Epilogue1(), Epilogue2()], [136, 72, 200])" in text
    assert "gemm(a, [b0, b1, b2], [colvec0, rowvec0, colvec0, exact0], [out0, out1, out2]" in text


def test_no_wider_tile_is_offered_than_was_swept_for_spills() -> None:
    for arch, widest in ((Arch.SM90A, 192), (Arch.SM100A, 256)):
        assert max(config.tile_n for config in offered(arch, MIXED)) == widest
        alone = [config.tile_n for segment in MIXED.segments for config in offered(arch, segment)]
        assert max(alone) == 256


def busy(dtype: DType) -> EpilogueSpec:
    """A colvec and a rowvec in each segment, with a residual, with silu and in fp32."""
    rows = [replace(ROW, name=f"rowvec{i}") for i in range(3)]
    ops = []
    for i in range(3):
        ops += [
            op(f"t{2 * i}", "mul", f"acc{i}", "colvec0"),
            op(f"t{2 * i + 1}", "add", f"t{2 * i}", f"rowvec{i}"),
        ]
    ops += [op("t6", "add", "t1", "exact0"), op("t7", "sigmoid", "t3"), op("t8", "mul", "t3", "t7")]
    stores = Store("out0", "t6", DType.BF16), Store("out1", "t8", DType.BF16), Store("out2", "t5", DType.F32)
    accumulators = tuple(replace(acc, a_dtype=dtype, b_dtype=dtype) for acc in segments(4096, 1024, 1024))
    return EpilogueSpec(accumulators, (COLVEC, *rows, PLANE), tuple(ops), stores)


def turned(dtype: DType) -> EpilogueSpec:
    """Rotated q and k, and v, of Llama's widths."""
    spec = rotated(128, 4096, 1024, 1024)
    return replace(
        spec, accumulators=tuple(replace(acc, a_dtype=dtype, b_dtype=dtype) for acc in spec.accumulators)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [DType.BF16, DType.E4M3], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("made", [busy, turned], ids=lambda made: made.__name__)
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A], ids=lambda arch: arch.value)
def test_tiles_that_are_offered_are_sound(
    arch: Arch, made: Callable[[DType], EpilogueSpec], dtype: DType
) -> None:
    spec = made(dtype)
    configs = offered(arch, spec)
    assert_sound(plan(spec, config, alignment) for config in configs for alignment in Alignment)


def test_a_tile_serves_every_segment() -> None:
    for arch in (Arch.SM90A, Arch.SM100A):
        for segment in MIXED.segments:
            able = {replace(config, subtile_n=16) for config in offered(arch, segment)}
            assert {replace(config, subtile_n=16) for config in offered(arch, MIXED)} <= able
    reduced = replace(
        MIXED, ops=(*MIXED.ops, op("t4", "block_sum", "acc2", block=40), op("t5", "mul", "acc2", "t4"))
    )
    assert replace(MIXED, ops=reduced.ops).segments[2].whole_columns == 40
    reduced = replace(reduced, stores=(*MIXED.stores[:2], Store("out2", "t5", DType.BF16)))
    with pytest.raises(ValueError, match="no tile of sm_100a"):
        offered(Arch.SM100A, reduced)
    # On Hopper a visit of every segment is a whole tile then.
    assert {config.subtile_n for config in offered(Arch.SM90A, reduced)} <= {80}


BAD = {
    "meets acc1": {"ops": (*MIXED.ops, op("t4", "mul", "acc0", "acc1"))},
    "nothing of acc2 is stored": {"stores": MIXED.stores[:2]},
    "rowvec0 is a rowvec of 2 segments": {"ops": (*MIXED.ops, op("t4", "mul", "acc2", "rowvec0"))},
    "reduction": {
        "stores": (*MIXED.stores, Store("out3", "t1", DType.F32, form=Reduction(Axis.ROW, reductions.SUM)))
    },
    "0 for all": {"accumulators": (*MIXED.accumulators[:2], replace(MIXED.accumulators[2], width=0))},
    "two or more dense products": {
        "accumulators": MIXED.accumulators[:1],
        "loads": MIXED.loads[:2],
        "ops": MIXED.ops[:2],
        "stores": MIXED.stores[:1],
    },
    "136 columns, and blocks of 64": {"ops": (op("t0", ROTATE_HALF.name, "acc0", block=64), *MIXED.ops[1:])},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_segments_are_refused(message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(MIXED, **BAD[message])


def test_operands_have_the_widths_of_segments() -> None:
    a, b, loads = operands(MIXED, 8, 16)
    check_operands(MIXED, a, b, loads)
    with pytest.raises(ValueError, match="acc1 has a segment of 72 columns, and its B is"):
        check_operands(MIXED, a, [b[0], b[0], b[2]], loads)
    with pytest.raises(ValueError, match="exact0"):
        check_operands(MIXED, a, b, [*loads[:2], loads[2][:, :64]])
