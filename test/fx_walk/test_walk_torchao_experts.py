"""torchao's fp8 experts: both products are kernels as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_backend
from cute_backend.spec import LoadKind, ProductKind

pytest.importorskip("torchao.quantization", reason="needs torchao")
from support.experts import Experts, in_fp8


@pytest.fixture
def traced() -> Iterator[None]:
    """Registers a shape rule for the op's second version, which torch 2.13 has none for, so that it is traced
    without a GPU."""

    def shaped(a: Tensor, b: Tensor, *_: Any, **__: Any) -> Tensor:
        return a.new_empty(a.shape[0], b.shape[-1], dtype=torch.bfloat16)

    with torch.library._scoped_library("aten", "IMPL", "Meta") as library:
        library.impl("_scaled_grouped_mm_v2", shaped)
        yield


@pytest.mark.usefixtures("traced")
def test_fp8_experts_are_two_kernels() -> None:
    """The scale of each row is a colvec, that of each column of each expert a groupvec."""
    experts = in_fp8(Experts(4, 512, 256))
    x, ends, routing = torch.randn(128, 512), torch.tensor([30, 60, 60, 128]), torch.rand(128)
    inputs = x.bfloat16(), ends.int(), routing.bfloat16()
    gated, down = cute_backend.explain(experts, *inputs, arch="sm_90a").regions
    assert [region.spec.product.kind for region in (gated, down)] == [ProductKind.GROUPED] * 2
    kinds = [[load.kind for load in region.spec.loads] for region in (gated, down)]
    assert kinds == [
        [LoadKind.COLVEC, LoadKind.GROUPVEC, LoadKind.GROUPVEC],
        [LoadKind.COLVEC, LoadKind.GROUPVEC, LoadKind.COLVEC],
    ]
    assert len(gated.spec.accumulators) == 2
