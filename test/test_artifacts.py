"""The artifacts of a compilation, for tlparse and in Inductor's debug folder."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._logging._internal import trace_log

import cute_backend
from cute_backend import artifacts, config
from cute_backend.fx_walk import epilogue_pass as pass_module

BF16 = torch.bfloat16


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 64, dtype=BF16)
        self.down = torch.nn.Linear(64, 64, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.down(F.relu(self.up(x))))


class _Artifacts(logging.Handler):
    """The artifacts of this package in torch's structured trace, by graph: its explanation, its modules by
    name."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[tuple[str, dict[str, str]]] = []

    def emit(self, record: Any) -> None:
        artifact = record.metadata.get("artifact", {})
        name = artifact.get("name", "")
        if name == artifacts.EXPLANATION:
            self.graphs.append((record.payload, {}))
        elif name.startswith("cute_"):
            self.graphs[-1][1][name] = record.payload
        if name.startswith("cute_"):
            assert artifact["encoding"] == "string" and record.metadata["frame_id"] == 0


@pytest.fixture
def traced() -> Iterator[list[tuple[str, dict[str, str]]]]:
    handler = _Artifacts()
    trace_log.addHandler(handler)
    try:
        yield handler.graphs
    finally:
        trace_log.removeHandler(handler)


@pytest.fixture
def debug_folder(tmp_path: Path) -> Iterator[Path]:
    """As TORCH_COMPILE_DEBUG=1 has it, but for the log."""
    settings = {"enabled": True, "debug_dir": str(tmp_path), "debug_log": False, "graph_diagram": False}
    with inductor_config.patch({f"trace.{name}": value for name, value in settings.items()}):
        yield tmp_path / "torchinductor"


def compiled(fn: Callable[..., Any], backend: str = "cute") -> Any:
    options = {"post_grad_custom_pre_pass": cute_backend.epilogue_pass} if backend == "inductor" else None
    return torch.compile(fn, backend=backend, options=options)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", ["cute", "inductor"])
def test_tlparse_gets_the_explanation_of_each_graph_and_each_module(
    backend: str, traced: list[tuple[str, dict[str, str]]], fresh_compiler: None
) -> None:
    model, x = MLP(), torch.randn(32, 64, dtype=BF16)
    compiled(model, backend)(x).sum().backward()
    (forward, forward_modules), (backward, backward_modules) = traced
    assert re.match(r"graph model__\d+_forward_\d+: 2 regions fused\n\nregion 0: addmm, ", forward)
    assert re.match(r"graph model__\d+_backward_\d+: 1 region fused, ", backward)
    names = ("self.up", "self.down") if backend == "cute" else ("primals_2", "primals_5")
    for name in names:  # Inductor's own backend does not know Dynamo's inputs
        assert re.search(rf"bias +{name}(\.bias)? +rowvec ", forward)
    explained = cute_backend.explain(model, x)
    assert {**forward_modules, **backward_modules} == {
        region.kernel().entry: region.source() for region in explained.regions
    }


def test_the_debug_folder_of_a_graph_has_both_as_files(debug_folder: Path, fresh_compiler: None) -> None:
    def program(chosen: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        branches = (lambda x, weight: (x @ weight).relu(), lambda x, weight: (x @ weight).sigmoid())
        return torch.cond(chosen, *branches, (x, weight)) @ x

    x = torch.randn(64, 64, dtype=BF16)
    compiled(program)(torch.tensor(True), x, x.clone())
    (folder,) = debug_folder.glob("model__*_inference_*")
    explanation = (folder / f"{artifacts.EXPLANATION}.txt").read_text()
    graphs = re.findall(r"^graph model__\d+_inference_\d+: (.*)$", explanation, re.MULTILINE)
    assert graphs == ["1 region fused", "1 region fused", "no regions fused, 1 refusal (costs nothing)"]
    modules = {path.stem: path.read_text() for path in folder.glob("cute_mm_*.py")}
    names = [re.fullmatch(r"cute_mm_(\w+)_\d+x\d+_[0-9a-f]{8}", name) for name in sorted(modules)]
    assert [name[1] for name in names if name] == ["relu", "sigmoid"]
    assert all("class Epilogue:" in text for text in modules.values())


def test_nothing_is_left_where_nobody_keeps_it(fresh_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_log, "handlers", [])
    monkeypatch.setattr(artifacts, "_record", lambda *_: pytest.fail("an explanation was made"))
    x = torch.randn(32, 64, dtype=BF16)
    with torch.no_grad():
        compiled(MLP())(x)
    assert counters["cute_backend"]["regions"] == 2


def planted(*args: Any) -> Any:
    raise RuntimeError("planted")


def test_a_failed_pass_is_an_explanation_too(
    traced: list[tuple[str, dict[str, str]]], fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_module, "rewrite", planted)
    x = torch.randn(32, 64, dtype=BF16)
    with torch.no_grad(), config.patch(raise_errors=False), pytest.warns(RuntimeWarning, match="planted"):
        compiled(MLP())(x)
    (tried, modules), (failed, none) = traced
    assert ": 2 regions fused\n" in tried and ": no regions fused, 1 refusal\n" in failed
    assert re.search(r"internal_error +cute_backend failed at", failed) and not none
    assert len(modules) == 1  # both layers have one kernel


def test_a_tile_that_cannot_be_had_is_what_is_told(
    traced: list[tuple[str, dict[str, str]]], fresh_compiler: None
) -> None:
    with torch.no_grad(), config.patch(tile="128x9"):
        compiled(MLP())(torch.randn(32, 64, dtype=BF16))  # on a CPU, which has no tiles
    ((told, modules),) = traced
    assert told.startswith("config.tile is '128x9'") and not modules
    assert counters["cute_backend"] == {"anchors": 2, "regions": 2}


def test_what_fails_in_it_leaves_the_program_fused(
    traced: list[tuple[str, dict[str, str]]], fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "_write", planted)
    x = torch.randn(32, 64, dtype=BF16)
    left_out = "planted; the explanation of this graph is left out of its artifacts"
    with torch.no_grad(), config.patch(raise_errors=False), pytest.warns(RuntimeWarning, match=left_out):
        compiled(MLP())(x)
    assert counters["cute_backend"] == {"anchors": 2, "regions": 2, "internal_error": 1}
