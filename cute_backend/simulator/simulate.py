"""A function's fused regions on the simulated machine: `cute_backend.simulate`.

The function is compiled as `torch.compile(fn, backend="cute")` would, up to the pass that finds the regions.
Its graph is then run node by node: each region by its real compiled kernel, with its real host code, on the
simulator; all else by aten.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._inductor.compile_fx import compile_fx
from torch.utils._pytree import tree_leaves

from cute_backend.errors import UsageError, check_function
from cute_backend.fx_walk.collect import as_the_pass_meets_it, call_of
from cute_backend.fx_walk.epilogue_pass import EpiloguePass, prepare
from cute_backend.fx_walk.products.capability import Capability, Named, device_capability
from cute_backend.fx_walk.refusals.reasons import Rejection
from cute_backend.fx_walk.replacement.rewrite import rewrite
from cute_backend.planning import TILE_K_BYTES, Alignment, Arch, Constraints, TileConfig, plan, unserved
from cute_backend.runtime.arguments.bind import Binding
from cute_backend.runtime.arguments.operands import Tensors, check_operands, groups_of, parse_spec, plane_of
from cute_backend.runtime.arguments.outputs import Outputs, deliver
from cute_backend.runtime.calls.op import gemm_epilogue, gemm_epilogue_into
from cute_backend.runtime.calls.spec_kernels import Ready
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.compiling.compile import SYMBOL
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.reach import Problem, config_for, stores_aligned
from cute_backend.simulator.host import HostProgram
from cute_backend.simulator.machine import Progress
from cute_backend.simulator.report import Recorder, Report
from cute_backend.simulator.simulation_errors import SimulationError
from cute_backend.spec import EpilogueSpec

CLUSTERS = 2
"""The default number of clusters in flight. It is small, so that each works through several tiles."""


TILE_SECONDS, STAGE_SECONDS = 0.06, 0.02
"""The measured time of a 128 x 128 tile, and of each 128 bytes of its K, on one core. It only serves to
refuse problems that would take too long."""

LONGEST_SECONDS = 600

INSTRUCTIONS_PER_SECOND = 2_000_000
"""Some ten times the instructions that a correct kernel executes in an estimated second. More means an
endless loop."""

INTEGER_TOLERANCE = 0.01
"""The allowed difference of integer outputs from their reference, relative in norm, as some values round the
other way."""


@dataclass(frozen=True)
class Machine:
    """The simulated machine.

    `config` is a tile configuration for every region, in place of the one for its size; `clusters` is the
    number of clusters that a persistent kernel keeps in flight; the other fields are those of `run_kernel`.
    Raises UsageError for an invalid seed.
    """

    arch: Arch = Arch.SM100A
    async_seed: int | None = None
    config: TileConfig | None = None
    clusters: int = CLUSTERS
    observer: Recorder | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        seed = self.async_seed
        if seed is not None and (type(seed) is not int or seed < 0):
            raise UsageError(f"async_seed is {seed!r}; it takes a whole number that is not negative")


@dataclass(frozen=True)
class Launch:
    """One region's kernel, the M, N and K that it ran on, and its report.

    `summing` is the report of the second kernel of a tile with split-K through memory, which adds up the
    parts of K and runs the epilogue. A kernel that finishes reductions has no report here.
    """

    kernel: Kernel
    problem: tuple[int, int, int]
    report: Report
    summing: Report | None = None


@dataclass(frozen=True)
class Simulation:
    """The results of a function, and the launches of its regions in order."""

    outputs: Any
    launches: list[Launch]


def simulate(
    fn: Callable[..., Any],
    /,
    *args: Any,
    arch: str = "sm_100a",
    async_seed: int | None = None,
    **kwargs: Any,
) -> Any:
    """Calls `fn(*args, **kwargs)` with its fused regions computed by their kernels on a simulated GPU.

    The arguments are CPU tensors and any other values that `fn` takes. `arch` is "sm_100a", "sm_90a",
    "sm_80", "sm_86", "sm_89", "sm_103a", "sm_120a" or "sm_121a". If a parameter of `fn` is itself called
    `arch` or `async_seed`, pass it by position. With `async_seed`, asynchronous operations complete and warps
    run in an order drawn from that seed; a correct kernel gives the same bits for every seed.

    Returns what `fn` returns. A tile takes some tenths of a second, and more for a long K. Raises UsageError
    if nothing is fused, or if a kernel would take more than 10 minutes, and SimulationError for a fault in a
    kernel. A simulation checks the function of kernels, not their speed.
    """
    return run(fn, args, Machine(Arch.parse(arch), async_seed), kwargs).outputs


def run(
    fn: Callable[..., Any],
    args: Sequence[Any],
    machine: Machine,
    kwargs: Mapping[str, Any] | None = None,
) -> Simulation:
    """Does what `simulate` does, on a machine that the caller configures. Returns the launches too."""
    launches: list[Launch] = []

    def execute(a: list[Tensor], b: list[Tensor], loads: list[Tensor], spec: str) -> list[Tensor]:
        outputs, launch = run_region(parse_spec(spec), a, b, loads, machine)
        launches.append(launch)
        return outputs

    return Simulation(run_with(fn, args, execute, kwargs, Named(machine.arch)), launches)


def reference(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    arch: Arch | None = None,
) -> Any:
    """Calls `fn(*args, **kwargs)` with its fused regions replayed by aten: the reference for `simulate`. The
    regions are those of an architecture if one is given."""
    return run_with(fn, args, gemm_epilogue, kwargs, device_capability if arch is None else Named(arch))


@dataclass(frozen=True)
class Difference:
    """An output and its reference. `relative` is the relative difference in norm, NaN if an element was not
    written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    equal: int
    relative: float

    @property
    def allowed(self) -> float:
        """The largest `relative` of a correct kernel: a unit in the dtype's last place or, for integers,
        INTEGER_TOLERANCE."""
        return torch.finfo(self.dtype).eps if self.dtype.is_floating_point else INTEGER_TOLERANCE

    @property
    def agrees(self) -> bool:
        """Whether `relative` is at most `allowed`. Of integers half of the elements have to be equal, too: a
        count that is wrong by one everywhere, or a token beside the right one, would be within 0.01."""
        is_rounded = self.dtype.is_floating_point or 2 * self.equal >= math.prod(self.shape)
        return self.relative <= self.allowed and is_rounded


def compare(outputs: Any, expected: Any) -> list[Difference]:
    """Every tensor of a function's result with that of the reference."""
    pairs = zip(tree_leaves(outputs), tree_leaves(expected), strict=True)
    return [_difference(actual, right) for actual, right in pairs if isinstance(right, Tensor)]


def _difference(actual: Tensor, expected: Tensor) -> Difference:
    left, right = actual.double(), expected.double()
    both = (left == right) | (left.isnan() & right.isnan())
    apart = torch.where(both, 0.0, left - right).norm()
    return Difference(
        tuple(expected.shape),
        expected.dtype,
        int(both.sum()),
        (apart / right.nan_to_num(0.0, 0.0, 0.0).norm().clamp(min=1e-30)).item(),
    )


Execute = Callable[[list[Tensor], list[Tensor], list[Tensor], str], list[Tensor]]
"""A way to compute the op."""


def run_with(
    fn: Callable[..., Any],
    args: Sequence[Any],
    execute: Execute,
    kwargs: Mapping[str, Any] | None = None,
    capability: Capability = device_capability,
) -> Any:
    """Calls `fn(*args, **kwargs)` with each of its fused regions computed by `execute`."""
    check_function(fn)
    backend = _Backend(execute, capability)
    with torch.no_grad():
        outputs = torch.compile(call_of(fn), backend=backend, dynamic=False)(*args, **(kwargs or {}))
    if not backend.regions:
        why = f": {backend.rejections[0].message}" if backend.rejections else ""
        raise UsageError(f"nothing in the function is fused, so there is no kernel to simulate{why}")
    return outputs


class _Backend:
    """A Dynamo backend: graphs as the pass rewrites them, run node by node."""

    def __init__(self, execute: Execute, capability: Capability) -> None:
        self.execute, self.capability = execute, capability
        self.regions = 0
        self.rejections: list[Rejection] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_fx(gm, example_inputs, inner_compile=self._compile)  # type: ignore[arg-type,return-value]

    def _compile(self, gm: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Callable[..., Any]:
        graphs: list[fx.Graph] = []

        as_the_pass_meets_it(gm, inputs, how, graphs.append)
        graph = graphs[-1]  # graphs that this one calls come before it, and run unchanged
        prepare(graph, self.capability)
        regions, rejections = EpiloguePass().analyse(graph, self.capability)
        self.regions += len(regions)
        self.rejections += rejections
        rewrite(graph, regions)
        return _Runner(fx.GraphModule(gm, graph), self.execute).run


class _Runner(fx.Interpreter):
    """Runs a rewritten graph, with `execute` for the op."""

    def __init__(self, gm: fx.GraphModule, execute: Execute) -> None:
        super().__init__(gm)
        self.extra_traceback = False  # errors need no further context
        self.execute = execute

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is gemm_epilogue:
            return self.execute(*args[:4])  # the constraints are also in the settings
        if target is auto_functionalized_v2 and args[0] is gemm_epilogue_into:
            results = [each.clone() for each in kwargs["_all_bases"]]
            given = self.execute(*(kwargs[name] for name in ("a", "b", "loads", "spec")))
            deliver(parse_spec(kwargs["spec"]), given, kwargs["loads"], results)
            return (None, *results)
        return super().call_function(target, args, kwargs)


def run_region(
    spec: EpilogueSpec, a: Tensors, b: Tensors, loads: Tensors, machine: Machine
) -> tuple[list[Tensor], Launch]:
    """The op on the simulated machine: see `cute_backend.runtime.calls.op` for its arguments and results.

    Outputs are first filled with NaN, or with all bits set, so that elements that a kernel doesn't write are
    noticed.
    """
    check_operands(spec, a, b, loads)
    if (why := unserved(spec, machine.arch.target)) is not None:
        raise UsageError(why)
    (m, n), k = plane_of(spec, a, b), a[0].shape[-1]
    seconds = _seconds(spec, m, n, k)
    bound = Binding(spec).bind(a, b, loads)
    aligned = stores_aligned(spec, m, n) is True and bound.aligned
    alignment = Alignment.TMA if aligned else Alignment.PLAIN
    problem = Problem(spec, m, n, k, groups_of(spec, a), Constraints.from_config())
    config = machine.config or config_for(problem, alignment, machine.arch, machine.arch.target.sm_count)
    kernel = Kernel.found(plan(spec, config, alignment))
    planned = kernel.plan
    program = _program(kernel)
    reports: list[Report] = []

    def function(*arguments: Any) -> None:
        """Stands for the loaded kernel."""
        memory = arguments[len(bound.tensors) : -1]
        counters = memory[-1:] if planned.finishes_rows else ()
        for written in memory[: len(memory) - len(counters)]:
            storage = written.untyped_storage()
            ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())
        reports.extend(
            program.launch(
                arguments,
                async_seed=machine.async_seed,
                observer=machine.observer,
                progress=machine.progress,
                most_instructions=int(INSTRUCTIONS_PER_SECOND * (1 + seconds)),
            )
        )
        if any(each.any() for each in counters):
            raise SimulationError(
                f"counters of tiles are not 0 after {kernel.entry}; a later launch would count on from there"
            )

    outputs = Ready(function, Outputs(planned), lambda: machine.clusters).run(bound.tensors, m, n)
    return outputs, Launch(kernel, (m, n, k), reports[0], reports[1] if planned.tile.sums_in_memory else None)


def _seconds(spec: EpilogueSpec, m: int, n: int, k: int) -> float:
    """The estimated time of a problem. Raises UsageError if it is over LONGEST_SECONDS."""
    rows = len(spec.accumulators) * -(-k * spec.product.a_dtype.bits // 8 // TILE_K_BYTES)
    seconds = -(-m // 128) * -(-n // 128) * (TILE_SECONDS + STAGE_SECONDS * rows)
    if seconds > LONGEST_SECONDS:
        raise UsageError(
            f"simulating M = {m}, N = {n}, K = {k} would take about {seconds / 60:.0f} minutes, and up to "
            f"{LONGEST_SECONDS // 60} are accepted: shrink M or N to a few tiles of 128, or K"
        )
    return seconds


@lru_cache(maxsize=64)
def _program(kernel: Kernel) -> HostProgram:
    built = build(kernel)
    return HostProgram(built.ptx, built.host_object, SYMBOL)
