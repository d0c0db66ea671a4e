"""Graphs compared with themselves after the pass, on inputs whose sums are exact."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, fx

from support.fx_walk.synthetic import BF16, called, rewritten, run

EPILOGUE = "cute_backend.gemm_epilogue.default"


def integers(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    """Integers so small that every sum and product of a test is exact in bf16's eight bits."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs_of(graph: fx.Graph) -> list[Tensor]:
    values = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    return [
        integers(*value.shape, seed=index).as_strided(value.shape, value.stride()).to(value.dtype)
        if value.numel() == sum((s - 1) * t for s, t in zip(value.shape, value.stride(), strict=True)) + 1
        else integers(*value.shape, dtype=value.dtype, seed=index)
        for index, value in enumerate(values)
    ]


def assert_same_after_the_pass(graph: fx.Graph, regions: int, left: list[str] | None = None) -> None:
    """Asserts that the pass fuses `regions` regions, leaves the calls `left`, and keeps the graph's
    results."""
    inputs = inputs_of(graph)
    before = run(copy.deepcopy(graph), *inputs)
    after_graph = rewritten(graph)
    calls = called(after_graph)
    assert calls.count(EPILOGUE) == regions
    assert [call for call in calls if call != EPILOGUE] == (left or [])
    for wanted, result in zip(before, run(after_graph, *inputs), strict=True):
        assert torch.equal(result, wanted)
        assert result.stride() == wanted.stride()
