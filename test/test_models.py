"""The regions of the models in examples/, on CPU tensors, and their results beside eager's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch.torch_version import TorchVersion

import cute_backend
from cute_backend.api import ExplainedRegion
from cute_backend.fx_walk.epilogue_pass import EpiloguePass
from support import model_files, ranks
from support.golden import assert_expected
from support.model_files import ARCHITECTURES, NAMES, ROOT, check, graph_breaks, load, outcome
from support.reference import relative_error
from support.sweeps import EXHAUSTIVE


def shown(region: ExplainedRegion) -> str:
    """A region in a line: its products, or parts of one, the kinds of its operands, its results."""
    count = len(region.products)
    several = "parts" if region.products[0].label.endswith("]") else "pair"
    products = f"launch of {count}" if region.spec.product.width else several if count == 2 else "one"
    loads = " ".join(load.kind for load in region.loads) or "nothing"
    reduced = region.spec.reductions
    kinds = ((store.kind if store.name in reduced else "plane", store.dtype) for store in region.stores)
    stores = ", ".join(" ".join(each) for each in kinds)
    return f"{products}: {loads} -> {stores}"


@pytest.fixture(autouse=True)
def settings_as_shipped() -> Iterator[None]:
    settings = {"block_reductions": "auto", "rotary_embeddings": "auto", "shared_launches": True}
    with cute_backend.config.patch(**settings):
        yield


EVERY_DAY = {"hugging_face.py:llama", "hugging_face.py:deepseek_v3", "hugging_face.py:gpt_oss_fp8"}


def explained() -> Iterator[ParameterSet]:
    """Every model. Of the architectures of transformers, `make test` has a dense one, and experts in bf16 and
    in fp8; tracing such a model takes seconds."""
    architectures = {name for name in NAMES if f"{name}_fp8" in NAMES or name.endswith("_fp8")}
    for name in NAMES:
        kept = name not in architectures or name in EVERY_DAY
        yield pytest.param(name, marks=() if kept else EXHAUSTIVE)


@pytest.mark.parametrize("model", list(explained()))
def test_what_is_fused_of_a_model(model: str) -> None:
    fused = _fused(model)
    assert_expected(f"models/{_file(model)}.txt", fused)
    counts = {"pair": 2, "parts": 1, "one": 1, "launch of 2": 2, "launch of 3": 3, "launch of 4": 4}
    products = sum(count * len(re.findall(f"^{kind}:", fused, re.M)) for kind, count in counts.items())
    assert _products(model) == products, "see docs/models.py"


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("hugging_face.py:llama_fp8", marks=EXHAUSTIVE),
        "torchao_fp8.py:mlp_per_tensor",
        "training.py:dropout",
    ],
)
def test_the_same_is_fused_for_any_number_of_rows(model: str) -> None:
    assert _fused(model, dynamic=True).splitlines() == _kept(model)


def _file(model: str) -> str:
    """The name of what is expected of a model.

    From torch 2.14 on the attention weights of GPT-OSS are a slice of the softmax with a sink, (..., S) of
    (..., S + 1), which earlier versions copy. TMA can't read such rows.
    """
    name = model.replace(".py:", "_")
    return f"{name}_since_2_14" if "gpt_oss" in model and TorchVersion(torch.__version__) >= "2.14" else name


def _fused(model: str, dynamic: bool = False) -> str:
    """The regions of a model, a line each, and how often each reason refuses something."""
    explained = cute_backend.explain(*_call(model), dynamic=dynamic)
    refused = Counter(rejection.reason.value for rejection in explained.rejections)
    lines = [
        *map(shown, explained.regions),
        "",
        *(f"{count} {reason}" for reason, count in sorted(refused.items())),
    ]
    return "\n".join(lines).strip() + "\n"


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


def test_no_model_launches_or_moves_more_than_by_inductor_alone() -> None:
    row = r"^\| (\S+) \| \d+ \| \d+ in \d+ \| (\d+) to (\d+) \| (\d+) to (\d+) \|$"
    rows = re.findall(row, (ROOT / "docs/models.md").read_text(), re.M)
    assert [model for model, *_ in rows] == [*NAMES, *ARCHITECTURES]
    assert len(ARCHITECTURES) >= 40
    assert not [model for model, *counts in rows if not _no_more(*map(int, counts))]


def _no_more(kernels: int, our_kernels: int, kib: int, our_kib: int) -> bool:
    return our_kernels <= kernels and our_kib <= kib


BF16_ERROR = 1e-2
"""Relative in norm: eager rounds to bf16 after each op, and a fused epilogue once."""

QUICK = [model for model in NAMES if model.startswith("training")] + ["torchao_fp8.py:mlp_per_row"]


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=EXHAUSTIVE if name.endswith(("gelu", "_row")) else ()) for name in QUICK],
)
def test_a_model_and_its_gradients_are_right(model: str, fresh_compiler: None) -> None:
    check(model, "cpu")
    assert counters["cute_backend"]["regions"] == sum(":" in line for line in _kept(model))


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_an_error_of_a_percent_is_told(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def given(fn: Any, args: tuple[Any, ...], backend: str) -> list[Tensor]:
        return [each.double() * factor for each in outcome(fn, args)]

    monkeypatch.setattr(model_files, "compiled", given)
    with nullcontext() if factor == 1.0 else pytest.raises(AssertionError, match="result 0 is"):
        check("training.py:dropout", "cpu")


def test_a_graph_break_is_told_from_a_whole_graph() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    assert graph_breaks(broken, (torch.ones(2),))
    assert not graph_breaks(lambda x: x + 1, (torch.ones(2),))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("model", ["torchao_fp8.py:mlp_per_row", "training.py:swiglu"])
def test_one_compilation_serves_every_number_of_rows_with_no_guard_of_ours(
    model: str, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[int] = []
    whole = EpiloguePass.fuse

    def counting(graph_pass: EpiloguePass, graph: fx.Graph) -> None:
        values = [node.meta.get("val") for node in graph.nodes]
        env = next(value.node.shape_env for value in values if isinstance(value, torch.SymInt))
        before = len(env.guards), len(env.replacements), len(env.deferred_runtime_asserts)
        whole(graph_pass, graph)
        assert (len(env.guards), len(env.replacements), len(env.deferred_runtime_asserts)) == before
        added.append(counters["cute_backend"]["regions"])

    monkeypatch.setattr(EpiloguePass, "fuse", counting)
    fn, (x,) = load(model)
    trains = x.requires_grad
    compiled = torch.compile(fn, backend="cute", dynamic=True)
    for tokens in (64, 7, 33, 2):
        part = x.detach()[:, :tokens].clone().requires_grad_(trains)
        for actual, right in zip(outcome(compiled, (part,)), outcome(fn, (part,)), strict=True):
            assert relative_error(actual, right) < BF16_ERROR
    assert counters["stats"]["unique_graphs"] == 1
    assert len(added) == (2 if trains else 1) and all(added)


def _kept(model: str) -> list[str]:
    return (ROOT / f"test/expected/models/{_file(model)}.txt").read_text().splitlines()


@pytest.mark.exhaustive
def test_regions_of_a_tensor_parallel_model_end_at_its_collectives() -> None:
    """Two processes, over gloo: gate and up are a pair, and what follows down waits for the all-reduce."""
    printed = ranks.run(ROOT / "examples" / "tensor_parallel.py", "--cpu")
    fused = "{'anchors': 3, 'regions': 1, 'nothing_to_fuse': 1, 'not_pointwise': 1}; right"
    assert printed.count(fused) == 2, printed
