"""What explain says of a program that torch.compile compiles in several graphs, or not at all."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cute_backend
from cute_backend.fx_walk.refusals.reasons import NO_PRODUCT

SQUARE = torch.ones(64, 64, dtype=torch.bfloat16)


def product(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).relu()


def line(fn: Callable[..., Any], offset: int) -> str:
    return f"{__name__.rpartition('.')[2]}.py:{fn.__code__.co_firstlineno + offset}"


def broken(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).relu()
    torch._dynamo.graph_break()
    sys.stdout.write("between\n")
    return (y @ w).tanh()


def test_each_break_is_named_once_with_its_place_and_the_code_there_runs(capsys: Any) -> None:
    explained = cute_backend.explain(broken, SQUARE, SQUARE)
    formulas = [region.formula for region in explained.regions]
    assert formulas == ["out0 = bf16(relu(acc))", "out0 = bf16(tanh(acc))"]
    assert [each.where for each in explained.breaks] == [line(broken, 2), line(broken, 3)]
    assert "graph_break()" in explained.breaks[0].reason
    assert all("\n" not in each.reason and each.reason for each in explained.breaks)
    assert capsys.readouterr().out == "between\n"
    text = str(explained)
    assert text.startswith("2 regions fused, 2 graph breaks\n")
    assert f"\n{line(broken, 2)}" in text.partition("\ngraph break")[2]
    assert f">{line(broken, 3)}</td>" in explained.to_html("page")


def test_a_program_of_one_graph_has_no_breaks() -> None:
    explained = cute_backend.explain(product, SQUARE, SQUARE)
    assert not explained.breaks and "graph break" not in str(explained) + explained.to_html("page")


@torch.compiler.disable
def disabled(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).relu()


def calls_disabled(x: Tensor, w: Tensor) -> Tensor:
    return disabled(x, w)


SPARSE = torch.eye(64).to_sparse()


def sparse_constant(x: Tensor, w: Tensor) -> Tensor:
    return torch.sparse.mm(SPARSE, w.float()).bfloat16() @ x


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("fn", "context", "why"),
    [
        (disabled, contextlib.nullcontext, "what is at its graph break, test_walk_graph_breaks.py:"),
        (calls_disabled, contextlib.nullcontext, line(calls_disabled, 1) + " (Skip calling `torch.compil"),
        (sparse_constant, contextlib.nullcontext, line(sparse_constant, 1)),
        (product, Passing, "a TorchDispatchMode is active"),
        (
            product,
            functools.partial(torch.compiler.set_stance, "force_eager"),
            "torch.compiler.set_stance('force_eager') is in force",
        ),
        (
            product,
            functools.partial(torch._dynamo.config.patch, disable=True),
            "torch._dynamo.config.disable is set",
        ),
        (lambda x, w: 3, contextlib.nullcontext, "no op on tensors is in its code"),
    ],
)
def test_a_program_without_a_graph_says_what_happened(fn: Any, context: Any, why: str) -> None:
    with context():
        explained = cute_backend.explain(fn, SQUARE, SQUARE)
    assert explained.no_product.startswith("torch.compile compiled no graph of it, because ")
    assert why in explained.no_product and NO_PRODUCT not in explained.no_product
    assert explained.no_product in " ".join(str(explained).split())
    with pytest.raises(cute_backend.UsageError, match="compiled no graph of it"):
        explained.first_region()


def test_a_product_at_a_break_is_not_denied() -> None:
    explained = cute_backend.explain(lambda x, w: disabled(x, w) + 1, SQUARE, SQUARE)
    (found,) = explained.breaks
    assert explained.no_product == f"{NO_PRODUCT}; Python runs what is at its graph breaks ({found.where})"


def test_tensors_on_meta_are_named_as_the_reason() -> None:
    x = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    linear = torch.nn.Linear(64, 64, dtype=torch.bfloat16, device="meta")
    with torch.no_grad():
        found = [
            cute_backend.explain(product, x, x),
            cute_backend.explain(torch.nn.Sequential(linear, torch.nn.ReLU()), x),
        ]
    for explained in found:
        assert explained.no_product.startswith("its tensors are on the device meta, for which Inductor ")
        assert not explained.regions
