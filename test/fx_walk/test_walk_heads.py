"""Results that programs want as (B, H, S, D) in memory, as attention reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_backend
from cute_backend import config
from cute_backend.api import Explanation
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.kinds.results import PLANE, Form, Heads

BF16 = torch.bfloat16
COLUMNS, WIDTH = 32, 128

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def heads(x: Tensor, columns: int = COLUMNS) -> Tensor:
    return x.unflatten(-1, (-1, columns)).transpose(1, 2)


def contiguous(x: Tensor, w: Tensor) -> Tensor:
    return heads(F.linear(x, w) * 0.5).contiguous()


def explained(fn: Callable[..., Any], *shapes: tuple[int, ...], arch: str = "sm_90a") -> Explanation:
    with FakeTensorMode():
        return cute_backend.explain(fn, *(torch.empty(shape, dtype=BF16) for shape in shapes), arch=arch)


def stored(fn: Callable[..., Any], *shapes: tuple[int, ...], arch: str = "sm_90a") -> list[Form]:
    """The form of every result of a program."""
    return [
        store.form for region in explained(fn, *shapes, arch=arch).regions for store in region.spec.stores
    ]


def compiled(fn: Callable[..., Any], *args: Tensor, regions: int = 1) -> Any:
    """Runs a program by the replay, and checks how many regions it has."""
    results = torch.compile(fn, backend="cute", dynamic=False)(*args)
    assert counters["cute_backend"]["regions"] == regions
    return results


def operands(batches: int, rows: int, *widths: int) -> list[Tensor]:
    """Small integers, of which every sum is exact."""
    generator = torch.Generator().manual_seed(rows)
    shapes = [(batches, rows, 64), *((width, 64) for width in widths)]
    return [torch.randint(-3, 4, shape, generator=generator).to(BF16) for shape in shapes]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_copy_to_heads_is_a_store(arch: str) -> None:
    assert stored(contiguous, (2, 100, 64), (WIDTH, 64), arch=arch) == [Heads(100, COLUMNS)]


@pytest.mark.parametrize("rows", [1, 100, 127, 2049])
def test_the_results_are_those_of_eager(rows: int) -> None:
    args = operands(2, rows, WIDTH)
    result, right = compiled(contiguous, *args), contiguous(*args)
    assert torch.equal(result, right) and result.stride() == right.stride()


def test_queries_keys_and_values_are_written_in_one_launch() -> None:
    def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return tuple(heads(F.linear(x, each).relu()).contiguous() for each in (q, k, v))

    shapes = ((2, 32, 4096), (4096, 4096), (1024, 4096), (1024, 4096))
    with config.patch(shared_launches=True):  # type: ignore[attr-defined]
        (region,) = explained(attention, *shapes).regions
        assert [store.form for store in region.spec.stores] == [Heads(32, COLUMNS)] * 3
        assert [store.kind for store in region.stores] == ["output, (B, H, 32, 32)"] * 3
        args = [torch.randint(-1, 2, shape).to(BF16) for shape in shapes]
        results = compiled(attention, *args)
    for result, right in zip(results, attention(*args), strict=True):
        assert torch.equal(result, right) and result.stride() == right.stride()


def test_a_copy_alone_is_worth_a_kernel() -> None:
    def bare(x: Tensor, w: Tensor) -> Tensor:
        return heads(F.linear(x, w)).contiguous()

    assert stored(bare, (2, 100, 64), (WIDTH, 64)) == [Heads(100, COLUMNS)]


def test_one_text_needs_no_axis_of_batches() -> None:
    assert stored(contiguous, (1, 100, 64), (WIDTH, 64)) == [Heads(100, COLUMNS)]
    args = operands(1, 100, WIDTH)
    assert torch.equal(compiled(contiguous, *args), contiguous(*args))


def test_rows_of_one_token_and_one_head_are_in_rows_anyway() -> None:
    assert stored(contiguous, (64, 1, 64), (WIDTH, 64)) == [PLANE]
    assert stored(contiguous, (2, 100, 64), (COLUMNS, 64)) == [PLANE]


def test_views_of_the_copy_are_views_of_the_result() -> None:
    def joined(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        copy = contiguous(x, w)
        return copy.flatten(0, 1), copy.transpose(1, 2), copy.sum()

    args = operands(2, 100, WIDTH)
    for result, right in zip(compiled(joined, *args), joined(*args), strict=True):
        assert torch.equal(result, right) and result.stride() == right.stride()


def test_both_layouts_may_be_wanted() -> None:
    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        product = F.linear(x, w) * 0.5
        return product, heads(product).contiguous()

    args = operands(2, 100, WIDTH)
    for result, right in zip(compiled(both, *args), both(*args), strict=True):
        assert torch.equal(result, right) and result.stride() == right.stride()


def test_rotated_heads_are_copied_by_the_kernel() -> None:
    def rotated(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = heads(F.linear(x, w))
        turned = torch.cat((-q[..., COLUMNS // 2 :], q[..., : COLUMNS // 2]), -1)
        return (q * cos + turned * sin).contiguous()

    with config.patch(rotary_embeddings="always"):  # type: ignore[attr-defined]
        assert stored(rotated, (2, 100, 64), (WIDTH, 64), *[(100, COLUMNS)] * 2) == [Heads(100, COLUMNS)]
        args = [arg.clamp(-1, 1) for arg in operands(2, 100, WIDTH)]
        tables = [torch.randint(-1, 2, (100, COLUMNS)).to(BF16) for _ in range(2)]
        assert torch.equal(compiled(rotated, *args, *tables), rotated(*args, *tables))


def test_a_gated_pair_is_written_by_heads() -> None:
    def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return heads(F.silu(F.linear(x, gate)) * F.linear(x, up)).contiguous()

    assert stored(gated, (2, 100, 64), (WIDTH, 64), (WIDTH, 64)) == [Heads(100, COLUMNS)]


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda x, w: heads(F.linear(x, w) * 0.5, 80).contiguous(), "80 columns"),
        (lambda x, w: heads(F.linear(x, w) * 0.5).transpose(2, 3).contiguous(), "(B, H, D, S)"),
        (lambda x, w: heads(F.linear(x, w) * 0.5).transpose(0, 1).contiguous(), "(H, B, S, D)"),
    ],
)
def test_other_layouts_are_copied_outside(fn: Callable[..., Tensor], why: str) -> None:
    found = explained(fn, (2, 100, 64), (160, 64))
    assert [each.reason for each in found.rejections] == [Reason.OUTPUT_LAYOUT], why
    assert [store.form for region in found.regions for store in region.spec.stores] == [PLANE]


def test_architectures_without_tma_copy_outside() -> None:
    found = explained(contiguous, (2, 100, 64), (WIDTH, 64), arch="sm_80")
    assert [each.reason for each in found.rejections] == [Reason.OUTPUT_LAYOUT]


def test_symbolic_rows_are_copied_outside() -> None:
    args = operands(2, 100, WIDTH)
    found = cute_backend.explain(contiguous, *args, dynamic=True, arch="sm_90a")
    assert [store.form for region in found.regions for store in region.spec.stores] == [PLANE]
    fn = torch.compile(contiguous, backend="cute", dynamic=True)
    assert torch.equal(fn(*args), contiguous(*args))


def test_heads_of_16_columns_are_copied_outside_if_what_reduces_them_is() -> None:
    """A visit has whole heads of 16 columns only if the kernel reduces them. It leaves the maxima to a later
    kernel, since they cost a plane more, and so the copy as well."""

    def with_maxima(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = heads(F.linear(x, w), 16)
        return y.amax(-1, keepdim=True), y.flatten(0, 1)

    args = operands(2, 2, 64)
    with config.patch(block_reductions="always"):
        results = compiled(with_maxima, *args, regions=0)
    assert not counters["cute_backend"]["internal_error"]
    for result, expected in zip(results, with_maxima(*args), strict=True):
        assert torch.equal(result, expected)
