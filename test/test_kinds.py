"""Kinds by their own arithmetic: that of a kernel, on torch's tensors, beside each kind's reference."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cute_backend.dtypes import VALUE_DTYPES, DType
from cute_backend.errors import SpecError
from cute_backend.formula import formula
from cute_backend.kinds import reductions
from cute_backend.kinds.axes import Extent, Order
from cute_backend.kinds.blocks import BLOCK_OPS, BlockOp
from cute_backend.kinds.loads import LoadKind
from cute_backend.kinds.reductions import REDUCTIONS, Axis, Reduction, ReductionKind, Values
from cute_backend.kinds.results import ByHeads, Cache, Heads, ordered
from cute_backend.memory_ops.emit import emit
from cute_backend.planning import Alignment, Arch, plan, tile_table
from cute_backend.replay import replay
from cute_backend.runtime.arguments.operands import check_operands
from cute_backend.runtime.arguments.random_operands import random_operands
from cute_backend.signature import Argument, Use, of_use, signature
from cute_backend.spec import (
    TABLE_COLUMNS,
    Accumulator,
    Blocks,
    Const,
    EpilogueSpec,
    Load,
    Op,
    Operand,
    ProductKind,
    Scaling,
    Store,
    Stride,
    WeightGroups,
)
from support.small_specs import row_maximum, spec_of, taken

INF, NAN = float("inf"), float("nan")
VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 88.0, -3e4, 1e-30, INF, -INF, NAN])


def _where(condition: Tensor, chosen: Any, other: Any) -> Tensor:
    kind = chosen if isinstance(chosen, Tensor) else other
    return torch.where(
        condition, torch.as_tensor(chosen).to(kind.dtype), torch.as_tensor(other).to(kind.dtype)
    )


def _extremum(a: Any, b: Any, sign: int, ignores_nan: bool = False) -> Tensor:
    """torch's extremum, with +0 above -0."""
    a, b = torch.as_tensor(a, dtype=torch.float32), torch.as_tensor(b, dtype=torch.float32)
    if ignores_nan:
        return torch.fmin(a, b)
    larger = torch.maximum(sign * a, sign * b)
    zeros = torch.maximum(torch.copysign(torch.ones(()), sign * a), torch.copysign(torch.ones(()), sign * b))
    return sign * torch.where(larger == 0, torch.copysign(larger, zeros), larger)


MATH = SimpleNamespace(
    where=_where,
    maximum=lambda a, b: _extremum(a, b, 1),
    minimum=lambda a, b: _extremum(a, b, -1),
    fmin=lambda a, b: _extremum(a, b, -1, ignores_nan=True),
    isinf=torch.isinf,
    exp2=lambda x, fastmath: torch.exp2(x),
    log=torch.log,
    div=torch.div,
    logical_not=torch.logical_not,
    to_f32=lambda x: x.float(),
    to_i32=lambda x: x.int(),
)
"""The functions of `device_math` that kinds of reductions use, on tensors."""


def identity(kind: ReductionKind) -> Values:
    dtypes = {DType.F32: torch.float32, DType.I32: torch.int32}
    return tuple(torch.tensor(part.identity, dtype=dtypes[part.dtype]) for part in kind.parts)


def combined(kind: ReductionKind, row: list[float], order: list[int]) -> Tensor:
    """The reduction of a row whose elements are combined in a random tree."""
    partials = [
        kind.element(MATH, torch.tensor(row[place]), torch.tensor(place, dtype=torch.int32))
        for place in order
    ]
    partials = [identity(kind), *partials]
    while len(partials) > 1:
        at = (7 * len(partials) + order[0]) % (len(partials) - 1)
        partials[at : at + 2] = [kind.combine(MATH, partials[at], partials[at + 1])]
    return kind.result(MATH, partials[0], torch.tensor(len(row)))


@pytest.mark.parametrize("kind", REDUCTIONS, ids=lambda kind: kind.name)
@given(row=st.lists(VALUES, min_size=1, max_size=9), draw=st.randoms(use_true_random=False))
def test_the_arithmetic_of_a_kernel_is_the_reference(
    kind: ReductionKind, row: list[float], draw: Any
) -> None:
    if kind is reductions.PROD:
        row = [max(min(value, 2.0), -2.0) if value == value else value for value in row]
    row = taken(kind, torch.tensor(row)).tolist()
    order = draw.sample(range(len(row)), len(row))
    expected = kind.reference(torch.tensor([row]), torch.float32)[0]
    got = combined(kind, row, order).to(expected.dtype)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    "kind", [kind for kind in REDUCTIONS if kind.several or kind.follow], ids=lambda kind: kind.name
)
@given(row=st.lists(VALUES, min_size=1, max_size=9))
def test_shorter_ways_agree(kind: ReductionKind, row: list[float]) -> None:
    """Several values at once, and elements in the order of their places."""
    row = taken(kind, torch.tensor(row)).tolist()
    values, inside = [torch.tensor(value) for value in row], torch.tensor(True)
    if kind.several is not None:
        whole = kind.combine(MATH, identity(kind), kind.several(MATH, values))
    else:
        assert kind.follow is not None
        whole = identity(kind)
        for place, value in enumerate(values):
            element = kind.element(MATH, value, torch.tensor(place, dtype=torch.int32))
            whole = kind.follow(MATH, whole, element, inside)
            beyond = kind.follow(MATH, whole, (torch.tensor(NAN), element[1]), ~inside)
            assert all(torch.equal(a, b) or a.isnan() for a, b in zip(beyond, whole, strict=True))
    expected = kind.reference(torch.tensor([row]), torch.float32)[0]
    got = kind.result(MATH, whole, torch.tensor(len(row))).to(expected.dtype)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_names_and_calls_belong_to_one_kind() -> None:
    assert len({kind.name for kind in REDUCTIONS}) == len(REDUCTIONS)
    uses = [
        (call, dtype, of)
        for kind in REDUCTIONS
        for call in kind.aten
        for of in VALUE_DTYPES
        for dtype in kind.stored_as(of)
    ]
    assert len(set(uses)) == len(uses)


def test_a_spec_has_the_name_alone() -> None:
    spec = spec_of(dtype=DType.BF16)
    spec = EpilogueSpec(spec.accumulators, spec.loads, spec.ops, (*spec.stores, row_maximum()))
    text = spec.to_json()
    assert '"kind":"max"' in text.replace(" ", "") and EpilogueSpec.from_json(text) == spec
    with pytest.raises(SpecError, match="no reduction is called 'largest'; there are sum, mean"):
        EpilogueSpec.from_json(text.replace('"max"', '"largest"'))


SIZES = [(2, 0), (16, 4), (64, 16), (96, 20), (128, 128), (96, 6), (48, 0)]
"""Columns of blocks and of their parts."""


@pytest.mark.parametrize("kind", BLOCK_OPS.values(), ids=str)
def test_a_visit_of_whole_blocks_has_all_that_an_op_needs(kind: BlockOp) -> None:
    able = [(block, part) for block, part in SIZES if not kind.contradiction(block, part)]
    assert able
    for block, part in able:
        assert kind.fits_visit(block, block, part) and kind.whole_columns(block, part) in (0, block)
        assert not kind.contradiction(8, kind.resized_part(part, 8))


@pytest.mark.parametrize("kind", BLOCK_OPS.values(), ids=str)
def test_an_op_over_blocks_reads_no_other_block(kind: BlockOp) -> None:
    """The result for several blocks is that for each alone."""
    for block, part in SIZES:
        if not kind.contradiction(block, part):
            rows = torch.randn(3, block)
            if not kind.reads:
                rows = torch.arange(3 * block, dtype=torch.int32).view(3, block)
            whole = kind.reference(rows, part, torch.float64)
            alone = [kind.reference(row.unsqueeze(0), part, torch.float64) for row in rows]
            assert whole.shape == rows.shape and torch.equal(whole, torch.cat(alone))
            assert whole.dtype is (torch.float32 if kind.reads else torch.int32)
            assert kind.reads or torch.equal(whole, whole[:1].expand(rows.shape))


@pytest.mark.parametrize("kind", BLOCK_OPS.values(), ids=str)
def test_an_op_over_blocks_passes_through_all_layers(kind: BlockOp) -> None:
    """A spec with nothing but this op has a formula, a module and a replay, and another size of blocks."""
    block, part = 32, 16
    operands: list[Operand] = [*(["acc"] * kind.reads), *([Const(part)] * kind.has_part)]
    step = Op("t0", kind.name, tuple(operands), DType.F32 if kind.reads else DType.I32, block=block)
    spec = replace(spec_of(dtype=DType.BF16), loads=(), ops=(step,), stores=(Store("out0", "t0", DType.F32),))
    assert EpilogueSpec.from_json(spec.to_json()) == spec and spec.block_columns == block
    assert kind.words(block).split("(")[0].split("{")[0] in formula(spec, {"t0": "t0"})
    a, b = torch.randn(4, 8).bfloat16(), torch.randn(8, 64).bfloat16()
    (result,) = replay(spec, [a], [b], [])
    rows = a.float() @ b.float() if kind.reads else torch.arange(64, dtype=torch.int32).expand(4, 64)
    expected = kind.reference(rows.reshape(-1, block), part if kind.has_part else 0, torch.float32)
    torch.testing.assert_close(result, expected.reshape(4, 64).float())
    value = "t0_of" if kind.reads else ""
    assert kind.text(value, block, step.part_columns) in emit(
        plan(spec, tile_table(Arch.SM90A, spec)[0], Alignment.TMA)
    )
    assert step.resized(64).block == 64 and not kind.contradiction(64, step.resized(64).part_columns)


@pytest.mark.parametrize("kind", LoadKind)
def test_strides_say_which_kind_a_load_is(kind: LoadKind) -> None:
    allowed = [(m, n) for m in (False, True) for n in (False, True) if kind.allows(m, n)]
    assert (kind.by_row or kind.by_group, kind.by_column) in allowed
    others = [each for each in LoadKind if not each.by_group and each is not kind]
    if not kind.by_group:
        assert LoadKind.of(*allowed[0]) is kind and len(allowed) == 1
        assert not any(other.allows(*allowed[0]) for other in others)


@pytest.mark.parametrize("kind", [kind for kind in LoadKind if not kind.by_group])
def test_a_load_passes_through_all_layers(kind: LoadKind) -> None:
    """Its argument has the axes along which it varies, and its elements reach those rows and columns."""
    strides = {"stride_m": Stride.OTHER if kind.by_row else Stride.ZERO}
    strides["stride_n"] = Stride.ONE if kind.by_column else Stride.ZERO
    spec = spec_of(Load("load", kind, DType.F32, **strides), dtype=DType.BF16)
    argument = Argument.of_load(spec.loads[0])
    assert [dim.extent for dim in argument.dims] == [Extent.M] * kind.by_row + [Extent.N] * kind.by_column
    m, n = 5, 16
    loaded = torch.randn(argument.shape({Extent.M: m, Extent.N: n}))
    (result,) = replay(spec, [torch.zeros(m, 8).bfloat16()], [torch.zeros(8, n).bfloat16()], [loaded])
    rows, columns = (slice(None) if varies else slice(1) for varies in (kind.by_row, kind.by_column))
    torch.testing.assert_close(result[rows, columns].reshape(loaded.shape), loaded.bfloat16())
    assert (result == result[rows, columns]).all()
    module = emit(plan(spec, tile_table(Arch.SM90A, spec)[0], Alignment.TMA))
    assert f"load  {kind.value}" in module
    assert all(kind.flat) and all(kind.deep)


MEMORY = [Heads(4, 32), Heads(0, 32), Cache(8, 4, 32, 2), Cache(8, 1, 32, 0), Cache(8, 4, 32, "at")]


@pytest.mark.parametrize("memory", MEMORY, ids=str)
def test_memory_by_heads_passes_through_all_layers(memory: ByHeads) -> None:
    """The batches, the heads, the words and the module of a store are those that its memory says."""
    positions = (Load("at", LoadKind.SCALAR, DType.I64, Stride.ZERO, Stride.ZERO),) * bool(memory.positions)
    plain = spec_of(dtype=DType.BF16)
    spec = replace(plain, loads=positions, stores=(replace(plain.stores[0], form=memory),))
    assert EpilogueSpec.from_json(spec.to_json()) == spec
    assert spec.stores[0].form == memory and memory.batch_rows == memory.rows
    assert spec.block_columns == memory.columns
    assert formula(spec, {}) == f"{formula(plain, {})}{memory.words()}"
    module = emit(plan(spec, tile_table(Arch.SM90A, spec)[0], Alignment.TMA))
    assert f"by_heads(out0, {memory.memory_rows or 'out0.shape[0]'}, {memory.columns})" in module
    statements = memory.statements("out0", 32, "held.at[0]", by_row=False)
    assert bool(statements) is not memory.in_boxes and all(each in module for each in statements)
    with pytest.raises(SpecError, match=f"^out0{memory.described('acc')} no plane of a batched product may"):
        replace(spec, accumulators=(replace(spec.product, kind=ProductKind.BATCHED),))
    if memory.rows > 1:
        b = [torch.zeros(8, 64).bfloat16()]
        with pytest.raises(
            ValueError, match=f"^out0 {memory.batches(memory.rows)}, and 6 rows are no multiple"
        ):
            check_operands(spec, [torch.zeros(6, 8).bfloat16()], b, [torch.tensor(0)] * len(positions))


@pytest.mark.parametrize("axis", Axis, ids=lambda axis: axis.value)
def test_a_reduction_passes_through_all_layers(axis: Axis) -> None:
    """Its argument has the axis that it keeps; the formula, the replay and the module are as it says."""
    reduction = Reduction(axis, reductions.ARGMAX)
    spec = spec_of(dtype=DType.BF16)
    spec = replace(spec, stores=(Store("out0", "acc", DType.I64, form=reduction),))
    assert EpilogueSpec.from_json(spec.to_json()) == spec and spec.reductions == {"out0": reduction}
    (argument,) = of_use(signature(spec), Use.STORE)
    assert argument.shape({Extent.M: 5, Extent.N: 16}) == axis.kept(5, 16)
    assert {*axis.kept("m", "n"), *axis.reduced("m", "n")} == {"m", "n"}
    assert axis.transposed.kept("m", "n") == axis.kept("n", "m")
    assert f"{axis.value}_argmax(acc)" in formula(spec, {})
    a, b = torch.randn(5, 8).bfloat16(), torch.randn(8, 16).bfloat16()
    (result,) = replay(spec, [a], [b], [])
    plane = a.float() @ b.float()
    assert torch.equal(result, plane.argmax(axis.over[0]) if len(axis.over) == 1 else plane.argmax())
    module = emit(plan(spec, tile_table(Arch.SM90A, spec)[0], Alignment.TMA))
    assert f"Axis.{axis.name}" in module
    assert all(line in module for line in reduction.take("out0"))
    assert [part.dtype for part in reduction.partials("out0")] == [
        DType.F32,
        DType.I32 if axis.kept(5, 16) else DType.I64,
    ]


OF_BLOCKS = [(Order.ROW, DType.F32), (Order.COLUMN, DType.BF16), (Order.TILED, DType.E8M0)]


@pytest.mark.parametrize(("order", "dtype"), OF_BLOCKS, ids=lambda each: each.value)
def test_values_of_blocks_pass_through_all_layers(order: Order, dtype: DType) -> None:
    """The check, the argument, the formula, the replay and the module of a store are those of its form."""
    largest = Op("t0", "block_max", ("acc",), DType.F32, block=32)
    spec = replace(spec_of(dtype=DType.BF16), loads=(), ops=(largest,))
    spec = replace(spec, stores=(Store("out0", "t0", dtype, ordered(order, 32)),))
    form = spec.stores[0].form
    assert EpilogueSpec.from_json(spec.to_json()) == spec
    assert spec.block_columns == form.block_columns == 32 and not spec.planes
    assert formula(spec, {}).endswith(f"(block32_max(acc)){form.words()}")
    (argument,) = of_use(signature(spec), Use.STORE)
    a, b = torch.randn(5, 8).bfloat16(), torch.randn(8, 64).bfloat16()
    (result,) = replay(spec, [a], [b], [])
    assert result.shape == argument.shape({Extent.M: 5, Extent.N: 64})
    scales = (a.float() @ b.float()).unflatten(1, (2, 32)).amax(2)
    if order is not Order.TILED:
        torch.testing.assert_close(result.float(), scales.to(result.dtype).float())
    tile = tile_table(Arch.SM100A, spec)[0]
    module = emit(plan(spec, tile, Alignment.TMA))
    assert all(line.strip() in module for line in form.statements("out0", tile.subtile_n, "", by_row=False))
    assert not form.function(by_row=False) or form.function(by_row=False).split(".")[1] in module
    with pytest.raises(SpecError, match=r"out0 (is in tiles|has one element for each 1 columns); "):
        replace(spec, stores=(replace(spec.stores[0], dtype=DType.F32, form=form.resized(1)),))


TABLES = [
    Blocks(32, Stride.ZERO, Stride.ONE),
    Blocks(32, Stride.ONE, Stride.ZERO),
    Blocks(24, Stride.ZERO, Stride.ONE, 64),
    Blocks(20, Stride.ZERO, Stride.ONE, 64),
]


@pytest.mark.parametrize("blocks", TABLES, ids=str)
def test_blocks_of_a_load_pass_through_all_layers(blocks: Blocks) -> None:
    """The argument, the replay, the view and the words of a load, and its place, are as they say."""
    load = Load("load", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.OTHER, blocks=blocks)
    spec = spec_of(load, dtype=DType.BF16)
    assert EpilogueSpec.from_json(spec.to_json()) == spec
    argument = Argument.of_load(load)
    assert argument.dims[1:] == blocks.dims(0)
    count = 192 // blocks.step
    assert argument.shape({Extent.M: 4, Extent.N: 192}) == (4, count, blocks.columns)
    inner = torch.randn(4, 1 if blocks.outer is Stride.ZERO else count, blocks.columns).bfloat16()
    given = inner[..., :1] if blocks.inner is Stride.ZERO else inner
    given = given.expand(4, count, blocks.columns)
    (result,) = replay(spec, [torch.zeros(4, 8).bfloat16()], [torch.zeros(8, 192).bfloat16()], [given])
    seen = result.unflatten(1, (count, blocks.step))[..., : blocks.columns]
    assert torch.equal(seen, given)
    whole = (blocks.columns % TABLE_COLUMNS or blocks.period) and blocks.columns * 16 % 128
    assert load.is_table is (blocks.inner is Stride.ONE and not whole)
    chosen = plan(spec, tile_table(Arch.SM90A, spec)[0], Alignment.TMA)
    module = emit(chosen)
    assert blocks.words() in module
    in_boxes = load.is_table and blocks.fits_boxes(chosen.tile.subtile_n)
    assert in_boxes is (chosen.placements["load"].name == "tma")
    calls = ["table"] if in_boxes else [name for name, _ in blocks.calls()]
    assert all(f"{name}(" in module for name in calls)
    with pytest.raises(SpecError, match="load has blocks of 1 columns; a block has two or more"):
        replace(spec, loads=(replace(load, blocks=replace(blocks, columns=1)),))


_FP8 = Accumulator("acc", DType.E4M3, DType.E4M3, fast_accum=False)
_INT8 = Accumulator("acc", DType.BF16, DType.I8)
SCALED = {
    "1x128 by 128x128": replace(_FP8, a_scaling=Scaling.LINE, b_scaling=Scaling.SQUARE),
    "1x32": replace(_FP8, a_scaling=Scaling.MX, b_scaling=Scaling.MX, fast_accum=True),
    "by 64, scales": replace(_INT8, weight_groups=WeightGroups(64, DType.BF16, DType.BF16)),
    "by 128, scales and zeros": replace(
        _INT8, weight_groups=WeightGroups(128, DType.F32, DType.BF16, DType.I8, DType.F32)
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_scales_pass_through_all_layers(name: str) -> None:
    acc = SCALED[name]
    spec = EpilogueSpec((acc,), (), (), (Store("out0", "acc", DType.F32),))
    assert EpilogueSpec.from_json(spec.to_json()) == spec
    a, b, _ = random_operands(spec, 16, 32, 256, torch.Generator().manual_seed(1))
    check_operands(spec, a, b, [])
    (of_a, of_b), beside = spec.scaled, []
    for (side, scales), tensors in ((of_a, a[1:]), (of_b, b[1:])):
        assert len(scales.beside(side)) == len(tensors)
        beside += [(scales, tensor) for tensor in tensors]
    assert beside
    for tensors in (a, b):
        for place in range(1, len(tensors)):
            wrong = [*tensors]
            wrong[place] = torch.cat([tensors[place]] * 2)
            given = (wrong, b) if tensors is a else (a, wrong)
            with pytest.raises(ValueError, match=r"(scales|zeros) of [AB] have shape"):
                check_operands(spec, *given, [])
    arch = Arch.SM100A if acc.a_scaling.by_mma else Arch.SM90A
    header = emit(plan(spec, tile_table(arch, spec)[0], Alignment.TMA)).split('"""')[1]
    arguments = [*of_use(signature(spec), Use.A_SCALES), *of_use(signature(spec), Use.B_SCALES)]
    for argument, (scales, _) in zip(arguments, beside, strict=True):
        (line,) = (line for line in header.split("\n") if line.startswith(f"    {argument.name} "))
        assert scales.words in line and scales.place in line
