"""The kernels that launches of one spec on one device use, and those that were chosen for known sizes.

Kernels are begun by `prepare`, which knows a region before it runs, or by the first launch of a spec that was
not announced (a graph from Inductor's cache, a direct call). They are built while the program goes on, and a
launch waits for its own, also while a CUDA graph is captured.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from cute_backend.errors import BuildError, UnavailableError
from cute_backend.planning import (
    UNCONSTRAINED,
    Alignment,
    Constraints,
    Plan,
    Sizes,
    TileConfig,
    fastest,
    plan,
)
from cute_backend.runtime.arguments.bind import Binding
from cute_backend.runtime.arguments.counters import set_aside
from cute_backend.runtime.arguments.device import Grid, device_at, max_active_clusters
from cute_backend.runtime.arguments.operands import Tensors
from cute_backend.runtime.arguments.outputs import Outputs
from cute_backend.runtime.calls.later_kernels import LaterKernels
from cute_backend.runtime.compiling.build import load_known
from cute_backend.runtime.compiling.rungs import (
    Obtained,
    begin_standing,
    is_asked_for,
    load_standing,
    obtain_standing,
    spill_bytes,
)
from cute_backend.runtime.disk.pack import packed_kernels
from cute_backend.runtime.host.capture import code_may_load
from cute_backend.runtime.host.forks import free_in_children
from cute_backend.runtime.host.notices import warn_once
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.link import KernelFunction
from cute_backend.runtime.kernels.reach import Problem, config_for, reachable_kernels, stores_aligned
from cute_backend.runtime.tuning.winners import winners_on
from cute_backend.spec import EpilogueSpec

log = logging.getLogger(__name__)

STATE = free_in_children(threading.RLock())
"""A lock that is held while kernels are added and chosen."""

KnownSizes = tuple[int, int, int, "int | None"]
"""M, N, K and the number of groups."""

_MAX_CHOICES = 4096
"""The number of sizes for which a choice is remembered."""


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

    def __init__(self, kernels: SpecKernels, ready: Ready, m: int, n: int) -> None:
        self.ready = ready
        self._kernels, self._chosen = kernels, kernels.chosen
        self._as_given = kernels.binding.takes_operands_as_given
        self._operands = kernels.binding.operands
        self._function, self._clusters = ready.function, ready.clusters
        self._memory = ready.outputs.of_size(m, n)

    @property
    def is_current(self) -> bool:
        """Whether no kernel has been added since this one was chosen."""
        return self._kernels.chosen is self._chosen

    def run(self, a: Tensors, b: Tensors, loads: Tensors, given: Tensors | None = None) -> list[Tensor]:
        results, memory = self._memory.allocate(a[0], given)
        if self._as_given:
            self._function(*a, *b, *loads, *memory, self._clusters())
        else:
            self._function(*self._operands(a, b, loads), *memory, self._clusters())
        return results


@dataclass(eq=False)
class Choice:
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


class SpecKernels:
    """The kernels of one spec on one device, under the constraints of a region."""

    def __init__(self, spec: EpilogueSpec, device: int, constraints: Constraints) -> None:
        self._spec, self._constraints = spec, constraints
        self._gpu = device_at(device)
        self.binding = Binding(spec)
        self._kernels: dict[Plan, Ready | None] = {}
        self._expected: set[Kernel] = set()
        self.choices: dict[KnownSizes, Choice] = {}
        self.chosen = object()
        """An object that is replaced whenever a kernel is added."""
        self.announced: set[Problem] = set()
        """The problems of known sizes whose kernels were prepared."""
        self.later = LaterKernels()
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
        self.later.discard(kernel)
        if isinstance(outcome, (BuildError, UnavailableError)):
            self._kernels[kernel.plan] = None
            warn_once(("failed", str(outcome)), f"cute_backend: {outcome}")
        else:
            self._kernels[kernel.plan] = Ready(outcome, Outputs(planned), self._grid(planned).clusters)
            if self._constraints.tile and planned != kernel.plan:
                _warn_of_rung(kernel, planned)
        self.choices.clear()
        self.chosen = object()

    def expect(self, kernel: Kernel) -> None:
        """Notes a kernel that is being built. A launch that needs it waits for it."""
        self._grid(kernel.plan)  # a launch, which may be captured, finds what the GPU is asked here
        self._expected.add(kernel)
        self.later.discard(kernel)
        self.choices.clear()
        self.chosen = object()

    def defer(self, kernel: Kernel) -> None:
        """Adds a kernel that serves its sizes better than those of a pack for any size, if it is on disk. If
        it is not, it is built for later processes, once a launch has asked for it."""
        with STATE:
            self._load(kernel)
            if not self.knows(kernel):
                self.later.add(kernel)

    def _grid(self, planned: Plan) -> Grid:
        """The clusters of a kernel on this GPU, where its counters are set aside."""
        if planned.finishes_rows:
            set_aside(self._gpu.index)
        size = planned.tile.cluster_size
        return Grid(max_active_clusters(self._gpu.index, size), size, self._gpu.sm_count)

    def choose(self, sizes: KnownSizes) -> Choice:
        """Chooses the kernels for these sizes among those that were prepared or are on disk."""
        problem = self._problem(*sizes)
        with STATE:
            kernels = [self._wanted(problem, alignment) for alignment in (Alignment.TMA, Alignment.PLAIN)]
            tma, plain = (self._fastest(kernel, Sizes(*sizes)) for kernel in kernels)
            choice = Choice(kernels, stores_aligned(self._spec, *sizes[:2]) is True, tma or plain, plain)
            if len(self.choices) >= _MAX_CHOICES:
                self.choices.clear()
            self.choices[sizes] = choice
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

    def obtain_missing(self, choice: Choice, wanted: Kernel | None) -> bool:
        """Waits for a kernel that is being built or, if a launch has none, seeks some. Returns False if none
        can be built."""
        with STATE:
            if all(choice is not current for current in self.choices.values()):
                return True  # another thread has added some
            if wanted is None:
                return self._seek(choice)
        with code_may_load():
            obtained = obtain_standing([wanted])
            with STATE:
                if not self.knows(wanted):
                    self.add(wanted, obtained[wanted])
        return True

    def _seek(self, choice: Choice) -> bool:
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
        known = (self._expected, self.later)
        return [each for each in kernels if not (self.knows(each) or any(each in some for some in known))]


def _warn_of_rung(named: Kernel, planned: Plan) -> None:
    """Says that another tile runs in place of one that a person named. Why a tile can't be compiled has been
    said."""
    if spilled := spill_bytes(named):
        warn_once(
            ("rung", named),
            f"cute_backend: tile {named.plan.tile.name}, which config.tile names, spills {spilled} bytes a "
            f"thread; {planned.tile.name} runs in its place.",
        )
