"""A queue of kernels that are built while the program goes on.

Threads take kernels from it and wait for their processes: as many at once as `limit` says. They are daemons,
so that a process that ends waits for none of them. A kernel that somebody waits for is taken before those
that nobody waits for yet.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Union

from cute_backend.errors import BuildError, UnavailableError
from cute_backend.runtime.compiling.workers import StoppedError, end_all
from cute_backend.runtime.host.forks import free_in_children
from cute_backend.runtime.host.progress import LiveLine
from cute_backend.runtime.kernels.kernel import Kernel

log = logging.getLogger(__name__)

Failure = Union[BuildError, UnavailableError]

Then = Callable[[Union[Exception, None]], None]
"""A function that is called after a build, with its error or None."""


_SLOWEST = 5
"""The number of kernels that are named as the slowest."""

_DELAY = 1.0
"""The seconds for which a batch is compiled before a line on the terminal says so."""


class _Build:
    """A kernel in the queue, and what became of it."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.error: Exception | None = None
        self.is_done = self.was_stopped = False
        self.then: list[Then] = []


class _Batch:
    """The kernels that were added since the queue was idle: their number, and the seconds that each took. One
    that is added again after its build counts twice."""

    def __init__(self) -> None:
        self.total = 0
        self.built = self.given_up = 0
        self.seconds: dict[str, float] = {}
        self.start = time.perf_counter()

    @property
    def is_done(self) -> bool:
        return self.total == self.built + self.given_up

    def report(self) -> None:
        """Logs how long all took, and which took the longest."""
        took = time.perf_counter() - self.start
        log.info("compiled %s in %.1f s", _counted(self.built), took)
        slowest = sorted(self.seconds.items(), key=lambda item: -item[1])[:_SLOWEST]
        log.debug("the slowest: %s", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in slowest))


def _counted(number: int) -> str:
    return f"{number} kernel{'s' * (number != 1)}"


class BuildQueue:
    """A queue whose kernels are built by `builder`, which raises BuildError or UnavailableError if it can't,
    in `limit` threads."""

    def __init__(self, builder: Callable[[Kernel], None], limit: Callable[[], int]) -> None:
        self._builder, self._limit = builder, limit
        self._changed = free_in_children(threading.Condition())
        self._builds: dict[Kernel, _Build] = {}
        self._waiting: list[_Build] = []
        self._threads = 0
        self._batch = _Batch()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Empties the queue of a forked child, which has none of the threads."""
        self._builds.clear()
        self._waiting.clear()
        self._threads = 0
        self._batch = _Batch()

    def __contains__(self, kernel: Kernel) -> bool:
        """Whether a kernel is in the queue, or was built and not collected since."""
        return kernel in self._builds

    def submit(self, kernel: Kernel, then: Then) -> None:
        """Adds a kernel at the end, unless it is there. After its build `then` is called, in any thread."""
        with self._changed:
            build = self._add(kernel, at=len(self._waiting))
            if not build.is_done:
                build.then.append(then)
                return
        then(build.error)

    def collect(self, kernels: Sequence[Kernel], step: Callable[[], None]) -> dict[Kernel, Failure | None]:
        """Waits for kernels, which are added if they are missing, and takes them out of the queue. Returns
        the error of each that can't be built, and None of each that was. `step` is called for each kernel
        that is done. If the wait is interrupted, all builds are given up.
        """
        errors: dict[Kernel, Exception | None] = {}
        with self._changed:
            left = [self._add(kernel, at) for at, kernel in enumerate(kernels)]
        try:
            while left:
                with self._changed:
                    while not (done := [each for each in left if each.is_done]):
                        if self._threads:
                            self._changed.wait()
                        else:
                            self._refuse(left)
                    left = [
                        self._add(each.kernel, at=0) if each.was_stopped else each
                        for each in left
                        if each.was_stopped or each not in done
                    ]
                    for each in done:
                        if self._builds.get(each.kernel) is each:
                            del self._builds[each.kernel]
                for each in done:
                    if not each.was_stopped:
                        errors[each.kernel] = each.error
                        step()
        except BaseException:
            self.stop()
            raise
        for error in errors.values():
            if error is not None and not isinstance(error, (BuildError, UnavailableError)):
                raise error
        return errors  # type: ignore[return-value]

    def settle(self) -> None:
        """Waits until nothing is built any more, also for kernels that nobody else waits for."""
        with self._changed:
            while self._threads and not self._batch.is_done:
                self._changed.wait()

    def line(self) -> LiveLine:
        """A line on the terminal that counts the kernels of the queue, for as long as somebody waits."""
        return LiveLine(
            lambda: f"compiling {_counted(self._batch.total)}, {self._batch.built} done",
            max(0.0, self._batch.start + _DELAY - time.perf_counter()),
        )

    def stop(self) -> None:
        """Gives up all builds, and ends the processes that compile. A kernel that another thread waits for is
        begun again."""
        with self._changed:
            for build in self._waiting:
                self._finish(build, was_stopped=True)
            self._waiting.clear()
        end_all()

    def _add(self, kernel: Kernel, at: int) -> _Build:
        """The build of a kernel, at this place of the queue or ahead of it unless it has begun."""
        build = self._builds.get(kernel)
        if build is None:
            build = self._builds[kernel] = _Build(kernel)
            if self._batch.is_done:
                self._batch = _Batch()
            self._batch.total += 1
            self._waiting.insert(at, build)
        elif build in self._waiting[at + 1 :]:
            self._waiting.remove(build)
            self._waiting.insert(at, build)
        if build in self._waiting and self._threads < self._limit():
            self._threads += 1
            try:
                threading.Thread(target=self._work, name="cute_backend build", daemon=True).start()
            except RuntimeError as error:  # the system allows no more threads, or the interpreter ends
                log.info("no thread can be started: %s", error)
                self._threads -= 1
        return build

    def _refuse(self, builds: Sequence[_Build]) -> None:
        """Gives kernels that wait an error, since there is no thread, and none could be started."""
        for build in builds:
            if build in self._waiting:
                self._waiting.remove(build)
                build.error = BuildError(
                    f"kernels are built by threads, and none can be started for {build.kernel.name}"
                )
                self._finish(build, was_stopped=False)

    def _work(self) -> None:
        """Builds kernels until none waits."""
        while True:
            with self._changed:
                if not self._waiting or self._threads > self._limit():
                    self._threads -= 1
                    return
                build = self._waiting.pop(0)
            self._build(build)
            for then in build.then if not build.was_stopped else ():
                try:
                    then(build.error)
                except Exception:  # the thread has other kernels to build, for which somebody waits
                    log.exception("what was to follow %s failed", build.kernel.name)

    def _build(self, build: _Build) -> None:
        start, was_stopped = time.perf_counter(), False
        try:
            self._builder(build.kernel)
        except StoppedError:
            was_stopped = True
        except Exception as error:
            build.error = error
        outcome = "was given up" if was_stopped else build.error or "was built"
        took = time.perf_counter() - start
        log.info("%s %s after %.1f s", build.kernel.name, outcome, took)
        with self._changed:
            self._finish(build, was_stopped, took)

    def _finish(self, build: _Build, was_stopped: bool, took: float = 0.0) -> None:
        build.is_done, build.was_stopped = True, was_stopped
        if was_stopped:
            del self._builds[build.kernel]
            self._batch.given_up += 1
        else:
            self._batch.built += 1
            self._batch.seconds[build.kernel.name] = took
        if self._batch.is_done:
            self._batch.report()
        self._changed.notify_all()
