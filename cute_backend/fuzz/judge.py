"""One program judged: what it gives eagerly, compiled with `cute`, and compiled with `inductor`.

What counts as right, for every output and every input that the program writes:

- the dtype and the shape are eager's, and under both compilers the strides are Inductor's;
- every element lies within its bounds (see `bounds`), give or take two units of the last place of the
  output's dtype, or is no further from the float64 reference than Inductor's;
- an exact program under eager's roundings gives eager's bits, wherever Inductor does.

Without Inductor (walker and replay alone) eager takes its place.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from ..backend import epilogue_pass
from ..fx_walk.collect import as_the_pass_meets_it
from .bounds import Bounds, follow
from .program import NOT_TAKEN, Program

Run = Callable[[Callable[..., Any], Sequence[Tensor], bool], tuple[Tensor, ...]]
"""A function of tensors, its arguments, whether sizes are symbolic: compiled and called."""


@dataclass(frozen=True)
class Verdict:
    """`failure` says what is wrong, in a sentence, and `kind` what sort of failure that is; both are empty
    where nothing is. `excluded` says why a program was not judged. `counted` are the pass's counters."""

    failure: str = ""
    kind: str = ""
    excluded: str = ""
    counted: Counter[str] = field(default_factory=Counter)
    elements: int = 0
    loose: int = 0


def judge(program: Program, replay_only: bool = False, device: str = "cpu") -> Verdict:
    """What is wrong with what `cute` makes of a program; what eager cannot run is not judged."""
    function, example_inputs = program.load()

    def inputs() -> list[Tensor]:
        return [_moved(each, device) for each in example_inputs()]

    def called(run: Run) -> list[Tensor]:
        arguments = inputs()
        results = run(function, arguments, program.dynamic)
        return [*results, *arguments]

    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        inductor_config.patch(emulate_precision_casts=program.eager, force_disable_caches=True),
    ):
        warnings.simplefilter("ignore")
        try:
            wanted = called(lambda fn, arguments, _: fn(*arguments))
            bounds = follow(program, inputs())
        except NOT_TAKEN as error:
            return Verdict(excluded=f"eager raises {_crash(error)}")
        counters.clear()
        try:
            results = called(walk_and_replay(epilogue_pass) if replay_only else compiled("cute"))
        except Exception as error:
            crash = _crash(error)
            try:
                called(walk_and_replay(_NoPass()) if replay_only else compiled("inductor"))
            except Exception as theirs:
                if _crash(theirs) == crash:
                    return Verdict(excluded=f"Inductor fails too: {crash}")
            return Verdict(failure=f"cute raises {crash}", kind=f"raises {type(error).__name__}")
        counted = Counter(counters["cute_backend"])
        try:
            others = wanted if replay_only else called(compiled("inductor"))
        except Exception as error:
            return Verdict(excluded=f"Inductor raises {_crash(error)}", counted=counted)

        def compared(others: list[Tensor]) -> str:
            for name, got, other, eager in zip(names, results, others, wanted, strict=True):
                failure = _wrong(program, bounds[name], got, other, eager, strides=not replay_only)
                if failure:
                    return f"{name} {failure}"
            return ""

        names = [*program.outputs, *(each.name for each in program.inputs)]
        failure, excluded = compared(others), ""
        if failure and replay_only and not compared(called(walk_and_replay(_NoPass()))):
            failure, excluded = "", "Inductor's graph before the pass differs from eager in the same way"
    return Verdict(
        failure=failure,
        kind="wrong" if failure else "",
        excluded=excluded,
        counted=counted,
        elements=sum(got.numel() for got in results),
        loose=sum(int(bounds[name].loose.sum()) for name in names),
    )


def _moved(tensor: Tensor, device: str) -> Tensor:
    """A tensor on a device, with its strides, whatever they are."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return whole.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _crash(error: BaseException) -> str:
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def _wrong(program: Program, limits: Bounds, got: Tensor, other: Tensor, eager: Tensor, strides: bool) -> str:
    """What is wrong with an output; empty where nothing is."""
    if (got.dtype, got.shape) != (eager.dtype, eager.shape):
        return f"is {got.dtype} {tuple(got.shape)}, not {eager.dtype} {tuple(eager.shape)}"
    if strides and got.numel() and _strides(got) != _strides(other):
        return f"has strides {got.stride()}, and Inductor's {other.stride()}"
    right = _same(got, other)
    if limits.candidates is None:
        right = right | (limits.distance(got) <= limits.distance(other))
    outside = limits.wrong(got) & ~right
    if outside.any():
        return _at(outside, got, "beyond its bounds", limits, other)
    if program.exact and program.eager and got.device.type == "cpu":
        apart = ~_same(got, eager) & _same(other, eager)
        if apart.any():
            return _at(apart, got, "not eager's to the bit", limits, eager)
    return ""


def _strides(tensor: Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _same(left: Tensor, right: Tensor) -> Tensor:
    a, b = left.double(), right.double()
    return (a == b) | (a.isnan() & b.isnan())


def _at(wrong: Tensor, got: Tensor, what: str, limits: Bounds, other: Tensor) -> str:
    place = tuple(wrong.nonzero()[0].tolist())
    low, high, reference = (each[place].item() for each in (limits.low, limits.high, limits.reference))
    return (
        f"({got.dtype} {tuple(got.shape)}) is {what} at {int(wrong.sum())} of {wrong.numel()} elements: "
        f"at {list(place)} it is {got[place].item()}, the bounds {low:.6g} to {high:.6g}, the reference "
        f"{reference:.6g}, the other result {other[place].item()}"
    )


# How programs are compiled


def compiled(backend: str) -> Run:
    """`torch.compile` with a backend."""

    def run(fn: Callable[..., Any], arguments: Sequence[Tensor], dynamic: bool) -> tuple[Tensor, ...]:
        torch._dynamo.reset()
        return torch.compile(fn, backend=backend, dynamic=dynamic)(*arguments)

    return run


class _NoPass(CustomGraphPass):
    def __call__(self, graph: fx.Graph) -> None:
        pass

    def uuid(self) -> str:
        return "none"


def walk_and_replay(change: CustomGraphPass) -> Run:
    """Inductor up to the pass, then the graph as it is after `change`, node by node with aten.

    A static program goes past Dynamo too: its functions are traced as they are.
    """

    def inner(gm: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Callable[..., Any]:
        graphs: list[fx.Graph] = []

        def see(graph: fx.Graph) -> None:
            change(graph)
            graphs.append(graph)

        as_the_pass_meets_it(gm, inputs, how, see)
        return fx.GraphModule(gm, graphs[0]).forward

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx(gm, inputs, inner_compile=inner)  # type: ignore[arg-type]

    def run(fn: Callable[..., Any], arguments: Sequence[Tensor], dynamic: bool) -> tuple[Tensor, ...]:
        if dynamic:
            torch._dynamo.reset()
            return torch.compile(fn, backend=backend, dynamic=True)(*arguments)
        return backend(fx.symbolic_trace(fn), arguments)(*arguments)

    return run
