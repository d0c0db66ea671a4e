"""The queue of kernels that are built while the program goes on."""

from __future__ import annotations

import io
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch._dynamo.utils import counters

from cute_backend import config
from cute_backend.errors import BuildError
from cute_backend.planning import Alignment, Arch
from cute_backend.runtime.compiling import build as building
from cute_backend.runtime.compiling import build_queue, rungs
from cute_backend.runtime.compiling.build_queue import BuildQueue
from cute_backend.runtime.compiling.workers import StoppedError
from cute_backend.runtime.host import progress
from cute_backend.runtime.kernels.kernel import Kernel
from support.runtime.forks import in_child
from support.runtime.handmade import kernel_of, make_spec

KERNELS = [kernel_of(make_spec(), alignment=each, arch=arch) for arch in Arch for each in Alignment][:4]


class Builder:
    """Builds a kernel when the test lets it, and notes the order in which kernels were begun."""

    def __init__(self, outcomes: dict[Kernel, Exception] | None = None) -> None:
        self.begun: list[Kernel] = []
        self.may = threading.Semaphore(0)
        self.is_busy = threading.Semaphore(0)
        self.outcomes = outcomes or {}

    def __call__(self, kernel: Kernel) -> None:
        self.begun.append(kernel)
        self.is_busy.release()
        self.may.acquire()
        if kernel in self.outcomes:
            raise self.outcomes[kernel]


def nothing(*arguments: Any) -> None:
    pass


def test_a_kernel_that_is_waited_for_is_taken_first() -> None:
    builder = Builder()
    queue = BuildQueue(builder, lambda: 1)
    for kernel in KERNELS:
        queue.submit(kernel, nothing)
    builder.may.release(4)
    builder.is_busy.acquire()  # the first one has begun
    assert queue.collect([KERNELS[3]], nothing) == {KERNELS[3]: None}
    assert queue.collect(KERNELS[:3], nothing) == dict.fromkeys(KERNELS[:3])
    assert builder.begun[0] == KERNELS[0] and sorted(map(KERNELS.index, builder.begun)) == [0, 1, 2, 3]


def test_the_order_of_those_that_wait() -> None:
    builder = Builder()
    queue = BuildQueue(builder, lambda: 1)
    for kernel in KERNELS[:3]:
        queue.submit(kernel, nothing)
    builder.is_busy.acquire()
    waiter = threading.Thread(target=lambda: queue.collect([KERNELS[2], KERNELS[3]], nothing))
    waiter.start()
    while KERNELS[3] not in queue:
        pass
    builder.may.release(4)
    waiter.join()
    queue.collect(KERNELS[:2], nothing)
    assert builder.begun == [KERNELS[0], KERNELS[2], KERNELS[3], KERNELS[1]]


def test_no_more_than_the_limit_are_built_at_once() -> None:
    builder = Builder()
    queue = BuildQueue(builder, lambda: 2)
    for kernel in KERNELS:
        queue.submit(kernel, nothing)
    for _ in range(2):
        builder.is_busy.acquire()
    assert not builder.is_busy.acquire(blocking=False) and queue._threads == 2
    builder.may.release(4)
    steps: list[None] = []
    queue.collect(KERNELS, lambda: steps.append(None))
    assert len(steps) == 4 and not any(kernel in queue for kernel in KERNELS)


def test_a_queue_settles_when_nothing_is_built_any_more() -> None:
    builder = Builder()
    queue = BuildQueue(builder, lambda: 1)
    queue.settle()
    for kernel in KERNELS:
        queue.submit(kernel, nothing)
    builder.may.release(4)
    queue.settle()
    assert len(builder.begun) == 4 and queue._batch.is_done


def test_a_kernel_that_is_built_again_while_another_is_built_counts_twice() -> None:
    builder = Builder()
    queue = BuildQueue(builder, lambda: 1)
    for kernel in KERNELS[:2]:
        queue.submit(kernel, nothing)
    builder.may.release()
    queue.collect(KERNELS[:1], nothing)
    queue.submit(KERNELS[0], nothing)
    assert queue._batch.total == 3
    builder.may.release(2)
    queue.collect(KERNELS[:2], nothing)
    assert queue._batch.is_done


def test_errors_reach_who_waits_and_what_comes_next() -> None:
    refused, wrong = BuildError("refused"), KeyError("wrong")
    builder = Builder({KERNELS[0]: refused, KERNELS[1]: wrong})
    builder.may.release(9)
    queue, seen = BuildQueue(builder, lambda: 1), list[Any]()
    queue.submit(KERNELS[0], seen.append)
    assert queue.collect([KERNELS[0], KERNELS[2]], nothing) == {KERNELS[0]: refused, KERNELS[2]: None}
    with pytest.raises(KeyError, match="wrong"):
        queue.collect([KERNELS[1]], nothing)
    queue.submit(KERNELS[3], nothing)
    queue.collect([KERNELS[2]], nothing)
    queue.submit(KERNELS[3], seen.append)
    queue.collect([KERNELS[3]], nothing)
    assert seen[0] is refused and seen[1:] in ([None], [])


def test_an_error_after_a_build_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    def wrong(error: Exception | None) -> None:
        raise KeyError("wrong")

    queue = BuildQueue(nothing, lambda: 1)
    queue.submit(KERNELS[0], wrong)
    for kernel in KERNELS[:2]:
        assert queue.collect([kernel], nothing) == {kernel: None}
    assert "KeyError: 'wrong'" in caplog.text


def test_an_interrupt_gives_up_what_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compilers are ended; another thread that waits for a kernel has it built again."""
    ended = threading.Event()

    def build(kernel: Kernel) -> None:
        begun.append(kernel)
        if len(begun) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            ended.wait()
            raise StoppedError("the compiler was ended")

    begun: list[Kernel] = []
    monkeypatch.setattr(build_queue, "end_all", ended.set)
    queue = BuildQueue(build, lambda: 1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            queue.collect(KERNELS[:2], nothing)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.is_set()
    assert queue.collect(KERNELS[:2], nothing) == dict.fromkeys(KERNELS[:2])
    assert begun.count(KERNELS[1]) == 1 and begun.count(KERNELS[0]) == 2


def test_a_thread_that_waits_for_a_kernel_that_was_given_up_begins_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builder = Builder()
    monkeypatch.setattr(build_queue, "end_all", nothing)
    queue, failures = BuildQueue(builder, lambda: 1), list[Any]()
    queue.submit(KERNELS[0], nothing)
    builder.is_busy.acquire()
    waiter = threading.Thread(target=lambda: failures.append(queue.collect([KERNELS[1]], nothing)))
    waiter.start()
    while KERNELS[1] not in queue:
        pass
    builder.outcomes[KERNELS[0]] = StoppedError("the compiler was ended")
    queue.stop()
    builder.may.release(9)
    waiter.join()
    assert failures == [{KERNELS[1]: None}] and KERNELS[0] not in queue


def test_without_threads_a_kernel_is_refused_and_later_ones_are_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the system limits processes, or at the end of an interpreter. Nothing hangs."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    queue = BuildQueue(nothing, lambda: 2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        queue.submit(KERNELS[0], nothing)
        queue.submit(KERNELS[1], nothing)
        queue.settle()
        (error,) = queue.collect([KERNELS[0]], nothing).values()
    assert str(error) == f"kernels are built by threads, and none can be started for {KERNELS[0].name}"
    assert queue.collect(KERNELS[:3], nothing) == dict.fromkeys(KERNELS[:3])


def test_a_kernel_waits_for_the_threads_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        builder.may.release(9)
        raise RuntimeError("can't start new thread")

    builder = Builder()
    queue = BuildQueue(builder, lambda: 2)
    queue.submit(KERNELS[0], nothing)
    builder.is_busy.acquire()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert queue.collect([KERNELS[1]], nothing) == {KERNELS[1]: None}


def test_a_forked_child_has_an_empty_queue() -> None:
    builder = Builder()
    queue = BuildQueue(builder, lambda: 1)
    queue.submit(KERNELS[0], nothing)
    builder.is_busy.acquire()

    def child() -> object:
        builder.may.release(2)
        return (KERNELS[0] in queue, [*queue.collect([KERNELS[0]], nothing).values()])

    assert in_child(child) == "(False, [None])"
    builder.may.release()
    assert queue.collect([KERNELS[0]], nothing) == {KERNELS[0]: None}


# What is begun is counted when it is used


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The kernels that were built, in order. They are not on disk before."""
    made: list[Kernel] = []
    monkeypatch.setattr(building, "_loaded", {})
    monkeypatch.setattr(building, "_queue", BuildQueue(made.append, lambda: 1))
    monkeypatch.setattr(building, "_has", made.__contains__)
    monkeypatch.setattr(building, "_load", lambda kernel: str if kernel in made else None)
    monkeypatch.setattr(building, "_make_room", nothing)
    monkeypatch.setattr(rungs, "_failed", set())
    counters.clear()
    return made


def wait_for(what: Callable[[], bool]) -> None:
    while not what():
        pass


def test_what_was_begun_is_counted_when_it_is_waited_for(
    built: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, other = KERNELS[:3]
    ladder = (first.plan, second.plan)
    monkeypatch.setattr(rungs, "rungs", lambda plan: ladder if plan == first.plan else (plan,))
    monkeypatch.setattr(
        rungs, "spill_bytes", lambda kernel: 8 * (kernel == first) if kernel in built else None
    )
    assert rungs.begin_standing([first, other]) == [first, other]
    wait_for(lambda: len(built) == 3)
    assert set(built) == {first, second, other} and not counters["cute_backend"]
    found = rungs.obtain_standing([first])
    assert found[first] == rungs.Obtained(second, str)
    assert counters["cute_backend"] == {"kernels_built": 2, "lower_rungs": 1}
    assert rungs.obtain_standing([other])[other].kernel == other
    assert counters["cute_backend"]["kernels_built"] == 3 == len(built)
    assert rungs.begin_standing([first, other]) == []


def test_a_kernel_that_is_gone_from_the_cache_is_not_begun_over_and_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Kernel] = []

    def begin(kernel: Kernel, then: Callable[[Exception | None], None]) -> None:
        begun.append(kernel)
        then(None)

    monkeypatch.setattr(rungs, "begin", begin)
    monkeypatch.setattr(rungs, "is_at_hand", lambda kernel: False)
    assert rungs.begin_standing(KERNELS[:1]) == begun == KERNELS[:1]


# What a person sees of it


class Terminal(io.StringIO):
    """A terminal, and an event for each text that it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.has_text = threading.Event()

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        self.has_text.set()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(build_queue, "_DELAY", 0.0)
    shown = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=shown))
    return shown


def test_a_line_on_a_terminal_counts_the_kernels_of_the_queue(terminal: Terminal) -> None:
    """Also those that nobody waits for. In the end it is removed."""
    builder = Builder()
    queue = BuildQueue(builder, lambda: 1)
    for kernel in KERNELS:
        queue.submit(kernel, nothing)
    builder.is_busy.acquire()
    with queue.line():
        assert terminal.has_text.wait(60)
        assert terminal.getvalue() == "\rcompiling 4 kernels, 0 done\x1b[K"
        terminal.has_text.clear()
        builder.may.release()
        assert terminal.has_text.wait(60)
    assert terminal.getvalue().endswith("\rcompiling 4 kernels, 1 done\x1b[K\r\x1b[K")
    builder.may.release(4)
    queue.collect(KERNELS, nothing)
    queue.submit(KERNELS[0], nothing)  # the next one is counted from the beginning
    builder.may.release()
    terminal.has_text.clear()
    with queue.line():
        assert terminal.has_text.wait(60)
    assert "compiling 1 kernel, " in terminal.getvalue()


@pytest.mark.parametrize("why", ["quiet", "CI", "no terminal", "soon done"])
def test_there_is_no_line(why: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = BuildQueue(nothing, lambda: 1)
    if why == "CI":
        monkeypatch.setenv("CI", "true")
    if why == "no terminal":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    if why == "soon done":
        monkeypatch.setattr(build_queue, "_DELAY", 1e6)
    with config.patch(quiet=why == "quiet"):  # type: ignore[attr-defined]
        line = queue.line()
        with line:
            queue.collect(KERNELS, nothing)
            assert (line._thread is None) == (why != "soon done")
    assert terminal.getvalue() == ""


class Tee:
    """A stream of a program's own, which has no more than print needs."""

    def write(self, text: str) -> None:
        pytest.fail("a line was written")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


def detached() -> io.TextIOWrapper:
    stream = io.TextIOWrapper(io.BytesIO())
    stream.detach()
    return stream


@pytest.mark.parametrize(
    "stream", [None, Tee(), closed(), detached()], ids=["none", "own", "closed", "detached"]
)
def test_a_program_without_a_stream_for_errors_has_no_line(
    stream: object, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))
    queue = BuildQueue(nothing, lambda: 1)
    with queue.line():
        assert queue.collect(KERNELS, nothing) == dict.fromkeys(KERNELS)


@pytest.mark.parametrize("stream", [None, closed()], ids=["none", "closed"])
def test_a_stream_that_goes_while_the_line_is_shown(
    stream: object, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = BuildQueue(nothing, lambda: 1).line()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))
    line._write("compiling 1 kernel")


def test_a_log_has_a_plain_line_and_the_slowest_kernels(caplog: pytest.LogCaptureFixture) -> None:
    queue = BuildQueue(nothing, lambda: 1)
    with caplog.at_level("DEBUG", logger=build_queue.__name__):
        queue.collect(KERNELS[:2], nothing)
    whole, slowest = caplog.messages[-2:]
    assert whole.startswith("compiled ") and whole.endswith(" s")
    assert slowest.startswith("the slowest: ") and KERNELS[1].name in caplog.text
    levels = {record.levelname for record in caplog.records if record.getMessage().startswith("the slowest")}
    assert levels == {"DEBUG"}


def test_a_kernel_that_cannot_be_built_is_not_counted_as_built(
    built: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, sound = KERNELS[:2]

    def builder(kernel: Kernel) -> None:
        if kernel == refused:
            raise BuildError("no registers")
        built.append(kernel)

    monkeypatch.setattr(building, "_queue", BuildQueue(builder, lambda: 1))
    assert isinstance(building.obtain([refused])[refused], BuildError)
    assert "kernels_built" not in counters["cute_backend"]
    building.obtain([refused, sound])
    assert counters["cute_backend"]["kernels_built"] == 1
