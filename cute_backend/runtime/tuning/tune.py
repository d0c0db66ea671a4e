"""Tuning: finds the fastest configuration of a problem by timing those that the cost model predicts to be
fast.

Candidates are compiled in parallel processes, timed round-robin from a cold L2, and the winner is remembered
for its M or, if M varies, for its bucket. Nothing is timed at a launch, which uses earlier results. A job
that is not thorough times only those few between which the model can't decide.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import chain, zip_longest
from threading import Thread
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import Progress

from cute_backend.errors import BuildError, UnavailableError
from cute_backend.planning import Sizes, TileConfig, bucket_of, candidates, doubted, plan
from cute_backend.runtime.arguments.device import Device, device_at
from cute_backend.runtime.compiling.build import Outcome, is_at_hand, obtain
from cute_backend.runtime.compiling.rungs import spill_bytes, standing
from cute_backend.runtime.host.notices import count, warn_once
from cute_backend.runtime.host.progress import line
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.link import KernelFunction
from cute_backend.runtime.kernels.reach import Problem, reachable_alignments, reachable_kernels
from cute_backend.runtime.tuning.timing import GpuTimer, Run, Timer
from cute_backend.runtime.tuning.tuning_results import Key, NoRoom, Records, Result, remembered
from cute_backend.spec import EpilogueSpec

log = logging.getLogger(__name__)


class Untuned(Enum):
    """The reasons why a region is not tuned. The value is the name in the counters; `sentence` is the reason
    for the user to read."""

    sentence: str

    def __new__(cls, key: str, sentence: str) -> Untuned:
        member = object.__new__(cls)
        member._value_ = key
        member.sentence = sentence
        return member

    SYMBOLIC = "untuned_symbolic", "its N, K or groups are not static, or nothing is known of its M"
    BATCH_INVARIANT = "untuned_batch_invariant", "config.batch_invariant leaves one configuration for all M"
    GROUPED = "untuned_grouped", "how its K is split into groups is known to the device alone"
    PACKED = "untuned_packed", "a pack has kernels for it, and others would have to be compiled"
    CAPTURING = "untuned_capturing", "a CUDA graph is being captured, in which nothing can be timed"
    LATE = "untuned_late", "measuring waits no longer for the compiler, or for another process that times"
    MEMORY = "untuned_memory", "its operands do not fit into the GPU's memory beside what is there"
    FAILED = "untuned_failed", "none of its candidates runs"

    def note(self, warns: bool = True) -> None:
        """Counts the reason and, if it `warns`, says it once in a process."""
        count(self.value)
        if not warns:
            return
        warn_once(
            self, f"cute_backend: a region is not tuned and gets the cost model's tile: {self.sentence}."
        )


_MORE_ROOM = 1.1
"""How many times as many bytes have to be free before a problem that did not fit is tried again: the rest of
memory differs a little from run to run."""


PATIENCE_S = 3.0
"""The most seconds for which measuring the regions of a graph waits for kernels to be compiled. On 16 cores,
those of most regions are built after 2 to 3 seconds, and those of queries, keys and values with a rotation
after 5 to 8, while the program is at a stand (H200, benchmarks/findings.md)."""


_LOCK_S = 120.0
"""The most seconds for which tuning waits for another process that times, which may have stopped: tuning then
times beside it. Measuring waits no longer than for kernels, and then leaves its regions."""


class Build(Protocol):
    """The interface of `cute_backend.runtime.compiling.build.obtain`."""

    def __call__(
        self, kernels: Sequence[Kernel], *, built: Callable[[], None], until: float | None
    ) -> dict[Kernel, Outcome]: ...


@dataclass(frozen=True)
class Job:
    """A region to tune: its spec and its sizes. A symbolic M is replaced by an example.

    `dynamic` says that M is symbolic, and `groups` how many groups M rows are in. `unfused` returns a
    function that computes the same as the region without our kernels; it is called only if that function has
    to be timed. A `thorough` job times all candidates of tuning, another those in doubt (`planning.doubted`).
    """

    spec: EpilogueSpec
    m: int
    n: int
    k: int
    dynamic: bool = False
    unfused: Callable[[], Run] | None = None
    groups: int | None = None
    thorough: bool = True


class Tuner:
    """Finds the fastest kernels on one GPU, and remembers them."""

    def __init__(
        self,
        gpu: Device,
        timer: Timer,
        memory: Records,
        build: Build = obtain,
        console: Console | None = None,
    ) -> None:
        self._gpu = gpu
        self._timer = timer
        self._memory = memory
        self._build = build
        self._console = console
        self.late: list[Job] = []
        """The jobs that were left since measuring did not wait longer for their kernels. Their `unfused`
        returns code that is compiled."""

    def tune(self, jobs: Sequence[Job], patience_s: float = PATIENCE_S) -> list[Result | None]:
        """The result of each job, either remembered or found now. A job without a result has None, and is
        counted. Unless a job is thorough, `patience_s` is how long kernels are waited for, in seconds."""
        keyed = [(self._key(job), job) for job in jobs]
        missing = {key: job for key, job in keyed if self._is_missing(key, job)}
        for key, job in keyed:
            if key not in missing and self._memory.get(key) is None:
                Untuned.MEMORY.note(warns=job.thorough)
        if missing:
            with self._progress(jobs) as progress:
                self._find(missing, progress, patience_s)
        return [self._memory.get(key) for key, _ in keyed]

    def tune_built(self, jobs: Sequence[Job]) -> None:
        """Tunes those of the jobs whose kernels are all built by now, and waits for none."""
        built = [job for job in jobs if all(map(is_at_hand, self._candidates(self._key(job), job)))]
        if built:
            self.tune(built, patience_s=0.0)

    def _is_missing(self, key: Key, job: Job) -> bool:
        known = self._memory.get(key)
        if known is not None:
            return job.thorough and not known.thorough
        lacked = self._memory.room_lacked(key)
        return lacked is None or self._timer.free_bytes() > _MORE_ROOM * lacked

    def recall(self, job: Job) -> Result | None:
        """The remembered result of a job, or None."""
        return self._memory.get(self._key(job))

    def _key(self, job: Job) -> Key:
        """The key of a job's result. Only the most common alignment is tuned, which `reachable_alignments`
        names first."""
        alignment = reachable_alignments(_problem(job))[0]
        m = bucket_of(job.m) if job.dynamic else job.m
        return Key(job.spec, alignment, m, job.n, job.k, self._gpu.model, job.groups)

    def _find(self, jobs: Mapping[Key, Job], progress: _Report, patience_s: float) -> None:
        kernels = {key: self._candidates(key, job) for key, job in jobs.items()}
        # The choices of the model come first: a program that waits no longer needs them.
        by_rank = chain.from_iterable(zip_longest(*kernels.values()))
        tried = [kernel for kernel in by_rank if kernel is not None]
        # The other kernels that the regions can need are needed soon, and are compiled along with the many
        # candidates of tuning. A program that was only to be measured does not wait for them.
        thorough = (job for job in jobs.values() if job.thorough)
        everything = list(dict.fromkeys([*tried, *chain.from_iterable(map(self._reached, thorough))]))
        waits = any(job.thorough for job in jobs.values())
        until = None if waits else time.perf_counter() + patience_s
        build = partial(self._build_all, progress, until)
        building = _begun(build, everything)
        unfused = {key: _unfused(job) for key, job in jobs.items()}
        outcomes = building.result()
        for key, job in jobs.items():
            if not job.thorough:
                kernels[key] = _standing(kernels[key], outcomes, build)
        named = dict.fromkeys([*tried, *chain.from_iterable(kernels.values())])
        _warn_of_failures(outcomes[kernel] for kernel in named if kernel in outcomes)
        progress.waiting()
        with self._memory.exclusively(_LOCK_S if waits else patience_s) as is_alone:
            progress.timing(len(jobs))
            for key, job in jobs.items():
                # Another process may have done it while this one was building.
                is_missing = self._is_missing(key, job)
                is_late = not (is_alone or job.thorough) or any(k not in outcomes for k in kernels[key])
                if is_missing and is_late:
                    if patience_s > 0:  # else it was counted when it was left
                        Untuned.LATE.note(warns=False)
                    self.late.append(_compiled(job, unfused.pop(key)))
                elif is_missing:
                    functions = _built({kernel: outcomes[kernel] for kernel in kernels[key]})
                    if job.thorough:
                        functions = _sound(functions)
                    free = self._timer.free_bytes()
                    try:
                        result = self._time(job, functions, kernels[key], unfused.pop(key))
                    except torch.OutOfMemoryError:
                        Untuned.MEMORY.note(warns=job.thorough)
                        if self._memory.get(key) is None:
                            self._memory.put({key: NoRoom(free)})
                    else:
                        self._remember(key, job, result)
                progress.step()

    def _build_all(
        self, progress: _Report, until: float | None, kernels: Sequence[Kernel]
    ) -> dict[Kernel, Outcome]:
        progress.compiling(len(kernels))
        return self._build(kernels, built=progress.step, until=until)

    def _remember(self, key: Key, job: Job, result: Result | None) -> None:
        if result is not None:
            log.info("timed %s: %s in %.1f us", key.text, result.config.name, result.us)
            self._memory.put({key: result})
            count("tuned" if job.thorough else "measured")

    def _reached(self, job: Job) -> list[Kernel]:
        return reachable_kernels(_problem(job), self._gpu.arch, self._gpu.sm_count)

    def _candidates(self, key: Key, job: Job) -> dict[Kernel, TileConfig]:
        """The kernels to time for a problem, each with the tile that it was planned for."""
        spec, gpu = key.spec, self._gpu
        tried = candidates if job.thorough else doubted
        configs = tried(gpu.arch, spec, Sizes(key.m, key.n, key.k, key.groups), gpu.sm_count)
        found: dict[Kernel, TileConfig] = {}
        for config in configs:
            found.setdefault(Kernel.found(plan(spec, config, key.alignment)), config)
        return found

    def _time(
        self,
        job: Job,
        functions: Mapping[Kernel, KernelFunction],
        tiles: Mapping[Kernel, TileConfig],
        unfused: Run | None,
    ) -> Result | None:
        if not functions:
            Untuned.FAILED.note()
            return None
        timings = self._timer((job.m, job.n, job.k), functions, unfused, job.groups)
        if not timings.kernels:
            Untuned.FAILED.note()
            return None
        best = min(timings.kernels, key=timings.kernels.__getitem__)
        return Result(tiles[best], timings.kernels[best], timings.unfused, job.thorough)

    @contextmanager
    def _progress(self, jobs: Sequence[Job]) -> Iterator[_Report]:
        doing = "tuning" if any(job.thorough for job in jobs) else "measuring"
        with line(self._console) as bar:
            yield _Report(bar, f"{doing} {len(jobs)} region{'s' * (len(jobs) != 1)}")


class _Report:
    """The progress line of the tuner."""

    def __init__(self, bar: Progress, what: str) -> None:
        self._bar = bar
        self._what = what
        self._task = bar.add_task(what, total=None)

    def compiling(self, total: int) -> None:
        self._bar.reset(self._task, total=total, description=f"{self._what}: compiling candidates")

    def waiting(self) -> None:
        self._bar.reset(self._task, total=None, description=f"{self._what}: another process is timing")

    def timing(self, total: int) -> None:
        self._bar.reset(self._task, total=total, description=f"{self._what}: timing")

    def step(self) -> None:
        self._bar.advance(self._task)


def _begun(
    build: Callable[[Sequence[Kernel]], dict[Kernel, Outcome]], kernels: Sequence[Kernel]
) -> Future[dict[Kernel, Outcome]]:
    """Begins to build kernels, in a daemon thread: a program that is interrupted would wait for the thread of
    a pool, and all kernels, before it ends."""
    built = Future[dict[Kernel, Outcome]]()

    def run() -> None:
        try:
            built.set_result(build(kernels))
        except BaseException as error:
            built.set_exception(error)

    Thread(target=run, name="cute_backend tuning", daemon=True).start()
    return built


def _standing(
    tiles: dict[Kernel, TileConfig],
    outcomes: dict[Kernel, Outcome],
    build: Callable[[Sequence[Kernel]], dict[Kernel, Outcome]],
) -> dict[Kernel, TileConfig]:
    """The kernels to time for a few tiles, with these: those that spill nothing. If all spill or can't be
    built, it is their lower rungs, which are built and added to `outcomes`. A kernel that is not built in
    time is missing there."""
    if tiles.keys() - outcomes.keys():
        return tiles
    failed = _failed(outcomes)
    if sound := {k: tile for k, tile in tiles.items() if k not in failed and not spill_bytes(k)}:
        return sound
    while True:
        found = dict[Kernel, TileConfig]()
        for kernel, tile in tiles.items():
            found.setdefault(standing(kernel, _failed(outcomes)), tile)
        missing = [kernel for kernel in found if kernel not in outcomes]
        built = build(missing) if missing else {}
        outcomes |= built
        if len(built) < len(missing) or not missing:
            return found


def _failed(outcomes: Mapping[Kernel, Outcome]) -> set[Kernel]:
    return {kernel for kernel, outcome in outcomes.items() if isinstance(outcome, BuildError)}


def _warn_of_failures(outcomes: Iterable[Outcome]) -> None:
    """Counts the kernels that could not be built, and names them in warnings."""
    for outcome in outcomes:
        if isinstance(outcome, (BuildError, UnavailableError)):
            count("candidates_failed")
            warn_once(("failed", str(outcome)), f"cute_backend: tuning leaves out a candidate: {outcome}")


def _built(outcomes: Mapping[Kernel, Outcome]) -> dict[Kernel, KernelFunction]:
    """The kernels that could be built."""
    return {
        kernel: outcome
        for kernel, outcome in outcomes.items()
        if not isinstance(outcome, (BuildError, UnavailableError))
    }


def _sound(functions: Mapping[Kernel, KernelFunction]) -> dict[Kernel, KernelFunction]:
    """The kernels that do not spill. A kernel that spills is counted."""
    sound = {kernel: function for kernel, function in functions.items() if not spill_bytes(kernel)}
    if spilled := len(functions) - len(sound):
        count("candidates_spilled", spilled)
    return sound


def _problem(job: Job) -> Problem:
    return Problem(job.spec, None if job.dynamic else job.m, job.n, job.k, groups=job.groups)


def _unfused(job: Job) -> Run | None:
    """The unfused program that the region is timed against, or None if Inductor can't compile it, which is
    counted."""
    if job.unfused is None:
        return None
    try:
        return job.unfused()
    except Exception as error:
        count("unfused_not_timed")
        reason = (str(error).strip() or "no message").splitlines()[0]
        warn_once(
            ("unfused", job.spec),
            "cute_backend: a region is not compared with Inductor's own code, which could not be compiled "
            f"by itself: {type(error).__name__}: {reason}",
        )
        return None


def _compiled(job: Job, unfused: Run | None) -> Job:
    """A job whose function to compile the unfused program returns what it has compiled."""
    return replace(job, unfused=None if unfused is None else lambda: unfused)


def tuner_for(index: int) -> Tuner:
    """The tuner of a GPU."""
    gpu = device_at(index)
    return Tuner(gpu, GpuTimer(gpu), remembered())
