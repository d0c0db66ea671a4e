"""Reductions as people write them: what each spelling fuses to, and that it gives what eager gives.

Values are integers whose sums and products bf16 holds, so results are compared to the bit; where a mean or a
logarithm rounds, with a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

import cute_backend
from cute_backend import config
from cute_backend.backend import cute
from cute_backend.fx_walk.collect import GraphReport, collect
from cute_backend.fx_walk.members.spelled_reductions import read_reduction
from cute_backend.fx_walk.refusals.reasons import LABEL, Reason
from cute_backend.fx_walk.replacement.rewrite import rewrite
from cute_backend.memory_ops.schedule import kernel_formula
from support.fx_walk.synthetic import BF16, E4M3, F32, OP, Graph, aten, called, prims, run, walk

pytestmark = pytest.mark.usefixtures("free_launches", "no_blocks")

M, N, K = 24, 40, 8
EPILOGUE = "cute_backend.gemm_epilogue.default"


def operands() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(BF16)

    return {"a": integers(M, K), "b": integers(K, N), "x": integers(2, 3, 4, K), "bias": integers(N)}


@dataclass(frozen=True)
class Program:
    """`formula` is the region's, a line each; `left` is what is not fused."""

    fn: Callable[..., Any]
    formula: tuple[str, ...]
    left: tuple[str, ...] = ()
    tolerance: float = 0.0


def one(fn: Callable[..., Any], text: str, **how: Any) -> Program:
    return Program(fn, (text,), **how)


CAST = "prims.convert_element_type.default"

PROGRAMS = {
    # Over the last axis
    "sum": one(lambda a, b: (a @ b).sum(-1), "out0 = bf16(row_sum(acc))"),
    "sum_keepdim": one(lambda a, b: (a @ b).sum(1, keepdim=True), "out0 = bf16(row_sum(acc))"),
    "sum_in_fp32": one(lambda a, b: (a @ b).sum(-1, dtype=F32), "out0 = f32(row_sum(acc))"),
    "sum_of_floats": one(lambda a, b: (a @ b).float().sum(-1), "out0 = f32(row_sum(acc))"),
    "mean": one(lambda a, b: (a @ b).mean(-1), "out0 = bf16(row_mean(acc))", tolerance=1e-2),
    "mean_of_squares": one(
        lambda a, b: (a @ b).float().pow(2).mean(-1, keepdim=True),
        "out0 = f32(row_mean(acc * acc))",
        tolerance=1e-6,
    ),
    "amax": one(lambda a, b: (a @ b).amax(-1), "out0 = bf16(row_max(acc))"),
    "amin": one(lambda a, b: (a @ b).relu().amin(-1), "out0 = bf16(row_min(relu(acc)))"),
    "amax_of_abs": one(lambda a, b: (a @ b).abs().amax(-1, keepdim=True), "out0 = bf16(row_max(abs(acc)))"),
    "aminmax": Program(
        lambda a, b: torch.aminmax(a @ b, dim=-1),
        ("out0 = bf16(row_min(acc))", "out1 = bf16(row_max(acc))"),
    ),
    "max": Program(
        lambda a, b: tuple((a @ b).max(-1)), ("out0 = bf16(row_max(acc))", "out1 = i64(row_argmax(acc))")
    ),
    "max_values": one(lambda a, b: (a @ b).max(-1).values, "out0 = bf16(row_max(acc))"),
    "min_indices": one(lambda a, b: (a @ b).min(-1, keepdim=True).indices, "out0 = i64(row_argmin(acc))"),
    "argmax": one(lambda a, b: (a @ b).argmax(-1), "out0 = i64(row_argmax(acc))"),
    "argmin_keepdim": one(lambda a, b: (a @ b).argmin(1, keepdim=True), "out0 = i64(row_argmin(acc))"),
    "logsumexp": one(
        lambda a, b: (a @ b).float().logsumexp(-1), "out0 = f32(row_logsumexp(acc))", tolerance=1e-6
    ),
    "logsumexp_keepdim": one(
        lambda a, b: torch.logsumexp(a @ b, 1, keepdim=True),
        "out0 = bf16(row_logsumexp(acc))",
        tolerance=1e-2,
    ),
    "sum_of_exp": one(
        lambda a, b: (a @ b).float().exp().sum(-1), "out0 = f32(row_sum(exp(acc)))", tolerance=1e-6
    ),
    "norm": one(
        lambda a, b: (a @ b).float().norm(dim=-1),
        "out0 = f32(sqrt(row_sum(acc * acc)))",
        tolerance=1e-6,
    ),
    # Over the rows
    "column_sum": one(lambda a, b: (a @ b).sum(0), "out0 = bf16(column_sum(acc))"),
    "product_of_rows": one(lambda a, b: (a @ b).float().prod(-1), "out0 = f32(row_prod(acc))"),
    "product_of_all": one(lambda a, b: (a @ b).prod(), "out0 = bf16(all_prod(acc))"),
    "column_amax": one(lambda a, b: (a @ b).amax(0, keepdim=True), "out0 = bf16(column_max(acc))"),
    "column_amin": one(lambda a, b: (a @ b).amin(-2), "out0 = bf16(column_min(acc))"),
    "column_argmax": one(lambda a, b: (a @ b).argmax(0), "out0 = i64(column_argmax(acc))"),
    # Over everything
    "all_sum": one(lambda a, b: (a @ b).sum(), "out0 = bf16(all_sum(acc))"),
    "all_mean": one(lambda a, b: (a @ b).float().mean(), "out0 = f32(all_mean(acc))", tolerance=1e-6),
    "all_amax": one(lambda a, b: (a @ b).abs().max(), "out0 = bf16(all_max(abs(acc)))"),
    "all_amax_dims": one(lambda a, b: (a @ b).amax((0, 1), keepdim=True), "out0 = bf16(all_max(acc))"),
    "all_argmax": one(lambda a, b: (a @ b).argmax(), "out0 = i64(all_argmax(acc))"),
    # Leading axes that make one M
    "rows_of_many_axes": one(lambda x, b: (x @ b).sum(-1, keepdim=True), "out0 = bf16(row_sum(acc))"),
    "columns_of_many_axes": one(lambda x, b: (x @ b).amax((0, 1, 2)), "out0 = bf16(column_max(acc))"),
    "columns_kept": one(lambda x, b: (x @ b).sum((0, 1, -2), keepdim=True), "out0 = bf16(column_sum(acc))"),
    "all_of_many_axes": one(lambda x, b: (x @ b).argmin(), "out0 = i64(all_argmin(acc))"),
    "an_axis_of_one_as_well": one(
        lambda a, b: (a @ b).view(1, M, N).sum((0, 2)), "out0 = bf16(row_sum(acc))"
    ),
    # Beside the output, and of what it is made of
    "beside": Program(
        lambda a, b, bias: ((y := torch.addmm(bias, a, b).relu()), y.abs().amax(-1)),
        ("t1 = relu(acc + bias)", "out0 = bf16(t1)", "out1 = bf16(row_max(abs(t1)))"),
    ),
    "of_an_intermediate": Program(
        lambda a, b, bias: ((y := a @ b).sum(0), (y + bias).relu(), (y * 2).amax()),
        (
            "out0 = bf16(column_sum(acc))",
            "out1 = bf16(relu(acc + rowvec0))",
            "out2 = bf16(all_max(acc * 2))",
        ),
    ),
    "one_value_three_ways": Program(
        lambda a, b: ((y := (a @ b).relu()).sum(-1), y.sum(0), y.sum()),
        (
            "t0 = relu(acc)",
            "out0 = bf16(row_sum(t0))",
            "out1 = bf16(column_sum(t0))",
            "out2 = bf16(all_sum(t0))",
        ),
    ),
    "of_integers": one(
        lambda a, b: ((a @ b).clamp(-100, 100).to(torch.int8)).amax(-1),
        "out0 = i8(row_max(i8(minimum(maximum(acc, -100), 100))))",
    ),
    "any_of_numbers": one(lambda a, b: (a @ b).any(0), "out0 = bool(column_max(bool(acc)))"),
    "all": one(
        lambda a, b: ((a @ b) > -8).all(),
        "out0 = bool(all_max(not (acc > -8)))",
        left=("aten.logical_not.default",),
    ),
    "of_truth_values": one(lambda a, b: ((a @ b) > 2).amax(-1), "out0 = bool(row_max(acc > 2))"),
    # What comes after
    "a_scale": Program(
        lambda a, b: ((y := (a @ b).relu()), y.amax(-1, keepdim=True).float() / 448),
        ("t0 = relu(acc)", "out0 = bf16(t0)", "out1 = f32(bf16(row_max(t0)) / 448)"),
        tolerance=1e-6,
    ),
}


def report_of(fn: Callable[..., Any], **options: Any) -> tuple[GraphReport, list[Tensor]]:
    """The one graph of a program, and the operands that it takes in the order of its inputs."""
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    given = {name: operands()[name] for name in names}
    (report,) = collect(fn, tuple(given.values()), **options)
    inputs = report.graph.find_nodes(op="placeholder")
    return report, [given[node.meta[LABEL]] for node in inputs]


def leaves(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def eager(fn: Callable[..., Any]) -> list[Tensor]:
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    return leaves(fn(*(operands()[name] for name in names)))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str) -> None:
    program = PROGRAMS[name]
    report, inputs = report_of(program.fn)
    (region,) = report.regions
    assert tuple(kernel_formula(region.spec).splitlines()) == program.formula
    rewrite(report.graph, report.regions)
    calls = called(report.graph)
    assert [call for call in calls if call not in (EPILOGUE, "aten.squeeze.dims")] == list(program.left)
    assert calls.count(EPILOGUE) == 1
    for got, expected in zip(leaves(run(report.graph, *inputs)), eager(program.fn), strict=True):
        assert (got.shape, got.dtype, got.stride()) == (expected.shape, expected.dtype, expected.stride())
        torch.testing.assert_close(got, expected, rtol=program.tolerance, atol=0)


def test_a_square_plane_is_reduced_along_the_axis_that_is_named() -> None:
    a, b = torch.randint(-1, 2, (N, K)).to(BF16), torch.randint(-1, 2, (K, N)).to(BF16)
    for axis, kind in ((0, "column"), (1, "row")):
        (report,) = collect(lambda a, b, axis=axis: (a @ b).sum(axis), (a, b))
        assert kernel_formula(report.regions[0].spec) == f"out0 = bf16({kind}_sum(acc))"


@pytest.mark.parametrize(("m", "dim", "kind"), [(1, 0, "column"), (1, 1, "row"), (1, (0, 1), "row")])
def test_one_row(m: int, dim: Any, kind: str) -> None:
    a, b = torch.ones(m, K, dtype=BF16), torch.ones(K, N, dtype=BF16)
    (report,) = collect(lambda a, b: (a @ b).relu().sum(dim), (a, b))
    assert kernel_formula(report.regions[0].spec) == f"out0 = bf16({kind}_sum(relu(acc)))"


@pytest.mark.parametrize("m", [1, M])
def test_any_over_an_empty_list_of_axes_reduces_nothing(m: int) -> None:
    """`aten.any.dims` alone takes an empty list at its word; torch rewrites `amin(dim=())` of bools to it."""

    def program(a: Tensor, b: Tensor) -> Tensor:
        return torch.ops.aten.any.dims((a @ b) > 2, [], True).logical_not()

    a, b = operands()["a"][:m], operands()["b"]
    (report,) = collect(program, (a, b))
    assert not any(region.spec.reductions for region in report.regions)
    rewrite(report.graph, report.regions)
    (got,) = leaves(run(report.graph, a, b))
    assert torch.equal(got, program(a, b))


@pytest.mark.parametrize("dim", [0, -1])
def test_a_number_may_be_reduced_over_an_axis_that_it_lacks(dim: int) -> None:
    a, b = torch.ones(16, 32, dtype=torch.bfloat16), torch.ones(32, 16, dtype=torch.bfloat16)
    (report,) = collect(lambda a, b, s: (a @ b).relu() * s.amax(dim), (a, b, torch.ones(())), arch="sm_90a")
    assert len(report.regions) == 1 and Reason.INTERNAL_ERROR not in {r.reason for r in report.rejections}


def test_a_reduction_of_results_is_left_to_another_kernel() -> None:
    """Its steps begin with work on results of rows, which are on no plane."""

    def fn(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b).float().norm(dim=-1).logsumexp(-1)

    report, inputs = report_of(fn)
    (region,) = report.regions
    assert kernel_formula(region.spec) == "out0 = f32(sqrt(row_sum(acc * acc)))"
    assert Reason.INTERNAL_ERROR not in {each.reason for each in report.rejections}
    rewrite(report.graph, report.regions)
    torch.testing.assert_close(leaves(run(report.graph, *inputs)), eager(fn), rtol=1e-6, atol=0)


def test_under_eagers_rounding_the_elements_are_rounded_first() -> None:
    with inductor_config.patch(emulate_precision_casts=True):
        report, _ = report_of(lambda a, b: (a @ b).relu().sum(-1))
    (region,) = report.regions
    assert kernel_formula(region.spec) == "out0 = bf16(row_sum(bf16(relu(bf16(acc)))))"


QUANTISED = (
    "t0 = relu(acc)",
    "out0 = bf16(t0)",
    "out1 = f32(maximum(bf16(row_max(abs(t0))), 1e-12) / 448)",
)


def quantised(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic rowwise quantisation, with the scale from the values as they are."""
    y = (a @ b).relu()
    scale = y.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448
    return (y.float() / scale).clamp(-448, 448).to(E4M3), scale


def quantised_through_fp32(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """As torchao writes it: the cast is used for the maximum and for the quotient."""
    y = (a @ b).relu().float()
    scale = y.abs().amax(-1, keepdim=True).to(BF16).float().clamp(min=1e-12) / 448
    return (y / scale).clamp(-448, 448).to(E4M3), scale


@pytest.mark.parametrize("fn", [quantised, quantised_through_fp32])
def test_dynamic_quantisation_fuses_its_maximum_beside_the_output(fn: Callable[..., Any]) -> None:
    """The activation is written once, in bf16, whatever the program casts it to on the way."""
    report, inputs = report_of(fn)
    (region,) = report.regions
    lines = kernel_formula(region.spec).splitlines()
    assert lines == list(QUANTISED)
    assert [rejection.reason for rejection in report.rejections if rejection.node.startswith("div")] == [
        Reason.FEEDBACK
    ]
    rewrite(report.graph, report.regions)
    assert not {"aten.amax.default", "aten.mm.default"} & set(called(report.graph))
    for got, expected in zip(leaves(run(report.graph, *inputs)), eager(fn), strict=True):
        torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=0)


def test_a_copy_outside_reads_the_written_value() -> None:
    """A recomputed node stays in the graph, where it was, and reads the region's output."""
    report, _ = report_of(quantised_through_fp32)
    names = {rejection.node: rejection.reason for rejection in report.rejections}
    (copy,) = [node for node, reason in names.items() if reason is Reason.LEFT_TO_USERS]
    rewrite(report.graph, report.regions)
    (node,) = [each for each in report.graph.nodes if each.name == copy]
    assert node.args[0].target is getitem and node.args[0].args[0].target is OP  # type: ignore[union-attr]


def sandwich(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    """A norm, a residual and a norm, of which Inductor makes one kernel that holds a row."""
    x = (a @ b + bias).float()
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + 1
    return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True))


def test_squares_for_a_mean_that_is_refused_are_not_written() -> None:
    report, _ = report_of(sandwich)
    (region,) = report.regions
    assert kernel_formula(region.spec) == "out0 = bf16(acc + rowvec0)"
    refused = [rejection.reason for rejection in report.rejections]
    assert refused == [Reason.LEFT_TO_USERS, Reason.FEEDBACK, Reason.FEEDBACK]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32, torch.float64])
def test_a_sum_is_written_in_the_shape_and_the_16_bits_that_are_wanted(dtype: torch.dtype) -> None:
    """As a bias takes its gradient, and not in fp32 for one more kernel."""
    made = Graph()
    wide = made.call(prims.convert_element_type.default, made.mm(), F32)
    total = made.call(aten.sum.dim_IntList, wide, [0], True)
    flat = made.call(aten.reshape.default, total, [48])
    result = made.call(prims.convert_element_type.default, flat, dtype)
    ((region,), rejections) = walk(made.output(result))
    is_kept = dtype in (BF16, torch.float16, F32)
    name = {BF16: "bf16", torch.float16: "f16"}.get(dtype, "f32")
    assert kernel_formula(region.spec) == f"out0 = {name}(column_sum(acc))"
    assert list(region.outputs) == [result if is_kept else flat]
    assert not rejections


def test_what_another_kernel_has_to_read_is_reduced_there() -> None:
    """Inductor's kernel for the variance reads both planes, and has the maximum for nothing."""
    made = Graph()
    relu = made.call(aten.relu.default, made.mm())
    total = made.call(aten.add.Tensor, relu, made.input("plane", (64, 48), F32))
    largest = made.call(aten.amax.default, total, [1])
    variance = made.call(aten.var.correction, total, [1])
    made.output(relu, largest, variance)
    ((region,), rejections) = walk(made.graph)
    assert kernel_formula(region.spec) == "out0 = bf16(relu(acc))"
    assert [(each.node, each.reason) for each in rejections] == [
        (total.name, Reason.LEFT_TO_USERS),
        (variance.name, Reason.REDUCTION),
    ]


@pytest.mark.parametrize("step", ["amax", "where", "sub", "exp", "log"])
def test_a_logsumexp_with_a_step_that_is_read_elsewhere_is_its_steps(step: str) -> None:
    """It is then no reduction of its own, and nothing that reads a maximum of the plane fuses behind it."""
    report, _ = report_of(lambda a, b: (a @ b).float().logsumexp(-1))
    graph = report.graph
    (node,) = [each for each in graph.nodes if each.name == step]
    (output,) = graph.find_nodes(op="output")
    output.args = ((*output.args[0], node),)
    kinds = [found.kind.name for found in map(read_reduction, graph.nodes) if found is not None]
    assert kinds and "logsumexp" not in kinds


def shifted(x: Tensor, shift: Tensor, tail: Tensor) -> Tensor:
    return (x - shift).exp().sum(-1).log() + tail


def finite(largest: Tensor, instead: float = 0.0) -> Tensor:
    return torch.where(largest.abs() == float("inf"), instead, largest)


NO_LOGSUMEXP = {
    "infinities_give_nan": lambda x: shifted(x, (m := x.amax(-1, keepdim=True)), m.squeeze(-1)),
    "the_tail_is_broadcast": lambda x: shifted(x, (m := finite(x.amax(-1, keepdim=True))), m),
    "another_number": lambda x: shifted(x, (m := finite(x.amax(-1, keepdim=True), 1.0)), m.squeeze(-1)),
    "another_maximum": lambda x: shifted(x, (m := finite((x + 1).amax(-1, keepdim=True))), m.squeeze(-1)),
    "the_smallest": lambda x: shifted(x, (m := finite(x.amin(-1, keepdim=True))), m.squeeze(-1)),
    "over_columns": lambda x: shifted(x, (m := finite(x.amax(0, keepdim=True))), m.squeeze(0)),
    "where_it_is_three": lambda x: shifted(
        x, (m := torch.where((y := x.amax(-1, keepdim=True)).abs() == 3.0, 0.0, y)), m.squeeze(-1)
    ),
    "else_another": lambda x: shifted(
        x,
        (m := torch.where(x.amax(-1, keepdim=True).abs() == float("inf"), 0.0, x.amin(-1, keepdim=True))),
        m.squeeze(-1),
    ),
    "over_everything": lambda x: shifted(x, (m := finite(x.amax((0, 1), keepdim=True))), m.squeeze(-1)),
}


@pytest.mark.parametrize("name", NO_LOGSUMEXP)
def test_what_looks_like_a_logsumexp_and_is_none(name: str) -> None:
    fn = NO_LOGSUMEXP[name]
    a, b = torch.randn(N, K).to(BF16), torch.randn(K, N).to(BF16)
    (report,) = collect(lambda a, b: fn((a @ b).float()), (a, b))
    assert "logsumexp" not in "".join(kernel_formula(region.spec) for region in report.regions)
    rewrite(report.graph, report.regions)
    (got,) = leaves(run(report.graph, a, b))
    torch.testing.assert_close(got, fn((a @ b).float()), rtol=1e-2, atol=1e-2)


def test_the_decomposition_written_by_hand_is_a_logsumexp() -> None:
    report, _ = report_of(
        lambda a, b: shifted(x := (a @ b).float(), (m := finite(x.amax(-1, keepdim=True))), m.squeeze(-1))
    )
    assert kernel_formula(report.regions[0].spec) == "out0 = f32(row_logsumexp(acc))"


@pytest.mark.parametrize(("limit", "kept"), [(3, ["", "max", "argmax"]), (2, ["", "argmax"])])
def test_too_many_results_leave_some_to_another_kernel(limit: int, kept: list[str]) -> None:
    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = (a @ b).relu()
        return y, y.sum(-1), *y.max(-1)

    with config.patch(max_stores=limit):
        report, inputs = report_of(fn)
    (region,) = report.regions
    found = [store.form.reduction for store in region.spec.stores]
    assert [reduction.kind.name if reduction else "" for reduction in found] == kept
    assert Reason.TOO_MANY_STORES in [rejection.reason for rejection in report.rejections]
    rewrite(report.graph, report.regions)
    for got, expected in zip(leaves(run(report.graph, *inputs)), eager(fn), strict=True):
        assert torch.equal(got, expected)


def test_dynamic_rows() -> None:
    given = operands()
    (report,) = collect(
        lambda a, b: ((y := (a @ b).relu()).amax(-1, keepdim=True), y.sum()),
        (given["a"], given["b"]),
        dynamic=True,
    )
    (region,) = report.regions
    rewrite(report.graph, report.regions)
    assert called(report.graph) == [EPILOGUE]
    assert [each.axis.value for each in region.spec.reductions.values()] == ["row", "all"]


# Through Inductor, and the messages that people read


def test_compiled(fresh_compiler: None) -> None:
    def fn(a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        y = torch.addmm(bias, a, b)
        return y.argmax(-1), (y + 1).max(0, keepdim=True).values, y.float().logsumexp(-1)

    given = operands()
    args = given["a"], given["b"], given["bias"]
    results = torch.compile(fn, backend=cute)(*args)
    assert dict(counters["cute_backend"]) == {"anchors": 1, "regions": 1}
    for got, expected in zip(results, fn(*args), strict=True):
        torch.testing.assert_close(got, expected)


def test_explain_shows_reductions_as_stores() -> None:
    given = operands()
    explained = cute_backend.explain(quantised, given["a"], given["b"], arch="sm_90a")
    (region,) = explained.regions
    assert [(store.name, store.dtype, store.kind, store.placement) for store in region.stores] == [
        ("out0", "bf16", "output", "tma"),
        ("out1", "f32", "row_max", "last_tile"),
    ]
    rows = [line.split() for line in str(explained).splitlines()]
    assert ["out1", "row_max", "last_tile", "f32"] in rows
    explained = cute_backend.explain(quantised, given["a"], given["b"], arch="sm_100a")
    assert explained.regions[0].stores[1].placement == "two_stage"


def test_logsumexp_in_float64_is_left_alone() -> None:
    """Its parts are looked at wherever they stand, beside a product or not. Found by the fuzzer."""
    x = torch.randn(3, 5, dtype=torch.float64)
    (report,) = collect(lambda x: x.logsumexp(0), (x,))
    assert not report.regions


def in_batches(count: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, b = ((count, rows, K), (K, N))
    return tuple(torch.randint(-1, 2, shape, generator=generator).to(BF16) for shape in (x, b))  # type: ignore


BATCHED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "sum": (lambda x, b: (x @ b).sum(1), "out0 = bf16(column_sum64(acc))"),
    "mean, kept": (lambda x, b: (x @ b).mean(1, keepdim=True), "out0 = bf16(column_mean64(acc))"),
    "amax": (lambda x, b: (x @ b).relu().amax(-2), "out0 = bf16(column_max64(relu(acc)))"),
    "two axes": (
        lambda x, b: (x @ b).view(3, 8, 8, N).sum((1, 2)),
        "out0 = bf16(column_sum64(acc))",
    ),
    "heads": (lambda x, b: (x @ b).view(3, 64, 5, 8).sum(1), "out0 = bf16(column_sum64(acc))"),
    "logsumexp": (lambda x, b: (x @ b).float().logsumexp(1), "out0 = f32(column_logsumexp64(acc))"),
}


@pytest.mark.parametrize("name", BATCHED)
def test_the_rows_of_each_batch_are_reduced(name: str) -> None:
    fn, text = BATCHED[name]
    args = in_batches(3, 64)
    (report,) = collect(fn, args)
    (region,) = report.regions
    assert (kernel_formula(region.spec), report.rejections) == (text, ())
    rewrite(report.graph, report.regions)
    (got,) = leaves(run(report.graph, *args))
    expected = fn(*args)
    assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)
    torch.testing.assert_close(got, expected, rtol=1e-2 if "mean" in name else 1e-6, atol=0)


def test_the_rows_of_a_dynamic_number_of_batches_are_reduced() -> None:
    def fn(x: Tensor, b: Tensor) -> Tensor:
        torch._check(x.shape[1] == 64)
        return (x @ b).sum(1)

    x, b = in_batches(3, 64)
    torch._dynamo.mark_dynamic(x, 0)
    (report,) = collect(fn, (x, b))
    assert kernel_formula(report.regions[0].spec) == "out0 = bf16(column_sum64(acc))"
    rewrite(report.graph, report.regions)
    assert called(report.graph).count(EPILOGUE) == 1


NOT_OF_BATCHES: dict[str, tuple[Callable[..., Tensor], int]] = {
    "rows that 32 does not divide": (lambda x, b: (x @ b).sum(1), 48),
    "an index": (lambda x, b: (x @ b).argmax(1), 64),
    "the batches": (lambda x, b: (x @ b).sum(0), 64),
    "the columns too": (lambda x, b: (x @ b).sum((1, 2)), 64),
    "moved axes": (lambda x, b: (x @ b).transpose(0, 1).sum(0), 64),
}


@pytest.mark.parametrize("name", NOT_OF_BATCHES)
def test_other_reductions_of_a_part_of_the_rows_are_refused(name: str) -> None:
    fn, rows = NOT_OF_BATCHES[name]
    (report,) = collect(fn, in_batches(3, rows))
    assert not report.regions
    assert [each.reason for each in report.rejections][-1] in (Reason.REDUCED_AXES, Reason.NOTHING_TO_FUSE)
    assert Reason.REDUCED_AXES in {each.reason for each in report.rejections}


@pytest.mark.parametrize("cast", [False, True], ids=["as_integers", "of_integers"])
def test_a_refused_sum_of_integers_is_called_one(cast: bool) -> None:
    """Elements are bools that are summed as int32, or int32."""

    def counted(a: Tensor, b: Tensor) -> Tensor:
        positive = (a @ b) > 0
        return (positive.to(torch.int32) + 1 if cast else positive).sum(1, dtype=torch.int32)

    given = operands()
    (report,) = collect(counted, (given["a"], given["b"]))
    (refused,) = (each.message for each in report.rejections if each.reason is Reason.UNSUPPORTED_DTYPE)
    assert " is a reduction of int32, and kernels reduce fp32 alone; epilogues support float32," in refused
