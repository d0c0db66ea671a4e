"""A launch: it picks the right kernel for the given shapes and addresses and runs it on the caller's stream,
without compiling.

Kernels are begun by `prepare`, which knows a region before it runs, or by the first launch of a spec that was
not announced (a graph from Inductor's cache, a direct call). They are built while the program goes on, and a
launch waits for its own, also while a CUDA graph is captured. A kernel that can't be built is replaced by the
replay of its spec, with a count and a warning.

The host cost of a call matters more than anything else here. All that depends on the spec, the device and the
sizes is looked up; then the outputs are allocated and the kernel is called. The compiled host code, through
TVM-FFI, checks dtypes, sizes, strides and addresses against what it was compiled for, before it launches
anything, and switches to the operands' device and finds its current stream. So Python code inspects operands
only when their sizes are new, or when that check has refused operands of these sizes before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from cute_backend.caches import deliver
from cute_backend.errors import BuildError, UnavailableError
from cute_backend.planning import (
    MOST_CONVERTED_ROWS,
    UNCONSTRAINED,
    Alignment,
    Arch,
    Constraints,
    Plan,
    Sizes,
    TileConfig,
    bucket_of,
    fastest,
    plan,
)
from cute_backend.runtime.arguments.bind import Binding
from cute_backend.runtime.arguments.counters import set_aside
from cute_backend.runtime.arguments.device import (
    Device,
    Grid,
    UnsupportedDeviceError,
    device_at,
    max_active_clusters,
)
from cute_backend.runtime.arguments.operands import (
    Size,
    Tensors,
    check_operands,
    groups_of,
    outputs_like,
    parse_spec,
    plane_of,
)
from cute_backend.runtime.arguments.outputs import Outputs, check_call
from cute_backend.runtime.calls.later_kernels import LaterKernels
from cute_backend.runtime.compiling.build import has_spare_core, load_known
from cute_backend.runtime.compiling.rungs import (
    Obtained,
    begin_standing,
    is_asked_for,
    load_standing,
    obtain_standing,
)
from cute_backend.runtime.compiling.workers import start_early
from cute_backend.runtime.disk.cache import existing_caches
from cute_backend.runtime.disk.pack import is_packed, is_packed_for_any_size, packed_kernels, packs
from cute_backend.runtime.host.capture import code_may_load
from cute_backend.runtime.host.forks import free_in_children
from cute_backend.runtime.host.notices import count, warn_once
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.link import KernelFunction
from cute_backend.runtime.kernels.reach import (
    Problem,
    Winners,
    config_for,
    launched,
    reachable_kernels,
    stores_aligned,
)
from cute_backend.runtime.tuning.tuning_results import Key, Result, remembered
from cute_backend.spec import EpilogueSpec

log = logging.getLogger(__name__)

_launchers: dict[tuple[str, int, str], Launcher] = {}
"""Launchers by the text of a spec, the device and the text of constraints."""

_state = free_in_children(threading.RLock())
"""A lock that is held while launchers add and choose kernels."""

REFUSED = (TypeError, ValueError)
"""The exceptions with which compiled host code refuses operands; any other is an error."""

_LOOKS = 16
"""After operands were refused, the number of launches in a row whose operands must fit before operands are
passed on unchecked again."""

_Sizes = tuple[int, int, int, "int | None"]
"""M, N, K and the number of groups."""

_MAX_CHOICES = 4096
"""The number of sizes for which a launcher remembers its choice."""


def launch(
    a: Tensors,
    b: Tensors,
    loads: Tensors | None,
    spec: str,
    constraints: str = "",
    results: Tensors | None = None,
) -> list[Tensor]:
    """Both ops on CUDA: see `cute_backend.runtime.calls.op` for their arguments. Returns the results, which
    are those given, if there are any.

    Raises UnsupportedDeviceError on a GPU for which no kernels exist, ValueError if operands contradict
    `spec`, and UsageError if no kernel meets `constraints`.
    """
    loads = loads or ()
    try:
        launcher = _launchers[spec, a[0].get_device(), constraints]
    except (KeyError, IndexError):
        parsed = parse_spec(spec)
        check_call(parsed, a, b, loads, results)
        launcher = _launcher(parsed, a[0].get_device(), Constraints.parse(constraints))
    return launcher(a, b, loads, results)


def fitted_for(a: Tensors, b: Tensors, spec: str, constraints: str) -> Fitted | None:
    """The kernel that an earlier launch of operands of these sizes ran without copies or views, or None."""
    launcher = _launchers.get((spec, a[0].get_device(), constraints))
    return None if launcher is None else launcher.fitted(a, b)


def prepare(problems: Iterable[Problem], device: int, *, at_once: bool = False) -> None:
    """Obtains every kernel that these regions can reach. Kernels that are in no cache and no pack are built
    in parallel while the program goes on, and the launch that needs one waits for it. With `at_once`, all are
    built when this returns.

    Launches of the regions then compile nothing. A kernel that can't be built causes a warning where it is
    waited for, and its launches are replayed. If a pack was made for a problem but lacks a kernel, M is
    beyond the pack's range, or the pack is for any size. The launch uses the kernel that is predicted to be
    the fastest. In the second case the missing one may be built for later processes (`later_kernels`).
    """
    gpu, problems = device_at(device), list(chain.from_iterable(map(launched, problems)))
    for problem in problems:
        _launcher(problem.spec, device, problem.constraints).announced.add(problem)
    wanted = [
        (_launcher(problem.spec, device, problem.constraints), kernel, problem)
        for problem in problems
        for kernel in reachable_kernels(problem, gpu.arch, gpu.sm_count, winners_on(gpu, problem.groups))
    ]
    log.info("%d kernels serve the regions of a graph on GPU %d", len(wanted), device)
    missing: dict[tuple[Launcher, Kernel], None] = {}
    for launcher, kernel, problem in wanted:
        if launcher.knows(kernel):
            continue
        if kernel.edited or not (is_packed(problem, gpu.arch) and launcher.has_like(kernel)):
            missing[launcher, kernel] = None
        elif is_packed_for_any_size(problem, gpu.arch):
            launcher.defer(kernel)
    obtained = load_standing(kernel for _, kernel in missing)
    begin_standing(kernel for _, kernel in missing if kernel not in obtained)
    obtained |= obtain_standing(
        kernel for _, kernel in missing if kernel not in obtained and (at_once or is_asked_for(kernel))
    )
    with _state:
        for launcher, kernel in missing:
            if kernel in obtained:
                launcher.add(kernel, obtained[kernel])
            else:
                launcher.expect(kernel)


def winners_on(gpu: Device, groups: int | None) -> Winners:
    """Returns what was found fastest on GPUs of this model, for products of `groups` groups. None stands for
    products without groups."""

    def winners(
        spec: EpilogueSpec, alignment: Alignment, ms: Sequence[int], n: int, k: int
    ) -> Mapping[int, TileConfig]:
        key = Key(spec, alignment, 0, n, k, gpu.model, groups)
        return remembered().winners(replace(key, m=m) for m in ms)

    return winners


def config_here(problem: Problem, alignment: Alignment, arch: Arch) -> TileConfig:
    """The configuration that a launch would get: on the current GPU if it has the architecture `arch`, else
    on the GPU that is planned for."""
    if (gpu := _gpu_here(arch)) is not None:
        return config_for(problem, alignment, arch, gpu.sm_count, winners_on(gpu, problem.groups))
    return config_for(problem, alignment, arch, arch.target.sm_count)


def result_here(problem: Problem, alignment: Alignment, arch: Arch) -> Result | None:
    """The timings of a problem of known sizes that decide on the current GPU, if it has the architecture."""
    m, n, k, constraints = problem.m, problem.n, problem.k, problem.constraints
    if (gpu := _gpu_here(arch)) is None or constraints != UNCONSTRAINED:
        return None
    assert m is not None and n is not None and k is not None
    m = bucket_of(m) if problem.varies else m
    return remembered().get(Key(problem.spec, alignment, m, n, k, gpu.model, problem.groups))


def _gpu_here(arch: Arch) -> Device | None:
    """The current GPU, if it has an architecture."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == arch.target.capability:
        return device_at(torch.cuda.current_device())
    return None


def expect(devices: Iterable[torch.device]) -> None:
    """Starts what compiles kernels, if a program that is about to be compiled for these devices is likely to
    need it: the program's own compilation goes on meanwhile. If a pack or the cache may have its kernels, the
    first one that is missing starts it."""
    gpus = [device for device in devices if device.type == "cuda"]
    if not gpus or not has_spare_core() or any(cache.has_kernels() for cache in existing_caches()):
        return
    for device in gpus:
        with suppress(UnsupportedDeviceError):
            arch = device_at(torch.cuda.current_device() if device.index is None else device.index).arch
            if not any(arch in pack.archs for pack in packs()):
                start_early(arch)


def announce(
    regions: Iterable[tuple[EpilogueSpec, Size, Size, Size, Size | None]],
    device: torch.device,
    *,
    at_once: bool = False,
) -> None:
    """Prepares the regions of a graph, given as (spec, M, N, K, groups of rows), before symbolic sizes are
    known, as `prepare` does.

    The constraints are those of the settings now. Does nothing for devices other than CUDA's, or without a
    GPU, since nothing will be launched.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    constraints, problems = Constraints.from_config(), []
    for spec, *sizes in regions:
        m, n, k, groups = (size if isinstance(size, int) else None for size in sizes)
        problems.append(Problem(spec, m, n, k, groups, constraints))
    index = torch.cuda.current_device() if device.index is None else device.index
    prepare(problems, index, at_once=at_once)


@torch.no_grad()
def _replayed(spec: EpilogueSpec, a: Tensors, b: Tensors, loads: Tensors) -> list[Tensor]:
    from cute_backend.replay import replay  # here, since few processes need it

    return replay(spec, a, b, loads)


def _launcher(spec: EpilogueSpec, device: int, constraints: Constraints) -> Launcher:
    key = (spec.to_json(), device, constraints.text)
    if (known := _launchers.get(key)) is not None:
        return known
    return _launchers.setdefault(key, Launcher(spec, device, constraints))


@dataclass(frozen=True)
class Ready:
    """A loaded kernel, the memory that it writes and the number of clusters that a launch starts now."""

    function: KernelFunction
    outputs: Outputs
    clusters: Callable[[], int]

    def run(self, operands: list[Tensor], m: int, n: int, given: Tensors | None = None) -> list[Tensor]:
        """Launches the kernel on operands that `Binding` returned. Returns the results for a plane of (m, n),
        which may be `given`."""
        results, memory = self.outputs.of_size(m, n).allocate(operands[0], given)
        self.function(*operands, *memory, self.clusters())
        return results


class Fitted:
    """A kernel that runs on the operands of one (M, N, K) without copies or views. Its host code checks them,
    and raises an error if they don't fit."""

    def __init__(self, launcher: Launcher, ready: Ready, m: int, n: int) -> None:
        self.ready = ready
        self._launcher, self._chosen = launcher, launcher.chosen
        self._as_given = launcher.binding.takes_operands_as_given
        self._operands = launcher.binding.operands
        self._function, self._clusters = ready.function, ready.clusters
        self._memory = ready.outputs.of_size(m, n)

    @property
    def is_current(self) -> bool:
        """Whether no kernel has been added since this one was chosen."""
        return self._launcher.chosen is self._chosen

    def run(self, a: Tensors, b: Tensors, loads: Tensors, given: Tensors | None = None) -> list[Tensor]:
        results, memory = self._memory.allocate(a[0], given)
        if self._as_given:
            self._function(*a, *b, *loads, *memory, self._clusters())
        else:
            self._function(*self._operands(a, b, loads), *memory, self._clusters())
        return results


@dataclass(eq=False)
class _Choice:
    """The kernels for one (M, N, K): one for operands that TMA can read, one for others. A Kernel is being
    built, and None stands for the replay.

    `kernels` are the two that these sizes ask for, in this order, which may be others. `fitted` is the kernel
    that ran on the last operands of these sizes without copies or views. Once it has refused operands, the
    next `looks` launches inspect theirs first.
    """

    kernels: Sequence[Kernel]
    stores_aligned: bool
    tma: Ready | Kernel | None
    plain: Ready | Kernel | None
    fitted: Fitted | None = None
    looks: int = 0


class Launcher:
    """The facts about a spec on a device that do not depend on operands."""

    def __init__(self, spec: EpilogueSpec, device: int, constraints: Constraints) -> None:
        self._spec = spec
        self._constraints = constraints
        self._is_wideable = spec.product.is_wideable
        self._gpu = device_at(device)
        self.binding = Binding(spec)
        self._kernels: dict[Plan, Ready | None] = {}
        self._expected: set[Kernel] = set()
        self._choices: dict[_Sizes, _Choice] = {}
        self.chosen = object()
        """An object that is replaced whenever a kernel is added."""
        self.announced: set[Problem] = set()
        """The problems of known sizes whose kernels were prepared."""
        self._later = LaterKernels()
        for kernel, function in load_known(packed_kernels(spec, self._gpu.arch)).items():
            self.add(kernel, Obtained(kernel, function))

    def _problem(self, m: int | None, n: int | None, k: int | None, groups: int | None = None) -> Problem:
        return Problem(self._spec, m, n, k, groups, self._constraints)

    def knows(self, kernel: Kernel) -> bool:
        """Whether the kernel was added, either as loaded or as one that can't be built."""
        return kernel.plan in self._kernels

    def has_like(self, kernel: Kernel) -> bool:
        """Whether a launch has a kernel to use in place of a missing one."""
        return bool(self._serving(kernel))

    def add(self, kernel: Kernel, obtained: Obtained) -> None:
        """Adds a kernel, as what runs in its place, or records that it can't be built. Raises BuildError if a
        person asks for that kernel."""
        outcome, planned = obtained.outcome, obtained.kernel.plan
        if is_asked_for(kernel) and isinstance(outcome, Exception):
            raise outcome
        self._expected.discard(kernel)
        self._later.discard(kernel)
        if isinstance(outcome, (BuildError, UnavailableError)):
            self._kernels[kernel.plan] = None
            warn_once(("failed", str(outcome)), f"cute_backend: {outcome}")
        else:
            self._kernels[kernel.plan] = Ready(outcome, Outputs(planned), self._grid(planned).clusters)
        self._choices.clear()
        self.chosen = object()

    def expect(self, kernel: Kernel) -> None:
        """Notes a kernel that is being built. A launch that needs it waits for it."""
        self._grid(kernel.plan)  # a launch, which may be captured, finds what the GPU is asked here
        self._expected.add(kernel)
        self._later.discard(kernel)
        self._choices.clear()
        self.chosen = object()

    def defer(self, kernel: Kernel) -> None:
        """Adds a kernel that serves its sizes better than those of a pack for any size, if it is on disk. If
        it is not, it is built for later processes, once a launch has asked for it."""
        with _state:
            self._load(kernel)
            if not self.knows(kernel):
                self._later.add(kernel)

    def _grid(self, planned: Plan) -> Grid:
        """The clusters of a kernel on this GPU, where its counters are set aside."""
        if planned.finishes_rows:
            set_aside(self._gpu.index)
        size = planned.tile.cluster_size
        return Grid(max_active_clusters(self._gpu.index, size), size, self._gpu.sm_count)

    def __call__(self, a: Tensors, b: Tensors, loads: Tensors, given: Tensors | None = None) -> list[Tensor]:
        """Runs a kernel. Returns the results, which may be `given`."""
        try:
            sizes = *plane_of(self._spec, a, b), a[0].shape[-1], groups_of(self._spec, a)
            if self._is_wideable and sizes[0] > MOST_CONVERTED_ROWS:
                return self._widened(a, b, loads, given)
            choice = self._choices.get(sizes)
            if choice is None or choice.fitted is None:
                return self._consider(a, b, loads, sizes, given)
            try:
                return choice.fitted.run(a, b, loads, given)
            except REFUSED:  # the host code found layouts that differ from the earlier ones
                choice.fitted, choice.looks = None, _LOOKS
                return self._consider(a, b, loads, sizes, given)
        except Exception:
            check_call(self._spec, a, b, loads, given)  # raises a better message if the operands are at fault
            raise

    def _widened(self, a: Tensors, b: Tensors, loads: Tensors, given: Tensors | None) -> list[Tensor]:
        """A launch of many rows, whose weight is converted in memory: each tile of rows would do it again."""
        count("weights_widened")
        launcher = _launcher(self._spec.widened, self._gpu.index, self._constraints)
        # The rows of its transpose are contiguous, and stay so if they are a slice of longer ones.
        with torch.no_grad():
            wide = [each.mT.to(a[0].dtype, memory_format=torch.contiguous_format).mT for each in b]
        return launcher(a, wide, loads, given)

    def fitted(self, a: Tensors, b: Tensors) -> Fitted | None:
        """The kernel that ran on the last operands of these sizes without copies or views, or None."""
        sizes = *plane_of(self._spec, a, b), a[0].shape[-1], groups_of(self._spec, a)
        choice = self._choices.get(sizes)
        return None if choice is None else choice.fitted

    def _consider(
        self, a: Tensors, b: Tensors, loads: Tensors, sizes: _Sizes, given: Tensors | None
    ) -> list[Tensor]:
        """A launch that inspects the addresses and strides of its operands."""
        m, n, k, groups = sizes
        if not (m and n and k) or groups == 0:
            return deliver(self._spec, self._empty_product(a, b, loads, m, n), loads, given)
        bound = self.binding.bind(a, b, loads)
        while True:
            choice = self._choices.get(sizes) or self._choose(sizes)
            aligned = choice.stores_aligned and bound.aligned
            ready = choice.tma if aligned else choice.plain
            if isinstance(ready, Ready):
                break
            if not self._obtain_missing(choice, ready):
                return deliver(self._spec, self._replay(a, b, loads), loads, given)
        outputs = ready.run(bound.tensors, m, n, given)
        self._later.ask(choice.kernels[not aligned])
        if not (bound.as_given and aligned is choice.stores_aligned):
            choice.looks = _LOOKS if choice.looks else 0
        elif choice.looks:
            choice.looks -= 1
        else:
            choice.fitted = Fitted(self, ready, m, n)
        return outputs

    def _choose(self, sizes: _Sizes) -> _Choice:
        """Chooses the kernels for these sizes among those that were prepared or are on disk."""
        problem = self._problem(*sizes)
        with _state:
            kernels = [self._wanted(problem, alignment) for alignment in (Alignment.TMA, Alignment.PLAIN)]
            tma, plain = (self._fastest(kernel, Sizes(*sizes)) for kernel in kernels)
            choice = _Choice(kernels, stores_aligned(self._spec, *sizes[:2]) is True, tma or plain, plain)
            if len(self._choices) >= _MAX_CHOICES:
                self._choices.clear()
            self._choices[sizes] = choice
            if log.isEnabledFor(logging.DEBUG):  # making a name takes longer than choosing
                log.debug("M %d, N %d, K %d of %s take %s", *sizes[:3], self._spec.key, kernels[0].entry)
            return choice

    def _wanted(self, problem: Problem, alignment: Alignment) -> Kernel:
        """The kernel for a problem of known sizes, which is loaded if it is on disk.

        It is the one for M if a region of these sizes was announced, and else the one for the bucket of M. If
        that was not prepared, the graph may be from Inductor's cache and M static: the kernel for M is used
        if it is on disk.
        """
        of_bucket = self._kernel(replace(problem, varies=True), alignment)
        announced = problem in self.announced
        if not (announced or self._unheard_of([of_bucket])):
            return of_bucket
        of_m = self._kernel(problem, alignment)
        for kernel in (of_m, of_bucket):
            self._load(kernel)
            if announced or not self._unheard_of([kernel]):
                return kernel
        return of_bucket

    def _kernel(self, problem: Problem, alignment: Alignment) -> Kernel:
        """The kernel that is chosen for a problem of known sizes."""
        winners = winners_on(self._gpu, problem.groups)
        tile = config_for(problem, alignment, self._gpu.arch, self._gpu.sm_count, winners)
        return Kernel.found(plan(self._spec, tile, alignment))

    def _load(self, kernel: Kernel) -> None:
        """Loads a kernel unless it is known or not on disk."""
        if unknown := self._unheard_of([kernel]):
            with code_may_load():
                for each, obtained in load_standing(unknown).items():
                    self.add(each, obtained)

    def _fastest(self, kernel: Kernel, sizes: Sizes) -> Ready | Kernel | None:
        """The kernel chosen for these sizes or, if it is missing, the one that is predicted to be the fastest
        of those that there are, or None."""
        there, tile = self._serving(kernel), kernel.plan.tile
        if not there or tile in there:
            return there.get(tile)
        return there[fastest(there, self._spec, sizes, self._gpu.sm_count)]

    def _serving(self, kernel: Kernel) -> dict[TileConfig, Ready | Kernel]:
        """The kernels that serve the operands of this one, by their tiles. One that is being built is a
        Kernel.

        A region with constraints uses no other kernel: another may not meet them, and under batch invariance
        the available kernels may differ from one M to the next.
        """
        alone = self._constraints != UNCONSTRAINED
        known: dict[Plan, Ready | Kernel | None] = {each.plan: each for each in self._expected}
        known |= self._kernels
        return {
            planned.tile: each
            for planned, each in known.items()
            if planned.alignment is kernel.plan.alignment
            and each is not None
            and (planned == kernel.plan or not alone)
        }

    def _obtain_missing(self, choice: _Choice, wanted: Kernel | None) -> bool:
        """Waits for a kernel that is being built or, if a launch has none, seeks some. Returns False if none
        can be built."""
        with _state:
            if all(choice is not current for current in self._choices.values()):
                return True  # another thread has added some
            if wanted is None:
                return self._seek(choice)
        with code_may_load():
            obtained = obtain_standing([wanted])
            with _state:
                if not self.knows(wanted):
                    self.add(wanted, obtained[wanted])
        return True

    def _seek(self, choice: _Choice) -> bool:
        """Loads the kernels of a region that was not announced, and may have any size, and begins to build
        those that are in no cache and no pack. If none could be loaded, the kernels for the sizes of the
        launch are built first. Returns False if it finds nothing to build or to load."""
        anything = self._problem(None, None, None)
        rest = self._unheard_of(reachable_kernels(anything, self._gpu.arch, self._gpu.sm_count))
        with code_may_load():
            loaded = load_standing(rest)
            for kernel, obtained in loaded.items():
                self.add(kernel, obtained)
        begun = [kernel for kernel in rest if kernel not in loaded]
        if not loaded:
            begun = list(dict.fromkeys([*self._unheard_of(choice.kernels), *begun]))
        begin_standing(begun)
        for kernel in begun:
            self.expect(kernel)
        return bool(loaded or begun)

    def _unheard_of(self, kernels: Iterable[Kernel]) -> list[Kernel]:
        """Returns the kernels that were neither added nor begun, and are not for later processes."""
        known = (self._expected, self._later)
        return [each for each in kernels if not (self.knows(each) or any(each in some for some in known))]

    def _replay(self, a: Tensors, b: Tensors, loads: Tensors) -> list[Tensor]:
        count("replayed")
        warn_once(
            ("replayed", self._spec),
            f"cute_backend: the epilogue {self._spec.key} has no kernel for these operands and is replayed "
            "with aten, slowly; an earlier warning says why.",
        )
        return _replayed(self._spec, a, b, loads)

    def _empty_product(self, a: Tensors, b: Tensors, loads: Tensors, m: int, n: int) -> list[Tensor]:
        """The results for a plane without elements, or for a K of 0. Neither needs a kernel."""
        check_operands(self._spec, a, b, loads)
        if (m == 0 or n == 0) and not self._spec.reductions:
            return outputs_like(self._spec, a[0], m, n)
        return _replayed(self._spec, a, b, loads)
