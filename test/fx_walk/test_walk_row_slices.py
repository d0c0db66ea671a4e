"""Products of which some rows are read, which are taken before the product."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from cute_backend.backend import cute
from cute_backend.fx_walk.preparation.row_slices import slice_before_products
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.memory_ops.schedule import kernel_formula
from support.fx_walk.synthetic import Graph, aten, called, run
from support.traffic import alone, fused

B, S, N, K = 4, 16, 72, 64
TOKENS = 48


def operands() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((B, S, K), (TOKENS, K), (N, K), (N,), (TOKENS, N))
    return tuple(torch.randn(size, generator=generator).bfloat16() for size in sizes)


Program = Callable[..., Tensor]


def last(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w)[:, -1].float() / 0.8


def last_of_a_softcap(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return (torch.tanh(F.linear(x, w, bias).float() / 30) * 30)[:, -1] * 2


def greedy(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w)[:, -1].argmax(-1)


def first_of_each(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w)[:, :1].relu()


def some(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return F.silu(F.linear(rows, w) + plane)[8:40] * plane[:32]


def every_third(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return (F.linear(rows, w) * plane.mean(-1, keepdim=True))[::3].relu()


def one(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return torch.addmm(bias, rows, w.t(), beta=2, alpha=3)[5].relu()


def one_with_an_operand_of_all(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return (F.linear(rows, w) * plane[:1])[5].relu()


def squeezed(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w)[:, -1:].squeeze(1) / 2


def unsqueezed(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w, bias)[:, 0].unsqueeze(1).relu()


def of_two_axes(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w)[1:, 2] / 2


def transposed(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w).relu()[:, 3].t() * 2


def in_heads(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w)[:, -1:].unflatten(-1, (3, -1)).transpose(1, 2).relu()


def of_a_transpose(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w).transpose(0, 1)[-1].relu()


def some_of_a_transpose(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w).transpose(0, 1)[5:6].relu()


def last_text_without_its_first_row(
    x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor
) -> Tensor:
    return F.linear(x, w)[:, 1:][-1].relu()


def in_parts(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    gate, up = F.linear(x, w)[:, -1].chunk(2, -1)
    return F.silu(gate) * up


def of_two_products(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return (F.silu(F.linear(rows, w)) * F.linear(rows, w.flip(0)))[:7] + 1


MOVED: dict[Program, tuple[int, str]] = {
    last: (B, "out0 = f32(acc / 0.8)"),
    last_of_a_softcap: (B, "out0 = f32(tanh((acc + bias) / 30) * 30 * 2)"),
    greedy: (B, "out0 = i64(row_argmax(acc))"),
    first_of_each: (B, "out0 = bf16(relu(acc))"),
    some: (32, ""),
    every_third: (16, "out0 = bf16(relu(acc * colvec0))"),
    one: (1, ""),
    one_with_an_operand_of_all: (1, ""),
    squeezed: (B, "out0 = bf16(acc / 2)"),
    unsqueezed: (B, "out0 = bf16(relu(acc + bias))"),
    of_two_axes: (B - 1, "out0 = bf16(acc / 2)"),
    transposed: (B, "out0 = bf16(relu(acc) * 2)"),
    in_heads: (B, "out0 = bf16(relu(acc))"),
    of_a_transpose: (B, "out0 = bf16(relu(acc))"),
    some_of_a_transpose: (B, "out0 = bf16(relu(acc))"),
    last_text_without_its_first_row: (S - 1, "out0 = bf16(relu(acc))"),
    of_two_products: (7, ""),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("program", MOVED, ids=lambda program: program.__name__)
@pytest.mark.usefixtures("free_launches")
def test_rows_are_taken_before_the_product(program: Program) -> None:
    rows, formula = MOVED[program]
    ours, theirs = fused(program, operands()), alone(program, operands())
    (region,) = ours.regions
    assert region.problem == (rows, N, K)
    assert formula in kernel_formula(region.spec)
    assert ours.bytes < theirs.bytes and ours.kernels <= theirs.kernels


def _strides(result: Tensor) -> list[int]:
    """The strides of axes of several elements; those of one element may have any stride."""
    return [stride for size, stride in zip(result.shape, result.stride(), strict=True) if size > 1]


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("program", "dynamic"),
    [(program, ()) for program in MOVED]
    + [(last, (0,)), (last, (0, 1)), (greedy, (0, 1)), (first_of_each, (0, 1))]
    + [(in_parts, ()), (squeezed, (0, 1)), (of_two_axes, (0, 1)), (in_heads, (0,)), (of_a_transpose, (0, 1))],
)
def test_the_result_is_eagers(program: Program, dynamic: tuple[int, ...], fresh_compiler: None) -> None:
    args = operands()
    for axis in dynamic:
        torch._dynamo.mark_dynamic(args[0], axis)
    with torch.no_grad():
        result = torch.compile(program, backend=cute)(*args)
        expected = program(*(arg.double() for arg in args))
    assert result.shape == expected.shape and _strides(result) == _strides(program(*args))
    torch.testing.assert_close(result.double(), expected.double(), rtol=0.02, atol=0.1)
    assert counters["cute_backend"]["regions"] == 1


def test_a_symbolic_depth_is_an_argument_by_a_node(fresh_compiler: None) -> None:
    """A graph can't name a symbolic size itself: torch warns, and code made of the graph raises NameError."""
    _, rows, w, _, _ = operands()

    def program(rows: Tensor, w: Tensor) -> Tensor:
        return (rows @ w.t())[3].relu()

    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Raw SymInt")
        result = torch.compile(program, backend=cute, dynamic=True)(rows, w)
    assert counters["cute_backend"]["regions"] == 1
    torch.testing.assert_close(result, program(rows, w), rtol=0.02, atol=0.1)


def read_twice(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    y = F.linear(rows, w)
    return y[:5].relu().sum() + y.sum()


def work_read_twice(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> tuple[Tensor, ...]:
    y = F.linear(rows, w).relu()
    return y[:5] * 2, y


def in_halves(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    top, bottom = F.linear(rows, w).chunk(2)
    return torch.relu(top) * bottom


def of_several_strides(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w)[:, 1:].relu()


def of_several_strides_behind_a_view(
    x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor
) -> Tensor:
    return F.linear(x, w)[:, 1:].transpose(0, 1).relu()


def returned(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w)[:, -1]


def worked_on_and_returned(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w).relu()[:, -1:].squeeze(1)


def sorted_rows(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return F.linear(x, w).relu()[:, -1].sort(-1).values


def with_an_addend_of_rows(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return torch.addmm(plane, rows, w.t())[:9].relu()


def of_batches(x: Tensor, rows: Tensor, w: Tensor, bias: Tensor, plane: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2)).relu()[:, -1] * 2


WHOLE: dict[Program, str] = {
    read_twice: r"sum_\d \(\S+\) reads other rows, too",
    work_read_twice: "the program returns other rows, too",
    in_halves: "aten.split.Tensor gives several parts of the rows",
    of_several_strides: "they have no single stride in A",
    of_several_strides_behind_a_view: "they have no single stride in A",
    worked_on_and_returned: "the program returns them",
    sorted_rows: r"sort \(\S+\) reads them, which is neither pointwise nor a reduction",
    with_an_addend_of_rows: "the addend of the product has rows, too",
    of_batches: "aten.bmm.default is computed for all rows",
}


@pytest.mark.parametrize("program", WHOLE, ids=lambda it: it.__name__)
@pytest.mark.usefixtures("free_launches")
def test_a_product_is_left_whole(program: Program) -> None:
    """The refusal says why."""
    found = fused(program, operands())
    assert not any(region.problem[0] not in (TOKENS, B * S) for region in found.regions)
    refused = [each for each in found.rejections if each.reason is Reason.PART_OF_ROWS]
    assert refused and all(re.search(f"because {WHOLE[program]}$", each.message) for each in refused)


def test_rows_that_are_returned_are_the_users_view() -> None:
    assert not fused(returned, operands()).regions


@pytest.mark.parametrize("place", ["before", "between", "behind"])
def test_no_product_moves_past_a_write_in_place(place: str) -> None:
    made = Graph()
    a, b = made.input("a", (TOKENS, K)), made.input("b", (K, N), strides=(1, K))

    def write() -> None:
        made.call(aten.copy_.default, a, made.call(aten.neg.default, a))

    if place == "before":
        write()
    product = made.call(aten.mm.default, a, b)
    if place == "between":
        write()
    result = made.call(aten.relu.default, made.call(aten.slice.Tensor, product, 0, 0, 8))
    if place == "behind":
        write()
    graph = made.output(result)
    _, rows, w, *_ = operands()
    (expected,) = run(graph, rows.clone(), w.t())
    slice_before_products(graph)
    (got,) = run(graph, rows.clone(), w.t())
    torch.testing.assert_close(got, expected)
    moved = [node.meta["val"].shape[0] for node in graph.nodes if node.target is aten.mm.default]
    assert moved == [TOKENS if place == "between" else 8]
    assert "aten.copy_.default" in called(graph)


@pytest.mark.parametrize("work", [aten.rrelu.default, aten.relu_.default])
def test_work_that_draws_or_writes_is_done_on_all_rows(work: torch._ops.OpOverload) -> None:
    """For fewer rows, a draw would give other numbers. A write is visible to other readers."""
    made = Graph()
    product = made.mm(TOKENS, N, K)
    done = made.call(work, product, *((0.1, 0.3, True) if work is aten.rrelu.default else ()))
    graph = made.output(made.call(aten.neg.default, made.call(aten.slice.Tensor, done, 0, 0, 8)))
    slice_before_products(graph)
    assert product in graph.nodes and product.meta["val"].shape[0] == TOKENS
