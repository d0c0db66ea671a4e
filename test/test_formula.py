"""The text form of a spec."""

import pytest

from cute_backend.formula import formula
from cute_backend.kinds import reductions
from cute_backend.spec import (
    Accumulator,
    Axis,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Op,
    Precision,
    Reduction,
    Store,
    Stride,
)

ACC = Accumulator("acc", DType.E4M3, DType.E4M3)
SCALE = Load("scale_a", LoadKind.COLVEC, DType.F32, Stride.OTHER, Stride.ZERO)
ROW = Load("rowvec0", LoadKind.ROWVEC, DType.BF16, Stride.ZERO, Stride.ONE)


def op(name, row, *operands, dtype=DType.F32):
    return Op(name, row, operands, dtype)


def text(*ops, stores=None, precision=Precision.FUSED):
    stores = stores or (Store("out0", ops[-1].name, DType.BF16),)
    names = {op.name: op.name for op in ops}
    return formula(EpilogueSpec((ACC,), (SCALE, ROW), ops, stores, precision), names)


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        ([op("t0", "mul", "acc", "scale_a"), op("t1", "add", "t0", "rowvec0")], "acc * scale_a + rowvec0"),
        ([op("t0", "add", "acc", "rowvec0"), op("t1", "mul", "t0", "scale_a")], "(acc + rowvec0) * scale_a"),
        ([op("t0", "mul", "acc", "rowvec0"), op("t1", "mul", "scale_a", "t0")], "scale_a * (acc * rowvec0)"),
        ([op("t0", "sub", "acc", "rowvec0"), op("t1", "sub", "scale_a", "t0")], "scale_a - (acc - rowvec0)"),
        ([op("t0", "neg", "acc"), op("t1", "exp", "t0")], "exp(-acc)"),
        ([op("t0", "add", "acc", Const(1.0)), op("t1", "neg", "t0")], "-(acc + 1)"),
        ([op("t0", "mul", "acc", Const(-0.5)), op("t1", "exp", "t0")], "exp(acc * -0.5)"),
    ],
)
def test_parentheses_stand_only_where_they_are_needed(ops, expected):
    assert text(*ops) == f"out0 = bf16({expected})"


def test_a_value_read_twice_is_named_and_computed_once():
    ops = [op("t0", "mul", "acc", "scale_a"), op("t1", "sigmoid", "t0"), op("t2", "mul", "t0", "t1")]
    assert text(*ops) == "t0 = acc * scale_a\nout0 = bf16(t0 * sigmoid(t0))"


def test_a_cast_shows_only_where_it_rounds():
    ops = [op("t0", "cast", "acc", dtype=DType.BF16), op("t1", "add", "t0", "t0")]
    assert text(*ops) == "out0 = bf16(acc + acc)"
    assert text(*ops, precision=Precision.EAGER) == "t0 = bf16(acc)\nout0 = bf16(t0 + t0)"


def test_reductions_name_their_axis():
    ops = [op("t0", "mul", "acc", "scale_a"), op("t1", "abs", "t0")]
    stores = (
        Store("out0", "t0", DType.BF16),
        Store("out1", "t1", DType.BF16, form=Reduction(Axis.ROW, reductions.MAX)),
        Store("out2", "t0", DType.I64, form=Reduction(Axis.ALL, reductions.ARGMIN)),
    )
    assert text(*ops, stores=stores).splitlines() == [
        "t0 = acc * scale_a",
        "out0 = bf16(t0)",
        "out1 = bf16(row_max(abs(t0)))",
        "out2 = i64(all_argmin(t0))",
    ]


def test_places_and_noise_are_named():
    ops = [
        op("t0", "row_index", dtype=DType.I32),
        op("t1", "column_index", dtype=DType.I32),
        op("t2", "gumbel", Const(1), Const(2), "t1", "t0", Const(3)),
        op("t3", "add", "acc", "t2"),
        op("t4", "add", "t3", "t0"),
    ]
    assert text(*ops) == "t0 = row\nout0 = bf16(acc + gumbel(1, 2, column, t0, 3) + t0)"


def test_every_output_has_its_line():
    ops = [op("t0", "mul", "acc", "scale_a"), op("t1", "relu", "t0")]
    stores = (Store("out0", "t0", DType.BF16), Store("out1", "t1", DType.E4M3))
    assert text(*ops, stores=stores) == "t0 = acc * scale_a\nout0 = bf16(t0)\nout1 = e4m3(relu(t0))"
