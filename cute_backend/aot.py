"""Packs: every kernel of a program, compiled ahead of time on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product, takewhile
from pathlib import Path
from typing import Any, Union

from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from cute_backend.errors import BuildError, UnavailableError, UsageError
from cute_backend.fx_walk.collect import GraphReport, collect
from cute_backend.fx_walk.graph.static import fake, hint
from cute_backend.planning import BUCKETS, UNCONSTRAINED, Alignment, Arch, Constraints, buckets_of, plan
from cute_backend.runtime.arguments.operands import Size, groups_of, parse_spec, plane_of
from cute_backend.runtime.calls.op import gemm_epilogue
from cute_backend.runtime.calls.sample_op import run_sample, sample_op
from cute_backend.runtime.compiling.build import build_again, removed
from cute_backend.runtime.compiling.rungs import begin_standing, ladder_of, obtain_standing, spill_bytes
from cute_backend.runtime.disk.cache import caches
from cute_backend.runtime.disk.pack import Content, packs, write_pack
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.reach import Problem, launched, reachable_kernels
from cute_backend.runtime.tuning.tuning_results import Key, Records, Result, remembered
from cute_backend.spec import EpilogueSpec


@dataclass(frozen=True)
class Request:
    """The problems and GPUs that a pack is to serve.

    `problems` are the results of `find_problems`, by architecture. `m` is the range of M, both ends included,
    for problems whose M is None. `sm_counts` are the numbers of multiprocessors of the GPUs; if it is empty,
    each architecture's own number is used.
    """

    problems: Mapping[Arch, Sequence[Problem]]
    m: tuple[int, int] | None = None
    sm_counts: Sequence[int] = ()


@dataclass(frozen=True)
class Written:
    """The result of `make_pack`: the numbers of kernels and of epilogues, and the SHA-256 of the manifest."""

    epilogues: int
    kernels: int
    sha256: str


def find_problems(
    fn: Callable[..., Any],
    args: Sequence[Any],
    arch: Arch,
    *,
    any_m: bool,
    any_size: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> list[Problem]:
    """Finds the products of a program that kernels compute. It traces the program on its arguments; CPU
    tensors are enough.

    With `any_m` the M of each product is None, and the program is traced twice, with static and with symbolic
    sizes, since torch.compile does both. With `any_size` no size is known: N, K and the number of groups are
    None, too. Raises what torch raises where `fn` can't run on its arguments.
    """
    found: dict[Problem, None] = {}
    any_m = any_m or any_size
    for dynamic in (False, True) if any_m else (False,):
        for report in collect(fn, args, dynamic, arch.value, kwargs):
            for spec, *sizes, constraints in chain(_regions(report), _inside_ops(report.graph)):
                m, n, k, groups = (None if size is None or any_size else hint(size) for size in sizes)
                problem = Problem(spec, None if any_m else m, n, k, groups, constraints)
                found |= dict.fromkeys(launched(problem))
    return list(found)


def begin(request: Request) -> None:
    """Begins to compile the kernels of a request, while the caller traces other programs. `make_pack` waits
    for them."""
    begin_standing(_kernels(request))


def make_pack(request: Request, path: Path) -> Written:
    """Compiles every kernel that may be chosen for a request, and writes the pack. Timings of its problems
    that are remembered here are part of the pack, and decide on GPUs of the model that they are of.

    Raises UsageError if there is nothing to pack or the file can't be written, BuildError, and
    UnavailableError without the CuTe DSL or a linker.
    """
    problems = list(dict.fromkeys(chain.from_iterable(request.problems.values())))
    if not problems:
        raise UsageError("nothing in the program is fused, so there is nothing to pack; explain says why")
    timed = dict(_timed(request, remembered()))
    fastest = (Kernel.found(plan(key.spec, found.config, key.alignment)) for key, found in timed.items())
    kernels = list(dict.fromkeys([*_kernels(request), *fastest]))
    texts = {key.text: found.to_dict() for key, found in timed.items()}
    try:
        sha256 = write_pack(path, Content(_compiled(kernels), problems, request.m, texts))
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror}") from error
    return Written(len({kernel.plan.spec for kernel in kernels}), len(kernels), sha256)


_Product = tuple[EpilogueSpec, Size, Size, Size, Union[Size, None], Constraints]


def _regions(report: GraphReport) -> Iterable[_Product]:
    constraints = Constraints.from_config()
    return [(region.spec, *region.problem, region.groups, constraints) for region in report.regions]


def _inside_ops(graph: fx.Graph) -> list[_Product]:
    """The products that `cute_backend.sample` computes when it runs. No graph shows them."""
    watch = _Watch()
    for node in graph.nodes:
        if node.target is sample_op:
            args, kwargs = tree_map_only(fx.Node, fake, (node.args, node.kwargs))
            with watch:
                run_sample(*args, **kwargs)
    return watch.products


class _Watch(TorchDispatchMode):
    """Records the products that run under it, on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[_Product] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is gemm_epilogue:
            a, b, _, text, *rest = args  # without the constraints if there are none
            spec, constraints = parse_spec(text), Constraints.parse(rest[0] if rest else "")
            sizes = *plane_of(spec, a, b), a[0].shape[-1], groups_of(spec, a)
            self.products.append((spec, *sizes, constraints))
        return func(*args, **(kwargs or {}))


def _kernels(request: Request) -> Iterator[Kernel]:
    for arch, problems in request.problems.items():
        for problem in problems:
            for sm_count in request.sm_counts or (arch.target.sm_count,):
                yield from reachable_kernels(problem, arch, sm_count, buckets=_buckets(request))


def _timed(request: Request, memory: Records) -> Iterator[tuple[Key, Result]]:
    """The timings of the problems that are remembered here, on whatever GPU of their architecture."""
    for arch, problems in request.problems.items():
        for problem in problems:
            if problem.n is None or problem.k is None or problem.constraints != UNCONSTRAINED:
                continue
            ms = _buckets(request) if problem.m is None else (problem.m,)
            for device, alignment, m in product(sorted(memory.devices()), Alignment, ms):
                key = Key(problem.spec, alignment, m, problem.n, problem.k, device, problem.groups)
                if (found := memory.get(key)) and found.config.arch is arch:
                    yield key, found


def _buckets(request: Request) -> Sequence[int]:
    return BUCKETS if request.m is None else buckets_of(*request.m)


def _compiled(wanted: list[Kernel]) -> dict[Kernel, tuple[bytes, Mapping[str, Any]]]:
    """The code and the figures of the kernels that run in place of those that are wanted, compiled where the
    cache lacks them, and of their rungs that spill, which a process has to know."""
    obtained = obtain_standing(wanted)
    for each in obtained.values():
        if isinstance(each.outcome, (BuildError, UnavailableError)):
            raise each.outcome
    spilled = (
        rung
        for kernel, each in obtained.items()
        for rung in takewhile(each.kernel.__ne__, ladder_of(kernel))
        if spill_bytes(rung)
    )
    kernels = list(dict.fromkeys((*(each.kernel for each in obtained.values()), *spilled)))
    found = {kernel: _read(kernel) for kernel in kernels}
    if lost := [kernel for kernel in kernels if found[kernel] is None]:
        build_again(lost)
        found |= {kernel: _read(kernel) for kernel in lost}
    compiled: dict[Kernel, tuple[bytes, Mapping[str, Any]]] = {}
    for kernel, kept in found.items():
        if kept is None:
            raise removed(kernel)
        code, entry = kept
        compiled[kernel] = (code, {name: entry[name] for name in ("registers", "spill_bytes", "smem_bytes")})
    return compiled


def _read(kernel: Kernel) -> tuple[bytes, Mapping[str, Any]] | None:
    """The code and the figures of a kernel, from a pack that this process has loaded or from the cache. None
    if it went from there since it was built."""
    for pack in packs():
        if found := pack.read(kernel):
            return found
    for cache in caches():
        if found := cache.read(kernel):
            if found[1]["linked"]:
                return found
            raise UnavailableError(
                "a pack holds shared libraries, and no linker was here when its kernels were compiled: "
                "install ld, or a C compiler, and run python -m cute_backend cache clear"
            )
    return None
