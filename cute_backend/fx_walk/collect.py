"""The regions that the pass finds in a function, without compiling a kernel and without a GPU.

for graph in collect(fn, (x, w)):
    for region in graph.regions:
        print(region.spec, region.load_labels)
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx, fake_tensor_prop
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from cute_backend.errors import check_function
from cute_backend.fx_walk.epilogue_pass import find as regions_of
from cute_backend.fx_walk.epilogue_pass import prepare
from cute_backend.fx_walk.graph.working_copy import WorkingCopy
from cute_backend.fx_walk.preparation.async_tp import multiply_while_moving
from cute_backend.fx_walk.products.capability import Capability, Named, device_capability
from cute_backend.fx_walk.refusals.containment import contain
from cute_backend.fx_walk.refusals.labels import input_names, label_inputs, plain_name
from cute_backend.fx_walk.refusals.reasons import Rejection
from cute_backend.fx_walk.region.region import Region
from cute_backend.fx_walk.replacement.rewrite import rewrite
from cute_backend.planning import Arch
from cute_backend.tracing.attention import attend_as_on
from cute_backend.tracing.shape_rules import shape_rules


@dataclass(frozen=True)
class GraphReport:
    """One post-grad graph: its regions, and the reasons why other nodes are not fused."""

    regions: tuple[Region, ...]
    rejections: tuple[Rejection, ...]
    graph: fx.Graph
    """The graph that the pass receives. The nodes of the regions belong to it."""
    is_backward: bool


def collect(
    fn: Callable[..., Any],
    args: Sequence[Any],
    dynamic: bool | None = None,
    arch: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> list[GraphReport]:
    """Returns a report for each graph that `torch.compile(fn, dynamic=dynamic)(*args, **kwargs)` makes, in
    order. Graphs that another graph calls come before it.

    The arguments are CPU, CUDA or fake tensors, or anything else that `fn` takes. Fakes replace them, so
    nothing is computed, unless `fn` reads a value, which only real tensors have, or no fake can stand for an
    argument. Code at a graph break runs, on the fakes. Fakes of a GPU that this torch was not built for stand
    for CPU tensors. With `arch`, such as "sm_90a", a graph is judged as if it ran on that architecture,
    otherwise by the device of its tensors. Caches are neither read nor written. Raises UsageError if `fn`
    can't be called, and torch's exception if `fn` can't run on these arguments.
    """
    check_function(fn)
    kwargs = kwargs or {}
    reports: list[GraphReport] = []
    by_name = {each.value: each for each in Arch}
    capability: Capability = device_capability if arch is None else Named(by_name[arch])
    backend = partial(_Collector, reports, capability, _user_names(fn))
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    with _fresh():
        try:
            if all(map(_has_fake, tensors)):
                mode = FakeTensorMode(allow_non_fake_inputs=True)
                given = tuple(args), dict(kwargs)
                fakes, named_fakes = tree_map(lambda value: _to_fake(mode, value), given)
                with mode:
                    observed = torch.compile(call_of(fn), backend=backend(on_fakes=True), dynamic=dynamic)
                    observed(*fakes, **named_fakes)
                return reports
        except (DataDependentOutputException, DynamicOutputShapeException):
            if any(isinstance(value, FakeTensor) for value in tensors):
                raise
            reports.clear()
        torch.compile(call_of(fn), backend=backend(on_fakes=False), dynamic=dynamic)(*args, **kwargs)
    return reports


@contextmanager
def _fresh() -> Iterator[None]:
    """A context with caches off, in which the backward graph is compiled together with the forward one. It
    leaves no trace in Dynamo.

    Otherwise sizes that differ from those of an earlier call would become dynamic. And beyond Dynamo's limit
    of recompilations, the function would silently run uncompiled in the next call of `collect` or in the
    program.
    """
    theirs = {id(code) for code in _compiled_codes()}
    with (
        shape_rules(),
        warnings.catch_warnings(),
        dynamo_config.patch(
            recompile_limit=sys.maxsize,
            accumulated_recompile_limit=sys.maxsize,
            automatic_dynamic_shapes=False,
        ),
        inductor_config.patch(force_disable_caches=True),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
    ):
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        try:
            yield
        finally:
            for code in _compiled_codes():
                if id(code) not in theirs:
                    reset_code(code)


def _compiled_codes() -> list[CodeType]:
    """The code objects with which Dynamo keeps something compiled."""
    seen = (reference() for reference in convert_frame.input_codes.seen)
    return [code for code in seen if code is not None and _debug_get_cache_entry_list(code)]


def call_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `fn`, with code of its own: Dynamo keeps what it compiles with the code."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


def _has_fake(value: torch.Tensor) -> bool:
    """Whether torch can make a fake that stands for a tensor. It can't for a quantised or a nested one, and
    its fake of a subclass that is no traceable wrapper, such as a masked tensor, is a plain tensor."""
    if value.is_quantized or value.is_nested:
        return False
    plain = type(value) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
    return plain or is_traceable_wrapper_subclass(value)


def _to_fake(mode: FakeTensorMode, value: Any) -> Any:
    """A fake in place of a tensor, with the marks of `mark_dynamic` and `mark_static`."""
    if not isinstance(value, torch.Tensor):
        return value
    made = _fake_of(mode, value)
    for name, mark in vars(value).items():
        if "_dynamo_" in name:
            setattr(made, name, deepcopy(mark))
    return made


def _fake_of(mode: FakeTensorMode, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, FakeTensor):
        return mode.from_tensor(value, static_shapes=True)
    device = value.device if value.device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")
    with mode:
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return made.requires_grad_(value.requires_grad)


class _Collector:
    """A Dynamo backend that observes each graph at the point where the pass would run, and runs it
    unchanged. `on_fakes` says that all tensors of the program are fakes."""

    def __init__(
        self,
        reports: list[GraphReport],
        capability: Capability,
        name_of: Callable[[str], str],
        *,
        on_fakes: bool,
    ) -> None:
        self.reports = reports
        self.capability = capability
        self.name_of = name_of
        self.on_fakes = on_fakes

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        names = input_names(gm, example_inputs, self.name_of)
        if self.on_fakes and isinstance(self.capability, Named):
            attend_as_on(self.capability.arch.target.capability, gm)

        def inner(gm: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Callable[..., Any]:
            seen = _copy(gm)
            label_inputs(seen.graph, names)
            self._report(seen, inputs, how)
            return gm.forward

        return compile_fx(gm, example_inputs, inner_compile=inner)  # type: ignore[arg-type,return-value]

    def _report(self, gm: fx.GraphModule, inputs: Sequence[Any], how: dict[str, Any]) -> None:
        is_backward = bool(how.get("is_backward", False))

        def see(graph: fx.Graph) -> None:
            regions, rejections = self._explained(graph)
            self.reports.append(GraphReport(tuple(regions), tuple(rejections), graph, is_backward))

        as_the_pass_meets_it(gm, inputs, how, see)

    def _explained(self, graph: fx.Graph) -> tuple[list[Region], list[Rejection]]:
        """Regions and rejections of a graph, after a rehearsal has shown that it can be rewritten."""

        def find(graph: fx.Graph) -> tuple[list[Region], list[Rejection]]:
            return regions_of(graph, self.capability)

        try:
            left_out = multiply_while_moving(graph)
            prepare(graph, self.capability)
            regions, rejections = find(graph)
            if regions:
                working = WorkingCopy(graph).graph
                rewrite(working, find(working)[0])
        except Exception as error:
            return [], [contain(error)]
        return regions, [*left_out, *rejections]


def as_the_pass_meets_it(
    gm: fx.GraphModule, inputs: Sequence[Any], how: dict[str, Any], see: Callable[[fx.Graph], None]
) -> None:
    """Does what Inductor does between AOTAutograd and the pass, then calls `see` with a copy of each graph
    that the module's calls, such as a branch of a `cond`, and at last of the module's own."""

    def spy(graph: fx.Graph) -> None:
        seen = deepcopy(graph)
        seen.owning_module = graph.owning_module
        see(seen)

    view_to_reshape(gm)
    with torch.no_grad():
        fake_tensor_prop(gm, inputs)
    with inductor_config.patch(post_grad_custom_pre_pass=spy):
        _recursive_post_grad_passes(gm, bool(how.get("is_inference", False)))


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A module with a graph of its own, as have the modules that it calls; all else is shared."""
    copied = fx.GraphModule(gm, deepcopy(gm.graph))
    for name, child in list(copied.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, _copy(child))
    return copied


def _user_names(fn: Callable[..., Any]) -> Callable[[str], str]:
    """Maps an input's name in the graph that Dynamo made of `call_of(fn)` to its name in the program.

    `bias` for a parameter, a variable of a closure or a global, `self.up.weight` for a module's.
    """
    code = getattr(fn, "__code__", None)
    try:
        parameters = list(inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters)
    except ValueError:  # a function that is not written in Python
        parameters = []

    def parameter(match: re.Match[str]) -> str:
        index = int(match[1])
        return parameters[index] if index < len(parameters) else match[0]

    def name_of(source: str) -> str:
        name = re.sub(r"^L\['args'\]\[(\d+)\]", parameter, source)
        name = re.sub(r"^L\['kwargs'\]\['(\w+)'\]", r"\1", name)
        if code is not None:
            free = code.co_freevars
            name = re.sub(
                r"^L\['fn'\]\.__closure__\[(\d+)\]\.cell_contents", lambda match: free[int(match[1])], name
            )
        return plain_name(re.sub(r"^L\['fn'\](\.__self__)?", "self", name))

    return name_of
