"""Planes whose columns are seen as blocks: heads, groups, whatever a view makes of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.utils import counters

from cute_backend.backend import cute
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.spec import Blocks, LoadKind, Order, Stride
from support.fx_walk.exact import integers, product_inputs
from support.fx_walk.spellings import EXACT, ROWVEC
from support.fx_walk.synthetic import BF16, Graph, aten, called, rewritten, run, walk

Z, ONE, S = Stride.ZERO, Stride.ONE, Stride.OTHER
BATCHES, ROWS, HEADS, WIDTH, K = 2, 3, 4, 8, 16
M, N = BATCHES * ROWS, HEADS * WIDTH

LOADS: dict[str, tuple[Tensor, LoadKind, tuple[Stride, ...], Blocks | None]] = {
    "one_row_of_all_heads": (integers(WIDTH), ROWVEC, (), Blocks(WIDTH, Z, ONE)),
    "strided_row": (integers(WIDTH, 3)[:, 1], ROWVEC, (), Blocks(WIDTH, Z, S)),
    "expanded_row": (
        integers(1, 1, 1, WIDTH).expand(BATCHES, 1, HEADS, WIDTH),
        ROWVEC,
        (),
        Blocks(8, Z, ONE),
    ),
    "number_of_a_head": (integers(HEADS, 1), ROWVEC, (), Blocks(WIDTH, ONE, Z)),
    "row_of_each_head": (integers(HEADS, WIDTH), ROWVEC, (), None),
    "padded_row_of_each_head": (integers(HEADS, WIDTH + 2)[:, 1:-1], ROWVEC, (), Blocks(WIDTH, S, ONE)),
    "transposed_row_of_each_head": (integers(WIDTH, HEADS).t(), ROWVEC, (), Blocks(WIDTH, ONE, S)),
    "row_of_a_place": (integers(ROWS, 1, WIDTH), EXACT, (Z, S), Blocks(WIDTH, Z, ONE)),
    "row_of_a_row": (integers(BATCHES, ROWS, 1, WIDTH), EXACT, (), Blocks(WIDTH, Z, ONE)),
    "number_of_a_row_and_head": (integers(BATCHES, ROWS, HEADS, 1), EXACT, (), None),
    "of_a_batch_and_head": (integers(BATCHES, 1, HEADS, 1), EXACT, (S, Z), Blocks(WIDTH, ONE, Z)),
    "heads_first": (
        integers(BATCHES, HEADS, ROWS, WIDTH).transpose(1, 2),
        EXACT,
        (S, S),
        Blocks(WIDTH, S, ONE),
    ),
    "plane": (integers(BATCHES, ROWS, HEADS, WIDTH), EXACT, (), None),
    "columns_first": (integers(HEADS, WIDTH, BATCHES, ROWS).permute(2, 3, 0, 1), EXACT, (), None),
    "windows_of_heads": (integers(99).as_strided((HEADS, WIDTH), (1, 1)), ROWVEC, (), Blocks(8, S, ONE)),
    "windows_of_places": (integers(99).as_strided((2, 3, 1, 8), (3, 1, 9, 1)), EXACT, (), Blocks(8, Z, ONE)),
    "column": (integers(BATCHES, ROWS, 1, 1), LoadKind.COLVEC, (), None),
}


def heads(made: Graph, m: object = M, n: object = N) -> fx.Node:
    """A product seen as (B, S, H, D)."""
    return made.call(aten.reshape.default, made.mm(m, n, K), [BATCHES, ROWS, HEADS, WIDTH])


def product() -> tuple[Tensor, Tensor, Tensor]:
    a, b = product_inputs(M, N)
    return a, b, (a.float() @ b.float()).reshape(BATCHES, ROWS, HEADS, WIDTH)


@pytest.mark.parametrize("moved", [False, True], ids=["places_first", "heads_first"])
@pytest.mark.parametrize("name", LOADS)
def test_a_load_has_a_class_along_blocks_and_within(name: str, moved: bool) -> None:
    """Whether the heads stand behind the places or, moved by a transpose, in front of them."""
    given, kind, modes, blocks = LOADS[name]
    if name == "number_of_a_row_and_head":
        blocks = Blocks(WIDTH, ONE, Z)
    made = Graph()
    value, load = heads(made), made.input("load", given.shape, strides=given.stride())
    if moved:
        padded = given.reshape((1,) * (4 - given.dim()) + given.shape).transpose(1, 2)
        load.meta["val"] = load.meta["val"].expand(padded.transpose(1, 2).shape).transpose(1, 2)
        given = padded
        value = made.call(aten.permute.default, value, [0, 2, 1, 3])
    graph = made.output(made.call(aten.add.Tensor, value, load))
    (region,), rejections = walk(graph)
    assert not rejections
    (spec_load,) = region.spec.loads
    assert (spec_load.kind, spec_load.m_modes, spec_load.blocks) == (kind, modes, blocks)
    if name == "columns_first":
        assert spec_load.order is Order.COLUMN
    assert called(rewritten(graph)) == ["cute_backend.gemm_epilogue.default"]
    a, b, plane = product()
    (result,) = run(graph, a, b, given)
    wanted = (plane.transpose(1, 2) if moved else plane) + given.float()
    assert torch.equal(result, wanted.to(BF16))
    assert result.stride() == wanted.to(BF16).stride()


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda y: y.view(BATCHES, ROWS, HEADS, WIDTH),
    "unflatten": lambda y: y.view(BATCHES, ROWS, N).unflatten(-1, (HEADS, WIDTH)),
    "from_a_batch_axis": lambda y: y.reshape(BATCHES, ROWS, N).reshape(BATCHES, ROWS, -1, WIDTH),
    "groups_of_heads": lambda y: y.view(BATCHES, ROWS, 2, HEADS // 2, WIDTH).flatten(2, 3),
    "moved_there_and_back": lambda y: y.view(BATCHES, ROWS, HEADS, WIDTH).transpose(1, 2).transpose(1, 2),
    "columns_first_and_back": lambda y: y.t().t().view(BATCHES, ROWS, HEADS, WIDTH),
    "axes_of_one": lambda y: y.view(BATCHES, 1, ROWS, HEADS, 1, WIDTH).squeeze(4).squeeze(1),
}
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "stay": lambda y: y,
    "transpose": lambda y: y.transpose(1, 2),
    "permute": lambda y: y.permute(0, 2, 1, 3),
    "swapaxes": lambda y: y.swapaxes(-2, -3),
    "movedim": lambda y: y.movedim(2, 1),
    "heads_outermost": lambda y: y.permute(2, 0, 1, 3),
}


def test_all_spellings_of_heads_through_torch_compile(fresh_compiler: None) -> None:
    """One product each, in one graph: each fused with work on its heads, and equal to eager to the bit."""
    moves = list(MOVES.values())
    products = [product_inputs(M, N) for _ in SPELLINGS]
    row, gate = integers(WIDTH), integers(HEADS, 1)

    def program(products: list[tuple[Tensor, Tensor]], row: Tensor, gate: Tensor) -> list[Tensor]:
        results = []
        for i, ((a, b), spelling) in enumerate(zip(products, SPELLINGS.values(), strict=True)):
            move = moves[i % len(moves)]
            y = move((spelling(a @ b) + row).relu())
            results.append(y - move(gate.expand(BATCHES, ROWS, HEADS, 1)))
        return results

    expected = program(products, row, gate)
    results = torch.compile(program, backend=cute)(products, row, gate)
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)
        assert result.stride() == wanted.stride()
    assert counters["cute_backend"] == {"anchors": len(SPELLINGS), "regions": len(SPELLINGS)}
    (report,) = collect(program, (products, row, gate))
    for region in report.regions:
        assert {load.blocks for load in region.spec.loads} == {Blocks(WIDTH, Z, ONE), Blocks(WIDTH, ONE, Z)}


def attention_input(x: Tensor, w: Tensor, row: Tensor, cosines: Tensor, residual: Tensor) -> Tensor:
    y = F.linear(x, w).unflatten(-1, (-1, row.shape[0])).transpose(1, 2)
    return (y * row + cosines).transpose(1, 2).flatten(2) + residual


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_heads_of_any_number_of_places_and_back(dynamic: bool, fresh_compiler: None) -> None:
    w, row = integers(N, K).clamp(-1, 1), integers(WIDTH).clamp(-2, 2)
    compiled = torch.compile(attention_input, backend=cute)
    for places in (3, 5) if dynamic else (3,):
        x, cosines = integers(BATCHES, places, K).clamp(-1, 1), integers(places, WIDTH)
        residual = integers(BATCHES, places, N)
        if dynamic:
            for tensor, axis in ((x, 1), (cosines, 0), (residual, 1)):
                torch._dynamo.mark_dynamic(tensor, axis)
        given = x, w, row, cosines, residual
        assert torch.equal(compiled(*given), attention_input(*given))
    assert counters["cute_backend"] == {"anchors": 1, "regions": 1}


def test_a_view_that_is_read_inside_and_outside_is_one_result() -> None:
    """The plane is written once, for the caller as heads and for the next step."""
    made = Graph()
    value = made.call(aten.relu.default, heads(made))
    moved = made.call(aten.permute.default, value, [0, 2, 1, 3])
    graph = made.output(moved, made.call(aten.mul.Tensor, moved, made.input("row", (WIDTH,))))
    (region,), rejections = walk(graph)
    assert not rejections and len(region.spec.stores) == 2
    a, b, plane = product()
    results = run(rewritten(graph), a, b, integers(WIDTH))
    wanted = plane.relu().transpose(1, 2)
    assert torch.equal(results[0], wanted.to(BF16))
    assert torch.equal(results[1], (wanted * integers(WIDTH)).to(BF16))


def test_a_copy_that_moves_heads_is_left_to_inductor() -> None:
    """A kernel writes a plane as it lies: (B, H, S, D) without gaps is another tensor's layout."""
    made = Graph()
    moved = made.call(aten.permute.default, made.call(aten.relu.default, heads(made)), [0, 2, 1, 3])
    copy = made.call(aten.clone.default, moved, memory_format=torch.contiguous_format)
    (region,), rejections = walk(made.output(copy))
    assert copy not in region.nodes and list(region.outputs) == [region.nodes[-1]]
    assert [(each.node, each.reason) for each in rejections] == [(copy.name, Reason.OUTPUT_LAYOUT)]


def test_reductions_see_heads_as_columns() -> None:
    """Over all heads and what each holds, a row; over rows, a column for each; over both, one number."""
    for dims, shape in (([2, 3], (M,)), ([0, 1], (N,)), ([0, 1, 2, 3], ())):
        made = Graph()
        graph = made.output(made.call(aten.amax.default, made.call(aten.relu.default, heads(made)), dims))
        (region,), rejections = walk(graph)
        assert not rejections and len(region.spec.reductions) == 1
        a, b, plane = product()
        (result,) = run(rewritten(graph), a, b)
        assert torch.equal(result, plane.relu().amax(dims).to(BF16)) and result.numel() == max(1, *shape, 1)


@pytest.mark.parametrize("dims", [[2], [0, 3], [1, 2, 3]])
def test_reductions_of_a_part_of_the_columns_are_refused(dims: list[int]) -> None:
    made = Graph()
    node = made.call(aten.amax.default, made.call(aten.relu.default, heads(made)), dims)
    _, rejections = walk(made.output(node))
    assert [(each.node, each.reason) for each in rejections] == [(node.name, Reason.REDUCED_AXES)]


MOVED_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows_of_moved_batches": lambda y: y.view(BATCHES, ROWS, N).transpose(0, 1).sum(-1),
    "columns_of_moved_heads": lambda y: y.view(M, HEADS, WIDTH).transpose(1, 2).amax(0),
    "place_in_a_transposed_plane": lambda y: y.t().argmax(),
    "place_in_one_row": lambda y: y[:1].view(HEADS, WIDTH).t().argmax(),
}


@pytest.mark.parametrize("name", MOVED_REDUCTIONS)
def test_reductions_that_count_moved_axes_are_refused(name: str) -> None:
    """A kernel writes the results of reductions, and counts places, in the product's order."""
    a, b = product_inputs(1 if name == "place_in_one_row" else M, N)
    (report,) = collect(lambda a, b: MOVED_REDUCTIONS[name]((a @ b).relu()), (a, b))
    assert not any(region.spec.reductions for region in report.regions)
    assert [each.reason for each in report.rejections] == [Reason.REDUCED_AXES]
    assert "whose axes were moved" in report.rejections[0].message


def test_a_reduction_of_moved_axes_that_leaves_none_of_them_is_fused() -> None:
    made = Graph()
    moved = made.call(aten.permute.default, made.call(aten.relu.default, heads(made)), [1, 0, 3, 2])
    graph = made.output(made.call(aten.amax.default, moved, [0, 1, 2, 3]))
    (region,), rejections = walk(graph)
    assert not rejections and len(region.spec.reductions) == 1


def test_axes_that_make_up_rows_are_no_columns_where_there_is_one_column() -> None:
    """(B, S), of a product with one column, has rows alone: a sum over S is one of a part of them."""
    a, b = product_inputs(M, 1)
    (report,) = collect(lambda a, b: (a @ b).relu().view(BATCHES, ROWS).sum(-1), (a, b))
    assert not any(region.spec.reductions for region in report.regions)
    assert Reason.REDUCED_AXES in [each.reason for each in report.rejections]


LACKING: dict[str, Tensor] = {
    "rows_of_batches": integers(BATCHES, N),
    "columns_of_batches": integers(BATCHES, 1),
}


@pytest.mark.parametrize("places", [BATCHES, ROWS])
@pytest.mark.parametrize("name", LACKING)
def test_an_operand_may_lack_an_axis_that_was_moved_before_others(name: str, places: int) -> None:
    """(S, B, N) of (B, S, N), and an operand that varies over B: as long as S, or not."""
    made, given = Graph(), LACKING[name]
    value = made.call(aten.reshape.default, made.mm(BATCHES * places, N, K), [BATCHES, places, N])
    moved = made.call(aten.permute.default, value, [1, 0, 2])
    graph = made.output(made.call(aten.add.Tensor, moved, made.input("load", given.shape)))
    (region,), rejections = walk(graph)
    assert not rejections and region.spec.loads[0].m_modes == (S, Z)
    a, b = product_inputs(BATCHES * places, N)
    (result,) = run(rewritten(graph), a, b, given)
    plane = (a.float() @ b.float()).reshape(BATCHES, places, N).transpose(0, 1)
    assert torch.equal(result, (plane + given.float()).to(BF16))
