"""Products of batches, `bmm`, `baddbmm` and `_grouped_mm` without offsets, as anchors: on graphs made by hand
and through torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.utils import counters

from cute_backend.backend import cute
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.spec import Columns, LoadKind, Major, ProductKind, Stride
from support.fx_walk.compared import assert_same_after_the_pass
from support.fx_walk.synthetic import BF16, Graph, aten, called, rewritten, run, walk

B, M, N, K = 3, 8, 40, 16
Z, S = Stride.ZERO, Stride.OTHER

LOADS = {
    "of_all": ((B, M, N), LoadKind.EXACT, ()),
    "row_of_a_batch": ((B, 1, N), LoadKind.EXACT, (S, Z)),
    "column_of_a_batch": ((B, M, 1), LoadKind.COLVEC, ()),
    "number_of_a_batch": ((B, 1, 1), LoadKind.COLVEC, (S, Z)),
    "plane_for_all_batches": ((M, N), LoadKind.EXACT, (Z, S)),
    "row_for_all_batches": ((N,), LoadKind.ROWVEC, ()),
}


def integers(*shape: int) -> Tensor:
    """Small integers, different from place to place: the products of some are exact."""
    return (torch.arange(torch.Size(shape).numel()) % 7 - 3).reshape(shape).to(BF16)


def products(b: int = B, m: int = M, n: int = N, k: int = K) -> tuple[Tensor, Tensor]:
    return integers(b, m, k), integers(b, n, k).transpose(1, 2)


def bmm(made: Graph, count: Any = B, m: Any = M, **strides: tuple[Any, ...]) -> fx.Node:
    left = made.input("a", (count, m, K), strides=strides.get("a"))
    right = made.input("b", (count, K, N), strides=strides.get("b", (N * K, 1, K)))
    return made.call(aten.bmm.default, left, right)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", LOADS)
def test_every_class_of_load_follows_a_product_of_batches(name: str, dynamic: bool) -> None:
    shape, kind, modes = LOADS[name]
    made = Graph()
    b, m = (made.size("b_count", B), made.size("m", M)) if dynamic else (B, M)
    product = bmm(made, b, m)
    symbols = {B: b, M: m}
    load = made.input("load", [symbols.get(size, size) for size in shape])
    graph = made.output(made.call(aten.add.Tensor, product, load))
    guards = list(made.shape_env.guards)
    (region,), rejections = walk(graph)
    assert not rejections and region.spec.product.kind is ProductKind.BATCHED
    assert [(each.kind, each.m_modes) for each in region.spec.loads] == [(kind, modes)]
    assert called(rewritten(graph)) == ["cute_backend.gemm_epilogue.default"]
    assert made.shape_env.guards == guards
    left, right = products()
    given = integers(*shape)
    (result,) = run(graph, *([B, M] if dynamic else []), left, right, given)
    assert torch.equal(result, (left.float() @ right.float() + given.float()).to(BF16))


def test_baddbmm_brings_its_sum_and_its_numbers() -> None:
    made = Graph()
    addend, left, right = made.input("c", (B, 1, N)), made.input("a", (B, M, K)), made.input("b", (B, K, N))
    product = made.call(aten.baddbmm.default, addend, left, right, beta=2, alpha=4)
    graph = made.output(made.call(aten.relu.default, product))
    (region,), rejections = walk(graph)
    assert not rejections
    assert [(load.name, load.m_modes) for load in region.spec.loads] == [("exact0", (S, Z))]
    assert region.spec.product.b_major is Major.MN
    a, b = products()
    c = integers(B, 1, N)
    (result,) = run(rewritten(graph), c, a, b.contiguous())
    assert torch.equal(result, (4 * (a.float() @ b.float()) + 2 * c.float()).relu().to(BF16))


@pytest.mark.parametrize("out_dtype", [None, BF16])
def test_a_grouped_product_without_offsets_is_one_of_a_batch(out_dtype: torch.dtype | None) -> None:
    made = Graph()
    left, right = made.input("a", (B, M, K)), made.input("b", (B, K, N), strides=(N * K, 1, K))
    product = made.call(aten._grouped_mm.default, left, right, out_dtype=out_dtype)
    graph = made.output(made.call(aten.relu.default, product))
    (region,), rejections = walk(graph)
    assert not rejections and region.spec.product.kind is ProductKind.BATCHED
    assert region.problem == (B * M, N, K)
    assert_same_after_the_pass(graph, 1)


def test_two_products_of_one_batch_are_a_pair() -> None:
    made = Graph()
    a, b0, b1 = made.input("a", (B, M, K)), made.input("b0", (B, K, N)), made.input("b1", (B, K, N))
    gate, up = made.call(aten.bmm.default, a, b0), made.call(aten.bmm.default, a, b1)
    graph = made.output(made.call(aten.mul.Tensor, gate, up))
    (region,), rejections = walk(graph)
    assert not rejections and len(region.spec.accumulators) == 2
    left, right = products()
    first, second = right.contiguous(), right.flip(0).contiguous()
    (result,) = run(rewritten(graph), left, first, second)
    wanted = (left.float() @ first.float()) * (left.float() @ second.float())
    assert torch.equal(result, wanted.to(BF16))


@pytest.mark.parametrize("row_major", [False, True], ids=["k_major", "n_major"])
@pytest.mark.parametrize("rows", [M, 1])
@pytest.mark.parametrize("cut", ["halves", "neighbours"])
def test_parts_of_one_product_of_batches_are_a_pair(cut: str, rows: int, row_major: bool) -> None:
    """As experts do, each of which multiplies its rows by a packed gate and up weight."""
    n = N + 8  # halves of a row-major B whose second begins at a multiple of 16 bytes
    made = Graph()
    a = made.input("a", (B, rows, K))
    b = made.input("b", (B, K, n), strides=(n * K, n, 1) if row_major else (n * K, 1, K))
    bias, plane = made.input("bias", (B, 1, n)), made.input("plane", (B, rows, n))
    y = made.call(aten.add.Tensor, made.call(aten.baddbmm.default, bias, a, b), plane)
    bounds = [(0, n, 2), (1, n, 2)] if cut == "neighbours" else [(0, n // 2, 1), (n // 2, n, 1)]
    gate, up = (made.call(aten.slice.Tensor, y, 2, *each) for each in bounds)
    graph = made.output(made.call(aten.sub.Tensor, made.call(aten.relu.default, gate), up))
    (region,), rejections = walk(graph)
    assert not rejections and region.problem == (B * rows, n // 2, K)
    wanted = [Columns.EVEN, Columns.ODD] if cut == "neighbours" else [Columns.ALL, Columns.ALL]
    assert [acc.columns for acc in region.spec.accumulators] == wanted
    assert all(acc.kind is ProductKind.BATCHED for acc in region.spec.accumulators)
    assert_same_after_the_pass(graph, 1)


@pytest.mark.parametrize(
    ("operand", "strides"),
    [("b", (0, 1, K)), ("a", (M * K + 1, K, 1)), ("b", (N * K + 4, 1, K))],
    ids=["one_for_all", "odd_step", "step_of_8_bytes"],
)
def test_steps_that_tma_does_not_take_are_refused(operand: str, strides: tuple[int, ...]) -> None:
    made = Graph()
    graph = made.output(made.call(aten.relu.default, bmm(made, **{operand: strides})))
    regions, (rejection,) = walk(graph)
    assert not regions and rejection.reason is Reason.OPERAND_LAYOUT
    assert "TMA requires strides from batch to batch that are multiples of 16 bytes" in rejection.message


def attended(q: Tensor, k: Tensor, mask: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    scores = (q @ k.transpose(1, 2)) * 0.25 + mask
    return F.silu(scores) * gate, scores.float().amax(-1)


def inputs(b: int, m: int, n: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(b)
    shapes = ((b, m, K), (b, n, K), (m, n), (b, 1, 1))
    return tuple(torch.randn(shape, generator=generator).to(BF16) for shape in shapes)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_program_of_batches_is_one_kernel_of_any_size(
    dynamic: bool, fresh_compiler: Callable[..., None]
) -> None:
    compiled = torch.compile(attended, backend=cute, dynamic=dynamic)
    for sizes in ((4, 24, 32), (3, 7, 16), (2, 33, 40))[: 3 if dynamic else 1]:
        args = inputs(*sizes)
        for result, eager in zip(compiled(*args), attended(*args), strict=True):
            assert result.stride() == eager.stride()
            torch.testing.assert_close(result, eager, rtol=0.03, atol=0.03)
    assert counters["cute_backend"] == {"anchors": 1, "regions": 1}
