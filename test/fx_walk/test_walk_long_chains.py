"""Graphs with long chains of ops: the walker's calls do not nest by a chain's length."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_backend import config
from cute_backend.fx_walk import collect as collecting
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.region.reduced import _MOST_OPS
from cute_backend.fx_walk.values import chain as chaining

LENGTH, DEPTH = 320, 260
"""The ops of a chain, and the calls that may nest within the walker: more than its 16 steps of work on
operands take, with six calls each."""

X, W, PLANE = (torch.ones(64, 64, dtype=torch.bfloat16) for _ in range(3))


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    with config.patch(block_reductions="auto", rotary_embeddings="auto"):  # type: ignore[attr-defined]
        yield


@pytest.fixture(autouse=True)
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits the calls that nest within the steps of the walker."""

    def limited(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            frame, depth = sys._getframe(), 0
            while frame := frame.f_back:
                depth += 1
            before = sys.getrecursionlimit()
            sys.setrecursionlimit(depth + DEPTH)
            try:
                return step(*arguments)
            finally:
                sys.setrecursionlimit(before)

        return run

    for name in ("prepare", "regions_of", "rewrite"):
        monkeypatch.setattr(collecting, name, limited(getattr(collecting, name)))


def affine(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    for _ in range(LENGTH // 2):
        y = y * 0.99 + 0.01
    return y


def horner(x: Tensor, w: Tensor) -> Tensor:
    y = product = x @ w
    for index in range(LENGTH // 2):
        y = y * product + index
    return y


def square_roots(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    for _ in range(LENGTH // 2):
        y = y.abs().sqrt()
    return y


def clamps(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).float()
    for index in range(LENGTH):
        y = y.clamp(max=448.0 + LENGTH - index)
    return y.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def operands(x: Tensor, w: Tensor) -> Tensor:
    plane = PLANE
    for _ in range(LENGTH):
        plane = plane + 0.5
    return (x @ w).relu() + plane


def after_a_reduction(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = (x @ w).float()
    total = y.sum(-1)
    for _ in range(200):  # a kernel finishes a reduction with 256 ops at most
        total = total * 0.5
    return y.relu(), total


@pytest.mark.sweep(2)
@pytest.mark.settings(block_reductions="always")  # a row of 64 columns is a block
@pytest.mark.parametrize("fn", [affine, horner, square_roots, clamps, operands, after_a_reduction])
def test_a_long_chain_is_one_region(fn: Callable[..., Any]) -> None:
    (graph,) = collect(fn, (X, W), arch="sm_90a")
    (region,) = graph.regions
    made = [*region.spec.ops, *(op for store in region.spec.stores for op in store.after)]
    assert len(made) >= (LENGTH // 2 if fn is not operands else 2)


def views(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    for index in range(LENGTH):
        y = y.t() if index % 2 else y.unsqueeze(0).select(0, 0)
    return y.relu()


def negated(x: Tensor, w: Tensor) -> Tensor:
    first, second = (x @ w).split(32, -1)
    for _ in range(LENGTH):
        second = torch.ops.aten.neg.default(second)
    return torch.cat((second, first), -1)


def log_softmax(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).float()
    for _ in range(LENGTH):
        y = y.tanh()
    index = torch.zeros(64, 1, dtype=torch.int64)
    return torch.log_softmax(y, -1).gather(-1, index)


def log_softmax_of_shared_steps(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    for _ in range(LENGTH // 8):
        y = y.tanh() * y
    index = torch.zeros(64, 1, dtype=torch.int64)
    return torch.log_softmax(y, -1).gather(-1, index)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("fn", [views, negated, log_softmax, log_softmax_of_shared_steps])
def test_what_is_looked_for_in_long_chains_ends(fn: Callable[..., Any]) -> None:
    (graph,) = collect(fn, (X, W), arch="sm_90a")
    assert not any(rejection.reason.value == "internal_error" for rejection in graph.rejections)
    assert graph.regions or graph.rejections


def test_a_kernel_finishes_a_reduction_with_a_limited_number_of_ops() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = (x @ w).float()
        total = y.sum(-1)
        for _ in range(_MOST_OPS + 40):
            total = total * 0.5
        return y.relu(), total

    (graph,) = collect(fn, (X, W), arch="sm_90a")
    (region,) = graph.regions
    assert max(len(store.after) for store in region.spec.stores) <= _MOST_OPS
    assert any(f"finishes one with {_MOST_OPS}" in rejection.message for rejection in graph.rejections)


def test_a_kernel_has_a_limited_number_of_ops_and_inductor_computes_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chaining, "_MOST_OPS", 40)
    (graph,) = collect(affine, (X, W), arch="sm_90a")
    (region,) = graph.regions
    assert len(region.spec.ops) == 40
    (rejection,) = graph.rejections
    assert "follows 40 ops of its kernel, which would take too long to compile with more" in rejection.message
