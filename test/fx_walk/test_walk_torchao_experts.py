"""torchao's fp8 experts: both products are kernels as they are."""

from __future__ import annotations

import pytest
import torch

import cute_backend
from cute_backend.spec import LoadKind, ProductKind
from cute_backend.tracing.shape_rules import shape_rules

pytest.importorskip("torchao.quantization", reason="needs torchao")
from support.experts import Experts, in_fp8


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


@pytest.mark.parametrize(
    ("a", "b", "shape"),
    [
        ((64, 32), (3, 32, 48), (64, 48)),
        ((64, 32), (32, 48), (3, 64, 48)),
        ((3, 64, 32), (32, 48), (64, 48)),
        ((3, 64, 32), (3, 32, 48), (3, 64, 48)),
    ],
)
def test_the_second_version_has_the_shape_of_each_form(
    a: tuple[int, ...], b: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    left, right = (torch.empty(sizes, dtype=torch.float8_e4m3fn, device="meta") for sizes in (a, b))
    scales, ends = [torch.empty(64, device="meta")], torch.empty(3, dtype=torch.int32, device="meta")
    with shape_rules():
        result = torch.ops.aten._scaled_grouped_mm_v2(left, right, scales, [1], [0], scales, [1], [0], ends)
    assert (result.shape, result.dtype) == (shape, torch.bfloat16)
