"""The inputs and outputs of a region, and several regions in one graph.

Each graph is run after the pass and compared with the same arithmetic in fp32 or with the graph before it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx

from cute_backend import config
from cute_backend.fx_walk.search import joining, resolve
from cute_backend.fx_walk.values import lower
from cute_backend.memory_ops.schedule import kernel_formula
from cute_backend.planning import PLANES
from cute_backend.spec import Const, DType, Order, Overflow, Precision, Stride
from support.fx_walk.compared import EPILOGUE, assert_same_after_the_pass, inputs_of, integers
from support.fx_walk.synthetic import BF16, E4M3, F32, Graph, aten, called, prims, rewritten, run, walk

M, N, K = 64, 48, 32


def silu(graph: Graph, value: fx.Node) -> fx.Node:
    wide = graph.call(prims.convert_element_type.default, value, F32)
    denominator = graph.call(
        aten.add.Tensor, graph.call(aten.exp.default, graph.call(aten.neg.default, wide)), 1
    )
    return graph.call(
        prims.convert_element_type.default, graph.call(aten.div.Tensor, wide, denominator), BF16
    )


def test_a_value_that_is_read_twice_is_computed_once() -> None:
    made = Graph()
    relu = made.call(aten.relu.default, made.mm())
    graph = made.output(made.call(aten.mul.Tensor, relu, relu))
    (region,), _ = walk(graph)
    assert [(op.op, op.operands) for op in region.spec.ops] == [("relu", ("acc",)), ("mul", ("t0", "t0"))]
    assert_same_after_the_pass(graph, 1)


def test_the_same_cast_or_step_made_twice_is_one_step() -> None:
    made = Graph()
    mm = made.mm()
    parts = [
        made.call(aten.relu.default, made.call(prims.convert_element_type.default, mm, F32)) for _ in "ab"
    ]
    graph = made.output(made.call(aten.add.Tensor, *parts))
    (region,), _ = walk(graph)
    assert [op.op for op in region.spec.ops] == ["relu", "add"]
    assert_same_after_the_pass(graph, 1)


def test_numbers_that_only_compare_equal_are_not_the_same_step() -> None:
    made = Graph()
    mm = made.mm()
    parts = [made.call(aten.mul.Tensor, mm, number) for number in (0.0, -0.0)]
    graph = made.output(made.call(aten.sub.Tensor, *parts))
    (region,), _ = walk(graph)
    assert [op.op for op in region.spec.ops] == ["mul", "mul", "sub"]


def test_a_product_that_nobody_reads_is_no_region() -> None:
    made = Graph()
    made.scaled_mm()
    graph = made.output(made.input("x", (3,)))
    regions, rejections = walk(graph)
    assert not regions and [each.reason.value for each in rejections] == ["nothing_to_fuse"]


def test_an_escaping_intermediate_is_a_further_store() -> None:
    made = Graph()
    mm = made.mm()
    relu = made.call(aten.relu.default, mm)
    graph = made.output(made.call(aten.add.Tensor, relu, made.input("bias", (N,))), relu, mm)
    (region,), _ = walk(graph)
    assert [(store.name, store.value) for store in region.spec.stores] == [
        ("out0", "acc"),
        ("out1", "t0"),
        ("out2", "t1"),
    ]
    assert_same_after_the_pass(graph, 1)


def test_results_that_differ_in_shape_alone_share_a_store() -> None:
    made = Graph()
    relu = made.call(aten.relu.default, made.mm())
    graph = made.output(relu, made.call(aten.reshape.default, relu, [8, 8, N]))
    (region,), _ = walk(graph)
    assert len(region.spec.stores) == 1 and len(region.outputs) == 2
    assert_same_after_the_pass(graph, 1)


def test_results_that_views_share_are_counted_once() -> None:
    made = Graph()
    relu = made.call(aten.relu.default, made.mm())
    shapes = ([8, 8, N], [4, 16, N], [2, 32, N], [1, 64, N], [16, 4, N])
    graph = made.output(*(made.call(aten.reshape.default, relu, shape) for shape in shapes))
    (region,), rejections = walk(graph)
    assert len(region.spec.stores) == 1 and len(region.outputs) == len(shapes) > PLANES
    assert not rejections


def test_equal_results_share_no_memory() -> None:
    """Whoever gets them may write to one of them."""
    made = Graph()
    relu = made.call(aten.relu.default, made.mm())
    copy, again = made.call(aten.clone.default, relu), made.call(aten.mul.Tensor, relu, 1)
    graph = made.output(relu, copy, again, made.call(aten.reshape.default, copy, [8, 8, N]))
    (region,), _ = walk(graph)
    assert [store.value for store in region.spec.stores] == ["t0", "t0", "t0"]
    places = [result.data_ptr() for result in run(rewritten(graph), *inputs_of(graph))]
    assert len(set(places)) == 3 and places[1] == places[3]


@pytest.mark.settings(shared_launches=False)
@pytest.mark.parametrize("written", [False, True], ids=["read", "given_away"])
def test_equal_results_that_are_only_read_share_a_store(written: bool) -> None:
    """An activation that a program writes out anew for each linear that reads it, as diffusion models do."""
    made = Graph()
    mm, results = made.mm(), []
    for index in range(5):
        halved = made.call(aten.mul.Tensor, made.call(aten.relu.default, mm), 0.5)
        weight = made.input(f"weight{index}", (N, N))
        results.append(halved if written else made.call(aten.mm.default, halved, weight))
    graph = made.output(*results)
    (region,), rejections = walk(graph)
    reasons = {each.reason.value for each in rejections}
    if written:
        assert reasons == {"too_many_stores"}
        return
    assert kernel_formula(region.spec) == "out0 = bf16(relu(acc) * 0.5)"
    assert len(region.outputs) == 5 and reasons == {"nothing_to_fuse"}
    assert_same_after_the_pass(graph, 1, ["aten.mm.default"] * 5)


def test_fakes_tell_of_results_and_their_views_that_they_share_memory() -> None:
    made = Graph()
    relu = made.call(aten.relu.default, made.mm())
    flat = made.call(aten.reshape.default, relu, [-1])
    rows = made.call(aten.reshape.default, relu, [8, 8, N])
    graph = rewritten(made.output(relu, rows, made.call(aten.abs.default, flat)))
    *results, absolute = graph.output_node().args[0]
    storages = {node.meta["val"].untyped_storage()._cdata for node in (*results, *absolute.all_input_nodes)}
    assert len(results) == 2 and len(storages) == 1


@pytest.mark.parametrize("gate_first", [True, False], ids=["gate_first", "up_first"])
def test_a_node_of_two_anchors_belongs_to_the_later_one(gate_first: bool) -> None:
    """A gated MLP: what the earlier product gives, its own epilogue fused, is an exact load of the later."""
    made = Graph()
    gate = made.mm(name="g")
    up = None if gate_first else made.mm(name="u")
    activated = silu(made, gate)
    up = made.mm(name="u") if up is None else up
    graph = made.output(made.call(aten.mul.Tensor, activated, up))
    first, second = walk(graph)[0]
    assert "exp" in [op.op for op in first.spec.ops] and not first.spec.loads
    assert [op.op for op in second.spec.ops] == ["mul"]
    assert [load.name for load in second.spec.loads] == ["exact0"]
    assert second.load_nodes == [activated]
    assert_same_after_the_pass(graph, 2)


def test_a_region_feeds_the_operand_of_the_next() -> None:
    made = Graph()
    hidden = made.call(aten.relu.default, made.mm())
    down = made.call(aten.mm.default, hidden, made.input("down", (N, K)))
    graph = made.output(made.call(aten.add.Tensor, down, made.input("bias", (K,))))
    assert_same_after_the_pass(graph, 2)


@pytest.mark.usefixtures("free_launches", "no_blocks")
def test_an_earlier_product_that_needs_a_later_one_is_placed_behind_it() -> None:
    """The later product's own region refuses the sum, for it would need itself; the earlier one takes it."""
    made = Graph()
    first, second = made.mm(name="1"), made.mm(name="2")
    relu = made.call(aten.relu.default, second)
    total = made.call(aten.sum.dim_IntList, relu, [1], True)
    graph = made.output(made.call(aten.add.Tensor, first, total), relu)
    assert len(walk(graph)[0]) == 2
    assert_same_after_the_pass(graph, 2)


@pytest.mark.usefixtures("free_launches", "no_blocks")
def test_two_regions_make_no_cycle_of_one_another() -> None:
    """The later region reads the earlier one; the earlier may then not read what the later one leads to."""
    made = Graph()
    first, second = made.mm(name="1"), made.mm(name="2")
    relu = made.call(aten.relu.default, first)
    total = made.call(aten.sum.dim_IntList, second, [1], True)
    both = made.call(aten.add.Tensor, second, relu)
    refused = made.call(aten.add.Tensor, relu, total)
    graph = made.output(both, refused)
    regions, rejections = walk(graph)
    assert len(regions) == 2
    assert (refused.name, "cycle") in [(each.node, each.reason.value) for each in rejections]
    assert_same_after_the_pass(graph, 2, ["aten.add.Tensor"])


def test_what_reads_an_intermediate_early_moves_behind_the_kernel() -> None:
    made = Graph()
    relu = made.call(aten.relu.default, made.mm())
    total = made.call(aten.cumsum.default, relu, 1)
    late = made.call(aten.cumsum.default, made.input("x", (N,)), 0)
    graph = made.output(made.call(aten.add.Tensor, relu, late), total)
    assert_same_after_the_pass(graph, 1, ["aten.cumsum.default", "aten.cumsum.default"])


def test_a_write_into_an_operand_after_the_region_stays_after_it() -> None:
    made = Graph()
    buffer = made.input("buffer", (M, N))
    total = made.call(aten.add.Tensor, made.mm(), buffer)
    made.call(aten.copy_.default, buffer, total)
    graph = made.output(made.call(aten.mul.Tensor, total, 2))
    (region,), rejections = walk(graph)
    assert region.load_nodes == [buffer]
    assert [each.reason.value for each in rejections] == ["mutated_load"]
    calls = called(rewritten(graph))
    assert calls == [EPILOGUE, "aten.copy_.default", "aten.mul.Tensor"]


def test_writes_of_a_region_stay_in_order_before_a_late_reshape() -> None:
    """The reshape is a result of the region, but the kernel does not wait for its place."""
    made = Graph()
    buffer = made.input("buffer", (M, N))
    relu = made.call(aten.relu.default, made.mm())
    double = made.call(aten.mul.Tensor, relu, 2)
    for value in (double, relu):
        made.call(aten.copy_.default, buffer, value)
    graph = made.output(made.call(aten.reshape.default, relu, [8, 8, N]))
    inputs = inputs_of(graph)
    graph = rewritten(graph)
    assert called(graph) == [EPILOGUE, "aten.copy_.default", "aten.copy_.default"]
    run(graph, *inputs)
    assert torch.equal(inputs[0], (inputs[1].float() @ inputs[2].float()).relu().to(BF16))


def test_a_three_dimensional_linear_fuses_with_its_reshapes() -> None:
    made = Graph()
    x, weight = made.input("x", (4, 16, K)), made.input("weight", (K, N))
    flat = made.call(aten.reshape.default, x, [-1, K])
    view = made.call(aten.reshape.default, made.call(aten.mm.default, flat, weight), [4, 16, N])
    graph = made.output(made.call(aten.add.Tensor, view, made.input("residual", (4, 16, N))))
    (region,), _ = walk(graph)
    assert [load.name for load in region.spec.loads] == ["exact0"]
    assert_same_after_the_pass(graph, 1)


@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (2, 1), (1, 0.5), (-1.5, 2)])
@pytest.mark.parametrize("shape", [(N,), (1, N), (M, 1), (), (M, N)], ids=str)
def test_addmm_scales_its_product_and_its_addend(alpha: float, beta: float, shape: tuple[int, ...]) -> None:
    made = Graph()
    addend, a, b = made.input("addend", shape), made.input("a", (M, K)), made.input("b", (K, N))
    addmm = made.call(aten.addmm.default, addend, a, b, alpha=alpha, beta=beta)
    graph = made.output(made.call(aten.relu.default, addmm))
    (region,), _ = walk(graph)
    assert [load.name for load in region.spec.loads] == ["exact0" if shape == (M, N) else "bias"]
    assert_same_after_the_pass(graph, 1)


def test_addmm_with_a_beta_of_zero_ignores_its_addend() -> None:
    """NaN in it included."""
    made = Graph()
    addend, a, b = made.input("addend", (N,)), made.input("a", (M, K)), made.input("b", (K, N))
    graph = made.output(made.call(aten.relu.default, made.call(aten.addmm.default, addend, a, b, beta=0)))
    (region,), _ = walk(graph)
    assert not region.spec.loads
    values = torch.full((N,), float("nan")).to(BF16), integers(M, K), integers(K, N, seed=1)
    (result,) = run(rewritten(graph), *values)
    assert torch.equal(result, (values[1].float() @ values[2].float()).relu().to(BF16))


def test_scales_and_bias_of_scaled_mm_are_loads_with_their_roles() -> None:
    made = Graph()
    bias = made.input("bias", (N,))
    graph = made.output(made.scaled_mm(bias=bias))
    (region,), _ = walk(graph)
    assert [(load.name, load.kind.value) for load in region.spec.loads] == [
        ("scale_a", "colvec"),
        ("scale_b", "rowvec"),
        ("bias", "rowvec"),
    ]
    assert kernel_formula(region.spec) == "out0 = bf16(acc * scale_a * scale_b + bias)"
    inputs = inputs_of(graph)
    bias_value, a, b, scale_a, scale_b = (value.float() for value in inputs)
    (result,) = run(rewritten(graph), *inputs)
    assert torch.equal(result, (a @ b * scale_a * scale_b + bias_value).to(BF16))


@pytest.mark.parametrize("shape", [(1, N), (N, 1)], ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_scaled_mm_v2_by_its_recipes(recipe: str, shape: tuple[int, int]) -> None:
    """Its `scale_b` may be (1, N) or (N, 1)."""
    made = Graph()
    a, b = made.input("a", (M, K), E4M3), made.input("b", (K, N), E4M3, (1, K))
    rowwise = recipe == "rowwise"
    scale_a = made.input("scale_a", (M, 1) if rowwise else (), F32)
    scale_b = made.input("scale_b", shape if rowwise else (1,), F32)
    code = int(rowwise)
    node = made.graph.call_function(
        aten._scaled_mm_v2.default, (a, b, [scale_a], [code], [], [scale_b], [code], [], None, BF16)
    )
    with made.mode:
        node.meta["val"] = torch.empty(M, N, dtype=BF16)
    graph = made.output(node)
    (region,), _ = walk(graph)
    kinds = ["colvec", "rowvec"] if rowwise else ["scalar", "scalar"]
    assert [load.kind.value for load in region.spec.loads] == kinds
    inputs = [integers(M, K, dtype=E4M3), integers(N, K, dtype=E4M3, seed=1).t()]
    scales = [
        torch.arange(fake.numel(), dtype=F32).reshape(fake.shape) + 1
        for fake in (scale_a.meta["val"], scale_b.meta["val"])
    ]
    (result,) = run(rewritten(graph), *inputs, *scales)
    wanted = inputs[0].float() @ inputs[1].float() * scales[0] * scales[1].reshape(1, -1)
    assert torch.equal(result, wanted.to(BF16))


def test_an_fp8_result_of_scaled_mm_is_rounded_before_what_follows() -> None:
    made = Graph()
    product = made.scaled_mm(out_dtype=E4M3)
    graph = made.output(made.call(prims.convert_element_type.default, product, F32), product)
    (region,), _ = walk(graph)
    assert [(op.op, op.dtype) for op in region.spec.ops][-1] == ("cast", DType.E4M3)
    assert {store.value for store in region.spec.stores} == {region.spec.ops[-1].name}


def test_a_load_in_a_narrow_dtype_is_widened_by_the_kernel() -> None:
    """Not by a kernel of its own that writes fp32 first."""
    made = Graph()
    wide = made.call(prims.convert_element_type.default, made.input("residual", (M, N)), F32)
    mm = made.call(prims.convert_element_type.default, made.mm(), F32)
    graph = made.output(made.call(aten.add.Tensor, mm, wide))
    (region,), _ = walk(graph)
    assert [load.dtype for load in region.spec.loads] == [DType.BF16]
    assert_same_after_the_pass(graph, 1)


def test_work_on_an_operand_that_nobody_else_reads_is_done_by_the_kernel() -> None:
    made = Graph()
    residual, mask = made.input("residual", (M, N)), made.input("mask", (M, N))
    masked = made.call(aten.neg.default, made.call(aten.mul.Tensor, residual, mask))
    graph = made.output(made.call(aten.add.Tensor, made.mm(), masked))
    (region,), _ = walk(graph)
    assert region.load_nodes == [residual, mask]
    assert_same_after_the_pass(graph, 1)


def test_long_work_on_an_operand_is_taken_in_part() -> None:
    made = Graph()
    value = made.input("residual", (M, N))
    for _ in range(300):
        value = made.call(aten.neg.default, value)
    graph = made.output(made.call(aten.add.Tensor, made.mm(), value))
    (region,), _ = walk(graph)
    assert [op.op for op in region.spec.ops] == ["neg"] * 16 + ["add"]
    assert_same_after_the_pass(graph, 1, ["aten.neg.default"] * 284)


def test_work_on_an_operand_that_others_read_is_not_done_again() -> None:
    made = Graph()
    negative = made.call(aten.neg.default, made.input("residual", (M, N)))
    graph = made.output(made.call(aten.add.Tensor, made.mm(), negative), negative)
    (region,), _ = walk(graph)
    assert region.load_nodes == [negative]
    assert_same_after_the_pass(graph, 1, ["aten.neg.default"])


def derivative(made: Graph) -> tuple[fx.Node, fx.Node, list[fx.Node]]:
    """A saved activation, a step that four others lean on, and two gradients of one product."""
    saved, product = made.input("saved", (M, N)), made.mm()
    sign = made.call(aten.sign.default, saved)
    gate = made.call(
        aten.add.Tensor, made.call(aten.mul.Tensor, sign, sign), made.call(aten.neg.default, sign)
    )
    other = made.call(aten.mul.Tensor, saved, sign)
    return saved, sign, [made.call(aten.mul.Tensor, product, each) for each in (gate, other)]


def test_work_on_an_operand_that_several_members_need_is_done_once_by_the_kernel() -> None:
    made = Graph()
    saved, _, gradients = derivative(made)
    graph = made.output(*gradients)
    (region,), _ = walk(graph)
    assert region.load_nodes == [saved]
    assert [op.op for op in region.spec.ops].count("sign") == 1
    assert_same_after_the_pass(graph, 1)


def test_work_on_an_operand_that_is_needed_outside_too_is_a_load() -> None:
    made = Graph()
    sign = made.call(aten.sign.default, made.input("saved", (M, N)))
    product = made.call(aten.mul.Tensor, made.mm(), sign)
    graph = made.output(product, made.call(aten.relu.default, sign))
    (region,), _ = walk(graph)
    assert region.load_nodes == [sign]
    assert_same_after_the_pass(graph, 1, ["aten.sign.default", "aten.relu.default"])


def test_work_that_is_needed_outside_too_is_done_again_on_what_is_loaded_anyway() -> None:
    made = Graph()
    saved, sign, gradients = derivative(made)
    graph = made.output(*gradients, made.call(aten.relu.default, sign))
    (region,), _ = walk(graph)
    assert region.load_nodes == [saved]
    assert_same_after_the_pass(graph, 1, ["aten.sign.default", "aten.relu.default"])


def recomputed(made: Graph) -> tuple[fx.Node, list[fx.Node]]:
    """A product, and the gradients of another that three steps after the first one go into."""
    gate, gradient = made.mm(name="0"), made.mm(name="1")
    wide = made.call(prims.convert_element_type.default, gate, F32)
    sign, double = made.call(aten.sign.default, wide), made.call(aten.mul.Tensor, wide, 2)
    steps = [made.call(aten.add.Tensor, sign, double), made.call(aten.neg.default, sign)]
    return gate, [made.call(aten.mul.Tensor, gradient, each) for each in steps]


def test_work_after_another_product_is_done_again_where_that_reads_less() -> None:
    made = Graph()
    gate, gradients = recomputed(made)
    graph = made.output(*gradients, made.call(aten.relu.default, gate))
    (first, second), rejections = walk(graph)
    assert kernel_formula(first.spec) == "out0 = bf16(acc)\nout1 = bf16(relu(acc))"
    assert second.load_nodes == [gate] and not rejections
    assert_same_after_the_pass(graph, 2)


def test_work_after_another_product_that_is_one_load_is_left_to_its_region() -> None:
    made = Graph()
    gate, gradient = made.mm(name="0"), made.mm(name="1")
    half = made.call(aten.mul.Tensor, made.call(aten.sign.default, gate), 2)
    graph = made.output(made.call(aten.mul.Tensor, gradient, half))
    (_, second), _ = walk(graph)
    assert second.load_nodes == [half]
    assert_same_after_the_pass(graph, 2)


def test_work_on_operands_is_walked_once_however_often_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Graph()
    value, powers = made.input("value", (M, N)), 12
    for _ in range(powers):
        value = made.call(aten.mul.Tensor, value, made.call(aten.neg.default, value))
    graph = made.output(made.call(aten.add.Tensor, made.mm(), value))
    lowered: list[fx.Node] = []
    whole = lower.lower
    for module in (joining, resolve):
        monkeypatch.setattr(module, "lower", lambda node, *rest: lowered.append(node) or whole(node, *rest))
    walk(graph)
    assert max(lowered.count(node) for node in lowered) <= 4  # grown and finished, before and after a refusal


def test_work_on_what_inductor_would_not_store_is_left_to_it() -> None:
    """A dropout mask: the random numbers, four times its size, would have to be written for the kernel."""
    made = Graph()
    random = made.call(aten.rand_like.default, made.input("residual", (M, N)))
    mask = made.call(aten.gt.Scalar, random, 0.5)
    graph = made.output(made.call(aten.mul.Tensor, made.mm(), mask))
    (region,), _ = walk(graph)
    assert region.load_nodes == [mask]


def test_work_on_a_vector_is_not_done_for_every_element() -> None:
    made = Graph()
    vector = made.call(aten.neg.default, made.input("vector", (N,)))
    graph = made.output(made.call(aten.add.Tensor, made.mm(), vector))
    (region,), _ = walk(graph)
    assert region.load_nodes == [vector]
    assert_same_after_the_pass(graph, 1, ["aten.neg.default"])


def test_filled_tensors_are_numbers() -> None:
    """As their dtype holds them; on whatever device they are made."""
    made = Graph()
    mm = made.mm()
    tenth = made.call(aten.full.default, [], 0.1, dtype=BF16)
    condition = made.call(aten.gt.Scalar, mm, 0)
    graph = made.output(made.call(aten.where.self, condition, mm, tenth))
    (region,), _ = walk(graph)
    assert region.spec.ops[-1].operands[-1] == Const(torch.tensor(0.1).to(BF16).item())
    assert_same_after_the_pass(graph, 1)


def test_a_column_major_result_is_stored_so() -> None:
    made = Graph()
    mm, load = made.mm(), made.input("load", (M, N), strides=(1, M))
    node = made.call(aten.add.Tensor, load, mm)
    assert node.meta["val"].stride() == (1, M)
    graph = made.output(node)
    (region,), _ = walk(graph)
    assert region.spec.stores[0].form.order is Order.COLUMN
    assert region.spec.loads[0].stride_m is Stride.ONE
    assert_same_after_the_pass(graph, 1)


def test_integers_wrap_to_their_own_width() -> None:
    made = Graph()
    narrow = made.call(prims.convert_element_type.default, made.mm(), torch.int8)
    graph = made.output(made.call(aten.mul.Tensor, narrow, 100))
    (region,), _ = walk(graph)
    assert [(op.op, op.dtype) for op in region.spec.ops] == [
        ("cast", DType.I8),
        ("mul", DType.I32),
        ("cast", DType.I8),
    ]
    assert_same_after_the_pass(graph, 1)


@pytest.mark.parametrize(
    "step",
    [
        lambda made, x, wide: made.call(aten.pow.Tensor_Scalar, wide, 2.0),
        lambda made, x, wide: made.call(aten.add.Tensor, x, wide, alpha=2**17),
        lambda made, x, wide: made.call(aten.rsub.Tensor, wide, x, alpha=2**17),
        lambda made, x, wide: made.call(aten.addcmul.default, x, wide, wide),
    ],
    ids=["pow", "add", "rsub", "addcmul"],
)
def test_the_steps_of_a_float_op_do_not_wrap_its_integers(step: Any) -> None:
    made = Graph()
    product = made.call(prims.convert_element_type.default, made.mm(), F32)
    whole = made.call(prims.convert_element_type.default, product, torch.int32)
    graph = made.output(step(made, product, made.call(aten.mul.Tensor, whole, 2**17)))
    assert_same_after_the_pass(graph, 1)


@pytest.mark.parametrize("alpha", [-1, 0, 1, 2, True, False])
def test_a_sum_of_truth_values_takes_alpha_as_one(alpha: int) -> None:
    """True plus minus one times True is True."""
    made = Graph()
    product = made.mm()
    positive = made.call(aten.gt.Scalar, product, 0)
    graph = made.output(
        made.call(aten.add.Tensor, positive, made.call(aten.gt.Scalar, product, 1), alpha=alpha)
    )
    assert_same_after_the_pass(graph, 1)


@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [(F32, exponent) for exponent in (0.5, -0.5, -1, -1.0, 0, 0.0, 1, 2, 2.0, 3, 4, -2, 1.5)]
    + [(torch.int32, exponent) for exponent in (0.5, -0.5, -1.0, 0, 1, 2, 3, 4, 1.5)],
)
def test_a_power_that_is_a_number_is_that_power(exponent: float, dtype: torch.dtype) -> None:
    """Of the integers from 1 to 3."""
    made = Graph()
    positive = made.call(aten.add.Tensor, made.input("plane", (M, N), dtype), 2)
    product = made.call(prims.convert_element_type.default, made.mm(), dtype)
    value = made.call(aten.add.Tensor, made.call(aten.mul.Tensor, product, 0), positive)
    graph = made.output(made.call(aten.pow.Tensor_Scalar, value, exponent), value)
    inputs = inputs_of(graph)
    wanted, _ = run(copy.deepcopy(graph), *inputs)
    result, _ = run(rewritten(graph), *inputs)
    assert called(graph).count(EPILOGUE) == 1
    assert result.dtype is wanted.dtype
    torch.testing.assert_close(result, wanted, rtol=3e-7, atol=0)


def chain(barriers: bool) -> fx.Graph:
    """mm, times two, to fp32, plus one, all but the cast's fp32 in bf16."""
    made = Graph()
    double = made.call(aten.mul.Tensor, made.mm(), 2)
    if barriers:
        double.meta["low_precision_pointwise_barrier"] = True
    wide = made.call(prims.convert_element_type.default, double, F32)
    return made.output(made.call(aten.add.Tensor, wide, 1))


def test_fused_precision_rounds_no_trip_through_bf16() -> None:
    (region,), _ = walk(chain(barriers=True), Precision.FUSED)
    assert [op.op for op in region.spec.ops] == ["mul", "add"]


def test_eager_precision_rounds_the_product_and_what_inductor_marks() -> None:
    (region,), _ = walk(chain(barriers=True), Precision.EAGER)
    assert [(op.op, op.dtype) for op in region.spec.ops] == [
        ("cast", DType.BF16),
        ("mul", DType.F32),
        ("cast", DType.BF16),
        ("add", DType.F32),
    ]
    assert region.spec.precision is Precision.EAGER


def test_eager_precision_rounds_what_a_marked_op_reads() -> None:
    """The inside of a decomposition ends where eager would have stored its result."""
    made = Graph()
    inner = made.call(aten.mul.Tensor, made.mm(), 0.3)
    marked = made.call(aten.add.Tensor, inner, 1)
    marked.meta["low_precision_pointwise_barrier"] = True
    (region,), _ = walk(made.output(marked), Precision.EAGER)
    assert [(op.op, op.dtype) for op in region.spec.ops] == [
        ("cast", DType.BF16),
        ("mul", DType.F32),
        ("cast", DType.BF16),
        ("add", DType.F32),
        ("cast", DType.BF16),
    ]


def test_eager_precision_leaves_the_inside_of_a_decomposition_alone() -> None:
    (region,), _ = walk(chain(barriers=False), Precision.EAGER)
    assert [op.op for op in region.spec.ops] == ["cast", "mul", "add"]


@pytest.mark.parametrize(
    ("operand", "casts"),
    [
        (((), F32), 1),
        (((), torch.float16), 1),
        (((M, N), torch.int32), 1),
        (((M, N), torch.int8), 0),
        (((M, N), torch.bool), 0),
        (((N,), BF16), 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("op", [aten.mul.Tensor, aten.gt.Tensor])
def test_eager_precision_rounds_an_operand_to_the_dtype_that_the_op_computes_in(
    op: Any, operand: tuple[tuple[int, ...], torch.dtype], casts: int
) -> None:
    """On a GPU: of numbers, see test_walk_quotients for what a CPU's kernels do."""
    made = Graph()
    load = made.input("operand", *operand, device="cuda:0")
    node = made.call(op, made.mm(device="cuda:0"), load)
    node.meta["low_precision_pointwise_barrier"] = True
    spec = walk(made.output(node), Precision.EAGER)[0][0].spec
    casts_of_it = [step for step in spec.ops if step.op == "cast" and step.operands == (spec.loads[0].name,)]
    assert [step.dtype for step in casts_of_it] == [DType.BF16] * casts


@pytest.mark.parametrize(("op", "number"), [(aten.gt.Scalar, 0.30078125), (aten.mul.Tensor, 0.3)])
def test_eager_precision_rounds_a_number_that_is_compared_with(op: Any, number: float) -> None:
    made = Graph()
    node = made.call(op, made.mm(), 0.3)
    node.meta["low_precision_pointwise_barrier"] = True
    (region,), _ = walk(made.output(node), Precision.EAGER)
    step = next(step for step in region.spec.ops if step.op != "cast")
    assert step.operands[1] == Const(number)


@pytest.mark.parametrize(
    ("precision", "bound", "overflow"),
    [
        (Precision.FUSED, None, Overflow.SATURATE),
        (Precision.EAGER, None, Overflow.NONFINITE),
        (Precision.EAGER, 448.0, Overflow.SATURATE),
        (Precision.EAGER, 1000.0, Overflow.NONFINITE),
    ],
)
def test_a_cast_to_fp8_overflows_as_eager_unless_a_clamp_proves_its_range(
    precision: Precision, bound: float | None, overflow: Overflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower, "eager_overflow", lambda dtype: Overflow.NONFINITE)
    made = Graph()
    value: Any = made.call(prims.convert_element_type.default, made.mm(), F32)
    if bound is not None:
        value = made.call(aten.clamp_min.default, value, -bound)
        value = made.call(aten.clamp_max.default, value, bound)
    graph = made.output(made.call(prims.convert_element_type.default, value, E4M3))
    (region,), _ = walk(graph, precision)
    assert region.spec.ops[-1].overflow is overflow


def test_the_same_epilogue_in_another_layer_is_the_same_spec() -> None:
    made = Graph()
    outputs = []
    for layer in "12":
        mm = made.mm(64 * int(layer), name=layer)
        outputs.append(
            made.call(aten.add.Tensor, made.call(aten.relu.default, mm), made.input(f"bias{layer}", (N,)))
        )
    first, second = walk(made.output(*outputs))[0]
    assert first.spec == second.spec and first.spec.key == second.spec.key


def test_a_region_is_cut_until_its_results_can_be_written() -> None:
    made = Graph()
    mm = made.mm()
    results = [made.call(aten.mul.Tensor, mm, factor) for factor in range(2, 8)]
    graph = made.output(*results)
    with config.patch(max_stores=4):
        (region,), rejections = walk(graph)
    assert len(region.spec.stores) == 4
    assert {each.reason.value for each in rejections} == {"too_many_stores"}
    assert_same_after_the_pass(graph, 1, ["aten.mul.Tensor"] * len(rejections))
