"""Epilogues of thousands of dependent ops: nothing recurses over their length."""

from dataclasses import replace

import pytest
import torch

from cute_backend.kinds import reductions
from cute_backend.memory_ops.emit import emit
from cute_backend.memory_ops.schedule import kernel_formula
from cute_backend.memory_ops.shared_noise import shares_noise
from cute_backend.memory_ops.simplify import simplify
from cute_backend.planning import Alignment, Arch, TileConfig, plan
from cute_backend.replay import replay
from cute_backend.spec import (
    REDUCED,
    Accumulator,
    Axis,
    Const,
    DType,
    EpilogueSpec,
    Op,
    Reduction,
    Store,
)

LENGTH = 2000
"""The ops of a chain: twice the calls that Python nests."""

ACC = Accumulator("acc", DType.BF16, DType.BF16)


def chain(*steps, last="acc", length=LENGTH, first=0):
    """Ops that repeat `steps`, each a row and its operands, of which None is the last value so far."""
    ops = []
    for index in range(first, first + length):
        row, *operands = steps[index % len(steps)]
        ops.append(
            Op(f"t{index}", row, tuple(last if each is None else each for each in operands), DType.F32)
        )
        last = ops[-1].name
    return ops


def plane(ops, dtype=DType.F32):
    return EpilogueSpec((ACC,), (), tuple(ops), (Store("out0", ops[-1].name, dtype),))


def clamped():
    ops = chain(("minimum", None, Const(448.0)), ("maximum", None, Const(-448.0)))
    return plane([*ops, Op("quantised", "cast", (ops[-1].name,), DType.E4M3)], DType.E4M3)


def indices():
    ops = [Op("row", "row_index", (), DType.I32)]
    for index in range(LENGTH):
        ops.append(Op(f"t{index}", "add", (ops[-1].name, Const(1)), DType.I32))
    return plane([*ops, Op("sum", "add", ("acc", ops[-1].name), DType.F32)])


def casts():
    ops, last = [], "acc"
    for index in range(LENGTH):
        ops.append(Op(f"t{index}", "cast", (last,), (DType.F16, DType.BF16)[index % 2]))
        last = ops[-1].name
    return plane(ops)


def after_a_reduction():
    after = tuple(chain(("mul", None, Const(0.99)), ("add", None, Const(0.01)), last=REDUCED))
    return EpilogueSpec(
        (ACC,),
        (),
        (),
        (Store("out0", "acc", DType.F32, form=Reduction(Axis.ROW, reductions.SUM), after=after),),
    )


def around_a_block():
    before = chain(("mul", None, Const(0.99)), length=LENGTH // 2)
    block = Op("block", "block_max", (before[-1].name,), DType.F32, block=32)
    behind = chain(("add", None, Const(0.01)), last="block", length=LENGTH // 2, first=LENGTH // 2)
    return plane([*before, block, *behind])


SPECS = {
    "affine": lambda: plane(chain(("mul", None, Const(0.99)), ("add", None, Const(0.01)))),
    "Horner": lambda: plane(chain(("mul", None, "acc"), ("add", None, Const(0.01)))),
    "square roots": lambda: plane(chain(("abs", None), ("sqrt", None))),
    "shared": lambda: plane(chain(("tanh", None), ("mul", None, None))),
    "powers of two": lambda: plane([*chain(("mul", None, Const(2.0)), ("mul", None, Const(0.5)))]),
    "clamps": clamped,
    "indices": indices,
    "casts": casts,
    "after a reduction": after_a_reduction,
    "around a block": around_a_block,
}


@pytest.mark.parametrize("name", SPECS)
def test_thousands_of_ops_have_a_key_a_formula_a_text_and_a_replay(name):
    spec = SPECS[name]()
    assert EpilogueSpec.from_json(spec.to_json()) == spec
    assert max(map(len, kernel_formula(spec).splitlines())) < 120
    text = emit(plan(spec, TileConfig(Arch.SM90A, 128, 128, 2), Alignment.TMA))
    compile(text, "kernel.py", "exec")
    assert max(map(len, text.splitlines())) < 120
    a, b = torch.ones(4, 16, dtype=torch.bfloat16) / 8, torch.ones(16, 32, dtype=torch.bfloat16)
    (result,) = replay(spec, [a], [b], [])
    (simple,) = replay(simplify(spec), [a], [b], [])
    torch.testing.assert_close(result.float(), simple.float(), equal_nan=True)


def test_a_long_expression_is_divided_among_lines_that_people_can_read():
    text = kernel_formula(plane(chain(("mul", None, Const(0.25)), ("add", None, Const(0.5)), length=20)))
    assert text.splitlines() == [
        "t11 = (((((acc * 0.25 + 0.5) * 0.25 + 0.5) * 0.25 + 0.5) * 0.25 + 0.5) * 0.25 + 0.5) * 0.25 + 0.5",
        "out0 = f32((((t11 * 0.25 + 0.5) * 0.25 + 0.5) * 0.25 + 0.5) * 0.25 + 0.5)",
    ]


def test_a_short_chain_has_no_names_for_its_steps():
    spec = plane(chain(("mul", None, Const(0.99)), ("add", None, Const(0.01)), length=10))
    assert len(kernel_formula(spec).splitlines()) == 1


def test_a_seed_may_be_computed_in_thousands_of_steps():
    row, column = Op("row", "row_index", (), DType.I32), Op("column", "column_index", (), DType.I32)
    seeds = [Op("s0", "add", (Const(1), Const(2)), DType.I32)]
    for index in range(1, LENGTH):
        seeds.append(Op(f"s{index}", "add", (f"s{index - 1}", Const(1)), DType.I32))
    operands = (seeds[-1].name, Const(2), "column", "row", Const(0))
    noise = Op("noise", "gumbel", operands, DType.F32)
    spec = plane([row, column, *seeds, noise, Op("sum", "add", ("acc", "noise"), DType.F32)])
    assert shares_noise(spec, noise)
    by_row = Op("noise", "gumbel", ("row", *operands[1:]), DType.F32)
    assert not shares_noise(
        replace(spec, ops=tuple(by_row if op == noise else op for op in spec.ops)), by_row
    )
