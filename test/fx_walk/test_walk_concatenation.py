"""Several planes of a kernel in one result: a product that is saved whole, and planes that are joined."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend import config
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.kinds.results import PLANE, Form, PartOf
from cute_backend.memory_ops.schedule import kernel_formula
from cute_backend.spec import DType
from support.fx_walk.compared import assert_same_after_the_pass
from support.fx_walk.synthetic import BF16, F32, Graph, aten, prims, walk
from support.traffic import Traffic, alone, fused

M, N, K = 128, 80, 40


def planes(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(BF16) for shape in shapes)


def parts(traffic: Traffic) -> list[list[Form]]:
    return [[store.form for store in region.spec.stores] for region in traffic.regions]


HALVES = [PartOf(0, 2), PartOf(1, 2)]


def gated(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """What the forward pass of a layer with one weight for gate and up leaves for the backward pass."""
    whole = F.linear(x, w)
    gate, up = whole.chunk(2, -1)
    return F.silu(gate) * up, whole


@pytest.mark.parametrize("rows", [(M,), (2, M // 2)])
def test_a_gated_product_that_is_saved_is_written_by_its_kernel(rows: tuple[int, ...]) -> None:
    args = planes((*rows, K), (2 * N, K))
    ours, theirs = fused(gated, args), alone(gated, args)
    assert parts(ours) == [[*HALVES, PLANE]]
    assert (theirs.kernels, ours.kernels) == (2, 1)
    assert theirs.bytes - ours.bytes == 2 * 2 * M * N  # Inductor's own kernel reads both halves


def training_step(x: Tensor, w: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def test_a_training_step_launches_its_products_and_nothing_else() -> None:
    args = tuple(each.requires_grad_() for each in planes((M, K), (2 * N, K), (K, N)))
    ours, theirs = fused(training_step, args), alone(training_step, args)
    assert parts(ours) == [[*HALVES, PLANE], HALVES]
    assert (theirs.kernels, ours.kernels) == (8, 6)
    assert theirs.bytes - ours.bytes == 8 * M * N


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_are_as_eager_has_them(interleaved: bool) -> None:
    def step(x: Tensor, w: Tensor, down: Tensor) -> Tensor:
        both = F.linear(x, w)
        gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)

    args = tuple(each.requires_grad_() for each in planes((2, 12, K), (2 * N, K), (K, N)))
    expected = torch.autograd.grad(step(*args).float().square().sum(), args)
    compiled = torch.compile(step, backend="cute", dynamic=False)
    found = torch.autograd.grad(compiled(*args).float().square().sum(), args)
    for left, right in zip(found, expected, strict=True):
        assert left.stride() == right.stride()
        torch.testing.assert_close(left, right, rtol=0.05, atol=0.02 * float(right.abs().max()))


def alternating(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """As `gated`, for a weight in which rows of gate and up alternate."""
    whole = F.linear(x, w)
    return F.silu(whole[..., ::2]) * whole[..., 1::2], whole


def stored(traffic: Traffic) -> list[list[DType]]:
    return [[store.dtype for store in region.spec.stores] for region in traffic.regions]


@pytest.mark.parametrize(("dtype", "pair"), [(BF16, DType.BF16X2), (torch.float16, DType.F16X2)])
def test_even_and_odd_columns_that_are_saved_together_are_written_in_pairs(
    dtype: torch.dtype, pair: DType
) -> None:
    args = tuple(each.to(dtype) for each in planes((2, M // 2, K), (2 * N, K)))
    ours, theirs = fused(alternating, args), alone(alternating, args)
    assert stored(ours) == [[pair, pair.part]]
    assert (theirs.kernels, ours.kernels) == (2, 1)
    assert theirs.bytes - ours.bytes == 2 * 2 * M * N
    for left, right in zip(
        torch.compile(alternating, backend="cute")(*args), alternating(*args), strict=True
    ):
        assert (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype)
        torch.testing.assert_close(left, right, rtol=0.02, atol=0.02)


def test_even_and_odd_columns_in_fp32_are_not_written_together() -> None:
    """An element of 64 bits would hold them."""

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        both = F.linear(x, w).float().exp()
        return both[..., ::2] * both[..., 1::2], both

    (report,) = collect(step, planes((M, K), (2 * N, K)))
    assert Reason.UNPAIRED in {rejection.reason for rejection in report.rejections}
    stores = [store.dtype for region in report.regions for store in region.spec.stores]
    assert stores == [DType.BF16X2, DType.F32]  # of the product, from which the exponentials follow


def by_slices(x: Tensor, w: Tensor, down: Tensor) -> Tensor:
    both = F.linear(x, w)
    return F.linear(F.silu(both[..., ::2]) * both[..., 1::2], down)


def by_unbind(x: Tensor, w: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, w).unflatten(-1, (-1, 2)).unbind(-1)
    return F.linear(F.silu(gate) * up, down)


@pytest.mark.parametrize(("step", "launches", "saved"), [(by_slices, 9, 18), (by_unbind, 8, 8)])
def test_a_step_with_alternating_columns_launches_its_products_and_nothing_else(
    step: Callable[..., Tensor], launches: int, saved: int
) -> None:
    args = tuple(each.requires_grad_() for each in planes((2, M // 2, K), (2 * N, K), (K, N)))
    ours, theirs = fused(step, args), alone(step, args)
    assert stored(ours) == [[DType.BF16X2, DType.BF16], [DType.BF16X2]]
    assert (theirs.kernels, ours.kernels) == (launches, 6)
    assert theirs.bytes - ours.bytes == saved * M * N


def test_a_dynamic_batch_has_the_same_kernels() -> None:
    layer = torch.nn.Linear(K, 2 * N, bias=False, dtype=BF16).requires_grad_(False)

    def specs(dynamic: bool) -> list[str]:
        (report,) = collect(lambda x: gated(x, layer.weight), planes((3, M, K)), dynamic=dynamic)
        return [region.spec.to_json() for region in report.regions]

    assert specs(True) == specs(False) != []


JOINED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "cat": (lambda x, y: torch.cat((x, y), -1), 2),
    "cat of three": (lambda x, y: torch.cat((x, y, x), 1), 3),
    "stack before the columns": (lambda x, y: torch.stack((x, y), 1), 2),
    "stack, then one axis": (lambda x, y: torch.stack((x, y), 1).view(M, 2 * N), 2),
}


@pytest.mark.parametrize("name", JOINED)
def test_planes_that_are_joined_are_parts(name: str) -> None:
    joined, count = JOINED[name]

    def fn(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        y = a @ b
        return joined(torch.relu(y), y * c)

    args = planes((M, K), (K, N), (M, N))
    ours, theirs = fused(fn, args), alone(fn, args)
    assert parts(ours) == [[PartOf(index, count) for index in range(count)]]
    assert (theirs.kernels, ours.kernels) == (2, 1) and ours.bytes < theirs.bytes
    torch.testing.assert_close(torch.compile(fn, backend="cute")(*args), fn(*args), rtol=0.02, atol=0.02)


def _scattered(base: Tensor, x: Tensor, y: Tensor, step: int) -> Tensor:
    base = torch.slice_scatter(base, x, -1, 0, None, step)
    return torch.slice_scatter(base, y, -1, 1, None, step)


ALTERNATING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "stack behind the columns": lambda x, y: torch.stack((x, y), -1),
    "assignments": lambda x, y: _scattered(y.new_empty(M, 2 * N), x, y, 2),
    "a sum of assignments": lambda x, y: (
        torch.slice_scatter(y.new_zeros(M, 2 * N), y, -1, 1, None, 2)
        + torch.slice_scatter(y.new_zeros(M, 2 * N), x, -1, 0, None, 2)
    ),
}


@pytest.mark.parametrize("name", ALTERNATING)
def test_columns_in_turn_are_written_in_pairs(name: str) -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        y = a @ b
        return ALTERNATING[name](torch.relu(y), y * c)

    args = planes((M, K), (K, N), (M, N))
    ours, theirs = fused(fn, args), alone(fn, args)
    assert stored(ours) == [[DType.BF16X2]]
    assert (theirs.kernels, ours.kernels) == (2, 1) and ours.bytes < theirs.bytes
    torch.testing.assert_close(torch.compile(fn, backend="cute")(*args), fn(*args), rtol=0.02, atol=0.02)


def test_a_sum_of_assignments_has_no_negative_zero() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        y = a @ b
        return ALTERNATING["a sum of assignments"](-y, y)

    args = torch.zeros(M, K, dtype=BF16), torch.zeros(K, N, dtype=BF16)
    (report,) = collect(fn, args)
    assert stored(Traffic(0, 0, tuple(report.regions))) == [[DType.BF16X2]]
    assert not torch.compile(fn, backend="cute")(*args).signbit().any()


NOT_JOINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows": lambda x, y: torch.cat((x, y), 0),
    "three that alternate": lambda x, y: torch.stack((x, y, x), -1),
    "a third of the columns": lambda x, y: _scattered(y.new_zeros(M, 3 * N), x, y, 3),
    "every second row": lambda x, y: _scattered(y.new_zeros(N, 2 * M), x.t(), y.t(), 2).t(),
    "a plane of its own": lambda x, y: torch.cat((x, torch.ones_like(y)[:, :8]), -1),
    "heads": lambda x, y: torch.cat((x.view(M, 5, 16), y.view(M, 5, 16)), -1),
    "heads before rows": lambda x, y: torch.cat((x.view(M, 5, 16).transpose(0, 1),) * 2, -1),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", NOT_JOINED)
def test_what_does_not_lie_side_by_side_is_left(name: str) -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        y = a @ b
        return NOT_JOINED[name](torch.relu(y), y * c)

    args = planes((M, K), (K, N), (M, N))
    ours, theirs = fused(fn, args), alone(fn, args)
    assert not any(part.count > 1 for each in parts(ours) for part in each)
    assert ours.bytes <= theirs.bytes and ours.kernels <= theirs.kernels
    torch.testing.assert_close(torch.compile(fn, backend="cute")(*args), fn(*args), rtol=0.02, atol=0.02)


def test_each_part_counts_as_a_store() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        y = a @ b
        return torch.cat([torch.relu(y * scale) for scale in (1.0, 2.0, 3.0)], -1)

    args = planes((M, K), (K, N))
    with config.patch(max_stores=2):
        ours = fused(fn, args)
    assert not any(part.count > 1 for each in parts(ours) for part in each)
    assert parts(fused(fn, args)) == [[PartOf(index, 3) for index in range(3)]]


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("turned", [False, True])
def test_joined_values_are_cast_where_they_are_computed(dim: int, turned: bool) -> None:
    """Also behind a view of the same memory, but not behind one in another order."""
    made = Graph()
    wide = made.call(prims.convert_element_type.default, made.mm(), F32)
    planes = [made.call(op, wide) for op in (aten.relu.default, aten.neg.default)]
    m, n = wide.meta["val"].shape
    columns = [made.call(aten.unsqueeze.default, plane, dim) for plane in planes]
    joined = made.call(aten.cat.default, columns, dim)
    if turned:
        joined = made.call(aten.permute.default, joined, [0, 2, 1])
        joined = made.call(aten.clone.default, joined, memory_format=torch.contiguous_format)
    flat = made.call(aten.reshape.default, joined, [m, 2 * n])
    graph = made.output(made.call(prims.convert_element_type.default, flat, BF16))
    found, _ = walk(graph)
    written = [store.dtype for region in found for store in region.spec.stores]
    if turned:
        assert not written
    else:
        assert written == ([DType.BF16] * 2 if dim == 1 else [DType.BF16X2])
        assert_same_after_the_pass(graph, 1)


def test_what_reads_a_joined_value_and_the_region_is_outside() -> None:
    made = Graph()
    y = made.call(aten.relu.default, made.mm())
    both = made.call(aten.cat.default, [y, y], -1)
    made.output(made.call(aten.mul.Tensor, both, 2.0), y)
    (region,), _ = walk(made.graph)
    assert kernel_formula(region.spec) == "out0 = bf16(relu(acc))"
