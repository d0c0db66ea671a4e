"""Elementwise ops that give several tensors: each is refused, and the rest of its graph is fused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_backend import explain
from cute_backend.fx_walk.refusals.reasons import Reason

M, N, K = 24, 40, 16

LIBRARY = torch.library.Library("several_results", "DEF")
for schema, results in (("pair(Tensor x) -> (Tensor, Tensor)", tuple), ("list(Tensor x) -> Tensor[]", list)):
    LIBRARY.define(schema, tags=(torch.Tag.pointwise, torch.Tag.pt2_compliant_tag))
    LIBRARY.impl(
        schema.partition("(")[0],
        lambda x, results=results: results((x + 1, x * 2)),
        "CompositeExplicitAutograd",
    )


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((M, K), (K, N), (K, N))
    x, w, v = (torch.randint(-6, 7, size, generator=generator).bfloat16() for size in sizes)
    return x, w, v


OPS = {
    "frexp": (torch.frexp, "aten.frexp.Tensor"),
    "pair": (lambda x: torch.ops.several_results.pair(x), "several_results.pair.default"),
    "list": (lambda x: torch.ops.several_results.list(x), "several_results.list.default"),
}


@pytest.mark.sweep(1)
@pytest.mark.settings(shared_launches=False)
@pytest.mark.parametrize("name", OPS)
def test_several_results_are_refused_alone(name: str, fresh_compiler: None) -> None:
    op, target = OPS[name]

    def program(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        first, second = op((x @ w).relu().float())
        return first * 2, second, (x @ v).relu()

    explained = explain(program, *operands())
    assert len(explained.regions) == 2
    (refusal,) = [each for each in explained.rejections if each.reason is Reason.UNSUPPORTED_OP]
    assert refusal.message == f"{target} is pointwise but gives several tensors"
    compiled = torch.compile(program, backend="cute")(*operands())
    for result, wanted in zip(compiled, program(*operands()), strict=True):
        assert torch.equal(result, wanted)
