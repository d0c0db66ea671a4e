"""Reports of `collect` on a function, for CPU tensors and fake ones, without computing anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.torch_version import TorchVersion

from cute_backend.fx_walk.collect import GraphReport, collect
from cute_backend.fx_walk.refusals.reasons import Reason

BF16 = torch.bfloat16


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(64, 128, dtype=BF16)
        self.up = torch.nn.Linear(64, 128, dtype=BF16)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x) + residual


def labels(report: GraphReport) -> list[dict[str, str]]:
    return [
        dict(zip([load.name for load in region.spec.loads], region.load_labels, strict=True))
        for region in report.regions
    ]


def test_loads_have_the_users_names() -> None:
    with torch.no_grad():
        (report,) = collect(Gated(), (torch.ones(2, 16, 64, dtype=BF16), torch.ones(128, dtype=BF16)))
    (gated,) = labels(report)
    assert gated == {"bias0": "self.gate.bias", "bias1": "self.up.bias", "rowvec0": "residual"}
    (region,) = report.regions
    assert region.product_labels == ["self.gate.weight", "self.up.weight"]
    assert region.problem == (32, 128, 64)
    assert not report.rejections and not report.is_backward


def branches(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cond(
        x.sum() > 0, lambda x, weight: (x @ weight).relu(), lambda x, weight: x @ weight, (x, weight)
    )


@torch.compiler.nested_compile_region
def layer(x: Tensor, weight: Tensor) -> Tensor:
    return F.gelu(x @ weight)


def layers(x: Tensor, weight: Tensor) -> Tensor:
    return layer(layer(x, weight), weight)


CALLED_TWICE = [1, 0] if TorchVersion(torch.__version__) >= "2.12" else [1, 1, 0]
"""Dynamo has one graph for both calls of a layer; torch 2.11's has one for each."""


@pytest.mark.parametrize(("program", "found"), [(branches, [1, 0, 0]), (layers, CALLED_TWICE)])
def test_graphs_that_a_graph_calls_are_reported_before_it(program: Any, found: list[int]) -> None:
    square = torch.ones(64, 64, dtype=BF16)
    assert [len(report.regions) for report in collect(program, (square, square))] == found


@pytest.mark.parametrize(
    ("model", "where"),
    [
        (torch.nn.Linear(64, 64, dtype=BF16), "self"),
        (torch.nn.Sequential(torch.nn.Dropout(0), torch.nn.Linear(64, 64, dtype=BF16)), "self.1"),
    ],
    ids=["linear", "sequential"],
)
def test_what_no_line_of_the_program_calls_is_told_by_its_module(model: torch.nn.Module, where: str) -> None:
    with torch.no_grad():
        (report,) = collect(model, (torch.ones(32, 64, dtype=BF16),))
    (rejection,) = report.rejections
    assert (rejection.node, rejection.where) == ("addmm", where)


def test_refusals_have_the_users_names() -> None:
    """Of an operand of the product, and of what the program computes."""

    def fn(x: Tensor, weight: Tensor, odd: Tensor) -> tuple[Tensor, ...]:
        y = F.linear(x, weight)
        rows = x.long()
        scanned = y.cumsum(-1)
        return y + rows, y - scanned, F.linear(x, odd[:, :64]).relu()

    plane, odd = torch.ones(64, 64, dtype=BF16), torch.ones(64, 65, dtype=BF16)
    with torch.no_grad():
        (report,) = collect(fn, (plane, plane, odd))
    messages = {rejection.reason: rejection.message for rejection in report.rejections}
    line = fn.__code__.co_firstlineno
    where = f"(test_walk_collect.py:{line + 2})", f"(test_walk_collect.py:{line + 3})"
    assert messages[Reason.UNSUPPORTED_DTYPE].startswith(f"rows {where[0]} is torch.int64")
    cycle = f"scanned {where[1]} depends on the region's own result through aten.cumsum.default, which is not"
    assert messages[Reason.CYCLE].startswith(cycle)
    assert messages[Reason.OPERAND_ALIGNMENT].startswith("odd has a stride of 130 bytes")


def test_nothing_is_computed_or_counted(fresh_compiler: None) -> None:
    """These products would take hours."""
    before = dict(counters["cute_backend"])
    x, weight = (
        torch.ones(1, 1, dtype=BF16).expand(2**20, 2**14),
        torch.ones(1, 1, dtype=BF16).expand(2**20, 2**14),
    )
    (report,) = collect(lambda x, w: (x.contiguous() @ w.contiguous().t()).relu(), (x, weight))
    assert report.regions[0].problem == (2**20, 2**20, 2**14)
    assert dict(counters["cute_backend"]) == before


def test_fakes_will_do_of_a_gpu_too() -> None:
    mode = FakeTensorMode()
    with mode:
        x, weight = (torch.empty(*shape, dtype=BF16, device="cuda:0") for shape in ((64, 32), (48, 32)))
    (report,) = collect(lambda x, w: F.linear(x, w).relu(), (x, weight), arch="sm_100a")
    assert len(report.regions) == 1


def test_dynamic_sizes_are_symbols() -> None:
    args = torch.ones(64, 32, dtype=BF16), torch.ones(48, 32, dtype=BF16)
    (report,) = collect(lambda x, w: F.linear(x, w).relu(), args, dynamic=True)
    assert all(isinstance(size, torch.SymInt) for size in report.regions[0].problem)


def test_forward_and_backward_are_both_reported() -> None:
    leaf = torch.ones(64, 32, dtype=BF16, requires_grad=True)
    reports = collect(lambda x, w: F.linear(x.tanh(), w), (leaf, torch.ones(48, 32, dtype=BF16)))
    assert [(report.is_backward, len(report.regions)) for report in reports] == [(False, 0), (True, 1)]
    assert leaf.grad is None


def test_a_program_that_looks_at_values_gets_real_ones() -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        y = F.linear(x, weight).relu()
        return F.linear(y, y).tanh() if y.sum() > 0 else y

    reports = collect(program, (torch.ones(32, 32, dtype=BF16), torch.ones(32, 32, dtype=BF16)))
    assert [len(report.regions) for report in reports] == [1, 1]


def test_a_function_is_asked_about_any_number_of_times() -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).relu()

    args = torch.ones(32, 32, dtype=BF16), torch.ones(32, 32, dtype=BF16)
    for _ in range(10):
        assert [len(report.regions) for report in collect(program, args)] == [1]


def test_asking_leaves_no_trace_in_what_is_compiled(fresh_compiler: None) -> None:
    """Nothing that Dynamo remembers of earlier questions counts: recompilations, or sizes that changed."""

    def program(x: Tensor, weight: Tensor) -> Tensor:
        y = F.linear(x, weight).relu()
        torch._dynamo.graph_break()
        return F.linear(y, weight).relu()

    for size in range(16, 192, 16):
        square = torch.ones(size, size, dtype=BF16)
        reports = collect(program, (square, square))
        problems = [region.problem for report in reports for region in report.regions]
        assert problems == [(size,) * 3] * 2
        assert all(isinstance(size, int) for problem in problems for size in problem)
    before = counters["cute_backend"]["regions"]
    torch.compile(program, backend="cute")(square, square)
    assert counters["cute_backend"]["regions"] == before + 2


def test_a_part_that_runs_with_many_sizes_is_seen_with_each() -> None:
    def part(x: Tensor, weight: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return F.linear(x, weight).relu()

    def program(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [part(x[:rows], weight) for rows in range(2, 32)]

    reports = collect(program, (torch.ones(32, 32, dtype=BF16), torch.ones(32, 32, dtype=BF16)))
    assert [report.regions[0].problem[0] for report in reports] == [*range(2, 32)]


def test_names_of_all_kinds_of_functions() -> None:
    weight, bias = torch.ones(32, 64, dtype=BF16), torch.ones(32, dtype=BF16)

    class Linear(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    linear = Linear(64, 32, dtype=BF16)

    def closure(x: Tensor) -> Tensor:
        return F.linear(x, weight) + bias

    x = torch.ones(16, 64, dtype=BF16)
    with torch.no_grad():
        found = [labels(collect(fn, (x,))[0])[0] for fn in (closure, linear, linear.forward)]
    assert found == [{"rowvec0": "bias"}, {"bias": "self.bias"}, {"bias": "self.bias"}]


LINEAR = torch.nn.Linear(64, 32, dtype=BF16)


def test_names_of_globals_are_the_programs() -> None:
    def program(x: Tensor) -> Tensor:
        return LINEAR(x).relu()

    with torch.no_grad():
        (report,) = collect(program, (torch.ones(16, 64, dtype=BF16),))
    assert labels(report) == [{"bias": "LINEAR.bias"}]


@pytest.mark.settings(shared_launches=False)
def test_what_a_tensor_subclass_holds_is_told_apart() -> None:
    def program(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias).relu()

    weight = TwoTensor(torch.ones(32, 64, dtype=BF16), torch.ones(32, 64, dtype=BF16))
    x, bias = torch.ones(16, 64, dtype=BF16), torch.ones(32, dtype=BF16)
    (report,) = collect(program, (x, weight, bias))
    assert [region.product_labels for region in report.regions] == [["weight.a"], ["weight.b"]]
    assert labels(report) == [{"bias": "bias"}, {"bias": "bias"}]


def test_sizes_that_follow_from_values_are_computed() -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero().squeeze(1)
        torch._dynamo.graph_break()
        return F.linear(x[rows], weight).relu()

    reports = collect(program, (torch.ones(16, 64, dtype=BF16), torch.ones(32, 64, dtype=BF16)))
    assert sum(len(report.regions) for report in reports) == 1


def test_what_torch_raises_is_raised() -> None:
    with pytest.raises(Exception, match="fake tensor call"):
        collect(lambda x, w: x @ w, (torch.ones(4, 5), torch.ones(6, 7)))


class Named(torch.Tensor):
    """A subclass whose function `name_of` a plain tensor lacks."""

    def name_of(self) -> str:
        return "named"


def jagged() -> Tensor:
    rows = [torch.ones(3, 64, dtype=BF16), torch.ones(5, 64, dtype=BF16)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(
    ("make", "program", "regions"),
    [
        (jagged, lambda x, w: (x @ w).relu(), 1),
        (
            lambda: torch.quantize_per_tensor(torch.ones(64, 64), 0.1, 0, torch.qint8),
            lambda x, w: (x.dequantize().bfloat16() @ w).relu(),
            0,  # Dynamo has no fake of it either, and compiles nothing
        ),
        (
            lambda: torch.masked.masked_tensor(torch.ones(64, 64), torch.ones(64, 64, dtype=torch.bool)),
            lambda x, w: ((w @ w).relu(), x.get_mask()),
            1,
        ),
        (lambda: torch.ones(64, 64).as_subclass(Named), lambda x, w: ((w @ w).relu(), x.name_of()), 1),
    ],
    ids=["jagged", "quantized", "masked", "subclass"],
)
def test_an_argument_without_a_fake_is_taken_as_it_is(make: Any, program: Any, regions: int) -> None:
    weight = torch.ones(64, 64, dtype=BF16)
    program(make(), weight)
    reports = collect(program, (make(), weight))
    assert sum(len(report.regions) for report in reports) == regions


def marked_dynamic() -> Tensor:
    x = torch.ones(48, 64, dtype=BF16)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def perhaps_dynamic() -> Tensor:
    x = torch.ones(48, 64, dtype=BF16)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def a_marked_fake() -> Tensor:
    with FakeTensorMode():
        return marked_dynamic()


@pytest.mark.parametrize("make", [marked_dynamic, perhaps_dynamic, a_marked_fake])
def test_sizes_that_are_marked_dynamic_are_symbols(make: Any) -> None:
    weight = torch.ones(64, 32, dtype=BF16)
    (report,) = collect(lambda x, w: (x @ w).relu(), (make(), weight))
    (nested,) = collect(lambda inputs, w: (inputs["x"] @ w).relu(), ({"x": make()}, weight))
    for m, *others in (report.regions[0].problem, nested.regions[0].problem):
        assert isinstance(m, torch.SymInt) and others == [32, 64]


def test_sizes_that_are_marked_static_are_numbers() -> None:
    x = torch.ones(48, 64, dtype=BF16)
    torch._dynamo.mark_static(x, 0)
    weight = torch.ones(64, 32, dtype=BF16)
    (report,) = collect(lambda x, w: (x @ w).relu(), (x, weight), dynamic=True)
    assert report.regions[0].problem[0] == 48
