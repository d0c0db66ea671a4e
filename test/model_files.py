"""The models of examples/, as tests load them."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import relative_error
from torch import Tensor
from torch._inductor import config as inductor_config

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from models import MODELS  # noqa: E402

NAMES = [f"{file}.py:{name}" for file, names in MODELS.items() for name in names]
NEEDS = {"torchao_fp8": ("torchao",), "hugging_face": ("torchao", "transformers")}


def load(model: str) -> tuple[Any, tuple[Any, ...]]:
    """A function such as "training.py:gelu" and its arguments; skips the test where it lacks a package."""
    file, name = model.split(".py:")
    for package in NEEDS.get(file, ()):
        pytest.importorskip(package, reason=f"{file}.py needs {package}: pip install '.[models]'")
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    module = importlib.import_module(file)
    return getattr(module, name), module.example_inputs()


def outcome(fn: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """What a call gives and, where an argument needs a gradient, those of all arguments and parameters."""
    args = tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args)
    torch.manual_seed(0)
    result = fn(*args)
    if not result.requires_grad:
        return [result]
    fn.zero_grad()
    result.backward(torch.sin(torch.arange(result.numel(), device=result.device)).view_as(result).to(result))
    return [result.detach(), *(arg.grad for arg in args), *(each.grad for each in fn.parameters())]


def errors(model: str, device: str, backend: str) -> list[float]:
    """By how much a backend's outcome differs from eager's, relative in norm, a number for each tensor."""
    fn, args = load(model)
    fn = copy.deepcopy(fn).to(device) if isinstance(fn, torch.nn.Module) else fn
    args = tuple(arg.detach().to(device).requires_grad_(arg.requires_grad) for arg in args)
    expected = outcome(fn, args)
    with inductor_config.patch(fallback_random=True):  # the masks of dropout as eager draws them
        actual = outcome(torch.compile(fn, backend=backend, dynamic=False), args)
    return [relative_error(each, right) for each, right in zip(actual, expected, strict=True)]
