"""A linear that torch writes as a product of batches, with one weight expanded to all of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from cute_backend.backend import cute
from cute_backend.fx_walk.preparation.broadcast import join_batches
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.spec import ProductKind
from support.fx_walk.synthetic import Graph, aten, called
from support.traffic import fused

B, S, N, K = 4, 16, 128, 64


def softcapped(x: Tensor, weight: Tensor) -> Tensor:
    """The scores of the last token of each text, as Gemma caps them."""
    return torch.tanh(F.linear(x[:, -1:], weight) / 30) * 30


def fifth_rows(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.view(B // 2, 2 * S, K)[:, ::4], weight).relu()


def all_but_the_first(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x[:, 1:], weight).relu()


def operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(B, S, K, generator=generator).bfloat16(), torch.randn(
        N, K, generator=generator
    ).bfloat16()


@pytest.mark.parametrize("program", [softcapped, fifth_rows])
def test_rows_with_one_stride_are_those_of_one_product(program) -> None:
    """The weight is read once, and what follows is fused."""
    x, weight = operands()
    found = fused(program, (x, weight))
    (region,) = found.regions
    assert not found.rejections and region.spec.product.kind is ProductKind.DENSE
    rows = program(x, weight).numel() // N
    assert region.problem == (rows, N, K)
    assert (found.kernels, found.bytes) == (1, 2 * (B * S * K + N * K + rows * N))


@pytest.mark.parametrize("dynamic", [(), (0,), (0, 1)], ids=["static", "any_batch", "any_batch_and_length"])
def test_the_result_is_that_of_the_batches(dynamic: tuple[int, ...], fresh_compiler: None) -> None:
    x, weight = operands()
    for axis in dynamic:
        torch._dynamo.mark_dynamic(x, axis)
    with torch.no_grad():
        result = torch.compile(softcapped, backend=cute)(x, weight)
    assert result.shape == (B, 1, N) and result.is_contiguous()
    torch.testing.assert_close(result.double(), softcapped(x.double(), weight.double()), rtol=0.01, atol=0.1)
    assert dict(counters["cute_backend"]) == {"anchors": 1, "regions": 1}


def test_rows_with_several_strides_stay_batches() -> None:
    found = fused(all_but_the_first, operands())
    assert not found.regions
    assert found.rejections[0].reason is Reason.OPERAND_LAYOUT
    assert "leading axes of the input do not collapse" in found.rejections[0].message


@pytest.mark.parametrize("empty", [{"k": 0}, {"n": 0}, {"rows": 0}, {"n": 0, "batches": 2}])
def test_products_of_no_elements_stay_batches(empty: dict[str, int]) -> None:
    """A reshape of no elements has any number of sizes that -1 could stand for."""
    sizes = {"batches": 3, "rows": 4, "k": 8, "n": 16} | empty
    made = Graph()
    batches = made.size("batches", 2) if "batches" in empty else sizes["batches"]
    a = made.input("a", (batches, sizes["rows"], sizes["k"]))
    b = made.input("b", (batches, sizes["k"], sizes["n"]), strides=(0, 1, max(sizes["k"], 1)))
    graph = made.output(made.call(aten.relu.default, made.call(aten.bmm.default, a, b)))
    join_batches(graph)
    assert called(graph) == ["aten.bmm.default", "aten.relu.default"]
