"""Pairs: which products and which parts of one share a kernel, what it then loads, and when none is shared.

Each graph is run after the pass and compared with the graph before it, to the bit.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from operator import getitem

import pytest
import torch
from torch import fx

from cute_backend.fx_walk.products.pairs import column_slice
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.fx_walk.region.region import Region
from cute_backend.fx_walk.replacement.rewrite import rewrite
from cute_backend.kinds.results import PLANE, PartOf
from cute_backend.memory_ops.schedule import kernel_formula
from cute_backend.spec import Columns, DType, LoadKind, Stride
from support.fx_walk.compared import assert_same_after_the_pass, inputs_of
from support.fx_walk.pairs import CUTS, Cut, K, M, N, halves, neighbours, the_region
from support.fx_walk.synthetic import BF16, E4M3, F32, OP, Graph, aten, called, prims, run, walk

EPILOGUE = "cute_backend.gemm_epilogue.default"


def product(graph: Graph, a: fx.Node, name: str, n: int = N, row_major: bool = False) -> fx.Node:
    strides = (n, 1) if row_major else (1, K)
    return graph.call(aten.mm.default, a, graph.input(name, (K, n), strides=strides))


# Two products of one A


@pytest.mark.parametrize("gate_first", [True, False])
def test_two_products_of_one_a_are_one_region(gate_first: bool) -> None:
    made = Graph()
    a = made.input("a", (M, K))
    gate, up = product(made, a, "g"), product(made, a, "u")
    left, right = (gate, up) if gate_first else (up, gate)
    graph = made.output(made.call(aten.mul.Tensor, made.call(aten.relu.default, left), right))
    region = the_region(graph)
    assert region.products == [gate, up]
    accs = ("acc0", "acc1") if gate_first else ("acc1", "acc0")
    assert kernel_formula(region.spec) == f"out0 = bf16(relu({accs[0]}) * {accs[1]})"
    assert region.b_views == [(gate.args[1], None), (up.args[1], None)] and region.a_nodes == [a]
    assert_same_after_the_pass(graph, 1)


def test_each_product_has_scales_and_a_bias_of_its_own() -> None:
    made = Graph()
    a, scale_a = made.input("a", (M, K), E4M3), made.input("scale_a", (M, 1), F32)
    halves = []
    for name in "gu":
        b = made.input(f"b{name}", (K, N), E4M3, (1, K))
        scale_b, bias = made.input(f"s{name}", (1, N), F32), made.input(f"bias{name}", (N,))
        node = made.graph.call_function(
            aten._scaled_mm.default, (a, b, scale_a, scale_b, bias, None, BF16, True)
        )
        node.meta["val"] = made.call(aten.mul.Tensor, scale_a, bias).meta["val"].to(BF16)
        halves.append(node)
    region = the_region(made.output(made.call(aten.mul.Tensor, *halves)))
    assert [load.name for load in region.spec.loads] == ["scale_a", "scale_b0", "bias0", "scale_b1", "bias1"]
    assert kernel_formula(region.spec) == (
        "out0 = bf16((acc0 * scale_a * scale_b0 + bias0) * (acc1 * scale_a * scale_b1 + bias1))"
    )


def test_what_else_is_read_of_a_pair_is_stored_too() -> None:
    made = Graph()
    a = made.input("a", (M, K))
    gate, up = product(made, a, "g"), product(made, a, "u")
    graph = made.output(made.call(aten.mul.Tensor, gate, up), gate, made.call(aten.cumsum.default, up, 1))
    region = the_region_beside(graph, "aten.cumsum.default")
    assert region.outputs.keys() >= {gate, up} and len(region.spec.stores) == 3


def the_region_beside(graph: fx.Graph, left: str) -> Region:
    (region,), _ = walk(graph)
    assert_same_after_the_pass(graph, 1, left=[left])
    return region


def test_the_same_view_of_one_tensor_is_one_a() -> None:
    made = Graph()
    x = made.input("x", (4, 16, K))
    sides = [product(made, made.call(aten.reshape.default, x, [M, K]), name) for name in "gu"]
    assert the_region(made.output(made.call(aten.mul.Tensor, *sides))).products == sides


def quantised(made: Graph, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    scale = made.call(aten.amax.default, made.call(aten.abs.default, x), [-1], True)
    return made.call(aten.div.Tensor, x, made.call(aten.add.Tensor, scale, 1)), scale


def test_an_a_that_is_computed_twice_in_the_same_way_is_one_a() -> None:
    made = Graph()
    x = made.input("x", (M, K))
    sides = [product(made, quantised(made, x)[0], name) for name in "gu"]
    graph = made.output(made.call(aten.mul.Tensor, *sides))
    assert the_region(graph).products == sides
    rewrite(graph, walk(graph)[0])
    assert called(graph).count("aten.div.Tensor") == 1


@pytest.mark.parametrize("change", ["a number", "a write", "noise"])
def test_an_a_that_is_computed_otherwise_is_another(change: str) -> None:
    made = Graph()
    x = made.input("x", (M, K))
    first = made.call(aten.mul.Tensor, x, 1)
    if change == "a write":
        made.call(aten.copy_.default, x, made.call(aten.neg.default, x))
    second = made.call(aten.mul.Tensor, x, 1.0 if change == "a number" else 1)
    if change == "noise":
        first, second = (made.call(aten.bernoulli.p, value, 0.5) for value in (first, second))
    sides = [product(made, a, name) for a, name in ((first, "g"), (second, "u"))]
    graph = made.output(made.call(aten.mul.Tensor, *sides))
    assert [len(region.anchors) for region in walk(graph)[0]] == [1]


def test_a_third_product_is_left_to_itself() -> None:
    made = Graph()
    a = made.input("a", (M, K))
    sides = [product(made, a, name) for name in "xyz"]
    total = made.call(aten.add.Tensor, made.call(aten.add.Tensor, sides[0], sides[1]), sides[2])
    graph = made.output(total)
    (region,), rejections = walk(graph)
    assert region.products == sides[1:] and region.load_nodes == [sides[0]]
    assert [(each.node, each.reason) for each in rejections] == [(sides[0].name, Reason.NOTHING_TO_FUSE)]
    assert_same_after_the_pass(graph, 1, left=["aten.mm.default"])


def other_a(made: Graph) -> tuple[fx.Node, fx.Node]:
    return made.mm(M, N, K, name="g"), made.mm(M, N, K, name="u")


def other_layout(made: Graph) -> tuple[fx.Node, fx.Node]:
    a = made.input("a", (M, K))
    return product(made, a, "g"), product(made, a, "u", row_major=True)


def other_dtype(made: Graph) -> tuple[fx.Node, fx.Node]:
    a = made.input("a", (M, K))
    wide = made.input("wide", (M, K), torch.float16)
    return product(made, a, "g"), made.call(
        aten.mm.default, wide, made.input("u", (K, N), torch.float16, (1, K))
    )


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        (other_a, "mul_tensor reads it .* of mm_default_1, .* that one multiplies au and this one ag"),
        (other_layout, "their operands differ in dtype or layout"),
        (other_dtype, "that one multiplies wide and this one a"),
    ],
)
def test_products_that_no_mma_computes_as_one_are_apart(
    sides: Callable[[Graph], tuple[fx.Node, fx.Node]], message: str
) -> None:
    made = Graph()
    gate, up = sides(made)
    graph = made.output(made.call(aten.mul.Tensor, gate, up))
    (region,), rejections = walk(graph)
    assert region.products == [up]
    (rejection,) = [each for each in rejections if each.node == gate.name]
    assert rejection.reason is Reason.APART
    assert re.search(message, rejection.message)


@pytest.mark.settings(shared_launches=False)
def test_products_that_meet_nowhere_are_regions_of_their_own() -> None:
    made = Graph()
    a = made.input("a", (M, K))
    graph = made.output(*(made.call(aten.relu.default, product(made, a, name)) for name in "qk"))
    assert [len(region.anchors) for region in walk(graph)[0]] == [1, 1]
    assert_same_after_the_pass(graph, 2)


def test_a_product_whose_operand_needs_the_other_is_no_pair_with_it() -> None:
    made = Graph()
    a = made.input("a", (M, K))
    first = product(made, a, "g")
    sums = made.call(aten.permute.default, made.call(aten.cumsum.default, first, 0), [1, 0])
    b = made.call(aten.clone.default, made.call(aten.slice.Tensor, sums, 1, 0, K))
    b.meta["val"] = b.meta["val"].contiguous()
    second = made.call(aten.mm.default, a, made.call(aten.permute.default, b, [1, 0]))
    graph = made.output(made.call(aten.mul.Tensor, first, second))
    assert all(len(region.anchors) == 1 for region in walk(graph)[0])
    rewrite(graph, walk(graph)[0])


def test_a_region_between_the_two_makes_no_cycle_with_them() -> None:
    """The region between them needs the first product, and the second one's epilogue needs that region."""
    made = Graph()
    a = made.input("a", (M, K))
    gate = product(made, a, "g")
    between = made.call(aten.mm.default, made.call(aten.relu.default, gate), made.input("w", (N, N)))
    moved = made.call(aten.add.Tensor, between, 1)
    up = product(made, a, "u")
    total = made.call(aten.add.Tensor, made.call(aten.mul.Tensor, gate, up), moved)
    graph = made.output(total, made.call(aten.neg.default, gate))
    regions, _ = walk(graph)
    before = run(copy.deepcopy(graph), *inputs_of(graph))
    inputs = inputs_of(graph)
    rewrite(graph, regions)
    assert called(graph).count(EPILOGUE) == len(regions) == 2
    for result, wanted in zip(run(graph, *inputs), before, strict=True):
        assert torch.equal(result, wanted)


def test_a_region_between_the_two_does_not_read_what_needs_them_too() -> None:
    """The pair reads the negation, so the sum, which needs the pair, can't be computed with the negation."""
    made = Graph()
    a = made.input("a", (M, K))
    gate = made.call(aten.relu.default, product(made, a, "g"))
    sums = made.call(aten.cumsum.default, gate, 1)
    between = product(made, made.input("z", (M, K)), "w")
    negated, total = made.call(aten.neg.default, between), made.call(aten.add.Tensor, between, sums)
    gated = made.call(aten.mul.Tensor, gate, product(made, a, "u"))
    graph = made.output(made.call(aten.add.Tensor, gated, negated), total)
    regions, rejections = walk(graph)
    assert [len(region.anchors) for region in regions] == [1, 2]
    assert [each.reason for each in rejections if each.node == total.name] == [Reason.CYCLE]
    assert_same_after_the_pass(graph, 2, left=["aten.cumsum.default", "aten.add.Tensor"])


# Parts of one product


@CUTS
@pytest.mark.parametrize("row_major", [False, True])
def test_parts_that_meet_are_one_region(cut: Cut, row_major: bool) -> None:
    made = Graph()
    y = product(made, made.input("a", (M, K)), "b", row_major=row_major)
    graph = made.output(made.call(aten.sub.Tensor, *cut(made, y)))
    region = the_region(graph)
    columns = [acc.columns for acc in region.spec.accumulators]
    wanted = (Columns.ALL, Columns.ALL) if cut is halves else (Columns.EVEN, Columns.ODD)
    assert columns == list(wanted) and region.products == [y]
    assert len(region.b_views) == (2 if cut is halves else 1)
    assert_same_after_the_pass(graph, 1)


@CUTS
def test_work_before_the_cut_is_done_for_each_part_with_its_part_of_the_operands(cut: Cut) -> None:
    made = Graph()
    a = made.input("a", (M, K))
    bias, row = made.input("bias", (N,)), made.input("row", (1, N), F32)
    column, plane = made.input("column", (M, 1), F32), made.input("plane", (M, N), F32)
    y = made.call(aten.addmm.default, bias, a, made.input("b", (K, N), strides=(1, K)))
    wide = made.call(prims.convert_element_type.default, y, F32)
    for op, operand in ((aten.mul.Tensor, row), (aten.add.Tensor, column), (aten.sub.Tensor, plane)):
        wide = made.call(op, wide, operand)
    graph = made.output(made.call(aten.sub.Tensor, *cut(made, wide)))
    spec = the_region(graph).spec
    step = Stride.ONE if cut is halves else Stride.OTHER
    assert {load.name: (load.kind, load.stride_n) for load in spec.loads} == {
        "bias0": (LoadKind.ROWVEC, step),
        "bias1": (LoadKind.ROWVEC, step),
        "rowvec0": (LoadKind.ROWVEC, step),
        "rowvec1": (LoadKind.ROWVEC, step),
        "colvec0": (LoadKind.COLVEC, Stride.ZERO),
        "exact0": (LoadKind.EXACT, step),
        "exact1": (LoadKind.EXACT, step),
    }
    assert_same_after_the_pass(graph, 1)


def of_heads(made: Graph, heads: fx.Node) -> list[fx.Node]:
    """The even and the odd columns of each head, as programs of rotary embeddings take them."""
    *outer, columns = heads.meta["val"].shape
    neighbours = made.call(aten.reshape.default, heads, [*outer, columns // 2, 2])
    return [made.call(aten.select.int, neighbours, len(outer) + 1, place) for place in (0, 1)]


def rotated_heads(made: Graph, y: fx.Node, batches: int, heads: int, dtype: torch.dtype) -> fx.Node:
    """The product's heads in neighbouring columns, rotated by a table of cosines and sines for each row, in
    `dtype`. The program takes each of them twice."""
    m, n = y.meta["val"].shape
    shape, half = [batches, m // batches, heads, n // heads], n // heads // 2
    table = made.input("table", (shape[1], 1, half, 2), dtype)
    x = made.call(prims.convert_element_type.default, made.call(aten.reshape.default, y, shape), dtype)
    (even, odd), taken = of_heads(made, x), [made.call(aten.select.int, table, 3, i) for i in (0, 1, 0, 1)]
    products = [made.call(aten.mul.Tensor, *each) for each in zip((even, odd, odd, even), taken, strict=True)]
    parts = (made.call(aten.sub.Tensor, *products[:2]), made.call(aten.add.Tensor, *products[2:]))
    columns = [made.call(aten.unsqueeze.default, part, 4) for part in parts]
    joined = made.call(aten.reshape.default, made.call(aten.cat.default, columns, -1), shape)
    return made.call(prims.convert_element_type.default, joined, BF16)


@pytest.mark.parametrize(
    ("m", "batches", "heads", "dtype"),
    [(64, 4, 3, F32), (64, 1, 4, BF16), (24, 3, 8, F32), (3, 3, 1, F32), (1, 1, 6, F32)],
)
def test_neighbouring_columns_of_heads_are_rotated_as_those_of_rows_are(
    m: int, batches: int, heads: int, dtype: torch.dtype
) -> None:
    """The table's parts are read once each, and the wide result is cast with its columns side by side."""
    made = Graph()
    graph = made.output(rotated_heads(made, made.mm(m, N, K), batches, heads, dtype))
    region = the_region(graph)
    assert [acc.columns for acc in region.spec.accumulators] == [Columns.EVEN, Columns.ODD]
    first, second = (load.name for load in region.spec.loads)
    assert kernel_formula(region.spec) == (
        f"out0 = pair(acc0 * {first} - acc1 * {second}, acc1 * {first} + acc0 * {second})"
    )
    assert_same_after_the_pass(graph, 1)


def test_work_on_an_operand_before_columns_of_heads_are_cut_is_left() -> None:
    """An operand of all columns of heads would be cut like the plane, which has several axes of columns."""
    made = Graph()
    heads = made.call(aten.reshape.default, made.mm(M, N, K), [M, 3, N // 3])
    scaled = made.call(aten.mul.Tensor, heads, made.input("row", (N // 3,)))
    graph = made.output(made.call(aten.sub.Tensor, *of_heads(made, scaled)))
    (region,), _ = walk(graph)
    assert kernel_formula(region.spec) == "out0 = bf16(acc * rowvec0)"
    assert_same_after_the_pass(graph, 1, ["aten.sub.Tensor"])


def test_what_reads_a_part_reads_it_by_strides_of_the_part() -> None:
    """An operand of the half plane is no part of anything: (N/2,) and (M, N/2) stay as they are."""
    made = Graph()
    y = product(made, made.input("a", (M, K)), "b")
    gate, up = halves(made, y)
    row, plane = made.input("row", (N // 2,)), made.input("plane", (M, N // 2))
    gated = made.call(aten.mul.Tensor, made.call(aten.add.Tensor, gate, row), up)
    graph = made.output(made.call(aten.add.Tensor, gated, plane))
    loads = the_region(graph).spec.loads
    assert [(load.name, load.stride_n, load.dtype) for load in loads] == [
        ("rowvec0", Stride.ONE, DType.BF16),
        ("exact0", Stride.ONE, DType.BF16),
    ]
    assert_same_after_the_pass(graph, 1)


def test_a_square_plane_is_not_taken_for_its_transpose() -> None:
    """Of (2 N, 2 N) the transpose has the shape of the plane, and its halves are rows of the product."""
    made, n = Graph(), 32
    y = made.call(aten.mm.default, made.input("a", (n, n)), made.input("b", (n, n)))
    turned = made.call(aten.permute.default, y, [1, 0])
    graph = made.output(made.call(aten.mul.Tensor, *halves(made, turned, n)))
    assert walk(graph)[0] == []


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ([(0, 16, 1), (16, 32, 1), (32, 48, 1)], "thirds"),
        ([(0, 48, 3), (1, 48, 3)], "every third"),
        ([(0, 24, 1), (12, 36, 1)], "parts that overlap"),
        ([(0, 24, 1), (0, 24, 1)], "one half twice"),
        ([(0, 24, 1), (1, 48, 2)], "a half and the odd ones"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_parts_are_no_pair(bounds: list[tuple[int, int, int]], kept: str) -> None:
    made = Graph()
    y = product(made, made.input("a", (M, K)), "b")
    parts = [made.call(aten.slice.Tensor, y, 1, *each) for each in bounds]
    total = parts[0]
    for part in parts[1:]:
        total = made.call(aten.mul.Tensor, total, part)
    regions, rejections = walk(made.output(total))
    assert not regions
    assert {each.reason for each in rejections} == {Reason.UNPAIRED, Reason.NOTHING_TO_FUSE}


def test_halves_of_a_product_that_is_needed_whole_are_written_with_what_follows_from_both() -> None:
    made = Graph()
    y = product(made, made.input("a", (M, K)), "b")
    bent = made.call(aten.relu.default, y)
    graph = made.output(made.call(aten.mul.Tensor, *halves(made, bent)), made.call(aten.sum.default, bent))
    (region,), rejections = walk(graph)
    assert len(region.anchors) == 2 and region.outputs.keys() >= {bent}
    assert [store.form for store in region.spec.stores] == [PartOf(0, 2), PartOf(1, 2), PLANE]
    assert {each.reason for each in rejections} == {Reason.HALVES_TOGETHER}


def test_even_and_odd_columns_of_a_product_that_is_needed_whole_are_written_in_pairs() -> None:
    made = Graph()
    y = product(made, made.input("a", (M, K)), "b")
    bent = made.call(aten.relu.default, y)
    product_of_parts = made.call(aten.mul.Tensor, *neighbours(made, bent))
    graph = made.output(product_of_parts, made.call(aten.sum.default, bent))
    (region,), rejections = walk(graph)
    assert len(region.anchors) == 2 and region.outputs.keys() >= {bent}
    assert [store.dtype for store in region.spec.stores] == [DType.BF16X2, DType.BF16]
    assert {each.reason for each in rejections} == {Reason.HALVES_TOGETHER}


@CUTS
def test_parts_that_never_meet_are_no_pair(cut: Cut) -> None:
    made = Graph()
    y = product(made, made.input("a", (M, K)), "b")
    graph = made.output(*(made.call(aten.relu.default, part) for part in cut(made, y)))
    regions, rejections = walk(graph)
    assert not regions
    assert {each.reason for each in rejections} == {Reason.UNPAIRED, Reason.NOTHING_TO_FUSE}


def test_parts_that_meet_in_a_larger_tensor_are_no_pair() -> None:
    """Scale and shift of a norm, as of a DiT, meet in a tensor of more axes; the split gives a list."""
    made = Graph()
    both = made.call(aten.split.Tensor, made.mm(m=M, n=2 * N), N, 1)
    scale, shift = (made.call(aten.unsqueeze.default, made.call(getitem, both, part), 1) for part in (0, 1))
    scaled = made.call(aten.mul.Tensor, made.input("normed", (M, 8, N)), scale)
    regions, rejections = walk(made.output(made.call(aten.add.Tensor, scaled, shift)))
    assert not regions
    assert [each.reason for each in rejections] == [Reason.NOTHING_TO_FUSE, Reason.UNPAIRED]


def test_what_is_no_pair_is_refused_for_what_it_is() -> None:
    """A variance of the whole product, as if no one had tried to take the product apart."""
    made = Graph()
    y = made.call(aten.relu.default, product(made, made.input("a", (M, K)), "b"))
    variance = made.call(aten.var.correction, y, [1], correction=0)
    even, _ = neighbours(made, y)
    graph = made.output(made.call(aten.mul.Tensor, even, even), variance)
    _, rejections = walk(graph)
    assert [each.reason for each in rejections if each.node == variance.name] == [Reason.REDUCTION]


def test_halves_that_tma_cannot_read_are_no_pair() -> None:
    """A row-major B whose second half begins 8 bytes off: 16 * 2 + 8."""
    made, n = Graph(), 40
    b = made.input("b", (K, n), strides=(n, 1))
    y = made.call(aten.mm.default, made.input("a", (M, K)), b)
    assert walk(made.output(made.call(aten.mul.Tensor, *halves(made, y, n))))[0] == []
    made = Graph()
    y = product(made, made.input("a", (M, K)), "b", n)
    assert_same_after_the_pass(made.output(made.call(aten.mul.Tensor, *halves(made, y, n))), 1)


def by_heads(made: Graph, y: fx.Node, start: int, end: int, step: int) -> fx.Node:
    """Columns of each of two heads."""
    heads = made.call(aten.reshape.default, y, [M, 2, N // 2])
    return made.call(aten.slice.Tensor, heads, 2, start, end, step)


def test_a_part_is_told_by_strides_and_offset() -> None:
    made = Graph()
    y = made.mm(M, N, K)
    heads = made.call(aten.reshape.default, y, [M, 2, N // 2])
    views = {
        "all": (made.call(aten.reshape.default, y, [4, 16, N]), (0, 1, N)),
        "odd": (made.call(aten.slice.Tensor, y, 1, 1, N, 2), (1, 2, N // 2)),
        "as_strided": (made.call(aten.as_strided.default, y, [M, 8], [N, 3], 5), (5, 3, 8)),
        "narrow rows": (made.call(aten.as_strided.default, y, [M, 24], [24, 1], 0), None),
        "rows": (made.call(aten.slice.Tensor, y, 0, 0, M // 2), None),
        "turned": (made.call(aten.permute.default, y, [1, 0]), None),
        "heads": (made.call(aten.reshape.default, y, [4, 16, 2, N // 2]), (0, 1, N)),
        "odd of heads": (by_heads(made, y, 1, N // 2, 2), (1, 2, N // 2)),
        "odd of a cast": (by_heads(made, made.call(aten.clone.default, heads), 1, N // 2, 2), (1, 2, N // 2)),
        "halves of heads": (by_heads(made, y, 0, N // 4, 1), None),
        "one head": (made.call(aten.select.int, heads, 1, 1), (N // 2, 1, N // 2)),
        "as bytes": (made.call(aten.view.dtype, y, torch.int16), None),
    }
    for name, (node, wanted) in views.items():
        part = column_slice(node, M)
        assert (part and (part.start, part.step, part.count)) == wanted, name


def test_nothing_of_a_pair_stays_in_the_graph() -> None:
    made = Graph()
    y = product(made, made.input("a", (M, K)), "b")
    both = made.call(aten.split.Tensor, y, N // 2, 1)
    parts = [made.call(aten.relu.default, made.call(getitem, both, i)) for i in (0, 1)]
    graph = made.output(made.call(aten.mul.Tensor, *parts))
    regions, _ = walk(graph)
    rewrite(graph, regions)
    left = {node.target for node in graph.nodes if node.op == "call_function"}
    assert left == {aten.slice.Tensor, OP, getitem}
