"""Blocks of columns that are reduced, and read again by the same epilogue: against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_backend import ops
from cute_backend.kinds import reductions
from cute_backend.kinds.results import OfBlocks
from cute_backend.memory_ops.schedule import kernel_formula
from cute_backend.planning import (
    Alignment,
    Arch,
    Rung,
    TileConfig,
    held,
    offered,
    plan,
    planes_written,
    serves,
    tile_table,
)
from cute_backend.replay import replay
from cute_backend.runtime.arguments.operands import check_operands
from cute_backend.runtime.compiling.build import build
from cute_backend.simulator.simulate import Machine
from cute_backend.spec import (
    Accumulator,
    Axis,
    Blocks,
    Columns,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Op,
    Operand,
    Order,
    ProductKind,
    Reduction,
    SpecError,
    Store,
    Stride,
)
from support.archs import FIRST
from support.sweeps import in_parts, of_part
from support.verdicts import assert_sound, run_sound

ACC = Accumulator("acc", DType.BF16, DType.BF16)
FP8 = Accumulator("acc", DType.E4M3, DType.E4M3)
ROW = Load("rowvec0", LoadKind.ROWVEC, DType.F32, Stride.ZERO, Stride.OTHER)
PLANE = Load("exact0", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.ONE)


ROW_SUM = Store("out0", "acc", DType.F32, form=Reduction(Axis.ROW, reductions.SUM))


def op(name: str, kind: str, *operands: Operand, block: int = 0) -> Op:
    return Op(name, kind, operands, DType.F32, block=block)


def norm(columns: int, *loads: Load) -> EpilogueSpec:
    """x / rms(x) * rowvec0 with x = acc + exact0, by heads; also what x was."""
    row = replace(ROW, blocks=Blocks(columns, Stride.ZERO, Stride.ONE))
    chain = (
        op("t0", "add", "acc", "exact0"),
        op("t1", "mul", "t0", "t0"),
        op("t2", "block_mean", "t1", block=columns),
        op("t3", "add", "t2", Const(0.5)),
        op("t4", "rsqrt", "t3"),
        op("t5", "mul", "t0", "t4"),
        op("t6", "mul", "t5", "rowvec0"),
    )
    stores = (Store("out0", "t6", DType.F32), Store("out1", "t0", DType.BF16))
    return EpilogueSpec((ACC,), (row, PLANE), chain, stores)


def softmax(columns: int) -> EpilogueSpec:
    """Over groups, with the largest of each; and how far the smallest lies below."""
    chain = (
        op("t0", "mul", "acc", Const(0.25)),
        op("t1", "block_max", "t0", block=columns),
        op("t2", "sub", "t0", "t1"),
        op("t3", "exp", "t2"),
        op("t4", "block_sum", "t3", block=columns),
        op("t5", "div", "t3", "t4"),
        op("t6", "block_min", "t2", block=columns),
    )
    stores = (Store("out0", "t5", DType.F32), Store("out1", "t1", DType.F32), Store("out2", "t6", DType.F32))
    return EpilogueSpec((ACC,), (), chain, stores)


def quantised(columns: int) -> EpilogueSpec:
    """Each block by the largest of it, which is stored once for a block: by rows, and by columns."""
    chain = (
        op("t0", "mul", "acc", Const(0.25)),
        op("t1", "abs", "t0"),
        op("t2", "block_max", "t1", block=columns),
        op("t3", "add", "t2", Const(0.5)),
        op("t4", "div", "t0", "t3"),
    )
    stores = (
        Store("out0", "t4", DType.BF16),
        Store("out1", "t3", DType.F32, OfBlocks(columns)),
        Store("out2", "t3", DType.BF16, OfBlocks(columns, Order.COLUMN)),
    )
    return EpilogueSpec((ACC,), (), chain, stores)


def operands(
    spec: EpilogueSpec, m: int, n: int, k: int = 64
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(m + n)
    a = torch.randint(-3, 4, (m, k), generator=generator).bfloat16() / 4
    b = torch.randint(-3, 4, (n, k), generator=generator).bfloat16().t() / 4
    loads = []
    for load in spec.loads:
        if load.blocks is None:
            loads.append(torch.randint(-9, 10, (m, n), generator=generator).bfloat16())
        else:
            columns = load.blocks.columns
            loads.append((torch.arange(columns) + 1.0).expand(n // columns, columns))
    return [a], [b], loads


def expected(spec: EpilogueSpec, columns: int, a: Tensor, b: Tensor, loads: list[Tensor]) -> list[Tensor]:
    """In float64, by numpy alone."""
    acc = a.double().numpy() @ b.double().numpy()
    m, n = acc.shape
    if spec.loads:
        x = acc + loads[1].double().numpy()
        blocks = x.reshape(m, n // columns, columns)
        wanted = blocks / np.sqrt((blocks**2).mean(-1, keepdims=True) + 0.5) * loads[0].double().numpy()
        return [torch.from_numpy(each.reshape(m, n)) for each in (wanted, x)]
    blocks = acc.reshape(m, n // columns, columns) / 4
    if any(store.form.block_columns for store in spec.stores):
        scales = np.abs(blocks).max(-1) + 0.5
        plane = (blocks / scales[..., None]).reshape(m, n)
        return [torch.from_numpy(each) for each in (plane, scales, scales)]
    largest, smallest = blocks.max(-1, keepdims=True), blocks.min(-1, keepdims=True)
    grown = np.exp(blocks - largest)
    wanted = (grown / grown.sum(-1, keepdims=True), largest, smallest - largest)
    return [torch.from_numpy(np.broadcast_to(each, blocks.shape).reshape(m, n).copy()) for each in wanted]


def check(results: list[Tensor], wanted: list[Tensor]) -> None:
    for result, right in zip(results, wanted, strict=True):
        assert result.shape == right.shape
        tolerance = 2e-6 if result.dtype is torch.float32 else 4e-3
        torch.testing.assert_close(result.double(), right, rtol=tolerance, atol=tolerance)


def is_dense(result: Tensor, order: Order) -> bool:
    return (result if order is Order.ROW else result.t()).is_contiguous()


def of_few_results(spec: EpilogueSpec) -> EpilogueSpec:
    """The first planes of a spec, as many as kernels write beside its blocks."""
    planes = spec.planes[: planes_written(spec.visit_columns)]
    kept = (each for each in spec.stores if each.form.block_columns or each in planes)
    return replace(spec, stores=tuple(kept))


SPECS = {"norm": norm, "softmax": softmax, "quantised": quantised}


@pytest.mark.parametrize("columns", [2, 5, 16])
@pytest.mark.parametrize("name", SPECS)
def test_the_replay_reduces_blocks(name: str, columns: int) -> None:
    spec = SPECS[name](columns)
    a, b, loads = operands(spec, 7, 6 * columns)
    results = replay(spec, a, b, loads)
    check(results, expected(spec, columns, *a, *b, loads))
    assert all(is_dense(result, store.form.order) for result, store in zip(results, spec.stores, strict=True))


CONFIGS = [
    (TileConfig(Arch.SM90A, 64, 128, pingpong=True, subtile_n=128), 128),
    (TileConfig(Arch.SM90A, 128, 128, 2, subtile_n=64), 64),
    (TileConfig(Arch.SM90A, 64, 128, 2, pingpong=True), 32),
    (TileConfig(Arch.SM90A, 64, 64, split_k=2), 16),
    (TileConfig(Arch.SM90A, 128, 96, 2, subtile_n=96), 96),
    (TileConfig(Arch.SM90A, 64, 96, subtile_n=96, split_k=2), 48),
    (TileConfig(Arch.SM90A, 128, 80, 2, subtile_n=80), 80),
    (TileConfig(Arch.SM90A, 64, 80, subtile_n=80), 80),
    (TileConfig(Arch.SM100A, 128, 128, subtile_n=64), 64),
    (TileConfig(Arch.SM100A, 256, 128, 2, ctas=2), 8),
    (TileConfig(Arch.SM80, 64, 128, subtile_n=128), 128),
]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("config", "columns"), CONFIGS, ids=lambda each: getattr(each, "name", str(each)))
def test_kernels_reduce_blocks(config: TileConfig, columns: int, name: str, alignment: Alignment) -> None:
    """Several tiles, the last of each row and column cut off; and one row."""
    spec = of_few_results(SPECS[name](columns))
    n = config.tile_n + columns
    for m in (config.tile_m + 9, 1):
        a, b, loads = operands(spec, m, n, 144)
        if alignment is Alignment.PLAIN:
            spec = replace(spec, loads=tuple(map(misaligned, spec.loads)))
        results, launch = run_sound(spec, a, b, loads, Machine(config.arch, 1, config, 1))
        check(results, expected(spec, columns, *a, *b, loads)[: len(spec.stores)])
        cut = launch.kernel.plan.tile.subtile_n
        assert cut % columns == 0 or (spec.pass_columns and columns % cut == 0)


def misaligned(load: Load) -> Load:
    """A plane of no known stride is read by element, whatever the alignment."""
    return replace(load, stride_n=Stride.OTHER) if load.kind is LoadKind.EXACT else load


def test_a_gated_pair_is_quantised_by_blocks_of_128() -> None:
    """As DeepSeek's activations are, in a tile of 128 columns of both; and it leaves no register out."""
    chain = (op("t0", "mul", "acc", "acc1"), *quantised(128).ops[1:])
    pair = (ACC, replace(ACC, name="acc1"))
    spec = EpilogueSpec(pair, (), chain, quantised(128).stores)
    a, b, _ = operands(quantised(128), 9, 512, 144)
    halves = [b[0][:, :256], b[0][:, 256:]]
    configs = tile_table(Arch.SM90A, spec)
    config = configs[0]
    results, _ = run_sound(spec, a, halves, [], Machine(Arch.SM90A, 1, config, 1))
    gate, up = (a[0].double() @ half.double() for half in halves)
    blocks = (gate * up).view(9, 2, 128)
    scales = blocks.abs().amax(-1) + 0.5
    check(results, [(blocks / scales[..., None]).view(9, 256), scales, scales])
    assert_sound(plan(spec, config, alignment) for alignment in Alignment)


def means(*sizes: int, planes: int = 0, accumulators: tuple[Accumulator, ...] = (ACC,)) -> EpilogueSpec:
    """The mean of blocks, of the means of smaller blocks if there are several `sizes`, as only visits can
    reduce them. It reads a number of planes."""
    loads = tuple(replace(PLANE, name=f"exact{i}") for i in range(planes))
    names = ("acc", *(f"t{i}" for i in range(len(sizes))))
    chain = tuple(
        op(name, "block_mean", names[i], block=size)
        for i, (name, size) in enumerate(zip(names[1:], sizes, strict=True))
    )
    return EpilogueSpec(accumulators, loads, chain, (Store("out0", names[-1], DType.F32),))


HELD = [(arch, columns) for arch in FIRST for columns in held(arch, means(16))]


def test_the_blocks_that_tiles_hold() -> None:
    visits = dict.fromkeys(Arch, (8, 16, 32, 64, 128))
    visits[Arch.SM100A] = visits[Arch.SM103A] = (8, 16, 32, 64)
    visits[Arch.SM90A] = (8, 16, 24, 32, 40, 48, 64, 80, 96, 128)
    assert {arch: held(arch, means(8, 16)) for arch in Arch} == visits
    passes = dict.fromkeys(Arch, (8, 16, 32, 64, 128))
    passes[Arch.SM100A] = passes[Arch.SM103A] = (8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256)
    passes[Arch.SM90A] = (8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
    assert {arch: held(arch, means(16)) for arch in Arch} == passes
    assert held(Arch.SM90A, means(8, 16, planes=1)) == visits[Arch.SM90A]
    assert held(Arch.SM90A, means(8, 16, planes=2)) == (8, 16, 32, 64)


def test_a_tile_serves_all_blocks_of_a_spec_at_once() -> None:
    """A visit has 80 or 96 columns; 480 would hold both."""
    assert serves(Arch.SM90A, means(16, 80)) and serves(Arch.SM90A, means(16, 96))
    assert not serves(Arch.SM90A, means(16, 80, 96))


@pytest.mark.parametrize("arch", Arch)
def test_two_products_share_the_columns_of_a_tile(arch: Arch) -> None:
    pair = (ACC, replace(ACC, name="acc1"))
    halves = (replace(ACC, columns=Columns.EVEN), replace(ACC, name="acc1", columns=Columns.ODD))
    few, by_tma = (8, 16, 32, 64), arch.target.planes_by_tma
    passes = (8, 16, 32, 48, 64, 96, 128) if by_tma else few
    for accumulators in (pair, halves):
        assert held(arch, means(16, accumulators=accumulators)) == passes
    wide = (*few, 128) if arch is Arch.SM90A else few
    for accumulators in (pair, halves):
        assert held(arch, means(8, 16, accumulators=accumulators)) == wide
    assert held(arch, means(8, 16, planes=1, accumulators=pair)) == few


@pytest.mark.parametrize(("arch", "columns"), HELD)
def test_every_tile_has_whole_blocks(arch: Arch, columns: int) -> None:
    specs = [norm(columns)] if columns in held(arch, means(8, 16)) else []
    for spec in (*specs, of_few_results(softmax(columns)), quantised(columns)):
        for config in tile_table(arch, spec):
            for alignment in Alignment:
                cut = Rung.of(spec, config, alignment).tile
                in_passes = spec.pass_columns and columns % cut.subtile_n == 0
                assert cut.subtile_n % columns == 0 or in_passes
                shared = cut.tile_n if in_passes else cut.tile_n // cut.ctas
                assert cut.tile_n % columns == 0 and shared % cut.subtile_n == 0


@pytest.mark.exhaustive
@in_parts(4)
@pytest.mark.parametrize(("arch", "columns"), [(Arch.SM90A, 128), (Arch.SM90A, 64), (Arch.SM100A, 64)])
@pytest.mark.parametrize("name", SPECS)
def test_every_kernel_of_blocks_has_a_sound_rung(name: str, arch: Arch, columns: int, part: slice) -> None:
    spec = SPECS[name](columns)
    ends = tile_table(arch, spec)[0], tile_table(arch, spec)[-1]
    assert_sound([plan(spec, config, alignment) for alignment in Alignment for config in ends][part])


def beside(columns: int, loads: int) -> EpilogueSpec:
    """The norm in bf16, of the sum with one plane, and with further planes added to it."""
    spec = norm(columns)
    planes = tuple(replace(PLANE, name=f"exact{i}") for i in range(loads))
    sums = tuple(op(f"t{6 + i}", "add", f"t{5 + i}", f"exact{i}") for i in range(1, loads))
    stores = (Store("out0", f"t{5 + loads}", DType.BF16), *spec.stores[1:])
    return replace(spec, loads=(*spec.loads[:1], *planes), ops=(*spec.ops, *sums), stores=stores)


@pytest.mark.parametrize("loads", [1, 2])
def test_a_block_in_a_thread_leaves_planes_by_element_registers(loads: int) -> None:
    """With a predicate and a clamped address for each element, the norm spilled 88 bytes beside one plane and
    568 beside two; with one predicate and clamped addresses 24 beside two."""
    spec = beside(64, loads)
    config = next(each for each in tile_table(Arch.SM100A, spec) if each.cta_rows == each.tile_n == 128)
    assert_sound([plan(spec, config, Alignment.PLAIN)])


@pytest.mark.exhaustive
@in_parts(8)
@pytest.mark.parametrize("columns", [32, 64])
@pytest.mark.parametrize("loads", [1, 2])
def test_blocks_in_a_thread_have_a_sound_rung(columns: int, loads: int, part: slice) -> None:
    spec = beside(columns, loads)
    split = replace(spec, loads=tuple(map(misaligned, spec.loads)))
    cases = ((each, config) for each in (spec, split) for config in tile_table(Arch.SM100A, each))
    assert_sound([plan(*case, alignment) for case in cases for alignment in Alignment][part])


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize("m", [1, 100, 127, 2049])
@pytest.mark.parametrize("columns", [32, 64])
def test_blocks_by_element_at_edges(columns: int, m: int) -> None:
    """With planes that begin at odd elements, whose addresses leave a thread registers for a part of a block
    in a visit, and a last tile that has one block."""
    spec, config = beside(columns, 1), TileConfig(Arch.SM100A, 128, 128, subtile_n=columns)
    a, b, (row, plane) = operands(spec, m, 128 + columns)
    odd = torch.zeros(m, plane.shape[1] + 1, dtype=plane.dtype)[:, 1:].copy_(plane)
    results, launch = run_sound(spec, a, b, [row, odd], Machine(Arch.SM100A, m, config, 1))
    chosen = launch.kernel.plan
    assert chosen.alignment is Alignment.PLAIN and chosen.tile.subtile_n < columns
    check(results, expected(spec, columns, *a, *b, [row, plane]))


def around(columns: int) -> EpilogueSpec:
    """The norm, with its plane added again after it, so that visits have to hold the blocks."""
    spec = norm(columns)
    (first, *others) = spec.stores
    stores = (replace(first, value="t7"), *others)
    return replace(spec, ops=(*spec.ops, op("t7", "add", "t6", "exact0")), stores=stores)


WHOLE_VISITS = {
    "norm": around(96),
    "norm of 80": around(80),
    "norm of fp32": replace(around(96), loads=(ROW, replace(PLANE, dtype=DType.F32))),
    "norm and row sums": replace(norm(96), stores=(*norm(96).stores[:1], replace(ROW_SUM, name="out1"))),
    "promoted": replace(around(96), accumulators=(replace(FP8, fast_accum=False),)),
    "groups": replace(around(96), accumulators=(replace(ACC, kind=ProductKind.GROUPED),)),
    "softmax": of_few_results(softmax(24)),
    "quantised": quantised(40),
}
"""Specs whose blocks only a visit of a whole tile holds."""


@pytest.mark.exhaustive
@in_parts(3)
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize("name", WHOLE_VISITS)
def test_visits_of_a_whole_tile_have_a_sound_rung(name: str, alignment: Alignment, part: slice) -> None:
    spec = WHOLE_VISITS[name]
    configs = offered(Arch.SM90A, spec)
    assert all(config.subtile_n == config.tile_n in (80, 96) for config in configs)
    assert_sound([plan(spec, config, alignment) for config in of_part(configs, part)])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("columns", [48, 80, 96])
def test_passes_reduce_blocks_of_promoted_sums(columns: int) -> None:
    """The wider tiles that hold these blocks leave promoted sums no registers, so others serve them."""
    spec = replace(norm(columns), accumulators=(replace(FP8, fast_accum=False),))
    *_, config = (each for each in offered(Arch.SM90A, spec) if each.split_k == 1)
    assert spec.pass_columns == columns and config.subtile_n < columns
    of_bf16, of_b, loads = operands(spec, 100, 2 * columns)
    a, b = ([each.to(torch.float8_e4m3fn) for each in given] for given in (of_bf16, of_b))
    results, launch = run_sound(spec, a, b, loads, Machine(Arch.SM90A, 1, config, 1))
    assert build(launch.kernel).spill_bytes == 0
    check(results, expected(spec, columns, *a, *b, loads))


@pytest.mark.parametrize(("columns", "loads", "stores"), [(96, 2, 1), (96, 1, 3), (128, 2, 1)])
def test_wide_visits_leave_few_planes_registers(columns: int, loads: int, stores: int) -> None:
    """A thread has up to 64 elements of each, and by element an address for each that it reads."""
    spec = around(columns)
    planes = tuple(replace(PLANE, name=f"exact{i}") for i in range(loads))
    results = tuple(Store(f"out{i}", "t7", DType.F32) for i in range(stores))
    with pytest.raises(ValueError, match=f"no tile of sm_90a holds blocks of {columns} columns"):
        tile_table(Arch.SM90A, replace(spec, loads=(*spec.loads[:1], *planes), stores=results))
    assert tile_table(Arch.SM90A, replace(spec, stores=results[:2]))
    assert planes_written(columns) == (4 if columns == 128 else 2)


def test_wide_visits_read_planes_from_shared_memory() -> None:
    """The stages of two warpgroups leave those of a plane no room, so a tile gives ping-pong up."""
    spec, results = around(128), [Store(f"out{i}", "t7", DType.BF16) for i in range(2)]
    few, many = (tile_table(Arch.SM90A, replace(spec, stores=tuple(results[:each])))[-1] for each in (1, 2))
    assert (few.name, many.name) == ("64x128_1x1_pingpong_by128", "64x128_1x1_by128")
    both = replace(spec, stores=tuple(results))
    assert plan(both, many, Alignment.TMA).placements["exact0"].name == "tma"
    both = replace(spec, stores=tuple(replace(each, dtype=DType.F32) for each in results))
    plans = [plan(both, tile_table(Arch.SM90A, both)[-1], alignment) for alignment in Alignment]
    assert [each.spilled for each in assert_sound(plans)] == [(0,), (0,)]


@pytest.mark.sim
@pytest.mark.sweep
@pytest.mark.parametrize("m", [1, 100, 127, 2049])
@pytest.mark.parametrize("columns", [80, 96])
def test_visits_of_a_whole_tile_at_edges(columns: int, m: int) -> None:
    spec = around(columns)
    spec = replace(spec, stores=tuple(replace(store, dtype=DType.BF16) for store in spec.stores))
    a, b, loads = operands(spec, m, 2 * columns)
    results, launch = run_sound(spec, a, b, loads, Machine(Arch.SM90A, m, None, 4))
    assert launch.kernel.plan.tile.subtile_n == columns and launch.kernel.plan.alignment is Alignment.TMA
    normed, plane = expected(spec, columns, *a, *b, loads)
    check(results, [normed + loads[1].double(), plane])


@pytest.mark.parametrize(("arch", "columns"), [(Arch.SM90A, 56), (Arch.SM100A, 112), (Arch.SM90A, 224)])
def test_blocks_that_no_tile_holds_are_refused(arch: Arch, columns: int) -> None:
    with pytest.raises(
        ValueError, match=rf"no tile of {arch.value} holds blocks of {columns} .* sizes: 8, 16"
    ):
        tile_table(arch, norm(columns))


def test_blocks_that_do_not_divide_the_columns_are_refused() -> None:
    a, b, _ = operands(softmax(8), 4, 20)
    with pytest.raises(ValueError, match="t1 has blocks of 8 columns, and 20 columns are no multiple"):
        check_operands(softmax(8), a, b, [])
    with pytest.raises(ValueError, match="t1 has blocks of 8 columns, and 20 columns are no multiple"):
        replay(softmax(8), a, b, [])


@pytest.mark.parametrize(("kind", "block"), [("block_sum", 0), ("block_sum", 1), ("abs", 8)])
def test_an_op_has_a_block_if_it_reduces_one(kind: str, block: int) -> None:
    spec = EpilogueSpec((ACC,), (), (op("t0", kind, "acc", block=block),), (Store("out0", "t0", DType.F32),))
    with pytest.raises(
        SpecError, match=f"t0 = {kind} has blocks of {block} columns; two or more have block_sum"
    ):
        ops.check(spec)
    assert EpilogueSpec.from_json(spec.to_json()) == spec


def test_a_store_of_blocks_has_some() -> None:
    with pytest.raises(SpecError, match="out0 has one element for each 1 columns; a block has two"):
        EpilogueSpec((ACC,), (), (), (Store("out0", "acc", DType.F32, OfBlocks(1)),))


def test_a_formula_says_how_long_blocks_are() -> None:
    assert kernel_formula(softmax(16)).splitlines()[1] == "t1 = block16_max(t0)"
    stored = kernel_formula(quantised(16)).splitlines()[3:]
    assert stored == ["out1 = f32(t3)[:, ::16]", "out2 = bf16(t3)[:, ::16]"]
    assert EpilogueSpec.from_json(quantised(16).to_json()) == quantised(16)
