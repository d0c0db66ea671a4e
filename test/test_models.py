"""What is fused of the models in examples/, on CPU tensors, and that it computes what eager does."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from golden import assert_expected
from model_files import NAMES, ROOT, errors, load
from torch import Tensor
from torch._dynamo.utils import counters

import cute_backend
from cute_backend.api import Region


def shown(region: Region) -> str:
    """A region in a line: its products, the kinds of its operands, its results."""
    products = "pair" if len(region.products) == 2 else "one"
    loads = " ".join(load.kind for load in region.loads) or "nothing"
    stores = ", ".join(f"{store.reduce or 'plane'} {store.dtype}" for store in region.stores)
    return f"{products}: {loads} -> {stores}"


@pytest.mark.parametrize("model", NAMES)
def test_what_is_fused_of_a_model(model: str) -> None:
    explained = cute_backend.explain(*_call(model))
    refused = Counter(rejection.reason.value for rejection in explained.rejections)
    lines = [
        *map(shown, explained.regions),
        "",
        *(f"{count} {reason}" for reason, count in sorted(refused.items())),
    ]
    assert_expected(f"models/{model.replace('.py:', '_')}.txt", "\n".join(lines).strip() + "\n")
    assert _products(model) == sum(len(region.products) for region in explained.regions), "see docs/models.py"


def _call(model: str):
    fn, args = load(model)
    trains = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    return fn if trains else torch.no_grad()(fn), *args


def _products(model: str) -> int:
    """How many products are fused of a model, as docs/models.md says."""
    (fused,) = re.findall(
        rf"^\| {re.escape(model)} \| \d+ \| (\d+) in", (ROOT / "docs/models.md").read_text(), re.M
    )
    return int(fused)


BF16_ERROR = 1e-2
"""Relative in norm: eager rounds to bf16 after each op, and a fused epilogue once."""

QUICK = [model for model in NAMES if model.startswith("training")] + ["torchao_fp8.py:mlp_per_row"]


@pytest.mark.parametrize("model", QUICK)
def test_a_model_and_its_gradients_are_eagers(model: str, fresh_compiler: None) -> None:
    assert max(errors(model, "cpu", "cute")) < BF16_ERROR
    assert counters["cute_backend"]["regions"] == sum(":" in line for line in _kept(model))


def _kept(model: str) -> list[str]:
    return (ROOT / f"test/expected/models/{model.replace('.py:', '_')}.txt").read_text().splitlines()
