"""Measures tables: compiles programs, compares their results with eager's, and times them."""

from __future__ import annotations

import copy
import gc
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import cute_backend.registration  # noqa: F401  a checkout that is not installed has no entry point
from cute_backend.bench.environment import Nvml
from cute_backend.bench.program_timing import MAX_CALLS, UNIT_US, Unit, preparing, time_units, unit_of
from cute_backend.bench.results import Ceilings, Clock, Measurement, ProblemResult, TableResult, Timing, Work
from cute_backend.bench.table import Cell, Problem, Rate, Runner, Table, Workload
from cute_backend.errors import UsageError, root_cause
from cute_backend.runtime.calls.prepare import announce

Progress = Callable[[str], Any]
"""A function that receives the name of each step: once for each cell, and once for each problem's timing."""

_DEVICE = "cuda"

_MEMORY_SHARE = 16
"""The inputs of one workload take at most 1 / _MEMORY_SHARE of the free memory."""


def compiled(runner: Runner, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as `runner` runs it, for the sizes of its first call alone. Raises UsageError without QuACK."""
    if runner is Runner.EAGER:
        return fn
    if runner is Runner.QUACK:
        if importlib.util.find_spec("quack") is None:
            raise UsageError("not installed: pip install --no-deps quack-kernels")
        from cute_backend.bench.quack_peer import spelling

        return spelling(fn)
    if runner is Runner.MAX_AUTOTUNE:
        return torch.compile(fn, mode="max-autotune-no-cudagraphs", dynamic=False)
    return torch.compile(fn, backend=runner.value, dynamic=False)


@torch.no_grad()
def build_kernels(tables: Iterable[Table]) -> dict[Workload, str]:
    """Builds every kernel that the tables' programs need, in parallel processes.

    Returns a note for each workload that is not fused, or that can't be traced in advance.
    """
    from cute_backend.api import explain

    regions: list[Any] = []
    notes = {}
    for workload in (each for table in tables for problem in table.problems for each in problem.workloads):
        if Runner.CUTE not in workload.runners or workload.calls_kernels:
            continue
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device(_DEVICE):
            args = workload.inputs()
        try:
            explained = explain(workload.fn, *args, dynamic=False)
            explained.first_region()
        except Exception as error:  # a user's program may raise anything when it is traced
            notes[workload] = _reason(error)
            continue
        regions += [(region.spec, *region.sizes, region.groups) for region in explained.regions]
    if regions:
        announce(regions, torch.device(_DEVICE), at_once=True)
    return notes


_COPIED_BYTES = (2**28, 2**30)
"""The sizes of copies that the bandwidth is measured with. The larger copy is faster, but depends on the
addresses of its buffers: on an H200 it was seen at 4.3 and at 2.6 TB/s."""

_CUBES = {4096: 16, 8192: 2}
"""The products that ceilings are measured with, M = N = K, and the number of calls of a unit."""


def measure_ceilings(rates: Sequence[Rate], rounds: int) -> Ceilings:
    """The bandwidth of the faster of two copies, and the best of torch's products of 4096 and 8192 cubed."""
    source = torch.zeros(max(_COPIED_BYTES), dtype=torch.uint8, device=_DEVICE)
    target = torch.empty_like(source)
    units: dict[Any, Unit] = {
        nbytes: unit_of(lambda nbytes=nbytes: target[:nbytes].copy_(source[:nbytes]), [(), ()])
        for nbytes in _COPIED_BYTES
    }
    units |= {
        (rate, size): _torch_product(rate, size, calls) for rate in rates for size, calls in _CUBES.items()
    }
    timings = time_units(units, rounds)
    best = {rate: max(2e6 * size**3 / timings[rate, size].median_us for size in _CUBES) for rate in rates}
    return Ceilings(max(2e6 * nbytes / timings[nbytes].median_us for nbytes in _COPIED_BYTES), best)


def _torch_product(rate: Rate, size: int, calls: int) -> Unit:
    with torch.device(_DEVICE):
        a, b = torch.randn(size, size), torch.randn(size, size)
        scales = torch.ones(size, 1), torch.ones(1, size)
    if rate is Rate.BF16:
        x, y = a.bfloat16(), b.bfloat16().t()
        return unit_of(lambda: torch.mm(x, y), [()] * calls)
    x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    return unit_of(
        lambda: torch._scaled_mm(x, y, *scales, out_dtype=torch.bfloat16, use_fast_accum=True), [()] * calls
    )


@dataclass(frozen=True)
class Run:
    """State that the problems of one run share. `notes` are `build_kernels`'s, and the calls of a unit take
    `unit_us` microseconds together."""

    ceilings: Ceilings
    notes: Mapping[Workload, str]
    nvml: Nvml
    rounds: int
    progress: Progress
    unit_us: float = UNIT_US


def measure_table(table: Table, run: Run) -> Iterator[TableResult]:
    """Yields the table as far as it is measured, once after each problem.

    Raises UsageError if a program fails in eager; other failures become notes of their cells.
    """
    problems: list[ProblemResult] = []
    for problem in table.problems:
        problems.append(_measure(problem, run))
        gc.collect()
        torch.cuda.empty_cache()
        yield TableResult(table.name, table.title, table.baseline, table.ratios, tuple(problems))


def steps(tables: Iterable[Table]) -> int:
    """The number of times that measuring them reports progress."""
    problems = [problem for table in tables for problem in table.problems]
    return sum(1 + sum(len(each.runners) for each in problem.workloads) for problem in problems)


@dataclass(frozen=True)
class _Variant:
    """A cell that is being prepared for timing, and its measurement so far."""

    measurement: Measurement
    unit: Unit | None = None


@dataclass(frozen=True)
class Prepared:
    """A problem whose programs are compiled, checked and captured."""

    name: str
    works: Sequence[Work]
    variants: Sequence[_Variant]

    @property
    def units(self) -> dict[Cell, Unit]:
        """The units to time, by cell."""
        return {each.measurement.cell: each.unit for each in self.variants if each.unit is not None}

    def result(self, timings: Mapping[Cell, Timing], clock: Clock | None = None) -> ProblemResult:
        """The problem's result with the timings of its units."""
        measurements = (
            replace(each.measurement, timing=timings.get(each.measurement.cell)) for each in self.variants
        )
        return ProblemResult(self.name, tuple(self.works), tuple(measurements), clock)


@torch.no_grad()
def _measure(problem: Problem, run: Run) -> ProblemResult:
    prepared = prepare(problem, run)
    run.progress(f"{problem.name}: timing")
    timings = time_units(prepared.units, run.rounds, run.nvml.sample_clock)
    return prepared.result(timings, run.nvml.take_clock())


@torch.no_grad()
def prepare(problem: Problem, run: Run) -> Prepared:
    """Compiles and checks every program of a problem, while other processes may time.

    Programs run alone (`preparing`) except for their first call, which compiles them. Raises UsageError if a
    program fails in eager.
    """
    torch._dynamo.reset()  # otherwise the sizes of the next problem would be dynamic, or over Dynamo's limit
    works: list[Work] = []
    variants: list[_Variant] = []
    for workload in problem.workloads:
        with preparing():
            with torch.device(_DEVICE):
                args = workload.inputs()
            try:
                expected = workload.fn(*args)
            except Exception as error:  # from a user's program, or on a GPU that lacks an op
                raise UsageError(
                    f"{workload.name} of {problem.name} fails in eager: {_reason(error)}"
                ) from error
            work = work_of(workload, args, expected)
            limit_us = work.limit_us(run.ceilings)
            sets = _input_sets(workload, args, limit_us, work.bytes, run.unit_us)
        works.append(work)
        for runner in workload.runners:
            run.progress(f"{problem.name}: {runner.value} {workload.name}")
            note = run.notes.get(workload, "") if runner is Runner.CUTE else ""
            variants.append(_variant(workload, runner, sets, expected, note))
        del expected
    return Prepared(problem.name, works, variants)


def _variant(
    workload: Workload, runner: Runner, sets: Sequence[tuple[Any, ...]], expected: Any, note: str
) -> _Variant:
    cell = Cell(workload.name, runner)
    replays = counters["cute_backend"]["replayed"]
    try:
        program = compiled(runner, workload.fn)
        result = program(*sets[0])
        with preparing():
            difference = (
                relative_difference(result, expected)
                if workload.check is None
                else workload.check(sets[0], result)
            )
            del result
            unit = unit_of(program, sets)
    except Exception as error:  # a peer's failure is a result: the others are still timed
        return _Variant(Measurement(cell, agrees=runner is not Runner.CUTE, note=_reason(error)))
    replayed = counters["cute_backend"]["replayed"] > replays
    notes = [note, unit.uncaptured, "no kernel could be built: aten ops were timed" if replayed else ""]
    agrees = workload.tolerance is None or difference <= workload.tolerance
    finite, note = difference if math.isfinite(difference) else None, "; ".join(filter(None, notes))
    return _Variant(Measurement(cell, None, unit.calls, finite, agrees, note), unit)


def _reason(error: BaseException) -> str:
    root = root_cause(error)
    line = next(iter(str(root).splitlines()), "no message")
    return line if isinstance(root, UsageError) else f"{type(root).__name__}: {line}"


def work_of(workload: Workload, args: tuple[Any, ...], result: Any) -> Work:
    """A workload's operations, and the bytes of its arguments, of a module's own tensors and of its
    results."""
    own = workload.fn.state_dict() if isinstance(workload.fn, torch.nn.Module) else ()
    moved = sum(_bytes(each) for each in tree_leaves((args, own, result))) - workload.unread
    operations = workload.operations
    if operations is None:
        with FlopCounterMode(display=False) as counter:
            workload.fn(*args)
        operations = counter.get_total_flops()
    return Work(workload.name, operations, moved, workload.rate)


def _bytes(value: Any) -> int:
    """The bytes that a tensor occupies; a broadcast axis takes none."""
    if not isinstance(value, Tensor):
        return 0
    sizes = [size for size, stride in zip(value.shape, value.stride(), strict=True) if stride]
    return math.prod(sizes) * value.element_size() if value.numel() else 0


def _input_sets(
    workload: Workload, args: tuple[Any, ...], limit_us: float, taken: int, unit_us: float = UNIT_US
) -> list[tuple[Any, ...]]:
    """Copies of the arguments, one for each call of a unit.

    A call takes at least `limit_us` microseconds, so the calls of a unit take at least `unit_us` together,
    unless there are MAX_CALLS of them. The arguments and results of a call have `taken` bytes.

    A module's weights would be warm from the second call on, so a module is called once.
    """
    calls = 1
    if not isinstance(workload.fn, torch.nn.Module):
        free, _ = torch.cuda.mem_get_info()
        fitting = free // _MEMORY_SHARE // max(taken, 1)
        calls = max(1, min(MAX_CALLS, fitting, math.ceil(unit_us / max(limit_us, 1e-3))))
    return [args, *(copy.deepcopy(args) for _ in range(calls - 1))]


def relative_difference(actual: Any, expected: Any, zero: float = 0.0) -> float:
    """The largest difference of a tensor from its counterpart, relative in norm; NaN if either contains NaN.

    A tensor of `expected` whose root mean square is below `zero` times that of all tensors counts as if it
    were that large: the gradient of a key's bias is zero except for rounding, so its relative difference can
    be anything.
    """
    pairs = [
        (got.double(), right.double())
        for got, right in zip(tree_leaves(actual), tree_leaves(expected), strict=True)
        if isinstance(right, Tensor)
    ]
    norms = [right.norm().item() for _, right in pairs]
    size = math.sqrt(math.fsum(norm**2 for norm in norms) / max(1, sum(right.numel() for _, right in pairs)))
    worst = 0.0
    for (got, right), own in zip(pairs, norms, strict=True):
        difference, norm = (got - right).norm().item(), max(own, zero * size * math.sqrt(right.numel()))
        if math.isnan(difference) or math.isnan(norm):
            return math.nan
        worst = max(worst, difference / norm if norm else difference and math.inf)
    return worst


def rate_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> Rate:
    """The arithmetic that bounds the time of a user's program from below: fp8 if any of its tensors is."""
    own = fn.state_dict() if isinstance(fn, torch.nn.Module) else ()
    fp8 = (torch.float8_e4m3fn, torch.float8_e5m2)
    return (
        Rate.FP8
        if any(isinstance(each, Tensor) and each.dtype in fp8 for each in tree_leaves((args, own)))
        else Rate.BF16
    )
