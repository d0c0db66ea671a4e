"""Judges one program by its results in eager, compiled with `cute`, and compiled with `inductor`.

These rules hold for every output, and for every input that the program writes:

- The dtype and the shape are eager's. With both compilers, the strides are Inductor's or eager's, as Inductor
  pads those of some results on a GPU, or eager's without the gaps of a view: a part of a packed product has
  memory of its own. torch, too, keeps only the order of a view's strides.
- Every element lies within its bounds (see `bounds`), extended by two units in the last place of the output's
  dtype, or is at least as close to the float64 reference as Inductor's.
- An exact program under eager's roundings gives eager's bits, if Inductor's code does.

Without Inductor (walker and replay alone), or if torch has no kernel for a step, eager takes its place. If a
program has steps through which no bounds are computed (`bounds.follow`), only its dtypes and shapes are
judged.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.fx.experimental.proxy_tensor import make_fx

import cute_backend.registration  # noqa: F401  a checkout that is not installed has no entry point
from cute_backend import config
from cute_backend.backend import epilogue_pass
from cute_backend.fuzz.bounds import Bounds, follow
from cute_backend.fuzz.drawn_program import NOT_TAKEN, Program

Run = Callable[[Callable[..., Any], Sequence[Tensor], bool], tuple[Tensor, ...]]
"""A way to compile a function of tensors and call it: takes the function, its arguments, and whether sizes
are symbolic."""


@dataclass(frozen=True)
class Verdict:
    """The result of judging a program. `failure` is a sentence and `kind` the sort of failure; both are empty
    if the program is right. `excluded` says why a program was not judged. `counted` are the pass's counters.
    `elements` is the number of elements that were judged, and `loose` the number of them that may have any
    value."""

    failure: str = ""
    kind: str = ""
    excluded: str = ""
    counted: Counter[str] = field(default_factory=Counter)
    elements: int = 0
    loose: int = 0


def judge(program: Program, replay_only: bool = False, device: str = "cpu") -> Verdict:
    """Compares a program compiled by `cute` with eager. A program that eager cannot run is not judged."""
    torch._dynamo.reset()
    function, example_inputs = program.load()
    if replay_only:
        ours, theirs = replayed(epilogue_pass), replayed(lambda graph: None)
    else:
        ours, theirs = compiled("cute"), compiled("inductor")

    def inputs() -> list[Tensor]:
        return [_moved(each, device) for each in example_inputs()]

    def called(run: Run) -> list[Tensor]:
        arguments = inputs()
        results = run(function, arguments, program.dynamic)
        return [*results, *arguments]

    with _settings(program):
        try:
            wanted = called(lambda fn, arguments, _: program.eager_results(arguments))
            bounds = follow(program, inputs()) if program.is_followed else {}
        except NOT_TAKEN as error:
            return Verdict(excluded=f"eager raises {_crash(error)}")
        counters.clear()
        try:
            results = called(ours)
        except Exception as error:
            crash = _crash(error)
            if crash == _crash_of(lambda: called(theirs)):
                return Verdict(excluded=f"torch fails without the pass too: {crash}")
            return Verdict(failure=f"cute raises {crash}", kind=f"raises {type(error).__name__}")
        counted = Counter(counters["cute_backend"])
        try:
            others = wanted if replay_only or not program.has_kernels else called(theirs)
        except Exception as error:
            return Verdict(excluded=f"Inductor raises {_crash(error)}", counted=counted)

        def compared(others: list[Tensor]) -> str:
            for name, got, other, eager in zip(names, results, others, wanted, strict=True):
                failure = _unlike(got, eager)
                if not failure and bounds:
                    strides = program.has_kernels and not replay_only
                    failure = _wrong(program, bounds[name], got, other, eager, strides)
                if failure:
                    return f"{name} {failure}"
            return ""

        names = [*program.outputs, *(each.name for each in program.inputs)]
        failure = compared(others)
        if failure and not bounds and replay_only:
            # torch's decompositions may give another shape than eager does.
            plain = called(theirs)
            if not any(_unlike(got, other) for got, other in zip(results, plain, strict=True)):
                return Verdict(excluded="torch's decompositions differ from eager in form", counted=counted)
    return Verdict(
        failure=failure,
        kind="wrong" if failure else "",
        counted=counted,
        elements=sum(got.numel() for got in results),
        loose=sum(
            int(bounds[name].loose.sum()) if bounds else got.numel()
            for name, got in zip(names, results, strict=True)
        ),
    )


def run_without_the_pass(program: Program, replay_only: bool = False, device: str = "cpu") -> None:
    """Runs a program as `judge` does, by Inductor alone."""
    function, example_inputs = program.load()
    run = replayed(lambda graph: None) if replay_only else compiled("inductor")
    with _settings(program):
        run(function, [_moved(each, device) for each in example_inputs()], program.dynamic)


_EVERYTHING = {
    "raise_errors": True,
    "shared_launches": True,
    "rotary_embeddings": "always",
    "block_reductions": "always",
}
"""Settings by which kernels do all that they can, whether or not it pays."""


@contextmanager
def _settings(program: Program) -> Iterator[None]:
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        config.patch(_EVERYTHING),  # type: ignore[attr-defined]
        inductor_config.patch(emulate_precision_casts=program.eager, force_disable_caches=True),
    ):
        warnings.simplefilter("ignore")
        yield


def _moved(tensor: Tensor, device: str) -> Tensor:
    """A copy of a tensor on a device, with the same strides."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return whole.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _crash(error: BaseException) -> str:
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def _crash_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return _crash(error)
    return ""


def _unlike(got: Tensor, eager: Tensor) -> str:
    """A sentence on how an output's dtype or shape differs from eager's; empty if they agree."""
    if (got.dtype, got.shape) == (eager.dtype, eager.shape):
        return ""
    return f"is {got.dtype} {tuple(got.shape)}, not {eager.dtype} {tuple(eager.shape)}"


def _wrong(program: Program, limits: Bounds, got: Tensor, other: Tensor, eager: Tensor, strides: bool) -> str:
    """A sentence on how the values of an output differ; empty if they agree."""
    accepted = (_strides(other), _strides(eager), _without_gaps(eager))
    if strides and got.numel() and _strides(got) not in accepted:
        return f"has strides {got.stride()}, Inductor's {other.stride()}, and eager's {eager.stride()}"
    right = _same(got, other)
    if limits.candidates is None:
        right = right | (limits.distance(got) <= limits.distance(other))
    outside = limits.wrong(got) & ~right
    if outside.any():
        return _at(outside, got, "beyond its bounds", limits, other)
    if program.exact and program.eager and got.device.type == "cpu":
        apart = ~_same(got, eager) & _same(other, eager) & ~limits.loose
        if apart.any():
            return _at(apart, got, "not eager's to the bit", limits, eager)
    return ""


def _strides(tensor: Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _without_gaps(tensor: Tensor) -> list[int]:
    """The strides that a tensor would have if its elements, in the order of memory, were neighbours."""
    sizes = [size for size in tensor.shape if size > 1]
    dense, step = _strides(tensor), 1
    for axis in sorted(range(len(sizes)), key=dense.copy().__getitem__):
        dense[axis], step = step, step * sizes[axis]
    return dense


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


def replayed(change: Callable[[fx.Graph], None]) -> Run:
    """The program's graph in aten ops, after Inductor's decompositions, changed by `change` and run node by
    node.

    Dynamo, AOTAutograd and Inductor's own passes are left out: they take ten times as long as the rest.
    """

    def run(fn: Callable[..., Any], arguments: Sequence[Tensor], dynamic: bool) -> tuple[Tensor, ...]:
        trace = make_fx(
            torch.func.functionalize(fn),
            decomposition_table=select_decomp_table(),
            tracing_mode="symbolic" if dynamic else "fake",
        )
        gm = trace(*arguments)
        gm.graph = fx_graph_cse(gm.graph)
        for module in gm.modules():
            if isinstance(module, fx.GraphModule):
                view_to_reshape(module)
                change(module.graph)
                module.graph.lint()
                module.recompile()
        return gm(*arguments)

    return run
