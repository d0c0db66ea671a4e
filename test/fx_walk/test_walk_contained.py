"""Whatever fails in this package, a program compiles as it does without it, and the failure is seen."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import networkx
import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import fresh_cache, run_and_get_code

import cute_backend
from cute_backend import backend, config, spec
from cute_backend.backend import epilogue_pass
from cute_backend.errors import BuildError, UsageError
from cute_backend.fx_walk import collect
from cute_backend.fx_walk import epilogue_pass as pass_module
from cute_backend.fx_walk.graph import working_copy
from cute_backend.fx_walk.graph.static import fake
from cute_backend.fx_walk.products import anchors
from cute_backend.fx_walk.refusals import containment
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.fx_walk.replacement import direct_call
from cute_backend.fx_walk.replacement.rewrite import rewrite
from cute_backend.runtime.host import notices
from support.fx_walk.recorded import GRAPHS, read, walked
from support.sweeps import in_parts

CACHES = [
    value
    for name, module in sys.modules.items()
    if name.startswith("cute_backend.fx_walk.")
    for value in vars(module).values()
    if hasattr(value, "cache_clear")
]
WALKER = str(Path(pass_module.__file__).parent)
FOLDER = "torch-2.13-cpu"
NAMES = (
    "training_linear_gelu_dynamic_backward",
    "fp8_llama_mlp_dynamic",
    "silu_mul_to_fp8",
    "training_linear_gelu",
)


class Planted(Exception):
    pass


@pytest.fixture
def contained(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As users have it, and nothing warned of so far."""
    monkeypatch.setattr(notices, "_warned", set())
    counters.clear()
    with config.patch(raise_errors=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# Every function of the walker raises once


@dataclass
class Calls:
    """How often each function of the walker was called, and whether the planted error was raised."""

    seen: Counter[CodeType] = field(default_factory=Counter)
    raised: bool = False


@contextmanager
def planted(event: str, code: CodeType | None, occurrence: int = 1) -> Iterator[Calls]:
    """Raises at one call, or at the end of one call, of `code`."""
    calls = Calls()

    def fail(frame: FrameType) -> None:
        calls.raised = True
        raise Planted(f"at the {event} of {frame.f_code.co_name}")

    def until_return(frame: FrameType, what: str, argument: Any) -> Any:
        if what == "return":
            fail(frame)
        return until_return

    def trace(frame: FrameType, what: str, argument: Any) -> Any:
        called = frame.f_code
        if not called.co_filename.startswith(WALKER):
            return None
        calls.seen[called] += 1
        if called is not code or calls.seen[called] != occurrence:
            return None
        if event == "call":
            fail(frame)
        return until_return

    for remembered in CACHES:
        remembered.cache_clear()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield calls
    finally:
        sys.settrace(before)


def state(graph: fx.Graph) -> list[Any]:
    """All that a graph is made of: nodes, arguments, metas and users, by identity and in order."""
    return [
        (id(node), node.name, node.op, node.target, node.args, node.kwargs, list(node.users), dict(node.meta))
        for node in graph.nodes
    ]


def same(left: list[Any], right: list[Any]) -> bool:
    """Whether two states are of the same objects: fake tensors have no comparison."""

    def flat(value: Any) -> Any:
        parts = (list, tuple)
        if isinstance(value, parts):
            return [flat(each) for each in value]
        if isinstance(value, dict):
            return [(key, flat(each)) for key, each in value.items()]
        return value if isinstance(value, (str, int, float, type(None))) else id(value)

    return bool(flat(left) == flat(right))


CONTAINING = {
    pass_module.EpiloguePass.__call__.__code__,
    *(function.__code__ for function in vars(containment).values() if hasattr(function, "__code__")),
}
"""The functions that contain failures, which these tests are about."""

COMMITTING = {working_copy.WorkingCopy.commit.__code__, working_copy.WorkingCopy._put.__code__}
"""The functions that put the finished graph in place, by calls of fx: half-way the graph means the same, but
is not as it was."""


UNOBSERVED = pass_module.EpiloguePass({"measure": False})
"""The pass alone: what fails where an explanation is made of a graph, or where something is measured, leaves
it fused."""


def called_by_the_pass(path: Path) -> Counter[CodeType]:
    graph, _ = read(path)
    with planted("call", None) as calls:
        UNOBSERVED(graph)
    return calls.seen


@pytest.mark.sweep(1)
@in_parts(8)
@pytest.mark.parametrize(
    ("event", "last"),
    [
        pytest.param("call", False, id="at its first call"),
        pytest.param("call", True, id="at its last call", marks=pytest.mark.exhaustive),
        pytest.param("return", False, id="at the end of its first", marks=pytest.mark.exhaustive),
    ],
)
def test_a_graph_is_as_it_was_whatever_of_the_walker_raises(
    event: str, last: bool, part: slice, contained: None
) -> None:
    """Each function of a part."""
    paths = [path for path in GRAPHS if path.parent.name == FOLDER and path.stem in NAMES]
    calls = {path: called_by_the_pass(path) for path in paths}
    costly_first = sorted(paths, key=lambda path: -calls[path].total())
    where = {code: (path, count) for path in costly_first for code, count in calls[path].items()}
    assert len(where) > 200
    graphs = {path: read(path)[0] for path in paths}
    states = {path: state(graph) for path, graph in graphs.items()}
    raised = 0
    for code, (path, count) in [*where.items()][part]:
        occurrence = count if last else 1
        # A generator is called whenever it goes on, and when it is thrown away.
        once = count == 1 or code in COMMITTING or code.co_flags & inspect.CO_GENERATOR
        if code in CONTAINING or (once and (event, last) != ("call", False)):
            continue
        with planted(event, code, occurrence) as plant:
            UNOBSERVED(graphs[path])
        raised += 1
        why = f"{code.co_name} of {Path(code.co_filename).name}, {event} {occurrence}"
        assert plant.raised, why
        assert counters["cute_backend"]["internal_error"] == raised, why
        assert same(state(graphs[path]), states[path]), why
    assert raised > 12


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_graph_becomes_what_was_made_of_its_copy(path: Path) -> None:
    """As if it had been rewritten itself; what stays are the same nodes, with their arguments and metas."""
    graph, precision = read(path)
    before = {node: (node.args, node.meta) for node in graph.nodes}
    with inductor_config.patch(emulate_precision_casts=precision is spec.Precision.EAGER):
        epilogue_pass(graph)
    graph.lint()
    rewritten, regions, _ = walked(path)
    rewrite(rewritten, regions)
    texts = [[str((node, node.args)) for node in each.nodes] for each in (graph, rewritten)]
    assert texts[0] == texts[1]
    assert next(iter(reversed(graph.nodes))).op == "output"
    names = {node.name for node in before}
    stayed = [node for node in graph.nodes if node in before]
    assert len(stayed) == sum(node.name in names for node in rewritten.nodes)
    for node in stayed:
        args, meta = before[node]
        assert node.meta is meta
        assert node.args is args or str(node.args) != str(args)


# Whole compilations


def program(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).relu()


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 32, generator=generator).bfloat16(), torch.randn(
        32, 24, generator=generator
    ).bfloat16()


def compiled(fn: Callable[..., Any], *args: Any, **how: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, **{"backend": "cute", **how})(*args)


@pytest.fixture(scope="module")
def cpu_code() -> Iterator[None]:
    """One folder for Inductor's code, so that what all of these come to is compiled once."""
    with fresh_cache():
        yield


def fails(*args: Any, **kwargs: Any) -> Any:
    raise Planted("whatever it may be")


REPRESENTATIVES: list[tuple[Any, str]] = [
    (backend, "label_inputs"),
    (pass_module, "is_anchor"),
    (pass_module, "take_padding_back"),
    (pass_module, "find_regions"),
    (pass_module, "tuning_is_on"),
    (pass_module, "rewrite"),
    (pass_module, "announce_regions"),
    (pass_module.EpiloguePass, "uuid"),
    (anchors.Anchor, "inputs"),
    (spec.EpilogueSpec, "to_json"),
    (direct_call, "register"),
    (working_copy.WorkingCopy, "commit"),
    (working_copy.WorkingCopy, "_put"),
]


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("owner", "name"), REPRESENTATIVES, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_program_is_compiled_as_without_us_whatever_fails(
    owner: Any, name: str, contained: None, cpu_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = example()
    wanted = compiled(program, *args, backend="inductor")
    monkeypatch.setattr(owner, name, property(fails) if isinstance(vars(owner)[name], property) else fails)
    asks = "please report it, with the output of `python -m cute_backend doctor`$"
    failed = r"(cute_backend|test_walk_contained\.py) failed at .*\.py:\d+.* with Planted: whatever it may be"
    with pytest.warns(RuntimeWarning, match=f"{failed}; .*; {asks}"):
        assert torch.equal(compiled(program, *args), wanted)
    assert counters["cute_backend"] == {"internal_error": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(program, *args), wanted)
    assert counters["cute_backend"] == {"internal_error": 2}


def test_a_program_is_compiled_if_inductor_fails_at_its_last_step(
    contained: None, cpu_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has then reported the strides of the outputs, which it does once."""
    last, args = CompiledFxGraph.post_compile, example()
    wanted = compiled(program, *args, backend="inductor")

    def fail_once(*args: Any) -> None:
        last(*args)
        monkeypatch.setattr(CompiledFxGraph, "post_compile", last)
        fails()

    monkeypatch.setattr(CompiledFxGraph, "post_compile", fail_once)
    with (
        inductor_config.patch(force_disable_caches=True),
        pytest.warns(RuntimeWarning, match="as Inductor alone"),
    ):
        assert torch.equal(compiled(program, *args), wanted)
    assert counters["cute_backend"] == {"internal_error": 1}


@pytest.mark.parametrize(
    ("raises", "failed"),
    [
        (lambda: torch._check(False), r"torch failed at torch/__init__\.py:\d+, in a"),
        (lambda: fx.Graph().erase_node(None), r"torch failed at torch/fx/graph\.py:\d+, in a"),  # type: ignore[arg-type]
        (lambda: networkx.Graph().remove_node(1), r"networkx failed at networkx/\S+\.py:\d+, in a"),
        (lambda: inspect.signature(1), r"inspect\.py failed at inspect\.py:\d+, in a"),  # type: ignore[arg-type]
        (lambda: fails(), r"test_walk_contained\.py failed at test_walk_contained\.py:\d+, in a"),
        (
            lambda: fake(fx.Graph().placeholder("x")),
            r"cute_backend failed at fx_walk/graph/static\.py:\d+ with",
        ),
    ],
    ids=["torch", "fx", "networkx", "standard_library", "no_package", "ours"],
)
def test_a_warning_names_the_code_that_failed(
    raises: Callable[[], Any], failed: str, contained: None
) -> None:
    try:
        raises()
    except Exception as error:
        message = containment.contain(error).message
    assert re.match(failed, message)


def test_a_program_whose_inputs_cannot_be_named_is_fused(
    contained: None, cpu_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "input_names", fails)
    named = "Planted: whatever it may be; inputs are called as in the graph"
    with inductor_config.patch(force_disable_caches=True), pytest.warns(RuntimeWarning, match=named):
        compiled(program, *example())
    assert counters["cute_backend"] == {"anchors": 1, "regions": 1, "internal_error": 1}


@pytest.mark.parametrize("backend", ["cute", "inductor"])
@pytest.mark.parametrize("name", ["_implementation", "_direct_call"])
def test_a_kernel_that_generated_code_cannot_name_is_called_as_an_op(
    name: str, backend: str, contained: None, cpu_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = example()
    options = {"post_grad_custom_pre_pass": epilogue_pass} if backend == "inductor" else None
    monkeypatch.setattr(direct_call, name, fails)
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        result, code = run_and_get_code(torch.compile(program, backend=backend, options=options), *args)
    torch.testing.assert_close(result, program(*args), rtol=0.02, atol=0.02)
    assert re.search(r"torch\.ops\.cute_backend\.gemm_epilogue(_into)?\.default\(", code[0])
    assert counters["cute_backend"] == {"anchors": 1, "regions": 1, "internal_error": 1}


def test_a_graph_that_cannot_be_lowered_with_regions_is_compiled_without(
    contained: None, cpu_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = compiled(program, *example(), backend="inductor")
    monkeypatch.setattr(direct_call.ir.FallbackKernel, "create", fails)
    monkeypatch.setattr(direct_call, "_direct_call", fails)
    with pytest.warns(RuntimeWarning, match="direct_call.py.* Planted"):
        assert torch.equal(compiled(program, *example(), dynamic=True), wanted)
    assert counters["cute_backend"] == {"internal_error": 1}


def test_the_bare_pass_leaves_a_graph_that_it_fails_on(
    contained: None, cpu_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = compiled(program, *example(), backend="inductor")
    monkeypatch.setattr(pass_module, "rewrite", fails)
    options = {"post_grad_custom_pre_pass": epilogue_pass}
    with inductor_config.patch(force_disable_caches=True):
        assert torch.equal(compiled(program, *example(), backend="inductor", options=options), wanted)
    assert counters["cute_backend"] == {"internal_error": 1}


def trained(backend: str, dynamic: bool) -> list[Tensor]:
    x, weight = (each.requires_grad_() for each in example())
    compiled(program, x, weight, backend=backend, dynamic=dynamic).square().sum().backward()
    return [each.grad for each in (x, weight) if each.grad is not None]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dynamic", [False, True], ids=["at once", "with the first call of backward"])
def test_a_backward_graph_fails_by_itself(
    dynamic: bool, contained: None, cpu_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = trained("inductor", dynamic)
    whole = pass_module.find_regions

    def not_of_backward(graph: fx.Graph, *how: Any) -> Any:
        if any("tangents" in node.name for node in graph.nodes):
            raise Planted("in the backward pass")
        return whole(graph, *how)

    monkeypatch.setattr(pass_module, "find_regions", not_of_backward)
    for ours, theirs in zip(trained("cute", dynamic), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    assert counters["cute_backend"] == {"anchors": 1, "regions": 1, "internal_error": 1}


def test_a_graph_that_calls_others_is_compiled_again_with_them(
    contained: None, cpu_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def branches(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, program, lambda x, weight: (x @ weight) * 2, (x, weight))

    wanted = compiled(branches, *example(), backend="inductor")
    monkeypatch.setattr(direct_call.ir.FallbackKernel, "create", fails)
    monkeypatch.setattr(direct_call, "_direct_call", fails)
    assert torch.equal(compiled(branches, *example()), wanted)
    assert counters["cute_backend"] == {"internal_error": 1}


# What is raised all the same


def test_errors_of_the_program_are_its_own(contained: None, cpu_code: None) -> None:
    def theirs(graph: fx.Graph) -> None:
        raise ValueError("their own")

    with pytest.raises(Exception, match="ValueError: their own"):
        compiled(program, *example(), options={"post_grad_custom_pre_pass": theirs})
    assert not counters["cute_backend"]["internal_error"]


@pytest.mark.parametrize(
    "error", [UsageError("no such folder"), BuildError("was edited"), KeyboardInterrupt()]
)
def test_what_a_person_has_to_mend_is_raised(
    error: BaseException, contained: None, cpu_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise error

    monkeypatch.setattr(pass_module, "announce_regions", refuse)
    with pytest.raises(BaseException, match=str(error) or None) as raised:
        compiled(program, *example())
    assert isinstance(error, Exception) or raised.type is KeyboardInterrupt
    if isinstance(error, UsageError):
        assert isinstance(raised.value, UsageError) and str(raised.value).splitlines()[0] == str(error)


def test_a_setting_raises_all(contained: None, cpu_code: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_module, "rewrite", fails)
    monkeypatch.setattr(collect, "regions_of", fails)
    with config.patch(raise_errors=True):
        with pytest.raises(Exception, match="Planted: whatever it may be"):
            compiled(program, *example())
        with pytest.raises(Exception, match="whatever it may be"):
            cute_backend.explain(program, *example())


# Where else it is said


@pytest.mark.parametrize("name", ["regions_of", "rewrite"])
def test_explain_shows_it(name: str, contained: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, name, fails)
    explained = cute_backend.explain(program, *example())
    (rejection,) = explained.rejections
    assert not explained.regions and rejection.reason is Reason.INTERNAL_ERROR
    assert "with Planted: whatever it may be" in rejection.message
    assert "internal_error" in str(explained)


# What was found so


def clipped_step(x: Tensor) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).relu().square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        return norm

    return step


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda x: x.norm(),
    "norm_1": lambda x: x.norm(p=1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x),
    "count_nonzero": lambda x: x.count_nonzero(),
    "nanmean": lambda x: x.nanmean(),
    "sum_of_none": lambda x: x.sum(dim=None, keepdim=True),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("after", [False, True], ids=["alone", "after a product"])
def test_reductions_without_dims_pass(name: str, after: bool) -> None:
    def fn(x: Tensor, weight: Tensor) -> Tensor:
        return REDUCTIONS[name]((x @ weight).relu() if after else x)

    (report,) = collect.collect(fn, example())
    assert len(report.regions) == after


@pytest.mark.exhaustive
def test_a_training_step_that_clips_its_gradients(fresh_compiler: None) -> None:
    x = torch.randn(16, 32)
    wanted, step = clipped_step(x)(), torch.compile(clipped_step(x), backend="cute")
    torch.testing.assert_close(step(), wanted)
