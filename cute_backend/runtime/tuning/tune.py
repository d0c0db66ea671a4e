"""Tuning: finds the fastest configuration of a problem by timing those that the cost model predicts to be
fast.

Candidates are compiled in parallel processes, timed round-robin from a cold L2, and the winner is remembered
for its M or, if M varies, for its bucket. Nothing is timed at a launch, which uses earlier results. Measuring
times only those few between which the model can't decide, in two steps: what is built before Inductor works,
and the rest, which is built meanwhile, after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import chain
from threading import Thread
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import Progress

from cute_backend.errors import BuildError, UnavailableError
from cute_backend.planning import Sizes, bucket_of, candidates, doubted
from cute_backend.runtime.arguments.device import Device, device_at
from cute_backend.runtime.compiling.build import Outcome, is_at_hand, is_begun, obtain
from cute_backend.runtime.compiling.rungs import spill_bytes
from cute_backend.runtime.host.notices import count, warn_once
from cute_backend.runtime.host.progress import line
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.link import KernelFunction
from cute_backend.runtime.kernels.reach import Problem, reachable_alignments, reachable_kernels
from cute_backend.runtime.tuning.timing import GpuTimer, Run, Timer, Timings
from cute_backend.runtime.tuning.trials import (
    Configurations,
    Tiles,
    begin_few,
    by_rank,
    kernels_of,
    standing_of,
)
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
    LATE = "untuned_late", "measuring waits neither for its kernels nor for another process that times"
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


_TUNING_LOCK_S, _MEASURING_LOCK_S = 120.0, 5.0
"""The most seconds for which tuning and measuring wait for another process that times, and that may have
stopped. Tuning then times beside it, and measuring leaves its regions."""


class Build(Protocol):
    """The interface of `cute_backend.runtime.compiling.build.obtain`."""

    def __call__(self, kernels: Sequence[Kernel], *, built: Callable[[], None]) -> dict[Kernel, Outcome]: ...


@dataclass(frozen=True)
class Job:
    """A region to tune: its spec and its sizes. A symbolic M is replaced by an example.

    `dynamic` says that M is symbolic, and `groups` how many groups M rows are in. `unfused` returns a
    function that computes the same as the region without our kernels; it is called only if that function has
    to be timed.
    """

    spec: EpilogueSpec
    m: int
    n: int
    k: int
    dynamic: bool = False
    unfused: Callable[[], Run] | None = None
    groups: int | None = None


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

    def tune(self, jobs: Sequence[Job]) -> list[Result | None]:
        """The result of each job with all candidates of tuning, remembered or found now. Waits for the
        compiler. A job without a result has None, and is counted."""
        missing = self._missing(jobs, thorough=True)
        if missing:
            with self._progress(f"tuning {_regions(jobs)}") as progress:
                self._tune(missing, progress)
        return list(map(self.recall, jobs))

    def measure(self, jobs: Sequence[Job]) -> tuple[list[Result | None], list[Job]]:
        """The result of each job with the candidates that are in doubt (`planning.doubted`), remembered or
        found now, and the jobs that are late, for `measure_late`: their candidates are not all built.

        It waits for no kernel, but begins to build them, as far as cores are idle, and compiles the unfused
        program of each job meanwhile.
        """
        missing, late = self._missing(jobs, thorough=False), list[Job]()
        if missing:
            tiles = {key: self._kernels(key, doubted) for key in missing}
            begin_few(tiles.values())
            missing = {key: _compiled(job) for key, job in missing.items()}
            with self._progress(f"measuring {_regions(jobs)}") as progress:
                late = self._measure(missing, tiles, progress)
        return list(map(self.recall, jobs)), late

    def measure_late(self, jobs: Sequence[Job]) -> tuple[list[Result | None], list[Job]]:
        """Does the same as `measure` for jobs that were late, waits for the kernels that it began, and begins
        no others."""
        missing, late = self._missing(jobs, thorough=False), list[Job]()
        if missing:
            tiles = {key: self._kernels(key, doubted) for key in missing}
            with self._progress(f"measuring {_regions(jobs)}") as progress:
                while begun := [one for each in tiles.values() for one in standing_of(each) if is_begun(one)]:
                    _warn_of_failures(self._build_all(progress, begun))
                late = self._measure(missing, tiles, progress)
        return list(map(self.recall, jobs)), late

    def _missing(self, jobs: Sequence[Job], thorough: bool) -> dict[Key, Job]:
        """The jobs to time, by key. Counts the others that have no result."""
        keyed = {self._key(job): job for job in jobs}
        missing = {key: job for key, job in keyed.items() if self._is_missing(key, thorough)}
        for key in keyed.keys() - missing.keys():
            if self._memory.get(key) is None:
                Untuned.MEMORY.note(warns=thorough)
        return missing

    def _is_missing(self, key: Key, thorough: bool) -> bool:
        known = self._memory.get(key)
        if known is not None:
            return thorough and not known.thorough
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

    def _tune(self, jobs: Mapping[Key, Job], progress: _Report) -> None:
        kernels = {key: self._kernels(key, candidates) for key in jobs}
        # The other kernels that the regions can need are needed soon, and are compiled along with the many
        # candidates.
        wanted = chain(by_rank(kernels.values()), chain.from_iterable(map(self._reached, jobs.values())))
        building = _begun(partial(self._build_all, progress), list(dict.fromkeys(wanted)))
        unfused = {key: _unfused(job) for key, job in jobs.items()}
        outcomes = building.result()
        _warn_of_failures({each: outcomes[each] for each in by_rank(kernels.values())})
        progress.waiting()
        with self._memory.exclusively(_TUNING_LOCK_S):
            progress.timing(len(jobs))
            for key, job in jobs.items():
                # Another process may have done it while this one was building.
                if self._is_missing(key, thorough=True):
                    functions = _sound(_built({kernel: outcomes[kernel] for kernel in kernels[key]}))
                    self._time(key, job, functions, kernels[key], unfused.pop(key), thorough=True)
                progress.step()

    def _build_all(self, progress: _Report, kernels: Sequence[Kernel]) -> dict[Kernel, Outcome]:
        progress.compiling(len(kernels))
        return self._build(kernels, built=progress.step)

    def _measure(
        self,
        jobs: Mapping[Key, Job],
        tiles: Mapping[Key, Tiles],
        progress: _Report,
    ) -> list[Job]:
        """Times those of the jobs whose candidates are built, and returns the others."""
        kernels = {key: standing_of(each) for key, each in tiles.items()}
        ready = {key: job for key, job in jobs.items() if all(map(is_at_hand, kernels[key]))}
        late = [
            job for key, job in jobs.items() if key not in ready and self._is_missing(key, thorough=False)
        ]
        if not ready:
            return late
        progress.waiting()
        with self._memory.exclusively(_MEASURING_LOCK_S) as is_alone:
            progress.timing(len(ready))
            for key, job in ready.items():
                if self._is_missing(key, thorough=False):
                    if is_alone:
                        functions = _built(self._build(list(kernels[key]), built=lambda: None))
                        self._time(key, job, functions, kernels[key], _unfused(job), thorough=False)
                    else:
                        late.append(job)
                progress.step()
        return late

    def _reached(self, job: Job) -> list[Kernel]:
        return reachable_kernels(_problem(job), self._gpu.arch, self._gpu.sm_count)

    def _kernels(self, key: Key, configs: Configurations) -> Tiles:
        sizes = Sizes(key.m, key.n, key.k, key.groups)
        tried = configs(self._gpu.arch, key.spec, sizes, self._gpu.sm_count)
        return kernels_of(key.spec, tried, key.alignment)

    def _time(
        self,
        key: Key,
        job: Job,
        functions: Mapping[Kernel, KernelFunction],
        tiles: Tiles,
        unfused: Run | None,
        thorough: bool,
    ) -> None:
        """Times kernels, and remembers the result."""
        free = self._timer.free_bytes()
        try:
            sizes = job.m, job.n, job.k
            timed = self._timer(sizes, functions, unfused, job.groups) if functions else Timings({})
        except torch.OutOfMemoryError:
            Untuned.MEMORY.note(warns=thorough)
            if self._memory.get(key) is None:
                self._memory.put({key: NoRoom(free)})
            return
        if not timed.kernels:
            Untuned.FAILED.note()
            return
        best = min(timed.kernels, key=timed.kernels.__getitem__)
        result = Result(tiles[best], timed.kernels[best], timed.unfused, thorough)
        log.info("timed %s: %s in %.1f us", key.text, result.config.name, result.us)
        self._memory.put({key: result})
        count("tuned" if thorough else "measured")

    @contextmanager
    def _progress(self, what: str) -> Iterator[_Report]:
        with line(self._console) as bar:
            yield _Report(bar, what)


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


def _regions(jobs: Sequence[Job]) -> str:
    return f"{len(jobs)} region{'s' * (len(jobs) != 1)}"


def _warn_of_failures(outcomes: Mapping[Kernel, Outcome]) -> None:
    """Counts the kernels that could not be built, and names them in warnings."""
    for outcome in outcomes.values():
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


def _compiled(job: Job) -> Job:
    """A job whose unfused program is compiled now."""
    unfused = _unfused(job)
    return replace(job, unfused=None if unfused is None else lambda: unfused)


def tuner_for(index: int) -> Tuner:
    """The tuner of a GPU."""
    gpu = device_at(index)
    return Tuner(gpu, GpuTimer(gpu), remembered())
