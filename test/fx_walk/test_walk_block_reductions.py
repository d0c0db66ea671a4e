"""Reductions over blocks of columns that the region reads again: norms by head, softmaxes over groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.utils import counters

from cute_backend import config
from cute_backend.backend import cute
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.kinds import reductions
from cute_backend.kinds.blocks.reduced import BLOCK_REDUCTIONS
from cute_backend.planning import Arch, tile_table
from cute_backend.spec import Axis, Blocks, LoadKind, Order, Stride
from support.fx_walk.exact import integers, product_inputs
from support.fx_walk.synthetic import BF16, Graph, aten, called, rewritten, run, walk

BATCHES, ROWS, HEADS, WIDTH, K = 2, 4, 3, 16, 16
M, N = BATCHES * ROWS, HEADS * WIDTH
ROW = integers(WIDTH)


def heads(y: Tensor) -> Tensor:
    return y.view(BATCHES, ROWS, HEADS, WIDTH).float()


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def quantised(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1).clamp(min=1e-4) / 448
    return (x / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale.unsqueeze(-1)


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "qwen3": lambda y: ROW * rms(heads(y)).to(BF16),
    "heads_first": lambda y: (rms(heads(y)) * ROW).transpose(1, 2),
    "moved_before": lambda y: rms(heads(y).transpose(1, 2)) * ROW,
    "rms_norm": lambda y: F.rms_norm(y.unflatten(-1, (HEADS, WIDTH)), (WIDTH,), ROW),
    "layer_norm": lambda y: F.layer_norm(y.view(M, HEADS, WIDTH), (WIDTH,), ROW, eps=1e-3),
    "group_norm_of_two_axes": lambda y: F.layer_norm(heads(y).view(M, HEADS, 2, WIDTH // 2), (2, WIDTH // 2)),
    "softmax": lambda y: heads(y).softmax(-1).flatten(-2),
    "log_softmax": lambda y: heads(y).log_softmax(-1),
    "logsumexp": lambda y: heads(y) - heads(y).logsumexp(-1, keepdim=True),
    "var": lambda y: (heads(y) - heads(y).mean(-1)[..., None]) / (heads(y).var(-1)[..., None] + 1).sqrt(),
    "extrema": lambda y: (heads(y) - heads(y).amin(-1, True)) / (heads(y).max(-1, True)[0] + 99),
    "any": lambda y: heads(y) * (heads(y) > 9).any(-1, keepdim=True),
    "expanded": lambda y: y * heads(y).sum(-1, True).expand(BATCHES, ROWS, HEADS, WIDTH).reshape(M, N),
    "repeated": lambda y: y * heads(y).view(M, HEADS, WIDTH).sum(-1).repeat_interleave(WIDTH, -1),
    "quantised": lambda y: quantised(heads(y)),
    "a_number_of_each_head": lambda y: (heads(y) - (heads(y).mean(-1, True) + ROW[:HEADS, None])).relu(),
}


def test_every_spelling_through_torch_compile(fresh_compiler: None) -> None:
    """One product each, in one graph: each is one kernel, and gives what eager does."""
    products = [product_inputs(M, N) for _ in SPELLINGS]

    def program(products: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [spelling(a @ b) for (a, b), spelling in zip(products, SPELLINGS.values(), strict=True)]

    results, expected = torch.compile(program, backend=cute)(products), program(products)
    for name, result, wanted in zip(SPELLINGS, results, expected, strict=True):
        assert result.dtype is wanted.dtype and result.stride() == wanted.stride(), name
        torch.testing.assert_close(result.float(), wanted.float(), rtol=1e-2, atol=1e-2, msg=name)
    assert counters["cute_backend"] == {"anchors": len(SPELLINGS), "regions": len(SPELLINGS)}
    (report,) = collect(program, (products,))
    for name, region in zip(SPELLINGS, report.regions, strict=True):
        assert {op.block for op in region.spec.ops if op.block} == {WIDTH}, name
        assert not region.spec.reductions, name


def by_largest(y: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers' finegrained_fp8 quantises activations."""
    x = y.relu().float().view(M, -1, WIDTH)
    scale = x.abs().amax(-1) / 448.0
    return (x / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).reshape(M, N), scale


def by_inverse(y: Tensor) -> tuple[Tensor, Tensor]:
    """As DeepSeek does, which multiplies by the inverse of what it stores."""
    x = y.relu().view(M, -1, WIDTH)
    largest = x.abs().float().amax(dim=2).view(M, -1).clamp(1e-4)
    values = (x * (448.0 / largest.unsqueeze(2))).to(torch.float8_e4m3fn)
    return values.view(M, N), (largest / 448.0).view(M, -1)


def by_powers_of_two(y: Tensor) -> tuple[Tensor, Tensor]:
    x = y.relu().float().view(M, -1, WIDTH)
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True).clamp(1e-4) / 448)))
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1), scale.squeeze(-1)


def by_groups_of_all_elements(y: Tensor) -> tuple[Tensor, Tensor]:
    """As vLLM's reference, `native_per_token_group_quant_fp8`, whose groups are rows of their own."""
    x = y.relu()
    groups = x.reshape(x.numel() // WIDTH, WIDTH)
    largest = groups.abs().max(dim=-1, keepdim=True)[0].clamp(min=1e-10).to(torch.float32)
    scale = largest / 448.0
    values = (groups / scale).clamp(min=-448.0, max=448.0).to(torch.float8_e4m3fn)
    return values.reshape(x.shape), scale.reshape(*x.shape[:-1], x.shape[-1] // WIDTH)


def by_groups_of_batches(y: Tensor) -> tuple[Tensor, Tensor]:
    """As `by_groups_of_all_elements`, of (B, S, N), with the values left in groups."""
    groups = y.view(2, -1, N).relu().reshape(-1, WIDTH).float()
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) * (1.0 / 448.0)
    return (groups / scale).to(torch.float8_e4m3fn), scale


def for_the_next_product(y: Tensor) -> tuple[Tensor, Tensor]:
    """Scales with strides (1, M), as `_scaled_mm` takes them."""
    values, scale = by_largest(y)
    return values, scale.t().contiguous().t()


QUANTISED = [
    by_largest,
    by_inverse,
    by_powers_of_two,
    for_the_next_product,
    by_groups_of_all_elements,
    by_groups_of_batches,
]


def test_quantised_blocks_and_their_scales_are_one_kernel_each(fresh_compiler: None) -> None:
    """Products of integers are exact, and so is all that is compared here."""
    products = [product_inputs(M, N) for _ in QUANTISED]

    def program(products: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        results = [spelling(a @ b) for (a, b), spelling in zip(products, QUANTISED, strict=True)]
        return [each for pair in results for each in pair]

    results, expected = torch.compile(program, backend=cute)(products), program(products)
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype is wanted.dtype and result.stride() == wanted.stride()
        assert torch.equal(result.float(), wanted.float())
    assert counters["cute_backend"] == {"anchors": len(QUANTISED), "regions": len(QUANTISED)}
    (report,) = collect(program, (products,))
    assert not report.rejections
    scales = [store for region in report.regions for store in region.spec.stores if store.form.block_columns]
    assert [store.form.block_columns for store in scales] == [WIDTH] * len(QUANTISED)
    assert [store.form.order for store in scales].count(Order.COLUMN) == 1, "for the next product"


def chain(made: Graph, dims: list[int] | None = None, n: int = N) -> tuple[fx.Node, fx.Node]:
    """A product seen as (M, H, D), and it less its means."""
    y = made.call(aten.reshape.default, made.mm(M, n, K), [M, n // WIDTH, WIDTH])
    mean = made.call(aten.mean.dim, y, dims or [-1], True)
    return y, made.call(aten.sub.Tensor, y, mean)


def groups_of(y: Tensor) -> Tensor:
    return y.reshape(-1, WIDTH)


JOINED: dict[str, tuple[Callable[[Tensor], Any], Reason]] = {
    "a number for each group": (
        lambda y: groups_of(y) * torch.arange(M * N // WIDTH)[:, None].bfloat16(),
        Reason.BLOCKS,
    ),
    "a number for each column of a group": (
        lambda y: groups_of(y) * torch.arange(WIDTH).bfloat16(),
        Reason.BLOCKS,
    ),
    "over groups": (lambda y: (groups_of(y) * 2).amax(0), Reason.REDUCED_AXES),
    "over all": (lambda y: (groups_of(y) * 2).amax(), Reason.REDUCED_AXES),
    "transposed": (lambda y: groups_of(y).t() * 2, Reason.REARRANGED),
    "across rows": (lambda y: y.reshape(-1, N * 2) * 2, Reason.REARRANGED),
    "across blocks": (lambda y: y.reshape(-1, N // 3 * 2) * 2, Reason.REARRANGED),
}


@pytest.mark.parametrize("case", JOINED)
def test_what_an_axis_of_rows_and_blocks_does_not_tell_apart_is_refused(case: str) -> None:
    program, reason = JOINED[case]
    (report,) = collect(lambda a, b: program(a @ b), product_inputs(M, N))
    assert reason in {rejection.reason for rejection in report.rejections}


def test_a_kind_that_reduces_no_blocks_is_left_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the kind is, the rest of the graph is fused."""
    monkeypatch.delitem(BLOCK_REDUCTIONS, reductions.MIN.name)
    monkeypatch.setitem(vars(reductions.MIN), "of_blocks", False)

    def program(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        plane = (a @ b).relu()
        return plane, heads(plane).amin(-1)

    (report,) = collect(program, product_inputs(M, N))
    assert len(report.regions) == 1
    assert Reason.INTERNAL_ERROR not in {each.reason for each in report.rejections}


def test_a_block_is_known_by_its_axis_and_not_by_its_size() -> None:
    """With as many rows as heads and columns of a head, a result that meets others axes is refused."""
    made = Graph()
    y = made.call(aten.reshape.default, made.mm(16, 256, K), [16, 16, 16])
    largest = made.call(aten.amax.default, y, [-1])
    wrong = made.call(aten.sub.Tensor, y, largest)
    _, rejections = walk(made.output(wrong))
    assert (wrong.name, Reason.REARRANGED) in [(each.node, each.reason) for each in rejections]
    made = Graph()
    y = made.call(aten.reshape.default, made.mm(16, 256, K), [16, 16, 16])
    largest = made.call(aten.amax.default, y, [-1])
    graph = made.output(made.call(aten.sub.Tensor, y, made.call(aten.unsqueeze.default, largest, 2)))
    a, b = product_inputs(16, 256)
    (result,) = run(rewritten(graph), a, b)
    plane = (a.float() @ b.float()).view(16, 16, 16)
    assert torch.equal(result, (plane - plane.amax(-1, True)).to(BF16))


def test_work_on_the_results_of_blocks_reads_operands_by_blocks() -> None:
    made = Graph()
    y = made.call(aten.reshape.default, made.mm(M, N, K), [M, HEADS, WIDTH])
    mean = made.call(aten.add.Tensor, made.call(aten.mean.dim, y, [-1]), made.input("of_head", (HEADS,)))
    mean = made.call(aten.mul.Tensor, mean, made.input("of_row", (M, 1)))
    graph = made.output(made.call(aten.sub.Tensor, y, made.call(aten.unsqueeze.default, mean, -1)))
    (region,), rejections = walk(graph)
    assert not rejections
    of_head, of_row = region.spec.loads
    assert of_head.blocks == Blocks(WIDTH, Stride.ONE, Stride.ZERO) and of_row.blocks is None
    given = product_inputs(M, N), integers(HEADS), integers(M, 1)
    (result,) = run(rewritten(graph), *given[0], *given[1:])
    plane = (given[0][0].float() @ given[0][1].float()).view(M, HEADS, WIDTH)
    wanted = plane - ((plane.mean(-1) + given[1]) * given[2])[..., None]
    torch.testing.assert_close(result.float(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.settings(block_reductions="always")
@pytest.mark.usefixtures("free_launches")
def test_a_row_that_a_tile_holds_is_a_block_where_it_is_read_again() -> None:
    made = Graph()
    plane = made.call(aten.relu.default, made.mm(M, 64, K))
    total = made.call(aten.sum.dim_IntList, plane, [-1], True)
    graph = made.output(made.call(aten.div.Tensor, plane, made.call(aten.add.Tensor, total, 1.0)))
    (region,), rejections = walk(graph)
    assert not rejections and [op.block for op in region.spec.ops if op.block] == [64]
    assert called(rewritten(graph)) == ["cute_backend.gemm_epilogue.default"]
    made = Graph()
    plane = made.call(aten.relu.default, made.mm(M, 64, K))
    total = made.call(aten.sum.dim_IntList, plane, [-1], True)
    (region,), _ = walk(made.output(plane, made.call(aten.sqrt.default, total)))
    assert [(each.axis, each.kind) for each in region.spec.reductions.values()] == [
        (Axis.ROW, reductions.SUM)
    ]


@pytest.mark.parametrize("n", [56, 4096])
def test_a_row_that_no_tile_holds_is_whole_when_the_kernel_is_done(n: int) -> None:
    made = Graph()
    plane = made.call(aten.relu.default, made.mm(M, n, K))
    node = made.call(aten.div.Tensor, plane, made.call(aten.sum.dim_IntList, plane, [-1], True))
    _, rejections = walk(made.output(node))
    assert (node.name, Reason.FEEDBACK) in [(each.node, each.reason) for each in rejections]


HELD = {
    "sm_80": "8, 16, 32, 64, 128",
    "sm_90a": "8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256",
    "sm_100a": "8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256",
}


@pytest.mark.settings(block_reductions="always")
@pytest.mark.parametrize(
    ("columns", "arch"), [(56, "sm_90a"), (24, "sm_80"), (12, "sm_90a"), (272, "sm_90a"), (112, "sm_100a")]
)
def test_blocks_that_no_tile_holds_are_refused_with_those_that_one_does(columns: int, arch: str) -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b).relu().view(M, 3, columns).softmax(-1)

    (report,) = collect(program, product_inputs(M, 3 * columns), arch=arch)
    (message,) = (each.message for each in report.rejections if each.reason is Reason.BLOCK_SIZE)
    assert (
        message == f"it reduces blocks of {columns} columns, which no tile holds whole; "
        f"supported block sizes: {HELD[arch]}"
    )


@pytest.mark.sweep(2)
@pytest.mark.settings(block_reductions="always")
@pytest.mark.parametrize("columns", [24, 40, 80, 96])
def test_heads_of_a_whole_tile_are_normalised_on_hopper(columns: int, fresh_compiler: None) -> None:
    def program(a: Tensor, b: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = (a @ b).view(M, 3, columns)
        return F.rms_norm(y.float(), (columns,), weight).to(BF16), F.layer_norm(y, (columns,))

    inputs = (*product_inputs(M, 3 * columns), torch.rand(columns))
    (report,) = collect(program, inputs, arch="sm_90a")
    (region,) = report.regions
    assert region.spec.whole_columns == columns and len(region.spec.planes) == 2
    results = torch.compile(program, backend=cute)(*inputs)
    for result, wanted in zip(results, program(*inputs), strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-2, atol=1e-2)
    assert counters["cute_backend"] == {"anchors": 1, "regions": 1}
    (elsewhere,) = collect(program, inputs, arch="sm_100a")
    assert (Reason.BLOCK_SIZE in [each.reason for each in elsewhere.rejections]) is (columns < 80)


@pytest.mark.settings(block_reductions="always")
@pytest.mark.parametrize(("columns", "most"), [(64, 4), (40, 2), (96, 4)])
def test_a_whole_tile_leaves_registers_for_two_results(columns: int, most: int) -> None:
    def program(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = F.layer_norm((a @ b).view(M, 3, columns), (columns,))
        return y, *(torch.cumsum(y.sin() * i, 0) for i in range(1, 5))

    for arch in ("sm_90a", "cpu"):
        (report,) = collect(program, product_inputs(M, 3 * columns), arch=None if arch == "cpu" else arch)
        assert [len(region.spec.planes) <= most for region in report.regions] == [True], arch
        assert all(tile_table(Arch.SM90A, region.spec) for region in report.regions)


@pytest.mark.settings(block_reductions="always")
def test_a_whole_tile_leaves_registers_for_one_plane() -> None:
    """A plane that is read before and after the norm is held by a visit, which leaves none for another."""

    def program(a: Tensor, b: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = F.layer_norm((a @ b + first).view(M, 3, 96), (96,)).view(M, 288) + first
        return torch.cumsum(y * second, 0)

    inputs = (*product_inputs(M, 288), integers(M, 288), integers(M, 288))
    (report,) = collect(program, inputs, arch="sm_90a")
    (region,) = report.regions
    assert len(region.spec.loads_of(LoadKind.EXACT)) == 1 and tile_table(Arch.SM90A, region.spec)
    assert Reason.BLOCK_SIZE in [each.reason for each in report.rejections]


@pytest.mark.settings(block_reductions="always")
def test_blocks_of_two_sizes_lie_in_one_visit() -> None:
    """A visit of 480 columns would hold both."""

    def program(a: Tensor, b: Tensor) -> Tensor:
        y = (a @ b).view(M, 30, 16).softmax(-1).view(M, 5, 96)
        return y.softmax(-1).view(M, 6, 80).softmax(-1)

    (report,) = collect(program, product_inputs(M, 480), arch="sm_90a")
    (region,) = report.regions
    assert region.spec.whole_columns == 96 and tile_table(Arch.SM90A, region.spec)
    (message,) = (each.message for each in report.rejections if each.reason is Reason.BLOCK_SIZE)
    assert "blocks of 480 columns" in message


@pytest.mark.parametrize("dims", [[1], [0], [0, 1]])
def test_results_of_blocks_are_not_reduced_again(dims: list[int]) -> None:
    """Each stands at all columns of its block, of which a sum would take every one."""
    made = Graph()
    y = made.call(aten.reshape.default, made.mm(M, N, K), [M, HEADS, WIDTH])
    total = made.call(aten.sum.dim_IntList, made.call(aten.amax.default, y, [-1]), dims)
    graph = made.output(total)
    _, rejections = walk(graph)
    assert (total.name, Reason.REDUCED_AXES) in [(each.node, each.reason) for each in rejections]
    a, b = product_inputs(M, N)
    (result,) = run(rewritten(graph), a, b)
    wanted = (a.float() @ b.float()).view(M, HEADS, WIDTH).amax(-1).to(BF16).sum(dims)
    assert torch.equal(result, wanted)


def test_a_pair_of_blocks_of_128_reads_no_plane() -> None:
    """Beside one no registers are left, on Hopper."""

    def gated(x: Tensor, gate: Tensor, up: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = (F.silu(x @ gate) * (x @ up)).float()
        y = (y if factor is None else y * factor).view(M, -1, 128)
        scale = y.abs().amax(-1) / 448
        return (y / scale[..., None]).to(torch.float8_e4m3fn).flatten(1), scale

    (a, b), (_, other) = product_inputs(M, 256), product_inputs(M, 256)
    (region,) = collect(gated, (a, b, other), arch="sm_90a")[0].regions
    assert len(region.spec.accumulators) == 2
    assert [store.form.block_columns for store in region.spec.stores] == [128, 0]
    (report,) = collect(gated, (a, b, other, integers(M, 256)), arch="sm_90a")
    assert Reason.BLOCK_SIZE in [each.reason for each in report.rejections]


def test_where_blocks_lie_counts_and_not_which_axes_are_reduced() -> None:
    """Heads are no block, nor is a part of a head together with rows."""
    for dims in ([1], [0, 2]):
        made = Graph()
        y, _ = chain(made, dims)
        (reduction,) = (user for user in y.users if user.target is aten.mean.dim)
        _, rejections = walk(made.output(*y.users))
        assert (reduction.name, Reason.REDUCED_AXES) in [(each.node, each.reason) for each in rejections]


def norm_by_head(a: Tensor, b: Tensor, plane: Tensor) -> Tensor:
    heads = (a @ b).view(M, -1, 64)
    return heads * (heads.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


def norm_after_residual(a: Tensor, b: Tensor, plane: Tensor) -> Tensor:
    heads = (a @ b + plane).view(M, -1, 64)
    return heads * (heads.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


def silu_by_plane_quantised(a: Tensor, b: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
    blocks = (F.silu(a @ b) * plane).view(M, -1, 128).float()
    scale = blocks.abs().amax(-1, keepdim=True) / 448
    return (blocks / scale).to(torch.float8_e4m3fn), scale


def norm_and_its_residual(a: Tensor, b: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
    """The value that is normed is stored as well."""
    y = a @ b + plane
    heads = y.view(M, -1, 64)
    return heads * (heads.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(), torch.cumsum(y, 0)


def residual_around_a_norm(a: Tensor, b: Tensor, plane: Tensor) -> Tensor:
    """The plane is read before the norm and after it."""
    return norm_after_residual(a, b, plane).view(M, -1) + plane


def product_around_a_norm(a: Tensor, b: Tensor, plane: Tensor) -> Tensor:
    """The product is read before the residual and after the norm."""
    y = a @ b
    heads = (y + plane).view(M, -1, 64)
    return heads * (heads.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * y.view(M, -1, 64)


def norm_and_product(a: Tensor, b: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
    """The product is stored as well, which is known only once the region has its end."""
    y = a @ b
    heads = (y + plane).view(M, -1, 64)
    normed = heads * (heads.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    return normed, torch.cumsum(y, 0)


def pair_quantised(a: Tensor, b: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = (a @ b).chunk(2, -1)
    blocks = (F.silu(gate) * up).view(M, -1, 64).float()
    scale = blocks.abs().amax(-1, keepdim=True) / 448
    return (blocks / scale).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize(
    ("program", "setting", "taken"),
    [
        (norm_by_head, "auto", True),
        (norm_by_head, "never", False),
        (norm_after_residual, "auto", True),
        (norm_after_residual, "never", False),
        (silu_by_plane_quantised, "auto", True),
        (norm_and_its_residual, "auto", True),
        (residual_around_a_norm, "auto", False),
        (residual_around_a_norm, "always", True),
        (product_around_a_norm, "auto", False),
        (norm_and_product, "auto", False),
        (norm_and_product, "always", True),
        (pair_quantised, "auto", True),
    ],
)
def test_blocks_are_reduced_where_that_pays_or_always(program: Callable, setting: str, taken: bool) -> None:
    with config.patch(block_reductions=setting):
        (report,) = collect(program, (*product_inputs(M, 256), integers(M, 256)), arch="sm_90a")
    reduced = [op for region in report.regions for op in region.spec.ops if op.block]
    assert bool(reduced) is taken
    assert (Reason.BLOCK_COST in {each.reason for each in report.rejections}) is not taken
    assert all(tile_table(Arch.SM90A, region.spec) for region in report.regions)
    if taken and setting == "auto":
        assert all(region.spec.visit_columns == 1 for region in report.regions)


@pytest.mark.settings(block_reductions="always")
@pytest.mark.parametrize(("columns", "visited"), [(8, 8), (96, 1)])
def test_a_row_behind_a_plane_is_a_block_if_visits_hold_it_or_passes_do(columns: int, visited: int) -> None:
    """For rows of 96 columns no visit has room beside a plane on Blackwell. Passes read the plane ahead."""
    x, w, plane = (
        torch.ones(size, dtype=torch.bfloat16) for size in ((16, 32), (32, columns), (16, columns))
    )
    (report,) = collect(lambda x, w, plane: (x @ w + plane).softmax(-1), (x, w, plane), arch="sm_100a")
    (region,) = report.regions
    assert not report.rejections
    assert {op.block for op in region.spec.ops} == {0, columns}
    assert region.spec.visit_columns == visited
