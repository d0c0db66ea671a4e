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
from cute_backend.runtime.compiling.rungs import note, spill_bytes
from cute_backend.runtime.host.notices import count, warn_once
from cute_backend.runtime.host.progress import line
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.link import KernelFunction
from cute_backend.runtime.kernels.reach import Problem, reachable_alignments, reachable_kernels
from cute_backend.runtime.tuning.jobs import Job, Untuned, kept, unfused_of
from cute_backend.runtime.tuning.timing import GpuTimer, Run, Timer, Timings
from cute_backend.runtime.tuning.trials import (
    Configurations,
    Tiles,
    begin_few,
    by_rank,
    kernels_of,
    standing_of,
)
from cute_backend.runtime.tuning.tuning_results import Key, NoRoom, Records, Result, remembered, wins

log = logging.getLogger(__name__)


_MORE_ROOM = 1.1
"""How many times as many bytes have to be free before a problem that did not fit is tried again: the rest of
memory differs a little from run to run."""


_TUNING_LOCK_S, _MEASURING_LOCK_S = 120.0, 5.0
"""The most seconds for which tuning and measuring wait for another process that times, and that may have
stopped. Tuning then times beside it, and measuring leaves its regions."""


Functions = Mapping[Kernel, KernelFunction]


class Build(Protocol):
    """The interface of `cute_backend.runtime.compiling.build.obtain`."""

    def __call__(self, kernels: Sequence[Kernel], *, built: Callable[[], None]) -> dict[Kernel, Outcome]: ...


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
        found now, and the jobs that are late, for `measure_late`: their candidates are not all built. It
        waits for no kernel."""
        missing, late = self._missing(jobs, thorough=False), list[Job]()
        if missing:
            tiles = {key: self._kernels(key, doubted) for key in missing}
            missing = {key: kept(job) for key, job in missing.items()}
            with self._progress(f"measuring {_regions(jobs)}") as progress:
                late = self._measure(missing, tiles, progress)
        return list(map(self.recall, jobs)), late

    def begin(self, jobs: Sequence[Job]) -> None:
        """Begins to build the candidates of jobs that are late, as far as cores are idle."""
        begin_few(self._kernels(key, doubted) for key in dict.fromkeys(map(self._key, jobs)))

    def measure_late(self, jobs: Sequence[Job]) -> tuple[list[Result | None], list[Job]]:
        """Does the same as `measure` for jobs that were late, and waits for the kernels that `begin` began.
        It begins no others."""
        missing, late = self._missing(jobs, thorough=False), list[Job]()
        if missing:
            tiles = {key: self._kernels(key, doubted) for key in missing}
            with self._progress(f"measuring {_regions(jobs)}") as progress:
                while begun := [*filter(is_begun, by_rank(map(_awaited, tiles.values())))]:
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
        unfused = {key: unfused_of(job) for key, job in jobs.items()}
        outcomes = building.result()
        _warn_of_failures({each: outcomes[each] for each in by_rank(kernels.values())})
        progress.waiting()
        with self._memory.exclusively(_TUNING_LOCK_S):
            progress.timing(len(jobs))
            for key, job in jobs.items():
                # Another process may have done it while this one was building.
                if self._is_missing(key, thorough=True):
                    functions = _sound(_built({kernel: outcomes[kernel] for kernel in kernels[key]}))
                    time = partial(self._time, job, functions, unfused.pop(key))
                    self._find(key, kernels[key], time, thorough=True)
                progress.step()

    def _build_all(self, progress: _Report, kernels: Sequence[Kernel]) -> dict[Kernel, Outcome]:
        progress.compiling(len(kernels))
        outcomes = self._build(kernels, built=progress.step)
        for kernel, outcome in outcomes.items():
            note(kernel, outcome)
        return outcomes

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
                        time = partial(self._compare, job, functions)
                        self._find(key, kernels[key], time, thorough=False)
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
        self, job: Job, functions: Functions, unfused: Run | None = None, products: bool = False
    ) -> Timings:
        if not functions:
            return Timings({})
        return self._timer((job.m, job.n, job.k), functions, unfused, job.groups, products)

    def _compare(self, job: Job, functions: Functions) -> Timings:
        """Timings of kernels or, if Inductor's own code may be faster, of that and the best of them. Torch's
        product is part of that code, and can be timed without compiling it."""
        timed = self._time(job, functions, products=job.unfused is not None)
        if job.unfused is None or not timed.kernels:
            return timed
        best = _best(timed)
        if timed.products is not None and not wins(timed.products, timed.kernels[best]):
            return timed
        try:
            return self._time(job, {best: functions[best]}, unfused_of(job))
        except torch.OutOfMemoryError:
            count("unfused_not_timed")  # it has inputs of its own
            return timed

    def _find(self, key: Key, tiles: Tiles, time: Callable[[], Timings], thorough: bool) -> None:
        """Times the kernels of a problem, and remembers the result."""
        free = self._timer.free_bytes()
        try:
            timed = time()
        except torch.OutOfMemoryError:
            Untuned.MEMORY.note(warns=thorough)
            if self._memory.get(key) is None:
                self._memory.put({key: NoRoom(free)})
            return
        if not timed.kernels:
            Untuned.FAILED.note()
            return
        best = _best(timed)
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


def _awaited(tiles: Tiles) -> list[Kernel]:
    """The kernels of a problem that may be waited for: those that stand, and those that failed, to name
    them."""
    return [*standing_of(tiles), *tiles]


def _best(timed: Timings) -> Kernel:
    return min(timed.kernels, key=timed.kernels.__getitem__)


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


def _sound(functions: Functions) -> dict[Kernel, KernelFunction]:
    """The kernels that do not spill. A kernel that spills is counted."""
    sound = {kernel: function for kernel, function in functions.items() if not spill_bytes(kernel)}
    if spilled := len(functions) - len(sound):
        count("candidates_spilled", spilled)
    return sound


def _problem(job: Job) -> Problem:
    return Problem(job.spec, None if job.dynamic else job.m, job.n, job.k, groups=job.groups)


def tuner_for(index: int) -> Tuner:
    """The tuner of a GPU."""
    gpu = device_at(index)
    return Tuner(gpu, GpuTimer(gpu), remembered())
