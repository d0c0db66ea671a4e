"""The spec: canonical JSON, and every contradiction that construction refuses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_backend.kinds import reductions
from cute_backend.kinds.results import PartOf, WholePlane
from cute_backend.numerics import TORCH_DTYPES
from cute_backend.spec import (
    REDUCED,
    Accumulator,
    Axis,
    Blocks,
    Columns,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Major,
    Op,
    Order,
    Overflow,
    Precision,
    ProductKind,
    Reduction,
    Scaling,
    SpecError,
    Store,
    Stride,
    WeightGroups,
)
from support.random_specs import NUMBERS, specs

ACC = Accumulator("acc", DType.E4M3, DType.E4M3)
BIAS = Load("bias", LoadKind.ROWVEC, DType.BF16, Stride.ZERO, Stride.ONE)
ADD = Op("t0", "add", ("acc", "bias"), DType.F32)
OUT = Store("out0", "t0", DType.BF16)
SPEC = EpilogueSpec((ACC,), (BIAS,), (ADD,), (OUT,))
HALF = Op("half", "mul", (REDUCED, Const(0.5)), DType.F32)


@given(specs(reductions=True))
def test_json_round_trip(spec: EpilogueSpec) -> None:
    text = spec.to_json()
    again = EpilogueSpec.from_json(text)
    assert again.to_json() == text
    assert again.key == spec.key
    if "nan" not in text:
        assert again == spec


@given(NUMBERS)
def test_numbers_keep_type_and_bits(value: bool | int | float) -> None:
    spec = replace(SPEC, ops=(Op("t0", "add", ("acc", Const(value)), DType.F32),))
    constant = EpilogueSpec.from_json(spec.to_json()).ops[0].operands[1]
    assert isinstance(constant, Const)
    assert type(constant.value) is type(value)
    if isinstance(value, float):
        assert math.copysign(1.0, constant.value) == math.copysign(1.0, value) or math.isnan(value)
        assert constant.value == value or (math.isnan(value) and math.isnan(constant.value))
    else:
        assert constant.value == value


def test_constants_of_other_types_make_other_keys() -> None:
    keys = {
        replace(SPEC, ops=(Op("t0", "add", ("acc", Const(value)), DType.F32),)).key
        for value in (1, 1.0, True, -0.0, 0.0, math.nextafter(1.0, 2.0))
    }
    assert len(keys) == 6


def test_json_is_canonical() -> None:
    text = SPEC.to_json()
    data = json.loads(text)
    assert text == json.dumps(data, sort_keys=True, separators=(",", ":"))
    shuffled = json.dumps(dict(reversed(data.items())), indent=2)
    assert EpilogueSpec.from_json(shuffled).to_json() == text


def _load(kind: LoadKind, stride_m: Stride, stride_n: Stride) -> Load:
    return Load("bias", kind, DType.BF16, stride_m, stride_n)


def _modes(*modes: Stride) -> Load:
    return replace(_load(LoadKind.EXACT, Stride.OTHER, Stride.ONE), m_modes=modes)


def _blocks(blocks: Blocks) -> Load:
    return replace(_load(LoadKind.ROWVEC, Stride.ZERO, Stride.OTHER), blocks=blocks)


@pytest.mark.parametrize(
    "field, value",
    [
        ("precision", Precision.EAGER),
        ("loads", (replace(BIAS, dtype=DType.F16),)),
        ("loads", (replace(BIAS, stride_n=Stride.OTHER),)),
        ("loads", (_load(LoadKind.EXACT, Stride.OTHER, Stride.ONE),)),
        ("loads", (_modes(Stride.OTHER, Stride.ZERO),)),
        ("loads", (_modes(Stride.OTHER, Stride.OTHER),)),
        ("loads", (_blocks(Blocks(64, Stride.ZERO, Stride.ONE)),)),
        ("loads", (_blocks(Blocks(32, Stride.ZERO, Stride.ONE)),)),
        ("loads", (_blocks(Blocks(64, Stride.OTHER, Stride.ZERO)),)),
        ("accumulators", (replace(ACC, fast_accum=False),)),
        ("accumulators", (replace(ACC, kind=ProductKind.BATCHED),)),
        ("accumulators", (replace(ACC, kind=ProductKind.GROUPED),)),
        ("accumulators", (replace(ACC, b_dtype=DType.E5M2),)),
        ("accumulators", (ACC, replace(ACC, name="up"))),
        ("ops", (replace(ADD, op="sub"),)),
        ("stores", (replace(OUT, dtype=DType.F16),)),
        ("stores", (replace(OUT, form=Reduction(Axis.ROW, reductions.MAX)),)),
        ("stores", (replace(OUT, form=Reduction(Axis.ROW, reductions.MIN)),)),
        ("stores", (replace(OUT, form=Reduction(Axis.ALL, reductions.MAX)),)),
        ("stores", (replace(OUT, form=Reduction(Axis.ALL, reductions.MAX), after=(HALF,)),)),
    ],
)
def test_every_field_reaches_the_key(field: str, value: Any) -> None:
    assert replace(SPEC, **{field: value}).key != SPEC.key


def test_dtypes_and_producers() -> None:
    assert SPEC.dtypes == {"acc": DType.F32, "bias": DType.BF16, "t0": DType.F32}
    assert SPEC.producers == {"acc": ACC, "bias": BIAS, "t0": ADD}
    assert SPEC.loads_of(LoadKind.ROWVEC) == (BIAS,)
    assert SPEC.loads_of(LoadKind.COLVEC) == ()


MAXIMA = replace(OUT, form=Reduction(Axis.ROW, reductions.MAX))
BOTH = Op("t0", "gt", ("acc", "bias"), DType.BOOL)


HALVES = (replace(OUT, form=PartOf(0, 2)), replace(OUT, name="out1", form=PartOf(1, 2)))


def test_the_parts_of_a_result_are_stored_apart_and_returned_together() -> None:
    spec = replace(SPEC, stores=(replace(OUT, name="first"), *HALVES))
    assert spec.results == ((spec.stores[0],), HALVES)
    assert EpilogueSpec.from_json(spec.to_json()) == spec


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"stores": HALVES[:1]}, "out0 is part 0 of 2; the parts of a result follow each other"),
    ({"stores": HALVES[::-1]}, "out1 is part 1 of 2; the parts"),
    ({"stores": (replace(OUT, form=PartOf(0, 1)),)}, "part 0 of 1; the parts of a result are two or more"),
    ({"stores": (HALVES[0], replace(HALVES[1], dtype=DType.F32))}, "all parts have one dtype"),
    ({"version": 99}, "version 99; this package writes"),
    ({"accumulators": ()}, "at least one accumulator"),
    (
        {"accumulators": (ACC, replace(ACC, name="up", fast_accum=False))},
        "acc and up differ in dtypes, majors",
    ),
    ({"accumulators": (replace(ACC, columns=Columns.EVEN),)}, "the accumulators have even columns; expected"),
    (
        {"accumulators": (replace(ACC, columns=Columns.ODD), replace(ACC, name="up", columns=Columns.EVEN))},
        "have odd, even columns",
    ),
    (
        {
            "accumulators": (replace(ACC, kind=ProductKind.BATCHED),),
            "stores": (replace(OUT, form=WholePlane(Order.COLUMN)),),
        },
        "out0 has order column; the planes of a batched product have rows",
    ),
    (
        {
            "accumulators": (replace(ACC, kind=ProductKind.BATCHED),),
            "stores": (replace(OUT, form=Reduction(Axis.ALL, reductions.MAX)),),
        },
        "out0, the all max of '.*', is of several rows; batched products are reduced by row",
    ),
    (
        {
            "accumulators": (replace(ACC, kind=ProductKind.GROUPED),),
            "stores": (replace(OUT, form=Reduction(Axis.COLUMN, reductions.MAX)),),
        },
        "out0, the column max of '.*', is of several rows; grouped products are reduced by row",
    ),
    (
        {"accumulators": (Accumulator("acc", DType.BF16, DType.BF16, kind=ProductKind.K_GROUPED),)},
        "acc has K in groups, and a 16-bit operand that is contiguous along K; neither may be",
    ),
    (
        {"loads": (_load(LoadKind.GROUPVEC, Stride.OTHER, Stride.ONE),)},
        "bias has a vector for each group, and the rows of a dense product are in none",
    ),
    (
        {
            "accumulators": (replace(ACC, kind=ProductKind.GROUPED),),
            "loads": (
                replace(
                    _load(LoadKind.GROUPVEC, Stride.OTHER, Stride.ONE), m_modes=(Stride.OTHER, Stride.ZERO)
                ),
            ),
        },
        "bias has a vector for each group, and M or N in several modes",
    ),
    ({"stores": ()}, "at least one store"),
    ({"loads": (replace(BIAS, name="acc"),)}, "two values are called 'acc'"),
    ({"ops": (ADD, ADD)}, "two values are called 't0'"),
    ({"loads": (replace(BIAS, name="bias-1"),)}, "'bias-1' is not an identifier"),
    ({"loads": (_load(LoadKind.ROWVEC, Stride.ONE, Stride.ONE),)}, r"bias is called rowvec .* \(1, 1\)"),
    ({"loads": (_load(LoadKind.ROWVEC, Stride.ZERO, Stride.ZERO),)}, r"bias is called rowvec .* \(0, 0\)"),
    ({"loads": (_load(LoadKind.COLVEC, Stride.ZERO, Stride.ONE),)}, r"bias is called colvec .* \(0, 1\)"),
    ({"loads": (_load(LoadKind.SCALAR, Stride.OTHER, Stride.ZERO),)}, r"bias is called scalar .* \(s, 0\)"),
    ({"loads": (_load(LoadKind.EXACT, Stride.ZERO, Stride.ONE),)}, r"bias is called exact .* \(0, 1\)"),
    ({"loads": (_modes(Stride.OTHER),)}, r"bias has M modes \(s\); expected two or more"),
    ({"loads": (_modes(Stride.ZERO, Stride.ZERO),)}, r"bias has M modes \(0, 0\); expected"),
    ({"loads": (_modes(Stride.OTHER, Stride.ONE),)}, r"bias has M modes \(s, 1\); expected"),
    (
        {"loads": (replace(BIAS, m_modes=(Stride.OTHER, Stride.ZERO)),)},
        r"M modes \(s, 0\) and a stride of class 0 along all of M; expected s",
    ),
    ({"loads": (_blocks(Blocks(1, Stride.OTHER, Stride.ZERO)),)}, "blocks of 1 columns; a block has two or"),
    (
        {"loads": (_blocks(Blocks(8, Stride.ZERO, Stride.ZERO)),)},
        "bias has blocks of 8 columns and strides of class 0 along both",
    ),
    (
        {"loads": (replace(BIAS, blocks=Blocks(8, Stride.ZERO, Stride.ONE)),)},
        "bias has blocks of 8 columns and a stride of class 1 along all of N; expected s",
    ),
    (
        {
            "loads": (
                replace(
                    _load(LoadKind.EXACT, Stride.ONE, Stride.OTHER),
                    blocks=Blocks(8, Stride.OTHER, Stride.ONE),
                ),
            )
        },
        "bias has blocks of 8 columns and strides of 1 along two axes",
    ),
    ({"ops": (replace(ADD, operands=("acc", "t0")),)}, "t0 reads 't0' before it is made"),
    ({"ops": (replace(ADD, operands=("acc", "gate")),)}, "t0 reads 'gate' before it is made"),
    ({"ops": (replace(ADD, dtype=DType.BF16),)}, "t0 = add has dtype bf16; only a cast may narrow"),
    ({"ops": (replace(ADD, overflow=Overflow.NONFINITE),)}, "t0 = add to f32 has no overflow rule"),
    (
        {"ops": (Op("t0", "cast", ("acc",), DType.BF16, Overflow.NONFINITE),)},
        "t0 = cast to bf16 has no overflow rule",
    ),
    ({"stores": (replace(OUT, value="t1"),)}, "out0 stores 't1', which nothing computes"),
    ({"stores": (replace(OUT, dtype=DType.I64),)}, "out0 stores a plane as i64"),
    (
        {"loads": (replace(BIAS, dtype=DType.I64),)},
        "bias is i64, which only places in a row or in a cache are loaded as",
    ),
    ({"ops": (Op("t0", "cast", ("acc",), DType.I64),)}, "t0 = cast has dtype i64|t0 has dtype i64"),
    ({"stores": (replace(MAXIMA, dtype=DType.I64),)}, "out0, the row max of 't0', is stored as i64"),
    ({"stores": (replace(MAXIMA, dtype=DType.I8),)}, "is stored as i8; expected f32, bf16, f16, e4m3, e5m2"),
    (
        {"stores": (replace(MAXIMA, form=Reduction(Axis.COLUMN, reductions.ARGMAX)),)},
        "out0, the column argmax of 't0', is stored as bf16; expected i64",
    ),
    (
        {"stores": (replace(MAXIMA, form=Reduction(Axis.COLUMN, reductions.SUM, 48)),)},
        "has batches of 48 rows, which are a multiple of 32",
    ),
    (
        {"stores": (replace(MAXIMA, form=Reduction(Axis.ROW, reductions.SUM, 64)),)},
        "has batches of 64 rows; only columns have them, and no places",
    ),
    (
        {"ops": (Op("t0", "cast", ("acc",), DType.I32),), "stores": (MAXIMA,)},
        "reduces i32, which fp32 does not hold",
    ),
    ({"stores": (replace(OUT, after=(HALF,)),)}, "out0 stores a plane and has ops after it; only reductions"),
    (
        {"stores": (replace(MAXIMA, after=(replace(HALF, operands=("bias", "bias")),)),)},
        "half reads 'bias' before it is made",
    ),
    (
        {"stores": (replace(MAXIMA, dtype=DType.BOOL, after=(HALF,)),), "ops": (BOTH,)},
        "stored as bool; the result of ops after it is a float",
    ),
    ({"stores": (OUT, OUT)}, "clash"),
    ({"stores": (replace(OUT, name="acc"),)}, "clash"),
]


@pytest.mark.parametrize("change, message", CONTRADICTIONS, ids=[message for _, message in CONTRADICTIONS])
def test_contradictions_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(SPEC, **change)


@pytest.mark.parametrize(
    "a, b, message",
    [
        (DType.F32, DType.F32, "no MMA takes f32 times f32"),
        (DType.U8, DType.U8, "no MMA takes u8 times u8"),
        (DType.I8, DType.E4M3, "no MMA multiplies i8 by e4m3"),
        (DType.E4M3, DType.E2M1X2, "no MMA multiplies e4m3 by e2m1x2"),
        (DType.BF16, DType.E2M1X2, "to the bf16 or f16 of the other operand are i8, u8, e4m3, e5m2"),
        (DType.F16, DType.BF16, "no MMA multiplies f16 by bf16"),
        (DType.E5M2, DType.E5M2, "e5m2 is accepted on one side only"),
    ],
)
def test_products_that_no_mma_has(a: DType, b: DType, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(SPEC, accumulators=(Accumulator("acc", a, b),))


@pytest.mark.parametrize(
    "change",
    [{"b_major": Major.MN}, {"a_major": Major.MN}, {"kind": ProductKind.BATCHED}, {"columns": Columns.EVEN}],
)
def test_weights_are_converted_in_dense_products_along_k(change: dict[str, Any]) -> None:
    acc = Accumulator("acc", DType.BF16, DType.I8)
    assert acc.is_converted and acc.dtype is DType.F32
    spec = EpilogueSpec((acc,), (), (), (Store("out", "acc", DType.BF16),))
    with pytest.raises(SpecError, match="acc converts i8 to bf16, which only a dense product does"):
        replace(spec, accumulators=(replace(acc, **change),))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (WeightGroups(48, DType.F32, DType.F32), "groups of 48 of K, .*; groups have 32, 64, 128, 256"),
        (WeightGroups(64, DType.I8, DType.F32), "by scales of i8; scales are f32, bf16, f16"),
        (WeightGroups(64, DType.F32, DType.F32, DType.I32, DType.F32), "zeros of i32; .* zeros f32, bf16"),
        (WeightGroups(64, DType.F32, DType.F32, DType.I8), "zeros and the dtype of their difference"),
        (WeightGroups(64, DType.F32, DType.F16), "weights are computed in f32 or bf16"),
        (WeightGroups(64, DType.F32, DType.BF16, DType.I8, DType.F16), "weights are computed in f32 or bf16"),
    ],
)
def test_groups_that_no_kernel_converts(groups: WeightGroups, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(SPEC, accumulators=(Accumulator("acc", DType.BF16, DType.U8, weight_groups=groups),))


@pytest.mark.parametrize("stored", [DType.I8, DType.U8])
@pytest.mark.parametrize("zero", [DType.I8, DType.U8])
@pytest.mark.parametrize("difference", [DType.BF16, DType.F16, DType.F32])
def test_differences_of_integers_are_exact_if_none_is_rounded(
    stored: DType, zero: DType, difference: DType
) -> None:
    codes = torch.arange(256).to(torch.uint8)
    x, z = codes.view(TORCH_DTYPES[stored])[:, None].int(), codes.view(TORCH_DTYPES[zero]).int()
    is_exact = torch.equal((x - z).to(TORCH_DTYPES[difference]).int(), x - z)
    groups = WeightGroups(64, DType.F32, DType.F32, zero, difference)
    assert groups.subtracts_exactly(stored) is is_exact


def test_a_difference_of_anything_but_integers_may_be_rounded() -> None:
    assert not WeightGroups(64, DType.F32, DType.F32, DType.BF16, DType.F32).subtracts_exactly(DType.I8)
    assert not WeightGroups(64, DType.F32, DType.F32, DType.I8, DType.F32).subtracts_exactly(DType.E4M3)
    assert not WeightGroups(64, DType.F32, DType.F32).subtracts_exactly(DType.I8)


def test_groups_are_those_of_a_weight_that_is_converted() -> None:
    groups = WeightGroups(64, DType.BF16, DType.BF16, DType.U8, DType.BF16)
    acc = Accumulator("acc", DType.BF16, DType.U8, weight_groups=groups)
    spec = EpilogueSpec((acc,), (), (), (Store("out", "acc", DType.BF16),))
    assert EpilogueSpec.from_json(spec.to_json()) == spec
    without = replace(spec, accumulators=(replace(acc, weight_groups=None),))
    assert "weight_groups" not in without.to_json() and without.key != spec.key
    with pytest.raises(SpecError, match="converts no operand; only weights that are converted have groups"):
        replace(spec, accumulators=(replace(acc, b_dtype=DType.BF16),))


def test_sums_of_int8_are_int32_and_exact() -> None:
    acc = Accumulator("acc", DType.I8, DType.I8)
    assert EpilogueSpec((acc,), (), (), (Store("out", "acc", DType.I32),)).dtypes == {"acc": DType.I32}
    with pytest.raises(SpecError, match="acc has no fast_accum, and sums of i8 are exact"):
        replace(SPEC, accumulators=(replace(acc, fast_accum=False),))


@pytest.mark.parametrize("dtype", [DType.E4M3, DType.I8])
@pytest.mark.parametrize("majors", [(Major.MN, Major.K), (Major.K, Major.MN)])
def test_operands_of_8_bits_are_k_major(majors: tuple[Major, Major], dtype: DType) -> None:
    with pytest.raises(SpecError, match="operands of 8 and 4 bits must both be K-major"):
        replace(SPEC, accumulators=(Accumulator("acc", dtype, dtype, *majors),))
    replace(SPEC, accumulators=(Accumulator("acc", DType.BF16, DType.BF16, *majors),))


BY_BLOCKS = replace(ACC, fast_accum=False, a_scaling=Scaling.LINE, b_scaling=Scaling.SQUARE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"b_scaling": Scaling.NONE},
            "1x128 of A and none of B, but either both operands have them or neither has",
        ),
        ({"a_dtype": DType.F16, "b_dtype": DType.F16}, "and dtype f16; 1x128 blocks scale e4m3 and e5m2"),
        ({"fast_accum": True}, "and fast_accum, but its sums are scaled, and so promoted, block by block"),
        ({"kind": ProductKind.BATCHED}, "and is batched; only a dense product has them"),
        ({"kind": ProductKind.GROUPED}, "and is grouped; only .* rows in groups whose scales the MMA"),
    ],
    ids=lambda value: str(value),
)
def test_scales_of_blocks_that_no_product_has(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(SPEC, accumulators=(replace(BY_BLOCKS, **change),))


def test_scales_of_blocks_travel_and_reach_the_key() -> None:
    specs = [
        replace(SPEC, accumulators=(replace(BY_BLOCKS, a_scaling=a, b_scaling=b),))
        for a, b in ((Scaling.LINE, Scaling.SQUARE), (Scaling.LINE,) * 2, (Scaling.SQUARE, Scaling.LINE))
    ]
    assert [EpilogueSpec.from_json(spec.to_json()) for spec in specs] == specs
    assert len({spec.key for spec in specs}) == 3
    with pytest.raises(SpecError, match=r"acc and up differ in dtypes, .* or scaling"):
        replace(SPEC, accumulators=(BY_BLOCKS, replace(BY_BLOCKS, name="up", b_scaling=Scaling.LINE)))


@pytest.mark.parametrize(("scaling", "blocks"), [(Scaling.LINE, [1, 128, 129]), (Scaling.SQUARE, [1, 1, 2])])
def test_the_last_block_may_be_smaller(scaling: Scaling, blocks: list[int]) -> None:
    assert [scaling.blocks(lines) for lines in (1, 128, 129)] == blocks


MALFORMED = {
    "no JSON": lambda data: "{",
    "no object": lambda data: [],
    "another version": lambda data: {**data, "version": 99},
    "no version": lambda data: {key: value for key, value in data.items() if key != "version"},
    "no stores": lambda data: {key: value for key, value in data.items() if key != "stores"},
    "unknown dtype": lambda data: {**data, "stores": [{**data["stores"][0], "dtype": "f64"}]},
    "unknown precision": lambda data: {**data, "precision": "exact"},
    "two forms of a result": lambda data: {
        **data,
        "stores": [{**data["stores"][0], "heads": {"rows": 128, "columns": 64}, "block": 8}],
    },
    "a number for a list": lambda data: {**data, "ops": 3},
    "a bare number operand": lambda data: {**data, "ops": [{**data["ops"][0], "operands": ["acc", 1.0]}]},
    "two kinds of number": lambda data: {
        **data,
        "ops": [{**data["ops"][0], "operands": ["acc", {"int": 1, "bool": True}]}],
    },
    "a bool called int": lambda data: {
        **data,
        "ops": [{**data["ops"][0], "operands": ["acc", {"int": True}]}],
    },
    "a decimal float": lambda data: {
        **data,
        "ops": [{**data["ops"][0], "operands": ["acc", {"float": 1.5}]}],
    },
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_json_is_refused(name: str) -> None:
    changed = MALFORMED[name](json.loads(SPEC.to_json()))
    with pytest.raises(SpecError):
        EpilogueSpec.from_json(changed if isinstance(changed, str) else json.dumps(changed))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        EpilogueSpec.from_json(text)


@pytest.mark.parametrize(
    "dtype, bits, register",
    [
        (DType.F32, 32, DType.F32),
        (DType.BF16, 16, DType.F32),
        (DType.F16, 16, DType.F32),
        (DType.E4M3, 8, DType.F32),
        (DType.E5M2, 8, DType.F32),
        (DType.I8, 8, DType.I32),
        (DType.U8, 8, DType.I32),
        (DType.I32, 32, DType.I32),
        (DType.I64, 64, DType.I32),
        (DType.BOOL, 8, DType.BOOL),
    ],
)
def test_dtype_facts(dtype: DType, bits: int, register: DType) -> None:
    assert (dtype.bits, dtype.register) == (bits, register)
