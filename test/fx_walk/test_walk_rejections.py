"""Every reason to refuse, by the smallest graph that has it, and what the pass does with the rest of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import pytest
import torch
from torch import fx

from cute_backend import config
from cute_backend.fx_walk.ends.boundary import MAX_CANDIDATES
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.fx_walk.replacement.rewrite import rewrite
from cute_backend.planning import Arch
from cute_backend.planning.targets import Demand
from cute_backend.spec import DType
from support.fx_walk.synthetic import BF16, E4M3, F32, OP, Graph, aten, prims, walk

pytestmark = pytest.mark.usefixtures("free_launches", "no_blocks")


@dataclass(frozen=True)
class Case:
    """`make` gives the node that must be refused; `fused` is how many regions the rest of the graph has.
    `blocks` is the setting `block_reductions`."""

    make: Callable[[Graph], fx.Node]
    fused: int = 0
    capability: tuple[int, int] = (9, 0)
    blocks: str = "never"


def add_load(name: str, shape: tuple[Any, ...], **how: Any) -> Callable[[Graph], fx.Node]:
    """A product with a sum after it that has to read an input."""
    return lambda graph: graph.call(aten.add.Tensor, graph.mm(), graph.input(name, shape, **how))


def dense_mm(graph: Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    return graph.call(aten.mm.default, a, b)


def mm_of(dtype: torch.dtype) -> Callable[[Graph], fx.Node]:
    return lambda graph: dense_mm(graph, graph.input("a", (64, 32), dtype), graph.input("b", (32, 48), dtype))


def only_equal_at_run_time(graph: Graph) -> fx.Node:
    m, other = graph.size("m", 64), graph.size("other", 64)
    mm, load = graph.mm(m=m), graph.input("load", (other, 48))
    node = graph.graph.call_function(aten.add.Tensor, (mm, load))
    node.meta["val"] = mm.meta["val"]
    return node


def unknown_stride(graph: Graph) -> fx.Node:
    stride = graph.shape_env.create_unbacked_symint()
    load = graph.input("load", (64, 48))
    with graph.mode:
        load.meta["val"] = torch.empty_strided((64, 48), (stride, 1), dtype=BF16)
    mm = graph.mm()
    node = graph.graph.call_function(aten.add.Tensor, (mm, load))
    node.meta["val"] = mm.meta["val"]
    return node


def written_before(view_op: Any) -> Callable[[Graph], fx.Node]:
    """The load is a view of what is written in place before the sum."""

    def make(graph: Graph) -> fx.Node:
        buffer = graph.input("buffer", (64 * 48,))
        view = graph.call(view_op, buffer, [64, 48])
        mm = graph.mm()
        graph.call(aten.add_.Tensor, buffer, 1)
        return graph.call(aten.add.Tensor, mm, view)

    return make


def written_before_a_cast(graph: Graph) -> fx.Node:
    """The sums are rounded only after a plane was written that is read for them."""
    buffer, mm = graph.input("buffer", (64, 48)), graph.mm()
    wide = graph.call(prims.convert_element_type.default, graph.call(aten.add.Tensor, mm, buffer), F32)
    sums = graph.call(aten.sum.dim_IntList, wide, [1])
    graph.call(aten.add_.Tensor, buffer, 1)
    return graph.call(prims.convert_element_type.default, sums, BF16)


def write_in_between(graph: Graph) -> fx.Node:
    """Fusing the second op would move the write behind it: it writes what the first gave."""
    buffer, load = graph.input("buffer", (64, 48)), graph.input("load", (48,))
    mm = graph.mm()
    relu = graph.call(aten.relu.default, mm)
    graph.call(aten.copy_.default, buffer, relu)
    return graph.call(aten.add.Tensor, relu, load)


def cycle(graph: Graph) -> fx.Node:
    relu = graph.call(aten.relu.default, graph.mm())
    return graph.call(aten.div.Tensor, relu, graph.call(aten.cumsum.default, relu, 1))


def cycle_through_moved_axes(graph: Graph) -> fx.Node:
    """That the refused op has its axes in another order is no reason: it is in no kernel."""
    relu = graph.call(aten.relu.default, graph.mm(64, 64))
    moved = graph.call(aten.permute.default, relu, [1, 0])
    return graph.call(aten.add.Tensor, relu, graph.call(aten.special_bessel_j0.default, moved))


def residual_of_a_block(graph: Graph) -> fx.Node:
    """The value that is added back has gone through a norm and a product, so it is no feedback."""
    value = relu(graph)
    norm = graph.call(aten.rsqrt.default, graph.call(aten.mean.dim, value, [1], True))
    normed = graph.call(aten.mul.Tensor, value, norm)
    inner = graph.call(aten.mm.default, normed, graph.input("w", (48, 48)))
    return graph.call(aten.add.Tensor, value, graph.call(aten.cumsum.default, inner, 1))


def sum_of_another_product(graph: Graph) -> fx.Node:
    """The sum that divides is of what a later product makes of the region's result, in its kernel."""
    value = relu(graph)
    inner = graph.call(aten.mm.default, value, graph.input("w", (48, 48)))
    return graph.call(aten.div.Tensor, value, graph.call(aten.sum.dim_IntList, inner, [1], True))


def selected_by_its_own_maximum(graph: Graph) -> fx.Node:
    """Which rows are read is known when the kernel is done."""
    value = relu(graph)
    rows = graph.call(
        aten.index.Tensor, graph.input("table", (48, 48)), [graph.call(aten.argmax.default, value, 1)]
    )
    return graph.call(aten.add.Tensor, value, rows)


def relu(graph: Graph, **how: Any) -> fx.Node:
    return graph.call(aten.relu.default, graph.mm(**how))


def meets_another(graph: Graph) -> fx.Node:
    """The work after the first product is fused with the second."""
    first = graph.mm(name="first")
    graph.results = [graph.call(aten.mul.Tensor, first, graph.mm(name="second"))]
    return first


def own_sum(graph: Graph) -> fx.Node:
    """The sum is fused, but what divides by it is another kernel's."""
    value = relu(graph)
    scale = graph.call(aten.add.Tensor, graph.call(aten.sum.dim_IntList, value, [1], True), 1)
    return graph.call(aten.div.Tensor, value, scale)


def softmax_maximum(graph: Graph) -> fx.Node:
    """Nothing is gained by the maximum alone: the row is read for the sum in any case."""
    value = relu(graph)
    largest = graph.call(aten.amax.default, value, [-1], True)
    powers = graph.call(aten.exp.default, graph.call(aten.sub.Tensor, value, largest))
    total = graph.call(aten.sum.dim_IntList, powers, [-1], True)
    graph.results = [graph.call(aten.div.Tensor, powers, total)]
    return largest


def layer_norm_moments(graph: Graph) -> fx.Node:
    value = relu(graph)
    moments = graph.call(aten.var_mean.correction, value, [1], correction=0, keepdim=True)
    graph.results = [graph.call(aten.sub.Tensor, value, graph.call(getitem, moments, 1))]
    return moments


def sum_over_heads(graph: Graph) -> fx.Node:
    value = graph.call(aten.reshape.default, relu(graph), [8, 8, 48])
    return graph.call(aten.sum.dim_IntList, value, [0])


def rearranged(graph: Graph) -> fx.Node:
    """Pieces of 32 of the plane's elements, which has rows of 48."""
    return graph.call(aten.reshape.default, graph.call(aten.relu.default, graph.mm()), [96, 32])


def meets_its_transpose(graph: Graph) -> fx.Node:
    value = graph.call(aten.relu.default, graph.mm(32, 32))
    return graph.call(aten.add.Tensor, value, graph.call(aten.permute.default, value, [1, 0]))


def three_strides_of_columns(graph: Graph) -> fx.Node:
    value = graph.call(aten.reshape.default, graph.call(aten.relu.default, graph.mm()), [64, 2, 6, 4])
    return graph.call(aten.add.Tensor, value, graph.input("load", (2, 6, 4), strides=(100, 9, 1)))


def larger_plane(graph: Graph) -> fx.Node:
    return graph.call(aten.add.Tensor, graph.mm(), graph.input("load", (3, 64, 48)))


def odd_layout(graph: Graph) -> fx.Node:
    """Strides that are neither row- nor column-major, as a permuted residual would leave them."""
    view = graph.call(aten.reshape.default, graph.call(aten.relu.default, graph.mm()), [8, 8, 48])
    node = graph.call(aten.add.Tensor, view, graph.call(aten.mul.Tensor, view, 2))
    with graph.mode:
        node.meta["val"] = torch.empty_strided((8, 8, 48), (48, 8 * 48, 1), dtype=BF16)
    return node


def many(graph: Graph, count: int, shape: tuple[int, ...]) -> fx.Node:
    value = graph.mm()
    for index in range(count):
        value = graph.call(aten.add.Tensor, value, graph.input(f"load{index}", shape))
    return value


def many_results(graph: Graph) -> fx.Node:
    mm = graph.mm()
    results = [graph.call(aten.mul.Tensor, mm, index + 2) for index in range(11)]
    graph.results = results
    return results[0]


def abs_for_a_variance(graph: Graph) -> fx.Node:
    """The sum is written anyway; the variance takes its absolute value as it reads it."""
    total = graph.call(aten.add.Tensor, graph.mm(), graph.input("load", (48,)))
    magnitude = graph.call(aten.abs.default, total)
    graph.results = [total, graph.call(aten.var.correction, magnitude, [-1])]
    return magnitude


def many_ends(graph: Graph) -> fx.Node:
    """Values that all are read outside, more than the search for the best of them takes."""
    first = value = graph.call(aten.relu.default, graph.mm())
    for index in range(MAX_CANDIDATES + 1):
        graph.results.append(graph.call(aten.var.correction, value, [-1]))
        value = graph.call(aten.add.Tensor, value, index + 1)
    graph.results.append(value)
    return first


def matrix_vector(graph: Graph) -> fx.Node:
    """The result of Inductor's decomposition of `mm` with M of 1, under max-autotune on a GPU."""
    a, b = graph.input("a", (1, 32)), graph.input("b", (32, 48), strides=(1, 32))
    factors = graph.call(aten.unsqueeze.default, a, 2), graph.call(aten.unsqueeze.default, b, 0)
    node = graph.call(aten.sum.dim_IntList, graph.call(aten.mul.Tensor, *factors), [1])
    for each in (*factors, *node.all_input_nodes, node):
        each.meta["original_aten"] = aten.mm.default
    return node


def scaled_v2(recipe: int, scale: tuple[int, ...]) -> Callable[[Graph], fx.Node]:
    def make(graph: Graph) -> fx.Node:
        a, b = graph.input("a", (64, 256), E4M3), graph.input("b", (256, 48), E4M3, (1, 256))
        scales = graph.input("scale_a", scale, F32), graph.input("scale_b", scale, F32)
        node = graph.graph.call_function(
            aten._scaled_mm_v2.default,
            (a, b, [scales[0]], [recipe], [], [scales[1]], [recipe], [], None, BF16),
        )
        with graph.mode:
            node.meta["val"] = torch.empty(64, 48, dtype=BF16)
        return node

    return make


def scale_result(graph: Graph) -> fx.Node:
    node = graph.scaled_mm()
    node.update_arg(5, graph.input("scale_result", (), F32))
    return node


def bias_on_another_device(graph: Graph) -> fx.Node:
    mm = graph.mm(device="cuda:0")
    return graph.call(aten.add.Tensor, mm, graph.input("load", (), device="cpu"))


def operand_on_another_device(graph: Graph) -> fx.Node:
    a, b = graph.input("a", (64, 32), device="cuda:0"), graph.input("b", (32, 48), device="cuda:1")
    node = graph.graph.call_function(aten.mm.default, (a, b))
    with graph.mode:
        node.meta["val"] = torch.empty(64, 48, dtype=BF16, device="cuda:0")
    return node


def sparse_load(graph: Graph) -> fx.Node:
    mm, load = graph.mm(), graph.input("load", (64, 48))
    with graph.mode:
        load.meta["val"] = torch.empty(64, 48, dtype=BF16).to_sparse()
    node = graph.graph.call_function(aten.add.Tensor, (mm, load))
    node.meta["val"] = mm.meta["val"]
    return node


def run_time_number(graph: Graph) -> fx.Node:
    graph.size("s", 7)
    (size,) = graph.graph.nodes
    mm = graph.mm()
    node = graph.graph.call_function(aten.mul.Tensor, (mm, size))
    node.meta["val"] = mm.meta["val"]
    return node


@pytest.mark.parametrize("arch", list(Arch), ids=lambda arch: arch.value)
def test_a_refusal_of_dtypes_lists_those_of_the_gpu_at_hand(arch: Arch) -> None:
    made = Graph()
    a, b = made.input("a", (64, 32), F32, device="cuda"), made.input("b", (32, 48), F32, device="cuda")
    _, (rejection,) = walk(made.output(dense_mm(made, a, b)), capability=arch.target.capability)
    assert rejection.reason is Reason.OPERAND_DTYPE
    before, _, listed = rejection.message.partition("; supported: ")
    assert before == f"kernels for {arch.value} do not multiply torch.float32 by torch.float32"
    assert {*listed.split(", ")} == {dtype.value for dtype in arch.target.operands}


def reshaped(graph: Graph) -> fx.Node:
    mm = graph.mm()
    graph.results = [graph.call(aten.reshape.default, mm, [8, 8, 48])]
    return mm


def quantised(graph: Graph) -> fx.Node:
    relu = graph.call(aten.relu.default, graph.mm(device="cuda:0"))
    return graph.call(prims.convert_element_type.default, relu, torch.float8_e4m3fn)


def addmm(graph: Graph) -> fx.Node:
    a, b = graph.input("a", (64, 32)), graph.input("b", (32, 48))
    return graph.call(aten.addmm.default, graph.input("bias", (48,)), a, b)


def bmm(graph: Graph) -> fx.Node:
    a, b = graph.input("a", (4, 16, 32)), graph.input("b", (4, 32, 48))
    return graph.call(aten.bmm.default, a, b)


LIBRARY = torch.library.Library("a_library", "DEF")
LIBRARY.define("block_fp8_gemm(Tensor a, Tensor b) -> Tensor")
LIBRARY.define("comments(Tensor a, Tensor b) -> Tensor")
for name in ("block_fp8_gemm", "comments"):
    LIBRARY.impl(name, lambda a, b: a.new_empty(a.shape[0], b.shape[1], dtype=BF16), "Meta")


def relu_of_sum(dtype: torch.dtype, shape: tuple[int, ...], beta: int = 1) -> Callable[[Graph], fx.Node]:
    """An addend for which torch raises an error, though not for fakes of it."""

    def make(graph: Graph) -> fx.Node:
        a, b = graph.input("a", (64, 32)), graph.input("b", (32, 48), strides=(1, 32))
        node = graph.call(aten.addmm.default, graph.input("c", shape, dtype), a, b, beta=beta)
        graph.call(aten.relu.default, node)
        return node

    return make


def relu_of_batched_sum(graph: Graph) -> fx.Node:
    a, b = graph.input("a", (2, 64, 32)), graph.input("b", (2, 32, 48))
    node = graph.graph.call_function(aten.baddbmm.default, (graph.input("c", (2, 64, 48), F32), a, b))
    node.meta["val"] = graph.input("like", (2, 64, 48), F32).meta["val"]
    graph.call(aten.relu.default, node)
    return node


def scaled_batches(graph: Graph) -> fx.Node:
    """A grouped product of a batch in fp8, (G, M, K) by (G, K, N) without offsets."""
    a = graph.input("a", (4, 64, 32), torch.float8_e4m3fn, device="cuda:0")
    weight = graph.input("b", (4, 48, 32), torch.float8_e4m3fn, device="cuda:0")
    of_a = graph.input("scale_a", (4, 64), torch.float32, device="cuda:0")
    of_b = graph.input("scale_b", (4, 48), torch.float32, device="cuda:0")
    b = graph.call(aten.permute.default, weight, [0, 2, 1])
    return graph.call(aten._scaled_grouped_mm.default, a, b, of_a, of_b, out_dtype=torch.bfloat16)


def by_a_library(graph: Graph) -> fx.Node:
    a, b = graph.input("a", (64, 32), E4M3), graph.input("b", (32, 48), E4M3)
    graph.call(torch.ops.a_library.comments.default, a, b)
    return graph.call(torch.ops.a_library.block_fp8_gemm.default, a, b)


class Wrapped:
    """A stub of a Triton kernel of the function `fn`, or of an autotuner around one."""

    def __init__(self, fn: Any) -> None:
        self.fn, self.__name__ = fn, "wrapped"


def long_int_mm(graph: Graph) -> fx.Node:
    """A product whose sums may be 2^31 where each operand is -128."""
    a, weight = (graph.input(name, (16, 2**17), torch.int8) for name in ("a", "weight"))
    return graph.call(aten._int_mm.default, a, graph.call(aten.permute.default, weight, [1, 0]))


def by_triton(graph: Graph) -> fx.Node:
    """As transformers' `finegrained_fp8` launches its autotuned kernel, after one that multiplies nothing."""
    from torch._higher_order_ops.triton_kernel_wrap import (
        kernel_side_table,
        triton_kernel_wrapper_functional,
    )

    def softmax_kernel() -> None: ...

    def w8a8_block_fp8_matmul_kernel() -> None: ...

    for function in (softmax_kernel, w8a8_block_fp8_matmul_kernel):
        index = kernel_side_table.add_kernel(Wrapped(Wrapped(function)))  # type: ignore[arg-type]
        launch = {"kernel_idx": index, "constant_args_idx": 0, "grid": [(1, 1, 1)], "kwargs": {}}
        node = graph.graph.call_function(triton_kernel_wrapper_functional, (), launch)
        node.meta["val"] = {}
    return node


CASES: dict[Reason, dict[str, Case]] = {
    Reason.DEVICE: {"meta": Case(lambda graph: graph.mm(device="meta"))},
    Reason.CAPABILITY: {
        "turing": Case(lambda graph: graph.mm(device="cuda:0"), capability=(7, 5)),
        "thor": Case(lambda graph: graph.mm(device="cuda:0"), capability=(11, 0)),
    },
    Reason.FP8: {"quantised_on_ampere": Case(quantised, 1, capability=(8, 0))},
    Reason.NOTHING_TO_FUSE: {
        "mm": Case(lambda graph: graph.mm()),
        "reshape_alone": Case(reshaped),
        "addmm": Case(addmm),
    },
    Reason.MATRIX_VECTOR: {"one_row": Case(matrix_vector)},
    Reason.BATCHED: {
        "columns": Case(
            lambda graph: graph.call(aten.amax.default, graph.call(aten.relu.default, bmm(graph)), [0, 1]), 1
        ),
        "all": Case(lambda graph: graph.call(aten.sum.default, graph.call(aten.relu.default, bmm(graph))), 1),
    },
    Reason.INT32_RANGE: {"k": Case(long_int_mm)},
    Reason.OPAQUE_PRODUCT: {
        "a_library": Case(by_a_library),
        "triton": Case(by_triton),
    },
    Reason.GROUPED: {
        "scaled_batches": Case(scaled_batches),
    },
    Reason.OPERAND_DTYPE: {
        "float32": Case(mm_of(F32)),
        "float64": Case(mm_of(torch.float64)),
        "e5m2_twice": Case(lambda graph: graph.scaled_mm(dtypes=(torch.float8_e5m2, torch.float8_e5m2))),
    },
    Reason.ADDEND_DTYPE: {
        "fp32_bias": Case(relu_of_sum(F32, (48,))),
        "f16_plane": Case(relu_of_sum(torch.float16, (64, 48))),
        "int32_bias": Case(relu_of_sum(torch.int32, (48,))),
        "times_zero": Case(relu_of_sum(F32, (48,), beta=0)),
        "batched": Case(relu_of_batched_sum),
    },
    Reason.OPERAND_LAYOUT: {
        "no_contiguous_mode": Case(
            lambda graph: dense_mm(
                graph, graph.input("a", (64, 32), strides=(64, 2)), graph.input("b", (32, 48))
            )
        ),
        "expanded": Case(
            lambda graph: dense_mm(
                graph, graph.input("a", (64, 32), strides=(0, 1)), graph.input("b", (32, 48))
            )
        ),
    },
    Reason.OPERAND_ALIGNMENT: {
        "odd_k": Case(lambda graph: graph.mm(k=33)),
        "odd_n_beside_it": Case(
            lambda graph: dense_mm(graph, graph.input("a", (64, 32)), graph.input("b", (32, 47)))
        ),
    },
    Reason.OPERAND_DEVICE: {"another_gpu": Case(operand_on_another_device)},
    Reason.EMPTY: {
        "no_rows": Case(lambda graph: graph.mm(m=0)),
        "no_k": Case(lambda graph: graph.mm(k=0)),
    },
    Reason.RECIPE: {
        "mx_v2": Case(scaled_v2(3, (512,))),
    },
    Reason.SCALE_LAYOUT: {
        "blockwise_v2": Case(scaled_v2(4, (64, 2))),
        "mx_v1": Case(lambda graph: graph.scaled_mm(128, 128, 128, ((516,), (512,)), torch.float8_e8m0fnu)),
    },
    Reason.MIXED_SCALES: {
        "tensorwise_by_rowwise": Case(lambda graph: graph.scaled_mm(scales=((), (1, 48)))),
        "swapped": Case(lambda graph: graph.scaled_mm(64, 64, 32, ((1, 64), (64, 1)))),
        "v2": Case(scaled_v2(1, (1, 1))),
    },
    Reason.SCALE_DTYPE: {"bf16": Case(lambda graph: graph.scaled_mm(scale_dtype=BF16))},
    Reason.SCALE_RESULT: {"given": Case(scale_result)},
    Reason.OUT_DTYPE: {"float64": Case(lambda graph: graph.scaled_mm(out_dtype=torch.float64))},
    Reason.SYMBOLIC_SCALAR: {"size": Case(run_time_number)},
    Reason.NOT_POINTWISE: {
        "scan": Case(lambda graph: graph.call(aten.cumsum.default, relu(graph), 1), 1),
    },
    Reason.UNSUPPORTED_OP: {
        "several_results": Case(lambda graph: graph.call(aten.frexp.Tensor, relu(graph)), 1),
        "no_row": Case(
            lambda graph: graph.call(aten.lgamma.default, graph.call(aten.relu.default, graph.mm())), 1
        ),
    },
    Reason.REDUCTION: {
        "variance": Case(lambda graph: graph.call(aten.var.correction, relu(graph), [1]), 1),
    },
    Reason.REDUCED_AXES: {
        "part_of_m": Case(sum_over_heads, 1),
        "part_of_m_and_n": Case(
            lambda graph: graph.call(
                aten.amax.default, graph.call(aten.reshape.default, relu(graph), [8, 8, 48]), [1, 2]
            ),
            1,
        ),
    },
    Reason.BLOCK_SIZE: {
        "norm_by_head": Case(
            lambda graph: graph.call(
                aten.mean.dim, graph.call(aten.reshape.default, relu(graph), [64, 4, 12]), [-1], True
            ),
            1,
            blocks="always",
        ),
    },
    Reason.FEEDBACK: {
        "own_sum": Case(own_sum, 1),
        "softmax": Case(softmax_maximum, 1),
        "layer_norm": Case(layer_norm_moments, 1),
    },
    Reason.REARRANGED: {
        "pieces_of_rows": Case(rearranged, 1),
        "meets_its_transpose": Case(meets_its_transpose, 1),
    },
    Reason.PART_OF_ROWS: {
        "slice": Case(lambda graph: graph.call(aten.slice.Tensor, relu(graph), 0, 1, 64), 1),
        "select": Case(lambda graph: graph.call(aten.select.int, relu(graph), -2, 3), 1),
        "split": Case(lambda graph: graph.call(aten.split.Tensor, relu(graph), 16), 1),
        "batch": Case(
            lambda graph: graph.call(aten.select.int, graph.call(aten.relu.default, bmm(graph)), 0, 1), 1
        ),
    },
    Reason.UNPAIRED: {
        "packed_by_head": Case(
            lambda graph: graph.call(
                aten.select.int, graph.call(aten.reshape.default, relu(graph), [64, 2, 3, 8]), 2, 1
            ),
            1,
        ),
        "one_column": Case(lambda graph: graph.call(aten.select.int, relu(graph), 1, 3), 1),
        "thirds": Case(lambda graph: graph.call(aten.slice.Tensor, relu(graph), 1, 0, 16), 1),
        "one_half": Case(lambda graph: graph.call(aten.slice.Tensor, relu(graph), 1, 0, 24), 1),
        "split": Case(
            lambda graph: graph.call(aten.split.Tensor, relu(graph), 16, 1),
            1,
        ),
    },
    Reason.APART: {"another_a": Case(meets_another, 1)},
    Reason.PLANE: {"batch": Case(larger_plane)},
    Reason.OUTPUT_LAYOUT: {"permuted": Case(odd_layout, 1)},
    Reason.UNSUPPORTED_DTYPE: {
        "int64_load": Case(add_load("load", (48,), dtype=torch.int64)),
        "int16_result": Case(
            lambda graph: graph.call(prims.convert_element_type.default, graph.mm(), torch.int16)
        ),
        "complex_result": Case(
            lambda graph: (lambda y: graph.call(aten.complex.default, y, y))(
                graph.call(prims.convert_element_type.default, graph.mm(), torch.float32)
            ),
            1,
        ),
        "integer_sum": Case(
            lambda graph: graph.call(aten.sum.default, graph.call(aten.gt.Scalar, relu(graph), 0)), 1
        ),
        "integer_maximum": Case(
            lambda graph: graph.call(
                aten.amax.default,
                graph.call(prims.convert_element_type.default, relu(graph), torch.int32),
                [1],
            ),
            1,
        ),
    },
    Reason.FLOAT64: {
        "chain": Case(
            lambda graph: graph.call(prims.convert_element_type.default, graph.mm(), torch.float64)
        ),
        "load": Case(add_load("load", (64, 48), dtype=torch.float64)),
    },
    Reason.CYCLE: {
        "moved_axes": Case(cycle_through_moved_axes, 1),
        "own_scan": Case(cycle, 1),
        "own_maximum": Case(selected_by_its_own_maximum, 1),
        "block": Case(residual_of_a_block, 1),
        "sum_of_another_product": Case(sum_of_another_product, 2),
    },
    Reason.MUTATION: {"copied_out": Case(write_in_between, 1)},
    Reason.TOO_MANY_OPERANDS: {"vectors": Case(lambda graph: many(graph, config.max_loads + 1, (48,)), 1)},
    Reason.TOO_MANY_LOADS: {"planes": Case(lambda graph: many(graph, 9, (64, 48)), 1)},
    Reason.TOO_MANY_STORES: {"eleven": Case(many_results, 1)},
    Reason.UNSEARCHED: {"many_ends": Case(many_ends, 1)},
    Reason.LEFT_TO_USERS: {"abs": Case(abs_for_a_variance, 1)},
    Reason.LOAD_DEVICE: {"zero_dim_on_cpu": Case(bias_on_another_device)},
    Reason.LOAD_LAYOUT: {"sparse": Case(sparse_load)},
    Reason.SIZE_UNPROVEN: {"two_symbols": Case(only_equal_at_run_time)},
    Reason.STRIDE_UNKNOWN: {"unbacked": Case(unknown_stride)},
    Reason.BLOCKS: {"three_strides": Case(three_strides_of_columns, 1)},
    Reason.MUTATED_LOAD: {
        "view": Case(written_before(aten.view.default)),
        "reshape": Case(written_before(aten.reshape.default)),
        "cast_of_sums": Case(written_before_a_cast, 1),
    },
}


@pytest.mark.parametrize(
    ("reason", "name"), [(reason, name) for reason, cases in CASES.items() for name in cases]
)
def test_a_refusal_names_its_node_and_reason(reason: Reason, name: str) -> None:
    case, made = CASES[reason][name], Graph()
    node = case.make(made)
    graph = made.output(*(made.results or [node]))
    with config.patch(block_reductions=case.blocks):  # type: ignore[attr-defined]
        regions, rejections = walk(graph, capability=case.capability)
    assert [rejection.reason for rejection in rejections if rejection.node == node.name] == [reason]
    assert len(regions) == case.fused
    assert all("{" not in rejection.message for rejection in rejections)
    before = [other.name for other in graph.nodes]
    if regions:
        rewrite(graph, regions)
        assert sum(other.target is OP for other in graph.nodes) == case.fused
        assert node.name in [other.name for other in graph.nodes]
    else:
        assert before == [other.name for other in graph.nodes]


def reshaped(made: Graph, *shape: int, m: int = 64, n: int = 48) -> fx.Node:
    return made.call(aten.reshape.default, made.call(aten.relu.default, made.mm(m, n)), shape)


def permuted(made: Graph, shape: tuple[int, ...], *order: int) -> fx.Node:
    return made.call(aten.permute.default, reshaped(made, *shape), order)


def again(made: Graph, node: fx.Node, *shape: int) -> fx.Node:
    return made.call(aten.reshape.default, node, shape)


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (
            lambda made: again(made, permuted(made, (4, 16, 48), 1, 0, 2), 64, 48),
            "joins axes that were moved",
        ),
        (lambda made: again(made, permuted(made, (64, 6, 8), 0, 2, 1), 64, 48), "joins axes that were moved"),
        (lambda made: reshaped(made, 64 * 48), "isn't proven to keep rows and columns apart"),
        (lambda made: reshaped(made, 96, 32), "isn't proven to keep rows and columns apart"),
        (lambda made: made.call(aten.expand.default, reshaped(made, 64, 48), [3, 64, 48]), "repeats its ele"),
    ],
    ids=["window_reverse", "channel_shuffle", "flatten", "pieces_of_rows", "expand"],
)
def test_a_rearrangement_is_said_as_it_is(make: Callable[[Graph], fx.Node], how: str) -> None:
    made = Graph()
    node = make(made)
    _, rejections = walk(made.output(made.call(aten.neg.default, node)))
    (rejection,) = [each for each in rejections if each.node == node.name]
    assert rejection.reason is Reason.REARRANGED
    assert f"which {how}" in rejection.message


def test_a_target_refuses_what_its_mma_does_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the target's name and with what it takes, where the graph runs on it; a CPU multiplies anything."""
    target = Arch.SM90A.target
    operands = frozenset((DType.F16,))
    shipped = {kind: each for kind, each in target.tiles.shipped.items() if kind is not Demand.PROMOTED}
    tiles = replace(target.tiles, shipped=shipped)
    bare = replace(target, operands=operands, promotes=False, tiles=tiles)
    monkeypatch.setattr(Arch.SM90A, "target", bare)
    for device, messages in (
        ("cuda:0", ["kernels for sm_90a do not multiply torch.bfloat16 by torch.bfloat16; supported: f16"]),
        ("cpu", []),
    ):
        made = Graph()
        graph = made.output(made.call(aten.relu.default, made.mm(device=device)))
        regions, rejections = walk(graph)
        assert [rejection.message for rejection in rejections] == messages
        assert len(regions) == 1 - len(messages)


@pytest.mark.parametrize(
    ("make", "between"),
    [
        (cycle, "aten.cumsum.default"),
        (residual_of_a_block, "mm_default_1"),
        (sum_of_another_product, "mm_default_1"),
    ],
)
def test_a_cycle_names_what_stands_between(make: Callable[[Graph], fx.Node], between: str) -> None:
    made = Graph()
    node = make(made)
    _, rejections = walk(made.output(node))
    (message,) = [rejection.message for rejection in rejections if rejection.node == node.name]
    assert f"the region's own result through {between}, which is not part" in message


def test_every_reason_has_a_case() -> None:
    """Reasons that have no case here are tested in test_walk_backend and test_walk_contained (whole graphs),
    test_walk_tuning, test_walk_block_reductions, test_walk_rotations, test_walk_block_parts, test_walk_pairs,
    test_walk_segments, test_walk_caches, test_walk_weight_groups, test_walk_stored_weights and
    test_walk_async_tp."""
    whole_graphs = {Reason.CPP_WRAPPER, Reason.INTERNAL_ERROR}
    rotations = {Reason.ROTATION_SIZE, Reason.ROTATION_COST, Reason.ROTATED_PLACES, Reason.ROTATED_PART}
    parts = {Reason.PART_OPERAND, Reason.REDUCED_PART}
    elsewhere = {
        Reason.UNFUSED_FASTER,
        Reason.BLOCK_COST,
        Reason.HALVES_TOGETHER,
        Reason.UNSHARED,
        Reason.CACHE,
        Reason.LEFT_TO_ASYNC_TP,
        Reason.WEIGHT_GROUPS,
        Reason.WEIGHT_STEPS,
    }
    assert set(CASES) == set(Reason) - whole_graphs - rotations - parts - elsewhere
