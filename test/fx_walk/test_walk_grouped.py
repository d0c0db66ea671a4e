"""Products of groups of rows, `_grouped_mm` with offsets, as anchors: through torch.compile and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.utils import counters

from cute_backend.backend import cute
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.fx_walk.replacement.rewrite import rewrite
from cute_backend.spec import Columns, DType, LoadKind, Major, Order, ProductKind, Scaling, Stride
from support.fx_walk.synthetic import BF16, OP, Graph, aten, walk

M, N, K, GROUPS = 24, 40, 16, 4


def given(m: int = M, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """A, a weight (G, N, K) of each group and offsets: the second group has no rows, the last all but 8."""
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, K, generator=generator).to(BF16)
    weight = torch.randn(GROUPS, n, K, generator=generator).to(BF16)
    return x, weight, torch.tensor([3, 3, 8, m], dtype=torch.int32)


def experts(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


def routed(
    x: Tensor, weight: Tensor, ends: Tensor, routing: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    y = F.gelu(experts(x, weight, ends)) * routing[:, None]
    return y + residual, y.float().amax(-1)


def halves(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    gate, up = experts(x, weight, ends).chunk(2, -1)
    return F.silu(gate) * up


def neighbours(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    y = experts(x, weight, ends)
    return F.silu(y[:, ::2]) * y[:, 1::2]


def two(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return experts(x, weight, ends).relu() * experts(x, weight.flip(0), ends)


CASES: dict[str, tuple[Callable[..., Any], tuple[Columns, ...]]] = {
    "routed": (routed, (Columns.ALL,)),
    "halves": (halves, (Columns.ALL, Columns.ALL)),
    "neighbours": (neighbours, (Columns.EVEN, Columns.ODD)),
    "two": (two, (Columns.ALL, Columns.ALL)),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_rows_in_groups_are_one_kernel(name: str, dynamic: bool, fresh_compiler: Callable[..., None]) -> None:
    fn, columns = CASES[name]
    further = (torch.rand(M), torch.randn(M, N).to(BF16)) if fn is routed else ()
    (report,) = collect(fn, (*given(), *further))
    (region,) = report.regions
    assert [acc.columns for acc in region.spec.accumulators] == list(columns)
    assert {acc.kind for acc in region.spec.accumulators} == {ProductKind.GROUPED}
    assert region.spec.product.b_major is Major.K
    assert region.groups == GROUPS
    assert region.problem == (M, N // 2 if fn in (halves, neighbours) else N, K)
    if fn is routed:
        assert [load.kind for load in region.spec.loads] == [LoadKind.COLVEC, LoadKind.EXACT]
    compiled = torch.compile(fn, backend=cute)
    for m in (M, 40, 17) if dynamic else (M,):
        x, *rest = given(m)
        further = (torch.rand(m), torch.randn(m, N).to(BF16)) if fn is routed else ()
        for rows in (x, *further) if dynamic else ():
            torch._dynamo.mark_dynamic(rows, 0)
        results, wanted = (each(x, *rest, *further) for each in (compiled, fn))
        results, wanted = ([each] if isinstance(each, Tensor) else each for each in (results, wanted))
        for result, eager in zip(results, wanted, strict=True):
            assert result.stride() == eager.stride()
            torch.testing.assert_close(result, eager, rtol=0.03, atol=0.03)
    assert counters["cute_backend"]["regions"] == 1


def test_groups_that_end_elsewhere_share_no_kernel() -> None:
    def fn(x: Tensor, weight: Tensor, ends: Tensor, others: Tensor) -> Tensor:
        return experts(x, weight, ends).relu() * experts(x, weight, others)

    (report,) = collect(fn, (*given(), torch.tensor([1, 2, 3, M], dtype=torch.int32)))
    assert [len(region.spec.accumulators) for region in report.regions] == [1, 1]


def test_rows_of_several_groups_are_not_reduced_together() -> None:
    def fn(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return experts(x, weight, ends).relu().float().sum(0)

    (report,) = collect(fn, given())
    (message,) = [each.message for each in report.rejections if each.reason is Reason.BATCHED]
    assert "kernels reduce only the last axis of a batched or grouped product" in message


def test_three_by_three_axes_with_offsets_are_refused_with_their_shapes() -> None:
    a, b = (GROUPS, 8, 16), (GROUPS, 16, 40)
    made = Graph()
    left, right = made.input("a", a), made.input("b", b)
    bias = made.input("bias", (GROUPS, 40))
    product = made.call(aten._grouped_mm.default, left, right)
    product.kwargs = {"bias": bias}  # torch does not trace a bias
    _, (rejection,) = walk(made.output(made.call(aten.relu.default, product)))
    assert rejection.reason is Reason.GROUPED
    wanted = "has a bias, which no kernel of groups adds"
    assert wanted in rejection.message


def by_columns(
    weight: Tensor, x: Tensor, ends: Tensor, row: Tensor, column: Tensor, residual: Tensor
) -> tuple[Tensor, ...]:
    """Tokens lie in columns: with a row, a column and a plane, and the largest of each token."""
    y = torch._grouped_mm(weight, x, offs=ends)
    z = F.gelu(y) * row + column
    return z + residual, z.float().amax(0), z.t().contiguous()


def columns_of(tokens: int, weights: int = N, major: Major = Major.MN) -> tuple[Tensor, ...]:
    """Weights (G, `weights`, K) by (K, `tokens`), contiguous along tokens or K, and operands of the
    epilogue."""
    x, weight, ends = given(tokens, weights)
    x = x if major is Major.K else x.t().contiguous().t()
    generator = torch.Generator().manual_seed(tokens)
    residual = torch.randn(weights, tokens, generator=generator).to(BF16)
    row, column = torch.rand(tokens, generator=generator), torch.rand(weights, 1, generator=generator)
    return weight, x.t(), ends, row, column, residual


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("weights", [N, 1, M], ids=["wide", "of_one_row", "square"])
def test_columns_in_groups_are_rows_of_the_transposed_product(
    weights: int, dynamic: bool, fresh_compiler: Callable[..., None]
) -> None:
    major = Major.K if dynamic else Major.MN  # any number of columns is no pitch that torch takes
    (report,) = collect(by_columns, columns_of(M, weights, major))
    (region,) = report.regions
    acc = region.spec.product
    assert (acc.kind, acc.a_major, acc.b_major) == (ProductKind.GROUPED, major, Major.K)
    assert (region.problem, region.groups) == ((M, weights, K), GROUPS)
    if weights > 1:
        assert [load.kind for load in region.spec.loads] == [LoadKind.COLVEC, LoadKind.ROWVEC, LoadKind.EXACT]
        assert [store.form.order for store in region.spec.planes] == [Order.COLUMN, Order.ROW]
    compiled = torch.compile(by_columns, backend=cute)
    for tokens in (M, 40, 17) if dynamic else (M,):
        weight, x, ends, row, *rest = columns_of(tokens, weights, major)
        if dynamic:
            torch._dynamo.mark_dynamic(row, 0)
            torch._dynamo.mark_dynamic(x, 1)
            torch._dynamo.mark_dynamic(rest[-1], 1)
        results, wanted = (each(weight, x, ends, row, *rest) for each in (compiled, by_columns))
        for result, eager in zip(results, wanted, strict=True):
            assert result.stride() == eager.stride() or weights == 1
            torch.testing.assert_close(result, eager, rtol=0.03, atol=0.03)
    assert counters["cute_backend"]["regions"] == 1


def test_columns_of_several_groups_are_not_reduced_together() -> None:
    def fn(weight: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(weight, x, offs=ends).relu().float().sum(1)

    (report,) = collect(fn, columns_of(M)[:3])
    (message,) = [each.message for each in report.rejections if each.reason is Reason.BATCHED]
    assert "and only the first axis if its columns are in groups" in message


def test_products_of_one_matrix_by_rows_and_by_columns_share_no_kernel() -> None:
    """A (K, K) is multiplied from both sides by groups that end alike."""

    def fn(weight: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight, offs=ends).relu() * torch._grouped_mm(weight, x, offs=ends)

    generator = torch.Generator().manual_seed(4)
    weight, x = (torch.randn(*shape, K, K, generator=generator).to(BF16) for shape in ((GROUPS,), ()))
    args = (weight, x, torch.tensor([3, 3, 8, K], dtype=torch.int32))
    (report,) = collect(fn, args)
    assert [len(region.spec.accumulators) for region in report.regions] == [1, 1]
    torch.testing.assert_close(torch.compile(fn, backend=cute)(*args), fn(*args), rtol=0.03, atol=0.3)


def test_halves_of_rows_beside_groups_of_columns_are_no_pair() -> None:
    """Views of columns, whose groups they cut, don't lie on the plane; views of rows don't either, yet."""

    def fn(weight: Tensor, x: Tensor, ends: Tensor, dim: int) -> Tensor:
        gate, up = torch._grouped_mm(weight, x, offs=ends).relu().chunk(2, dim)
        return F.silu(gate) * up

    for dim in (0, 1):
        args = (*columns_of(M)[:3], dim)
        (report,) = collect(fn, args)
        assert [len(region.spec.accumulators) for region in report.regions] == [1]
        torch.testing.assert_close(torch.compile(fn, backend=cute)(*args), fn(*args), rtol=0.03, atol=0.3)


def test_scales_of_rows_of_groups_and_of_columns() -> None:
    """(G, M, K) by (K, N) in fp8, with scales (G, M) and (N,)."""
    made, fp8 = Graph(), torch.float8_e4m3fn
    weight = made.input("a", (GROUPS, N, K), fp8, device="cuda:0")
    x = made.input("b", (M, K), fp8, device="cuda:0")
    of_a = made.input("scale_a", (GROUPS, N), torch.float32, device="cuda:0")
    of_b = made.input("scale_b", (M,), torch.float32, device="cuda:0")
    ends = made.input("ends", (GROUPS,), torch.int32, device="cuda:0")
    b = made.call(aten.permute.default, x, [1, 0])
    product = made.call(
        aten._scaled_grouped_mm.default, weight, b, of_a, of_b, ends, out_dtype=BF16, use_fast_accum=True
    )
    (region,), _ = walk(made.output(made.call(aten.relu.default, product)))
    assert [(load.kind, view.node) for load, view in zip(region.spec.loads, region.views, strict=True)] == [
        (LoadKind.COLVEC, of_b),
        (LoadKind.GROUPVEC, of_a),
    ]
    assert region.problem == (M, N, K)


def gradient(dy: Tensor, x: Tensor, ends: Tensor, earlier: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of experts' weights (G, N, K), added to an earlier one, and the largest of each row."""
    y = torch._grouped_mm(dy.t(), x, offs=ends).float() + earlier
    return y, y.amax(-1)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_k_in_groups_is_one_kernel(dynamic: bool, fresh_compiler: Callable[..., None]) -> None:
    x, _, ends = given()
    generator = torch.Generator().manual_seed(2)
    dy, earlier = torch.randn(M, N, generator=generator).to(BF16), torch.randn(GROUPS, N, K)
    (report,) = collect(gradient, (dy, x, ends, earlier))
    (region,) = report.regions
    acc = region.spec.product
    assert (acc.kind, acc.a_major, acc.b_major) == (ProductKind.K_GROUPED, Major.MN, Major.MN)
    assert region.groups == GROUPS
    assert region.problem == (GROUPS * N, K, M)
    assert [load.kind for load in region.spec.loads] == [LoadKind.EXACT]
    compiled = torch.compile(gradient, backend=cute)
    for m in (M, 40, 17) if dynamic else (M,):
        x, _, ends = given(m)
        dy = torch.randn(m, N, generator=generator).to(BF16)
        for rows in (dy, x) if dynamic else ():
            torch._dynamo.mark_dynamic(rows, 0)
        for result, eager in zip(*(each(dy, x, ends, earlier) for each in (compiled, gradient)), strict=True):
            assert result.stride() == eager.stride()
            torch.testing.assert_close(result, eager, rtol=0.03, atol=0.03)
    assert counters["cute_backend"]["regions"] == 1


TOKENS = 2 * M
"""A pitch that torch takes in fp8."""


def fp8_gradient(of_a: tuple[int, ...], of_b: tuple[int, ...], step: int = 1) -> fx.GraphModule:
    """(N, tokens) by (tokens, K) in fp8, whose tokens are in groups, with relu behind it."""
    made, fp8 = Graph(), torch.float8_e4m3fn
    a = made.input("a", (N, TOKENS), fp8, device="cuda:0")
    b = made.call(aten.permute.default, made.input("b", (K, TOKENS), fp8, device="cuda:0"), [1, 0])
    scales = [
        made.input(name, (step * shape[0], *shape[1:]), torch.float32, device="cuda:0")
        for name, shape in (("scale_a", of_a), ("scale_b", of_b))
    ]
    right = [
        made.input(name, (GROUPS * n,), torch.float32, device="cuda:0") for name, n in (("sa", N), ("sb", K))
    ]
    ends = made.input("ends", (GROUPS,), torch.int32, device="cuda:0")
    product = made.call(aten._scaled_grouped_mm.default, a, b, *right, ends, out_dtype=BF16)
    if step > 1:
        scales = [made.call(aten.slice.Tensor, each, 0, 0, 2**31, step) for each in scales]
    product.args = (a, b, *scales, ends)  # torch refuses to trace some of the scales
    return made.output(made.call(aten.relu.default, product))


def test_k_in_groups_has_scales_of_every_groups_rows_and_columns() -> None:
    graph = fp8_gradient((GROUPS * N,), (GROUPS * K,))
    (region,), _ = walk(graph)
    acc = region.spec.product
    assert (acc.kind, acc.a_dtype, acc.a_major, acc.b_major) == (
        ProductKind.K_GROUPED,
        DType.E4M3,
        Major.K,
        Major.K,
    )
    assert [(load.name, load.kind) for load in region.spec.loads] == [
        ("scale_a", LoadKind.COLVEC),
        ("scale_b", LoadKind.GROUPVEC),
    ]
    assert (region.problem, region.groups) == ((GROUPS * N, K, TOKENS), GROUPS)
    rewrite(graph, [region])
    (call,) = (node for node in graph.nodes if str(node.target) == str(OP))
    assert [load.meta["val"].shape for load in call.args[2]] == [(GROUPS * N,), (GROUPS, K)]


@pytest.mark.parametrize(
    ("of_a", "of_b", "step"),
    [((N,), (K,), 1), ((GROUPS, N), (GROUPS, K), 1), ((GROUPS * N,), (GROUPS * K,), 2)],
    ids=["of_one_group", "in_a_table", "with_gaps"],
)
def test_other_scales_of_k_in_groups_are_refused(
    of_a: tuple[int, ...], of_b: tuple[int, ...], step: int
) -> None:
    regions, (rejection,) = walk(fp8_gradient(of_a, of_b, step))
    assert not regions and rejection.reason is Reason.GROUPED
    assert f"supported: ({GROUPS * N}) and ({GROUPS * K}) in float32" in rejection.message


@pytest.mark.parametrize("which", [0, 1])
def test_k_in_groups_is_contiguous_in_neither_operand(which: int) -> None:
    def fn(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(dy.t(), x, offs=ends).relu()

    operands = [torch.randn(M, N).to(BF16), torch.randn(M, K).to(BF16)]
    operands[which] = operands[which].t().contiguous().t()
    (report,) = collect(fn, (*operands, given()[2]))
    (rejection,) = report.rejections
    assert not report.regions and rejection.reason is Reason.OPERAND_LAYOUT
    assert "where K lies in groups" in rejection.message


def block(x: Tensor, weight: Tensor, down: Tensor, ends: Tensor, routing: Tensor) -> Tensor:
    """Experts: gate and up, down, and routing weights."""
    gate, up = experts(x, weight, ends).chunk(2, -1)
    return experts(F.silu(gate) * up, down, ends) * routing[:, None]


def test_the_gradient_of_a_block_of_experts_is_eagers(fresh_compiler: Callable[..., None]) -> None:
    """fp32 gradients of fp32 weights, which are cast in the block, take K in groups into kernels."""

    def fn(x: Tensor, weight: Tensor, down: Tensor, ends: Tensor, routing: Tensor) -> Tensor:
        return block(x, weight.to(BF16), down.to(BF16), ends, routing).float().square().mean()

    generator = torch.Generator().manual_seed(3)
    x, _, ends = given()
    shapes = ((GROUPS, 2 * N, K), (GROUPS, K, N), (M, 1))
    weight, down, routing = (torch.randn(shape, generator=generator) for shape in shapes)
    leaves = [x, weight, down, routing[:, 0]]
    gradients = []
    for call in (fn, torch.compile(fn, backend=cute)):
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        call(own[0], own[1], own[2], ends, own[3]).backward()
        gradients.append([leaf.grad for leaf in own])
    for ours, eager in zip(gradients[1], gradients[0], strict=True):
        assert (ours - eager).norm() < 0.01 * eager.norm()
    assert counters["cute_backend"]["regions"] >= 3


def added_back(x: Tensor, weight: Tensor, down: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    """A whole mixture of experts: rows of each expert's tokens, the block, and their sum by tokens."""
    of_rows, order = torch.sort(ids.flatten(), stable=True)
    counts = torch.histc(of_rows.float(), bins=GROUPS, min=0, max=GROUPS - 1)
    ends, tokens = torch.cumsum(counts, 0, dtype=torch.int32), order // ids.shape[1]
    y = block(x[tokens], weight, down, ends, routing.flatten()[order])
    return torch.zeros_like(x).index_add(0, tokens, y)


def test_tokens_are_added_back_behind_two_kernels(fresh_compiler: Callable[..., None]) -> None:
    """`index_add`, which adds rows in any order, stays Inductor's. All before it is in two kernels."""
    generator = torch.Generator().manual_seed(5)
    x, weight, down, routing = (
        torch.randn(shape, generator=generator).to(BF16)
        for shape in ((M, K), (GROUPS, 2 * N, K), (GROUPS, K, N), (M, 2))
    )
    ids = torch.rand(M, GROUPS, generator=generator).topk(2).indices
    args = (x, weight, down, ids, routing)
    (report,) = collect(added_back, args)
    gated, second = report.regions
    assert len(gated.spec.accumulators) == 2
    assert [load.kind for load in second.spec.loads] == [LoadKind.COLVEC]
    result, eager = torch.compile(added_back, backend=cute)(*args).float(), added_back(*args).float()
    assert (result - eager).norm() < 0.01 * eager.norm()
    assert counters["cute_backend"]["regions"] == 2


def test_an_a100_has_no_kernel_of_groups() -> None:
    given_rows, weights = ((24, 16), torch.bfloat16), ((GROUPS, 16, 40), torch.bfloat16)
    made = Graph()
    left, right = (
        made.input(name, *each, device="cuda:0") for name, each in (("a", given_rows), ("b", weights))
    )
    ends = made.input("ends", (GROUPS,), torch.int32, device="cuda:0")
    product = made.call(aten._grouped_mm.default, left, right, ends)
    graph = made.output(made.call(aten.relu.default, product))
    assert len(walk(graph)[0]) == 1
    regions, (rejection,) = walk(graph, capability=(8, 0))
    assert not regions and rejection.reason is Reason.GROUPED
    assert "multiplies rows in groups, which no kernel of sm_80 does" in rejection.message


def sorted_by(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of all rows in order, and where those of each end."""
    experts_of_rows, _ = torch.sort(ids.reshape(-1))
    counts = torch.histc(experts_of_rows.float(), bins=GROUPS, min=0, max=GROUPS - 1)
    return experts_of_rows, torch.cumsum(counts, 0, dtype=torch.int32)


def biased(x: Tensor, weight: Tensor, router: Tensor, bias: Tensor) -> Tensor:
    of_rows, ends = sorted_by(torch.topk(router, 2, dim=-1).indices)
    y = experts(x, weight, ends) + bias[of_rows]
    return F.silu(y[:, ::2]) * y[:, 1::2]


def routed_rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weights, what 12 tokens think of each expert, and biases: the second expert is of no token."""
    x, weight, _ = given()
    generator = torch.Generator().manual_seed(1)
    router = torch.rand(M // 2, GROUPS, generator=generator)
    router[:, 1] = -1
    return x, weight, router, torch.randn(GROUPS, N, generator=generator).to(BF16)


def test_a_bias_of_each_rows_expert_is_a_vector_of_its_group(fresh_compiler: Callable[..., None]) -> None:
    args = routed_rows()
    (report,) = collect(biased, args)
    (region,) = report.regions
    assert [(load.kind, load.stride_n) for load in region.spec.loads] == [
        (LoadKind.GROUPVEC, Stride.OTHER)
    ] * 2
    assert not any(node.target is aten.index.Tensor for node in region.nodes)
    result = torch.compile(biased, backend=cute)(*args)
    torch.testing.assert_close(result, biased(*args), rtol=0.03, atol=0.03)
    assert counters["cute_backend"]["regions"] == 1


def test_groups_may_be_counted_of_integers_and_the_bias_have_gaps() -> None:
    def fn(x: Tensor, weight: Tensor, scores: Tensor, bias: Tensor) -> Tensor:
        of_rows, _ = torch.sort(torch.argmax(scores, -1), stable=True)
        counts = torch.histc(of_rows.int().float(), bins=GROUPS, min=0, max=GROUPS - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        return (experts(x, weight, ends) * bias[:, ::2][of_rows]).relu()

    x, weight, _ = given()
    (report,) = collect(fn, (x, weight, torch.rand(M, GROUPS), torch.rand(GROUPS, 2 * N)))
    (load,) = report.regions[0].spec.loads
    assert (load.kind, load.dtype, load.stride_m, load.stride_n) == (
        LoadKind.GROUPVEC,
        DType.F32,
        Stride.OTHER,
        Stride.OTHER,
    )


def unsorted(ids: Tensor) -> tuple[Tensor, Tensor]:
    return ids.reshape(-1), sorted_by(ids)[1]


def from_the_last(ids: Tensor) -> tuple[Tensor, Tensor]:
    of_rows, _ = torch.sort(ids.reshape(-1), descending=True)
    return of_rows, torch.cumsum(torch.histc(of_rows.float(), GROUPS, 0, GROUPS - 1), 0, dtype=torch.int32)


def of_more_bins(ids: Tensor) -> tuple[Tensor, Tensor]:
    of_rows, _ = sorted_by(ids)
    return of_rows, torch.cumsum(torch.histc(of_rows.float(), GROUPS, 0, GROUPS), 0, dtype=torch.int32)


def of_any_number(ids: Tensor) -> tuple[Tensor, Tensor]:
    return sorted_by(ids - 1)


@pytest.mark.parametrize("rows", [unsorted, from_the_last, of_more_bins, of_any_number])
def test_what_may_be_another_groups_vector_is_gathered_first(
    rows: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    def fn(x: Tensor, weight: Tensor, router: Tensor, bias: Tensor) -> Tensor:
        of_rows, ends = rows(torch.topk(router, 2, dim=-1).indices)
        return (experts(x, weight, ends) + bias[of_rows]).relu()

    (report,) = collect(fn, routed_rows())
    assert [load.kind for load in report.regions[0].spec.loads] == [LoadKind.EXACT]


def test_a_table_of_more_rows_than_groups_is_gathered_first() -> None:
    x, weight, router, bias = routed_rows()
    (report,) = collect(biased, (x, weight, router, torch.cat([bias, bias])))
    assert {load.kind for load in report.regions[0].spec.loads} == {LoadKind.EXACT}


def scaled(scale_a: tuple[int, ...], scale_b: tuple[int, ...], recipe: int | None = None) -> fx.GraphModule:
    """A product of fp8 rows in groups, with relu behind it; with a `recipe`, by the op's second version."""
    made, fp8 = Graph(), torch.float8_e4m3fn
    a = made.input("a", (M, K), fp8, device="cuda:0")
    weight = made.input("b", (GROUPS, N, K), fp8, device="cuda:0")
    of_a = made.input("scale_a", scale_a, torch.float32, device="cuda:0")
    of_b = made.input("scale_b", scale_b, torch.float32, device="cuda:0")
    ends = made.input("ends", (GROUPS,), torch.int32, device="cuda:0")
    b = made.call(aten.permute.default, weight, [0, 2, 1])
    product = made.call(aten._scaled_grouped_mm.default, a, b, of_a, of_b, ends, out_dtype=BF16)
    if recipe is not None:  # of which torch 2.13 has no fake result
        given_scales = ([of_a], [recipe], [0], [of_b], [recipe], [0])
        product.target = aten._scaled_grouped_mm_v2.default
        product.args = (a, b, *given_scales, ends)
    return made.output(made.call(aten.relu.default, product))


@pytest.mark.parametrize("recipe", [None, 1], ids=["by_shape", "by_name"])
def test_rows_and_columns_of_groups_have_scales(recipe: int | None) -> None:
    (region,), _ = walk(scaled((M,), (GROUPS, N), recipe))
    acc = region.spec.product
    assert (acc.kind, acc.a_dtype, acc.fast_accum) == (ProductKind.GROUPED, DType.E4M3, False)
    assert [(load.name, load.kind) for load in region.spec.loads] == [
        ("scale_a", LoadKind.COLVEC),
        ("scale_b", LoadKind.GROUPVEC),
    ]


def test_groups_scaled_otherwise_than_by_rows_are_refused() -> None:
    regions, (rejection,) = walk(scaled((M,), (GROUPS, N), recipe=3))
    assert not regions and rejection.reason is Reason.GROUPED


def test_scaled_batches_are_refused() -> None:
    made, fp8 = Graph(), torch.float8_e4m3fn
    a = made.input("a", (GROUPS, 16, K), fp8, device="cuda:0")
    weight = made.input("b", (GROUPS, N, K), fp8, device="cuda:0")
    of_a = made.input("scale_a", (GROUPS, 16), torch.float32, device="cuda:0")
    of_b = made.input("scale_b", (GROUPS, N), torch.float32, device="cuda:0")
    b = made.call(aten.permute.default, weight, [0, 2, 1])
    product = made.call(aten._scaled_grouped_mm.default, a, b, of_a, of_b, out_dtype=BF16)
    regions, (rejection,) = walk(made.output(made.call(aten.relu.default, product)))
    assert not regions and rejection.reason is Reason.GROUPED
    assert f"(4, 16, {K}) by (4, {K}, {N}) without offsets; supported: in fp8, " in rejection.message


def mx_groups(of_a: tuple[int, ...], of_b: tuple[int, ...], swizzle: int | None = None) -> fx.GraphModule:
    """MXFP8 rows in groups, with relu behind them; with a `swizzle`, by the op's second version."""
    made, fp8, e8m0, k = Graph(), torch.float8_e4m3fn, torch.float8_e8m0fnu, 96
    a = made.input("a", (M, k), fp8, device="cuda:0")
    weight = made.input("b", (GROUPS, N, k), fp8, device="cuda:0")
    scales = [
        made.input(name, shape, e8m0, device="cuda:0") for name, shape in (("of_a", of_a), ("of_b", of_b))
    ]
    ends = made.input("ends", (GROUPS,), torch.int32, device="cuda:0")
    b = made.call(aten.permute.default, weight, [0, 2, 1])
    shapes = [
        made.input(name, shape, e8m0, device="cuda:0")
        for name, shape in (("any_a", (512, 4)), ("any_b", (GROUPS, 512)))
    ]
    product = made.call(aten._scaled_grouped_mm.default, a, b, *shapes, ends, out_dtype=BF16)
    product.args = (a, b, *scales, ends)  # torch refuses to trace some of the scales
    if swizzle is not None:
        product.target = aten._scaled_grouped_mm_v2.default
        product.args = (a, b, scales[:1], [3], [swizzle], scales[1:], [3], [swizzle], ends)
        product.kwargs = {}
    return made.output(made.call(aten.relu.default, product))


@pytest.mark.parametrize("swizzle", [None, 1], ids=["by_dtype", "by_name"])
def test_mxfp8_rows_in_groups_have_scales_in_tiles_of_their_group(swizzle: int | None) -> None:
    graph = mx_groups((3 * 128, 4), (GROUPS, 128 * 4), swizzle)
    (region,), _ = walk(graph, capability=(10, 0))
    acc = region.spec.product
    assert (acc.kind, acc.a_scaling, acc.b_scaling) == (ProductKind.GROUPED, Scaling.MX, Scaling.MX)
    regions, (rejection,) = walk(graph, capability=(9, 0))
    assert not regions and rejection.reason is Reason.RECIPE
    rewrite(graph, [region])
    (call,) = (node for node in graph.nodes if str(node.target) == str(OP))
    (_, _, rows), (_, columns) = call.args[:2]
    assert (rows.meta["val"].shape, columns.meta["val"].shape) == ((3 * 512,), (GROUPS, 512))


@pytest.mark.parametrize(
    ("of_a", "of_b", "swizzle"),
    [
        ((3 * 128, 3), (GROUPS, 512), None),
        ((3 * 512,), (GROUPS, 512), None),
        ((3 * 128, 4), (GROUPS, 1024), None),
        ((3 * 128, 4), (GROUPS, 512), 0),
    ],
    ids=["unpadded", "in_a_row", "of_other_columns", "no_swizzle"],
)
def test_other_scales_of_mxfp8_in_groups_are_refused(
    of_a: tuple[int, ...], of_b: tuple[int, ...], swizzle: int | None
) -> None:
    regions, (rejection,) = walk(mx_groups(of_a, of_b, swizzle), capability=(10, 0))
    assert not regions and rejection.reason is Reason.GROUPED
    if swizzle == 0:
        assert "has scales of the recipe BlockWise1x32 by BlockWise1x32; supported: " in rejection.message
        return
    shapes = [", ".join(map(str, each)) for each in (of_a, of_b)]
    assert f"has scale_a float8_e8m0fnu ({shapes[0]}" in rejection.message
    assert f"scale_b float8_e8m0fnu ({shapes[1]}); supported: (padded rows of all groups" in rejection.message


E8M0, E4M3, FP4 = torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.float4_e2m1fn_x2


def fp4_groups(recipe: list[int], block: int, of_a: tuple[int, ...], of_b: tuple[int, ...]) -> fx.GraphModule:
    """fp4 rows in groups, with relu behind them. Where the recipe has scales of whole operands, those of A
    and of B have the shapes given."""
    made, k = Graph(), 288
    scales = E8M0 if block == 32 else E4M3
    a = made.input("a", (M, k // 2), FP4, device="cuda:0")
    b = made.call(aten.permute.default, made.input("b", (GROUPS, N, k // 2), FP4, device="cuda:0"), [0, 2, 1])
    wide = -(-k // (4 * block)) * 4
    blocks_a = made.input("blocks_a", (3 * 128, wide), scales, device="cuda:0")
    blocks_b = made.input("blocks_b", (GROUPS, 128 * wide), scales, device="cuda:0")
    whole = [
        [made.input(name, shape, torch.float32, device="cuda:0")] if len(recipe) > 1 else []
        for name, shape in (("of_a", of_a), ("of_b", of_b))
    ]
    ends = made.input("ends", (GROUPS,), torch.int32, device="cuda:0")
    # Torch 2.13 has no fake result of the op's second version.
    like = [
        made.input(name, shape, device="cuda:0") for name, shape in (("x", (M, 96)), ("w", (GROUPS, 96, N)))
    ]
    product = made.call(aten._grouped_mm.default, *like, ends)
    product.target = aten._scaled_grouped_mm_v2.default
    given_a, given_b = [blocks_a, *whole[0]], [blocks_b, *whole[1]]
    product.args = (a, b, given_a, recipe, [1], given_b, recipe, [1], ends)
    return made.output(made.call(aten.relu.default, product))


@pytest.mark.parametrize(
    ("recipe", "block", "of_a", "of_b", "kinds"),
    [
        ([3], 32, (), (), []),
        ([2, 0], 16, (), (1,), [LoadKind.SCALAR, LoadKind.SCALAR]),
        ([2, 0], 16, (GROUPS,), (GROUPS,), [LoadKind.GROUPVEC, LoadKind.GROUPVEC]),
    ],
    ids=["mxfp4", "nvfp4", "nvfp4_of_each_expert"],
)
def test_fp4_rows_in_groups_have_scales_of_blocks_and_of_operands(
    recipe: list[int], block: int, of_a: tuple[int, ...], of_b: tuple[int, ...], kinds: list[LoadKind]
) -> None:
    graph = fp4_groups(recipe, block, of_a, of_b)
    (region,), _ = walk(graph, capability=(10, 0))
    acc = region.spec.product
    scaling = Scaling.MX if block == 32 else Scaling.NV
    assert (acc.kind, acc.a_dtype, acc.a_scaling) == (ProductKind.GROUPED, DType.E2M1X2, scaling)
    assert [load.kind for load in region.spec.loads] == kinds
    rewrite(graph, [region])
    (call,) = (node for node in graph.nodes if str(node.target) == str(OP))
    loads = [load.meta["val"] for load in call.args[2]]
    if LoadKind.GROUPVEC in kinds:
        assert [(load.shape, load.stride()) for load in loads] == [((GROUPS, N), (1, 0))] * 2


def test_a_scale_of_another_number_of_fp4_operands_is_refused() -> None:
    regions, (rejection,) = walk(fp4_groups([2, 0], 16, (GROUPS,), (GROUPS + 1,)), capability=(10, 0))
    assert not regions and rejection.reason is Reason.GROUPED
    assert "for the second level of NVFP4's scales, one number or (G,)" in rejection.message
