"""The fuzzer: it finds nothing wrong in what it draws first, and finds what is planted."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from cute_backend.__main__ import main
from cute_backend.fuzz import attention, command, draw, draw_form, forms, judge, weights
from cute_backend.fuzz import bounds as bounds_module
from cute_backend.fuzz.attention import draw_attention
from cute_backend.fuzz.block_formats import fp4, tiled
from cute_backend.fuzz.block_scaled_products import RECIPES
from cute_backend.fuzz.bounds import Bounds, bounds_of_step, follow, unit
from cute_backend.fuzz.drawn_program import Fill, Input, Program, Rule, Step
from cute_backend.fuzz.judge import _wrong
from cute_backend.fuzz.shrink import shrink
from cute_backend.fuzz.vocabulary import GATHERS, IN_STEPS, REDUCTIONS, table_ops
from cute_backend.fuzz.weights import draw_weights
from cute_backend.fx_walk.epilogue_pass import EpiloguePass
from cute_backend.fx_walk.products import anchors, packed_weights
from cute_backend.fx_walk.refusals.reasons import Rejection
from cute_backend.fx_walk.region.region import Region
from cute_backend.fx_walk.values import composites, lower
from cute_backend.kinds.blocks import ROTATE_HALF
from cute_backend.kinds.results import Heads
from cute_backend.ops import OPS
from cute_backend.spec import Axis, DType, Operand, Reduction, Scaling, WeightGroups

BF16 = torch.bfloat16


@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_programs_are_right(count: int) -> None:
    tally = command.run(command.Job(seed=0, first=0, last=count, replay_only=True))
    assert not tally.failures, [failure.message for failure in tally.failures]
    assert tally.programs == count
    assert tally.counted["regions"] > count / 2
    assert tally.loose < tally.elements / 20
    assert sum(tally.excluded.values()) <= count * 0.03, tally.excluded


def test_programs_are_right_through_both_compilers() -> None:
    tally = command.run(command.Job(seed=1, first=0, last=2))
    assert not tally.failures, [failure.message for failure in tally.failures]
    assert tally.counted["regions"] >= 1


@pytest.mark.parametrize("count", [16, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_nothing_raises_in_programs_of_every_form(count: int) -> None:
    tally = command.run(command.Job(seed=0, first=0, last=count, replay_only=True, kind="forms"))
    assert not tally.failures, [failure.message for failure in tally.failures]
    assert tally.programs == count and tally.counted["regions"] > count * 2 / 3
    assert sum(tally.excluded.values()) <= count * 0.03, tally.excluded


@pytest.mark.parametrize("count", [16, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_projections_of_attention_are_right(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()

    def seen(self: EpiloguePass, regions: Sequence[Region], rejections: Sequence[Rejection]) -> None:
        for spec in (region.spec for region in regions):
            found.update({"segments"} if len(spec.segments) > 1 else ())
            found.update(op.op for op in spec.ops if op.block)
            found.update("heads" for store in spec.stores if isinstance(store.form, Heads))

    monkeypatch.setattr(EpiloguePass, "show", seen)
    tally = command.run(command.Job(seed=0, first=0, last=count, replay_only=True, kind="attention"))
    assert not tally.failures, [failure.message for failure in tally.failures]
    assert tally.programs == count and tally.counted["regions"] > count / 2
    assert sum(tally.excluded.values()) <= count * 0.03, tally.excluded
    assert found >= {"segments", ROTATE_HALF.name, "block_mean", "heads"}


@pytest.mark.parametrize("count", [24, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_weights_of_8_bits_are_right(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()

    def seen(self: EpiloguePass, regions: Sequence[Region], rejections: Sequence[Rejection]) -> None:
        for spec in (region.spec for region in regions if region.spec.product.is_converted):
            groups = spec.product.weight_groups
            found.update({"pairs"} if len(spec.accumulators) > 1 else ())
            found.add("columns" if groups is None else "groups" if groups.zero is None else "zeros")
        found.update(rejection.reason.value for rejection in rejections)

    monkeypatch.setattr(EpiloguePass, "show", seen)
    tally = command.run(command.Job(seed=1, first=0, last=count, replay_only=True, kind="weights"))
    assert not tally.failures, [failure.message for failure in tally.failures]
    assert tally.programs == count and tally.counted["regions"] > count / 2
    assert sum(tally.excluded.values()) <= count * 0.03, tally.excluded
    assert found >= {"columns", "groups", "zeros", "weight_groups", "pairs"}


def test_every_spelling_of_weights_is_drawn() -> None:
    programs = [draw_weights(0, index) for index in range(200)]
    texts = {step.text for program in programs for step in program.steps}
    shapes = {each.shape for program in programs for each in program.inputs}
    stored = {each.dtype for program in programs for each in program.inputs}
    for grouping in weights.GROUPINGS:
        views = [grouping.there, grouping.back, *(view for _, view in grouping.vectors)]
        assert texts >= {f"{{0}}{view}".replace("@", "N") for view in views if view}
        wanted = [grouping.stored, *(shape for shape, _ in grouping.vectors)]
        assert shapes >= {tuple(size.replace("@", "N") for size in shape) for shape in wanted}
    assert stored >= set(weights.STORED)
    assert texts >= {text for halves in weights.HALVES for text in halves}
    assert texts >= {text for _, _, text in weights.JOINED}
    assert any("repeat_interleave" in text for text in texts)
    assert any(map(subtracts_behind, programs))


def subtracts_behind(program: Program) -> bool:
    """Whether 8 is subtracted from a cast of nibbles that are joined."""
    joined = {step.name for step in program.steps if step.rule is Rule.JOIN}
    cast = {step.name for step in program.steps if joined.intersection(step.operands)}
    return any(step.text == "{0} - 8" and cast.intersection(step.operands) for step in program.steps)


def test_every_rare_spelling_of_nibbles_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "OTHERS", 0.9)
    programs = [draw_weights(0, index) for index in range(400)]
    steps = [step for program in programs for step in program.steps]
    assert {step.text for step in steps} >= {
        text.replace("@", "N")
        for text in (
            *(text for halves in weights.MIXED_HALVES for text in halves if text),
            *(text for _, _, text in weights.OTHER_JOINED),
            *(f"{{0}}{view}" for _, view, _ in weights.OTHER_JOINED if view),
            *(f"{{0}}.to({dtype})" for dtype in weights.OTHER_DTYPES),
        )
    }
    views = {each.view for program in programs for each in program.inputs if each.dtype is torch.uint8}
    assert views >= {view.replace("@", "N") for _, view, _ in weights.OTHER_JOINED}


def test_every_spelling_of_attention_is_drawn() -> None:
    texts = {step.text for index in range(60) for step in draw_attention(0, index).steps}
    cuts = {cut.replace("#", "0") for cut in (*attention.CUTS, *attention.PACKED)}
    assert texts >= cuts | {text for spelling in attention.HALVES for text in spelling}


def test_every_form_is_drawn() -> None:
    drawn = {step.text for index in range(300) for step in draw_form(0, index).steps}
    lists = (forms.NORMS, forms.REDUCTIONS, forms.WITH_SCALARS, forms.WRITES, forms.OTHERS, forms.MAPPED)
    assert drawn >= {text for texts in (*lists, forms.PRODUCTS) for text in texts}
    gradients = {f"torch.func.grad(lambda w: {loss})({{1}})" for loss in forms.LOSSES}
    assert drawn >= gradients | {"{0}.sub_(0.1 * {1})"}


def test_dims_that_are_not_given_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """`x.norm()` once failed: a list was made of the dims of a sum, which may be None."""
    read = anchors.opaque_product

    def careless(node: fx.Node) -> str | None:
        if node.target is torch.ops.aten.sum.dim_IntList:
            list(node.args[1])  # type: ignore[arg-type]
        return read(node)

    monkeypatch.setattr(anchors, "opaque_product", careless)
    verdicts = (judge(draw_form(0, index), replay_only=True) for index in range(40))
    assert any(verdict.kind == "raises TypeError" for verdict in verdicts)


def test_a_seed_and_an_index_make_a_program() -> None:
    texts = [draw(5, index).source() for index in range(20)]
    assert texts == [draw(5, index).source() for index in range(20)]
    assert len(set(texts)) == 20
    assert draw(6, 0).source() != texts[0]


def test_every_row_of_the_op_table_is_drawn() -> None:
    texts = " ".join(op.text for op in table_ops())
    for row in OPS.values():
        spellings = [target for target in row.aten if target.startswith("aten.")]
        assert not spellings or any(f"torch.ops.{target}(" in texts for target in spellings), row.name


def test_casts_up_are_drawn_before_every_op_of_several_steps() -> None:
    found: set[str] = set()
    programs = [draw(1, index) for index in range(400)]
    for program in programs:
        cast = {step.name for step in program.steps if step.text == "{0}.float()"}
        found.update(step.text for step in program.steps if program.eager and cast & set(step.operands))
    assert found >= {op.text for op in IN_STEPS}
    assert 0.4 < sum(program.eager for program in programs) / len(programs) < 0.6


def test_roundings_can_be_asked_for_in_all_programs() -> None:
    job = command.Job(seed=0, first=0, last=1, emulate=True)
    assert all(job.program(index).eager for index in range(20))
    failure = command.Failure(3, replace(reducing(), eager=True), "wrong")
    assert "--first 3 --count 1 --emulate" in failure.text(job)


def test_every_gather_is_drawn() -> None:
    drawn = {step.text for index in range(400) for step in draw(1, index).steps}
    assert drawn >= {gather.text for gather in GATHERS}


@pytest.mark.parametrize("count", [60, pytest.param(600, marks=pytest.mark.exhaustive)])
def test_products_with_scales_of_blocks_are_drawn_and_right(count: int) -> None:
    found = [each for index in range(count) if not (each := draw(0, index)).has_kernels]
    verdicts = [judge(program, replay_only=True) for program in found]
    assert [verdict.failure for verdict in verdicts] == [""] * len(found)
    assert sum(verdict.counted["regions"] > 0 for verdict in verdicts) > 0.8 * len(found) > 0.05 * count
    if count > 100:
        texts = {step.text.partition(", out_dtype")[0] for program in found for step in program.steps}
        assert texts >= {recipe.text(BF16, "").partition(", out_dtype")[0] for recipe in RECIPES}


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_products_of_int8_are_drawn_and_right(count: int) -> None:
    programs = (draw(2, index) for index in range(count))
    found = [each for each in programs if any("_int_mm" in step.text for step in each.steps)]
    verdicts = [judge(program, replay_only=True) for program in found]
    assert [verdict.failure for verdict in verdicts] == [""] * len(found)
    assert sum(verdict.counted["regions"] > 0 for verdict in verdicts) > 0.6 * len(found) > 0.02 * count


def test_a_printed_program_with_scales_of_blocks_runs() -> None:
    program = next(each for index in range(60) if not (each := draw(0, index)).has_kernels)
    namespace: dict[str, Any] = {}
    exec(program.source(), namespace)
    assert len(namespace["example_inputs"]()) == len(program.inputs)
    assert {"fp4", "tiled"} <= namespace.keys()


def test_packed_fp4_and_tiled_scales_are_as_documented() -> None:
    values = torch.tensor([[0.5, -6.0, 1.5, 0.0], [-0.5, 4.0, 3.0, -2.0]])
    assert fp4(values).view(torch.uint8).tolist() == [[0xF1, 0x03], [0x69, 0xC5]]
    scales = torch.arange(150 * 6, dtype=torch.float32).view(150, 6)
    lying = tiled(scales, torch.float32)
    for row, block in ((0, 0), (31, 3), (32, 1), (127, 5), (128, 4), (149, 2)):
        place = (row // 128 * 2 + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        assert lying[place] == scales[row, block]


# Bounds


@pytest.mark.parametrize("count", [60, pytest.param(150, marks=pytest.mark.exhaustive)])
def test_eager_lies_within_the_bounds(count: int) -> None:
    """Eager is one of the implementations that they have to allow."""
    judged = 0
    for index in range(count):
        program = draw(7, index)
        _, example_inputs = program.load()
        bounds = follow(program, example_inputs())
        for name, result in zip(program.outputs, program.eager_results(example_inputs()), strict=True):
            assert not bounds[name].wrong(result).any(), f"program {index}: {name}\n{program.source()}"
            judged += result.numel() - int(bounds[name].loose.sum())
    assert judged > 333 * count


def step(text: str, rule: Rule, *operands: Bounds) -> Bounds:
    return bounds_of_step(Step("t", text, tuple("xyz"[: len(operands)]), rule), list(operands), {})


def test_a_rounding_that_may_happen_is_within_the_bounds() -> None:
    third = step("{0} / 3", Rule.EXACT, Bounds.exactly(torch.ones(1, dtype=BF16)))
    assert third.low.item() <= 1 / 3 <= third.high.item()
    rounded = torch.tensor([1 / 3]).to(BF16)
    assert not third.wrong(rounded).any()
    assert third.wrong(rounded * 1.04).all()


def test_under_eagers_roundings_a_step_is_rounded() -> None:
    third = step("{0} / 3", Rule.EXACT, Bounds.exactly(torch.ones(1, dtype=BF16))).stored()
    rounded = torch.tensor([1 / 3]).to(BF16)
    assert third.low.item() == third.high.item() == rounded.item()
    cube = step("{0} ** 3", Rule.COMPOSITE, replace(third, eager=third.eager.float()))
    assert not cube.wrong(rounded.float() ** 3).any()
    assert cube.wrong((rounded * rounded).float() * rounded.float()).all()


def test_a_value_near_a_jump_may_fall_on_either_side() -> None:
    near = step("{0} / 3 * 3", Rule.COMPOSITE, Bounds.exactly(torch.ones(1)))
    whole = step("{0}.floor()", Rule.EXACT, near)
    assert not whole.wrong(torch.zeros(1)).any() and not whole.wrong(torch.ones(1)).any()
    assert whole.wrong(torch.full((1,), 2.0)).all()


def test_a_minimum_between_the_ends_is_within_the_bounds() -> None:
    around = Bounds.exactly(torch.full((1,), -1.25))
    around.low, around.high = around.low - 0.1, around.high + 0.1
    for function, least in (("silu", -0.278464), ("mish", -0.308840)):
        value = step(f"F.{function}({{0}})", Rule.FUNCTION, around)
        assert not value.wrong(torch.tensor([least])).any(), function
        assert value.wrong(torch.tensor([least - 1e-3])).all(), function


def test_the_sign_of_nan_is_anybodys() -> None:
    signs = Bounds.exactly(torch.tensor([float("nan"), -1.0]))
    value = step("torch.copysign({0}, {1})", Rule.SIGN, Bounds.exactly(torch.full((2,), 5.0)), signs)
    assert value.wrong(torch.tensor([-5.0, 5.0])).tolist() == [False, True]
    assert value.wrong(torch.tensor([5.0, -5.0])).tolist() == [False, False]


def test_a_quotient_by_what_may_be_zero_is_unbounded() -> None:
    around = Bounds.exactly(torch.ones(2))
    around.low = torch.tensor([-1e-3, 1.0], dtype=torch.float64)
    around.high = torch.tensor([1e-3, 1.0], dtype=torch.float64)
    quotient = step("1 / {0}", Rule.EXACT, around)
    assert quotient.wrong(torch.tensor([1e30, 2.0])).tolist() == [False, True]


def test_a_gathered_element_has_the_bounds_of_its_place() -> None:
    table = Bounds.exactly(torch.tensor([1.0, 2.0, 4.0]))
    table.low, table.high = table.low - 0.25, table.high + 0.25
    rows = step("{0}[{1}]", Rule.VIEW, table, Bounds.exactly(torch.tensor([2, 0, -2])))
    assert rows.wrong(torch.tensor([4.2, 0.8, 2.0])).tolist() == [False] * 3
    assert rows.wrong(torch.tensor([1.0, 1.5, 4.0])).tolist() == [True] * 3


def test_infinities_and_nan_have_to_come_out() -> None:
    value = Bounds.exactly(torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0]))
    relu = step("torch.relu({0})", Rule.EXACT, value)
    assert relu.wrong(torch.tensor([torch.inf, 0.0, torch.nan, 1.0])).tolist() == [False] * 4
    assert relu.wrong(torch.tensor([1e38, torch.nan, 0.0, torch.nan])).tolist() == [True] * 4


def test_an_index_has_to_be_that_of_a_possible_maximum() -> None:
    values = Bounds.exactly(torch.tensor([[1.0, 3.0, 2.0]]))
    values.low, values.high = values.low - 0.6, values.high + 0.6
    found = bounds_of_step(
        Step("t", "{0}.argmax(-1)", ("x",), Rule.GREATEST, "{0}.amax(-1, keepdim=True)", -1), [values], {}
    )
    assert [found.wrong(torch.tensor([index])).item() for index in (0, 1, 2, 3)] == [True, False, False, True]
    least = "-((-{0}).amax(-1, keepdim=True))"
    found = bounds_of_step(Step("t", "{0}.argmin(-1)", ("x",), Rule.LEAST, least, -1), [values], {})
    assert [found.wrong(torch.tensor([index])).item() for index in (0, 1, 2, 3)] == [False, True, False, True]


def test_a_sum_in_steps_may_be_rounded_in_each_however_it_is_spelled() -> None:
    """The sum is 1.015625; a number that is four units of bf16 away may be its result after some steps."""
    value = Bounds.exactly(torch.tensor([[0.5, 0.515625]], dtype=torch.float64).bfloat16())
    for rule, is_wrong in ((Rule.SUM_IN_STEPS, False), (Rule.SUM, True)):
        found = bounds_of_step(Step("t", "{0}.sum(-1) / 1", ("x",), rule), [value], {})
        assert found.wrong(torch.tensor([1.046875]).bfloat16()).item() is is_wrong


def test_spellings_have_the_rules_of_their_kinds() -> None:
    rules = {each.text: each.rule for each in REDUCTIONS}
    assert rules["{0}.mean(@)"] is rules["{0}.logsumexp(@)"] is Rule.SUM_IN_STEPS
    assert rules["{0}.sum(@)"] is rules["{0}.cumsum(@)"] is Rule.SUM
    assert (rules["{0}.max(@).indices"], rules["{0}.argmin(@)"]) == (Rule.GREATEST, Rule.LEAST)


def test_units_are_those_of_the_dtype() -> None:
    value = torch.tensor([1.0, 3.0, 0.0, torch.inf], dtype=torch.float64)
    assert unit(value, BF16).tolist() == [2**-7, 2**-6, 2.0**-133, 0.0]
    assert unit(value, torch.float8_e4m3fn).tolist() == [2**-3, 2**-2, 2**-9, 0.0]


# What GPUs do


def on_hopper(a: Tensor, b: Tensor) -> Tensor:
    """a @ b as Hopper's tensor cores add fp8 products, in float64."""
    terms = a.double()[:, :, None] * b.double()
    exponents = (a.double().frexp().exponent - 1)[:, :, None] + (b.double().frexp().exponent - 1)
    total = torch.zeros_like(terms[:, 0])
    for part, exponent in zip(terms.split(32, 1), exponents.split(32, 1), strict=True):
        largest = torch.where(part == 0, -100, exponent).amax(1)
        unit = torch.maximum(largest, torch.where(total == 0, -100, total.frexp().exponent - 1)) - 13
        shifted = torch.cat([part, total[:, None]], 1).ldexp(-unit[:, None]).trunc().sum(1).ldexp(unit)
        unit = shifted.frexp().exponent - 14
        total = shifted.ldexp(-unit).trunc().ldexp(unit)
    return total


def scaled_product(fill: Fill, k: int, seed: int) -> list[Tensor]:
    shapes = [("8", f"{k}", torch.float8_e4m3fn, ""), ("16", f"{k}", torch.float8_e4m3fn, ".t()")]
    inputs = [Input("x", (rows, columns), dtype, fill, view) for rows, columns, dtype, view in shapes]
    inputs += [Input("x", (), torch.float32, Fill.POSITIVE if fill is Fill.NORMAL else fill)] * 2
    g = torch.Generator().manual_seed(seed)
    return [eval(each.text, {"torch": torch, "g": g}) for each in inputs]


def test_an_h200_adds_fp8_products_so() -> None:
    a, b, scale_a, scale_b = scaled_product(Fill.NORMAL, 16, seed=25222)
    seen = 0.7444279789924622
    assert abs((on_hopper(a, b) * scale_a * scale_b)[0, 9].item() / seen - 1) < 1e-7
    assert abs((a.double() @ b.double() * scale_a * scale_b)[0, 9].item() / seen - 1) > 1e-4


@pytest.mark.parametrize(("k", "wrong"), [(16, 1.02), (32, 1.02), (64, 1.1)])
@pytest.mark.parametrize("fill", [Fill.NORMAL, Fill.INTEGERS])
def test_fp8_products_may_be_as_far_off_as_tensor_cores_are(
    fill: Fill, k: int, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "torch._scaled_mm({0}, {1}, {2}, {3}, out_dtype=torch.float32)"
    product = Step("t", text, ("a", "b", "c", "d"), Rule.PRODUCT, "({0} @ {1}) * {2} * {3}")
    off = []
    for seed in range(20):
        inputs = scaled_product(fill, k, seed)
        limits = {}
        for aligned in (False, True):
            monkeypatch.setattr(bounds_module, "_is_fp8_on_a_gpu", lambda a, aligned=aligned: aligned)
            limits[aligned] = bounds_of_step(product, [Bounds.exactly(each) for each in inputs], {})
        got = (on_hopper(*inputs[:2]) * inputs[2].double() * inputs[3].double()).float()
        assert not limits[True].wrong(got).any()
        off.append(bool(limits[False].wrong(got).any()))
        large = got.abs() > limits[True].reference.abs().mean()
        assert limits[True].wrong(got * wrong)[large].all()
    assert all(off) if fill is Fill.NORMAL else not any(off)


def test_whole_sums_up_to_2_to_the_13_are_exact_on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds_module, "_is_fp8_on_a_gpu", lambda a: True)
    for size, exact in ((15, True), (16, False)):
        a = torch.full((1, 32), 16.0).to(torch.float8_e4m3fn)
        b = torch.full((32, 1), float(size)).to(torch.float8_e4m3fn)
        found = bounds_of_step(
            Step("t", "{0}.float() @ {1}.float()", ("a", "b"), Rule.PRODUCT, "{0} @ {1}"),
            [Bounds.exactly(a), Bounds.exactly(b)],
            {},
        )
        assert (found.low == found.high).all() == exact


def test_strides_are_inductors_or_eagers() -> None:
    eager = torch.arange(48.0).view(1, 8, 6)
    padded = torch.empty_strided((1, 8, 6), (64, 8, 1)).copy_(eager)
    transposed = eager.mT.contiguous().mT

    def complaint(got: Tensor) -> str:
        return _wrong(reducing(), Bounds.exactly(eager), got, padded, eager, strides=True)

    assert complaint(eager) == complaint(padded) == ""
    assert complaint(transposed).startswith("has strides (48, 1, 8), Inductor's (64, 8, 1)")


def test_a_part_may_leave_out_the_gaps_of_its_view() -> None:
    part = torch.zeros(2, 3, 12)[:, :, 4:8]

    def complaint(got: Tensor) -> str:
        return _wrong(reducing(), Bounds.exactly(part), got, part, part, strides=True)

    assert complaint(part) == complaint(part.contiguous()) == ""
    for other in (part.transpose(0, 1).contiguous().transpose(0, 1), torch.zeros(2, 3, 8)[:, :, :4]):
        assert "has strides" in complaint(other)


# Planted faults


def first_failure(last: int, tells: str = "", kind: str = "any") -> command.Failure:
    """The failure of the first program, of those that have `tells`, as the smallest one has to have it."""
    drawn = command.DRAWN[kind]
    for index in (each for each in range(last) if tells in drawn(0, each).source()):
        tally = command.run(command.Job(seed=0, first=index, last=index + 1, replay_only=True, kind=kind))
        if tally.failures:
            return tally.failures[0]
    raise AssertionError("the fault was not found")


def ignore_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of multiples without its multiple."""
    for name in ("aten.add.Tensor", "aten.sub.Tensor"):
        right = composites.COMPOSITES[name]

        def wrong(call: composites.Call, right: composites.Composite = right) -> Operand:
            return right(replace(call, args={**call.args, "alpha": 1}))

        monkeypatch.setitem(composites.COMPOSITES, name, wrong)


def lose_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reductions of rows that end one column early."""
    right = Reduction.reference

    def wrong(reduction: Reduction, plane: Tensor, accumulate: torch.dtype) -> Tensor:
        short = reduction.axis is Axis.ROW and plane.shape[1] > 1
        return right(reduction, plane[:, :-1] if short else plane, accumulate)

    monkeypatch.setattr(Reduction, "reference", wrong)


def forget_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager's roundings between bf16 ops left out, which changes the last bits alone."""
    monkeypatch.setattr(lower, "_rounded", lambda chain, value, dtype: value)
    monkeypatch.setattr(lower, "_as_eager_reads", lambda chain, value, argument, node: value)


def round_by_the_values_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cubes rounded as those of the 16-bit value that was cast to fp32, which is the same value."""
    right = composites.COMPOSITES["aten.pow.Tensor_Scalar"]

    def wrong(call: composites.Call) -> Operand:
        own = call.chain.dtype(call.operand(call.args["self"]))
        return right(replace(call, rounded_to=own if own in (DType.BF16, DType.F16) else call.rounded_to))

    monkeypatch.setitem(composites.COMPOSITES, "aten.pow.Tensor_Scalar", wrong)


def scale_by_the_blocks_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fp32 scales of each block of K taken for the next one."""
    right = Scaling.of_lines

    def wrong(scaling: Scaling, scales: Tensor, axis: int, count: int) -> Tensor:
        return right(scaling, scales.roll(1, 1 - axis), axis, count)

    monkeypatch.setattr(Scaling, "of_lines", wrong)


def scale_by_neighbouring_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiled scales of a row taken for the row after it."""
    right = Scaling.untiled

    def wrong(scaling: Scaling, scales: Tensor, lines: int, k: int) -> Tensor:
        return right(scaling, scales, lines, k).view(torch.uint8).roll(1, 0).view(scales.dtype)

    monkeypatch.setattr(Scaling, "untiled", wrong)


def wrap_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of int8 in 8 bits."""
    from cute_backend import numerics

    right = numerics.convert

    def wrong(value: Tensor, target: DType) -> Tensor:
        return right(value.to(torch.int8) if value.dtype is torch.float64 else value, target)

    monkeypatch.setattr(numerics, "convert", wrong)


def subtract_the_next_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zeros of each group of K taken for those of the next one."""
    right = WeightGroups.applied

    def wrong(self: WeightGroups, operand: Tensor, vectors: Sequence[Tensor], *how: Any) -> Tensor:
        scales, *zeros = vectors
        return right(self, operand, [scales, *(each.roll(1, 0) for each in zeros)], *how)

    monkeypatch.setattr(WeightGroups, "applied", wrong)


def subtract_zeros_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences of stored values and zeros without their rounding, which changes the last bits alone."""
    right = WeightGroups.applied

    def wrong(self: WeightGroups, *given: Any) -> Tensor:
        return right(replace(self, difference=self.difference and DType.F32), *given)

    monkeypatch.setattr(WeightGroups, "applied", wrong)


@pytest.mark.exhaustive
@pytest.mark.parametrize("plant", [subtract_the_next_zeros, subtract_zeros_in_fp32])
def test_a_fault_planted_in_weights_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as planted:
        plant(planted)
        failure = first_failure(400, kind="weights")
    assert " - " in failure.program.source()
    assert judge(failure.program, replay_only=True).failure == ""


def test_nibbles_taken_in_any_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walker once took views that exchange axes or repeat rows for views that keep the order."""
    monkeypatch.setattr(weights, "OTHERS", 0.9)
    with monkeypatch.context() as planted:
        planted.setattr(packed_weights, "_is_in_order", lambda node: True)
        programs = (draw_weights(0, index) for index in range(100))
        found = next(program for program in programs if judge(program, replay_only=True).failure)
    assert judge(found, replay_only=True).failure == ""


@pytest.mark.parametrize(
    ("plant", "tells"),
    [
        (wrap_sums, "_int_mm("),
        (scale_by_the_blocks_before, "_scaled_mm("),
        pytest.param(scale_by_neighbouring_tiles, "tiled(", marks=pytest.mark.exhaustive),
        (ignore_alpha, "alpha="),
        (lose_a_column, "(-1"),
        pytest.param(forget_roundings, "", marks=pytest.mark.exhaustive),
        pytest.param(round_by_the_values_dtype, ".float()", marks=pytest.mark.exhaustive),
    ],
)
def test_a_planted_fault_is_found_and_made_small(
    plant: Callable[[pytest.MonkeyPatch], None], tells: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as planted:
        plant(planted)
        failure = first_failure(200, tells)
        assert judge(failure.program, replay_only=True).failure == failure.message
    assert len(failure.program.steps) <= 4, failure.program.source()
    assert tells in failure.program.source()
    assert judge(failure.program, replay_only=True).failure == ""


# Shrinking


def test_shrinking_keeps_what_the_failure_needs_and_little_else() -> None:
    program = next(
        found
        for found in (draw(2, index) for index in range(400))
        if len(found.steps) > 6 and any("F.gelu" in step.text for step in found.steps)
    )
    smallest = shrink(program, lambda smaller: "F.gelu" in smaller.source())
    assert len(smallest.steps) == 1 and len(smallest.inputs) == 1 and len(smallest.outputs) == 1
    function, example_inputs = smallest.load()
    assert torch.isfinite(function(*example_inputs())[0]).all()


def test_shrinking_asks_no_more_often_than_allowed() -> None:
    asked: list[Program] = []

    def fails(program: Program) -> bool:
        asked.append(program)
        return True

    shrink(draw(2, 3), fails, trials=5)
    assert len(asked) == 5


def test_what_nothing_needs_is_pruned_and_what_writes_is_kept() -> None:
    inputs = tuple(Input(name, ("M",), torch.float32, Fill.NORMAL) for name in ("x0", "x1", "x2"))
    steps = (
        Step("t0", "{0}.neg()", ("x1",), Rule.EXACT),
        Step("t1", "{0}.copy_({1})", ("x0", "x1"), Rule.CAST),
        Step("t2", "{0}.abs()", ("x0",), Rule.EXACT),
    )
    program = Program((("M", 4),), inputs, steps, ("t2",), seed=0).pruned()
    assert [step.name for step in program.steps] == ["t1", "t2"]
    assert [each.name for each in program.inputs] == ["x0", "x1"]


# The command


def test_the_command_counts_and_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--count", "3", "--seed", "4", "--replay"]) == 0
    rows = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()[2:])
    assert rows["programs"] == "3" and rows["wrong"] == "0"


def test_the_command_prints_a_file_that_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lose_a_column(monkeypatch)
    program = replace(reducing(), seed=3)
    monkeypatch.setitem(command.DRAWN, "any", lambda seed, index: program)
    assert main(["fuzz", "--count", "1", "--replay"]) == 1
    out = capsys.readouterr().out
    assert "beyond its bounds" in out
    path = tmp_path / "found.py"
    path.write_text(out[: out.index("\n\n   ")])
    runpy.run_path(str(path), run_name="__main__")
    assert "largest difference from eager" in capsys.readouterr().out
    assert main(["explain", str(path)]) == 0


def reducing() -> Program:
    inputs = (
        Input("x0", ("M", "K"), BF16, Fill.NORMAL),
        Input("x1", ("N", "K"), BF16, Fill.NORMAL, ".t()"),
    )
    steps = (
        Step("t0", "{0} @ {1}", ("x0", "x1"), Rule.PRODUCT),
        Step("t1", "{0}.sum(-1)", ("t0",), Rule.SUM),
    )
    return Program((("B", 1), ("S", 16), ("M", 16), ("N", 16), ("K", 16)), inputs, steps, ("t1",), seed=0)


@pytest.mark.exhaustive
def test_processes_judge_the_same_programs(capsys: pytest.CaptureFixture[str]) -> None:
    how = ["fuzz", "--count", "5", "--seed", "8", "--replay"]
    assert main(how) == 0
    alone = capsys.readouterr().out
    assert main([*how, "--jobs", "2"]) == 0
    assert capsys.readouterr().out == alone


def ends_its_process_at_three(number: int) -> int:
    if number == 3:
        os.abort()
    return 2 * number


def test_what_ends_its_process_is_told_from_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes that are forked: unlike those of the command, they import nothing."""
    forking = multiprocessing.get_context("fork")
    monkeypatch.setattr(command.multiprocessing, "get_context", lambda method: forking)
    monkeypatch.setattr(command, "_quiet", lambda: None)
    numbers = list(range(5))
    found = dict(command.outcomes(ends_its_process_at_three, numbers, 2))
    assert found == {number: None if number == 3 else 2 * number for number in numbers}


@pytest.mark.parametrize(("survived", "excluded"), [(None, True), (True, False)])
def test_a_program_that_ends_its_process_is_wrong_unless_inductor_alone_does_too(
    survived: bool | None, excluded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcomes(function: Any, items: Any, jobs: int) -> Any:
        given = None if function is command.run else survived
        return ((item, given) for item in items)

    monkeypatch.setattr(command, "outcomes", outcomes)
    (tally,) = command._parts(command.Job(seed=8, first=4, last=5), jobs=2)
    assert tally.programs == 1 and bool(tally.excluded) is excluded
    assert [failure.message for failure in tally.failures] == ["cute ends its process"] * (not excluded)


FUZZING = """
import signal, sys, time
from cute_backend.__main__ import main
from cute_backend.fuzz import command

def add(self, other, added=command.Tally.add):
    added(self, other)
    print("judged", flush=True)

def draw(seed, index, drawn=command.draw):
    return drawn(seed, index) if index < 8 else time.sleep(600)

signal.signal(signal.SIGINT, signal.default_int_handler)  # which background jobs of a shell ignore
command.Tally.add, command.draw = add, draw
if __name__ == "__main__":
    sys.exit(main(["fuzz", "--count", "9", "--replay", "--jobs", sys.argv[1]]))
"""
"""The command, which says whenever a program is done, and takes forever to draw the ninth."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("jobs", "interrupt"),
    [
        pytest.param(1, os.kill, id="alone"),
        pytest.param(2, os.kill, id="its_parent", marks=pytest.mark.exhaustive),
        pytest.param(2, os.killpg, id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_an_interrupt_ends_it_with_what_was_done(
    jobs: int, interrupt: Callable[[int, int], None], tmp_path: Path
) -> None:
    """As Ctrl-C in a terminal, which goes to the children too, or as `kill -INT`."""
    path = tmp_path / "fuzzing.py"
    path.write_text(FUZZING)
    command = [sys.executable, str(path), str(jobs)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(8)] == ["judged\n"] * 8
        interrupt(process.pid, signal.SIGINT)
        try:
            out, error = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert (process.returncode, error) == (130, "")
    rows = dict(re.findall(r"^(.+?) +(\d+)$", out, re.MULTILINE))
    assert rows["programs"] == "8" and int(rows["regions"]) >= 1 and rows["wrong"] == "0"
    deadline = time.monotonic() + 20
    with pytest.raises(ProcessLookupError):  # no process of its session is left
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--count", "0"], "argument --count: '0' is no positive number"),
        (["--jobs", "0"], "argument --jobs: '0' is no positive number"),
        (["--first", "-1"], "argument --first: '-1' is no whole number"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--replay", "--device", "cuda"], "cuda"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_sentence(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fuzz", *arguments]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_only_refusals_are_listed_as_left_out() -> None:
    tally = command.Tally(programs=3, counted=Counter(regions=2, kernels_built=4, part_of_rows=1))
    rows = list(command._summary(tally).columns[0].cells)
    assert "kernels built" in rows
    assert [row for row in rows if row.startswith("left out")] == ["left out: part_of_rows"]
