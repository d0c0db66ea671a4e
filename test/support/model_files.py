"""The models of examples/, as tests load them."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor_config

from support.reference import relative_error

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import architectures  # noqa: E402
from models import MODELS  # noqa: E402

NAMES = [f"{file}.py:{name}" for file, names in MODELS.items() for name in names]
ARCHITECTURES = [*architectures.ARCHITECTURES]
"""The further models of docs/models.md."""
IN_FLOAT64 = [name for name in NAMES if name.startswith("training")] + [
    f"hugging_face.py:{name}" for name in ("llama", "qwen3", "gemma3")
]
"""Models that run in float64: those that neither quantise nor multiply in groups."""
NEEDS = {"torchao_fp8": ("torchao",), "hugging_face": ("torchao", "transformers")}


def load(model: str) -> tuple[Any, tuple[Any, ...]]:
    """A function such as "training.py:gelu" and its arguments. Skips the test if a package is missing."""
    file, name = model.split(".py:")
    for package in NEEDS.get(file, ()):
        pytest.importorskip(package, reason=f"{file}.py needs {package}: pip install '.[models]'")
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    module = importlib.import_module(file)
    fn, args = getattr(module, name), module.example_inputs()
    if file == "scaled_mm_recipes" and graph_breaks(fn, args):
        pytest.skip(f"Dynamo of torch {torch.__version__} does not trace torch.nn.functional.scaled_mm")
    return fn, args


def load_architecture(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A layer of ARCHITECTURES and its arguments; skips the test where it lacks a package."""
    for package in ("transformers", "diffusers"):
        pytest.importorskip(package, reason=f"{name} needs {package}: pip install '.[models]'")
    return architectures.architecture(name)


def graph_breaks(fn: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether Dynamo leaves some of a function to eager; nothing is computed."""

    class Traced(Exception):
        """The whole function is in one graph."""

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            raise Traced

        return call

    torch._dynamo.reset()
    try:
        torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)(*args)
    except Traced:
        return False
    except torch._dynamo.exc.Unsupported:
        return True
    raise ValueError(f"{fn} has no graph")


def outcome(fn: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """The results of a call and, if an argument needs a gradient, the gradients of all arguments and
    parameters. The incoming gradient holds the same numbers in bf16 and in float64."""
    args = tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args)
    torch.manual_seed(0)
    result = fn(*args)
    if not result.requires_grad:
        return [result]
    fn.zero_grad()
    gradient = torch.sin(torch.arange(result.numel(), device=result.device)).to(torch.bfloat16)
    result.backward(gradient.view_as(result).to(result))
    return [result.detach(), *(arg.grad for arg in args), *(each.grad for each in fn.parameters())]


def check(model: str, device: str) -> None:
    """Asserts that a model's results under `cute` are right.

    A fused epilogue rounds less often than eager. So for a model that runs in float64, the error of each
    tensor may be at most 1.5 times that of eager. In a model that quantises, another rounding moves some
    values by a step, and all results differ by percents: there, the difference from eager may be at most 1.5
    times that of Inductor's code.
    """
    fn, args = load(model)
    fn = copy.deepcopy(fn).to(device) if isinstance(fn, torch.nn.Module) else fn
    args = tuple(arg.detach().to(device).requires_grad_(arg.requires_grad) for arg in args)
    ours, eager = compiled(fn, args, "cute"), outcome(fn, args)
    if model in IN_FLOAT64:
        right, other, slack = in_float64(fn, args), eager, 5e-4
    else:
        right, other, slack = eager, compiled(fn, args, "inductor"), 2e-3
    for index, (got, limit, exact) in enumerate(zip(ours, other, right, strict=True)):
        error, allowed = relative_error(got, exact), relative_error(limit, exact)
        assert error < 1.5 * allowed + slack, f"result {index} is {error:.1e} off, the other {allowed:.1e}"


def compiled(fn: Any, args: tuple[Any, ...], backend: str) -> list[Tensor]:
    """The outcome of compiled code. Dropout draws the masks that eager draws, and the coordinate descent that
    torchao turns on for the whole process is off, because it takes minutes for a kernel that sorts."""
    with inductor_config.patch(fallback_random=True, coordinate_descent_tuning=False):
        return outcome(torch.compile(fn, backend=backend, dynamic=False), args)


def in_float64(fn: torch.nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    """The results of a bf16 model without rounding. The numbers that a GPU's dropout draws for an element
    depend on its dtype, so the masks are those of bf16 tensors."""
    dropout = F.dropout

    def as_of_bf16(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
        ones = torch.ones_like(x, dtype=torch.bfloat16)
        return x * (dropout(ones, p, training) != 0) / (1 - p) if training else x

    wide = tuple(
        arg.detach().double().requires_grad_(arg.requires_grad) if arg.is_floating_point() else arg
        for arg in args
    )
    with patch("torch.nn.functional.dropout", as_of_bf16):
        return outcome(copy.deepcopy(fn).double(), wide)
