"""Packed columns as Falcon and DBRX take them: by lists of indices, repeated, and after work on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import cute_backend
from cute_backend import config
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.preparation.index_lists import neighbours

BF16 = torch.bfloat16
WIDTH, COLUMNS = 256, 64
QUERIES, KEYS = 4, 2

Program = Callable[..., tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def shared() -> Iterator[None]:
    with config.patch(shared_launches=True):  # type: ignore[attr-defined]
        yield


def rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def attended(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return rotated(q, cos, sin).contiguous(), rotated(k, cos, sin), v


def grouped(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    # Falcon 40B: the key and the value of a group are repeated for its queries, and then rotated.
    packed = F.linear(x, w[: (QUERIES + 2 * KEYS) * COLUMNS])
    packed = packed.view(*x.shape[:2], -1, QUERIES // KEYS + 2, COLUMNS)
    query, key, value = packed[:, :, :, :-2], packed[:, :, :, [-2]], packed[:, :, :, [-1]]
    key, value = torch.broadcast_to(key, query.shape), torch.broadcast_to(value, query.shape)
    return attended(*(each.flatten(2, 3) for each in (query, key, value)), cos, sin)


def of_one_key(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    # Falcon 7B.
    packed = F.linear(x, w[: (QUERIES + 2) * COLUMNS]).view(*x.shape[:2], QUERIES + 2, COLUMNS)
    return attended(packed[..., :-2, :], packed[..., [-2], :], packed[..., [-1], :], cos, sin)


def of_three(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    # Falcon RW.
    packed = F.linear(x, w).view(*x.shape[:2], QUERIES, 3, COLUMNS)
    return attended(packed[..., 0, :], packed[..., 1, :], packed[..., 2, :], cos, sin)


def by_longer_lists(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    packed = F.linear(x, w).view(*x.shape[:2], 12, COLUMNS)
    query, key = packed[:, :, [0, 1, 2, 3]], packed[:, :, torch.arange(4, 8)]
    return attended(query, key, packed[:, :, [-4, -3, -2, -1]], cos, sin)


def clamped(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    # DBRX.
    packed = F.linear(x, w[: (QUERIES + 2 * KEYS) * COLUMNS]).clamp(min=-4, max=4)
    parts = packed.split([COLUMNS * heads for heads in (QUERIES, KEYS, KEYS)], dim=2)
    return attended(*(part.view(*x.shape[:2], -1, COLUMNS) for part in parts), cos, sin)


SPELLINGS = [grouped, of_one_key, of_three, by_longer_lists, clamped]


def operands(batch: int = 2, tokens: int = 64) -> list[Tensor]:
    """Small integers, of which every sum is exact."""
    generator = torch.Generator().manual_seed(1)
    shapes = (batch, tokens, WIDTH), (3 * QUERIES * COLUMNS, WIDTH), *[(1, 1, tokens, COLUMNS)] * 2
    return [torch.randint(-1, 2, shape, generator=generator).to(BF16) for shape in shapes]


def region_of(fn: Program, arch: str = "sm_90a") -> Any:
    (region,) = cute_backend.explain(fn, *operands(), arch=arch).regions
    return region


@pytest.mark.sweep(3)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("fn", SPELLINGS, ids=lambda fn: fn.__name__)
def test_queries_keys_and_values_are_one_kernel_that_rotates(fn: Program, arch: str) -> None:
    region = region_of(fn, arch)
    assert len(region.spec.accumulators) == 3
    assert [segment.moves_columns for segment in region.spec.segments] == [True, True, False]
    assert region.spec.stores[0].form.block_columns


@pytest.mark.sweep(3)
@pytest.mark.parametrize("tokens", [1, 100, 127])
@pytest.mark.parametrize("fn", SPELLINGS, ids=lambda fn: fn.__name__)
def test_results_are_eagers(fn: Program, tokens: int, fresh_compiler: None) -> None:
    args = operands(1, tokens)
    results = torch.compile(fn, backend="cute", dynamic=False)(*args)
    assert counters["cute_backend"]["regions"] == 1
    for result, right in zip(results, fn(*args), strict=True):
        torch.testing.assert_close(result, right, rtol=1e-2, atol=0)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("fn", SPELLINGS, ids=lambda fn: fn.__name__)
def test_symbolic_lengths(fn: Program, fresh_compiler: None) -> None:
    args = operands(2, 24)
    for each, axis in zip((args[0], *args[2:]), (1, 2, 2), strict=True):
        torch._dynamo.mark_dynamic(each, axis)
    results = torch.compile(fn, backend="cute")(*args)
    for result, right in zip(results, fn(*args), strict=True):
        torch.testing.assert_close(result, right, rtol=1e-2, atol=0)
    assert counters["cute_backend"]["regions"] == 1


def test_a_repeated_key_is_rotated_once() -> None:
    """The kernel writes the key of each group, and what is repeated is the rotated key."""
    (report,) = collect(grouped, tuple(operands()), arch="sm_90a")
    (region,) = report.regions
    key = next(node for node, result in region.outputs.items() if result == 1)
    assert key.meta["val"].numel() == 2 * 64 * KEYS * COLUMNS
    repeated = [node for node in report.graph.nodes if node.target is torch.ops.aten.expand.default]
    assert [tuple(node.meta["val"].shape[:3]) for node in repeated] == [(2, KEYS, 2), (2, 64, KEYS)]


def test_work_that_differs_between_repetitions_is_not_done_before(fresh_compiler: None) -> None:
    def scaled(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        query, key, value = grouped(x, w, cos, sin)
        return query, key * torch.arange(1, key.shape[1] + 1).to(BF16)[:, None, None], value

    args = operands(1, 100)
    for result, right in zip(torch.compile(scaled, backend="cute")(*args), scaled(*args), strict=True):
        torch.testing.assert_close(result, right, rtol=1e-2, atol=0)


LISTS = [
    ([4], (1, 4, 1)),
    ([-2], (1, 4, 1)),
    ([-2, -1], (1, 4, 2)),
    ([0, 1, 2], (1, 0, 3)),
    (range(2, 5), (1, 2, 3)),
    ([1, 0], None),
    ([2, 2], None),
    ([0, 2], None),
    ([[1, 2]], None),
    (range(0, 6, 2), None),
]


@pytest.mark.parametrize(("index", "place"), LISTS, ids=lambda each: str(each).replace(" ", ""))
def test_lists_of_neighbours_are_slices(index: Any, place: tuple[int, ...] | None) -> None:
    def fn(x: Tensor) -> Tensor:
        is_range = isinstance(index, range)
        return x[:, torch.arange(index.start, index.stop, index.step) if is_range else index] * 2

    (report,) = collect(fn, (torch.ones(3, 6),), arch="sm_90a")
    (node,) = (node for node in report.graph.nodes if node.target is torch.ops.aten.index.Tensor)
    found = neighbours(node)
    assert (None if found is None else astuple(found)) == place


def test_an_index_that_is_an_operand_is_no_slice() -> None:
    def fn(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, index], x[[0], [1]]

    (report,) = collect(fn, (torch.ones(3, 6), torch.tensor([4])), arch="sm_90a")
    nodes = [node for node in report.graph.nodes if node.target is torch.ops.aten.index.Tensor]
    assert len(nodes) == 2 and [*map(neighbours, nodes)] == [None, None]


def first_columns(columns: int, turned: int) -> Program:
    """Packed q, k and v of heads of which the first `turned` columns are rotated."""

    def part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.cat((rotated(x[..., :turned], cos, sin), x[..., turned:]), dim=-1)

    def fn(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        packed = F.linear(x, w).chunk(3, dim=-1)
        q, k, v = (each.view(*x.shape[:2], -1, columns).transpose(1, 2) for each in packed)
        return part(q, cos, sin), part(k, cos, sin), v

    return fn


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("columns", "turned", "tokens"), [(80, 32, 1), (80, 32, 64), (128, 96, 64), (128, 96, 1)]
)
def test_first_columns_of_packed_heads(columns: int, turned: int, tokens: int, fresh_compiler: None) -> None:
    """Phi-2's heads, also of a single token, and Phi-4-mini's, of which a visit has all columns."""
    generator = torch.Generator().manual_seed(1)
    shapes = (1, tokens, WIDTH), (3 * 8 * columns, WIDTH), *[(1, 1, tokens, turned)] * 2
    args = [torch.randint(-1, 2, shape, generator=generator).to(BF16) for shape in shapes]
    fn = first_columns(columns, turned)
    with config.patch(rotary_embeddings="always"):  # type: ignore[attr-defined]
        (region,) = cute_backend.explain(fn, *args, arch="sm_90a").regions
        assert [segment.moves_columns for segment in region.spec.segments] == [True, True, False]
        results = torch.compile(fn, backend="cute", dynamic=False)(*args)
    assert counters["cute_backend"]["regions"] == 1
    for result, right in zip(results, fn(*args), strict=True):
        torch.testing.assert_close(result, right, rtol=1e-2, atol=0)
