"""Servers of compilers: when one serves, what ends it, and that nothing is left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cute_backend.errors import BuildError
from cute_backend.planning import Arch
from cute_backend.runtime.compiling import build as building
from cute_backend.runtime.compiling import workers
from cute_backend.runtime.compiling.build_queue import BuildQueue
from cute_backend.runtime.compiling.workers import (
    Ended,
    StoppedError,
    end_all,
    forked,
    server_for,
)
from support.runtime import small_server
from support.runtime.forks import in_child
from support.runtime.handmade import kernel_of, make_spec

ARCH = Arch.SM90A


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    """Servers without the DSL, whose workers run Python code. To start one takes 1.8 seconds, so tests share
    it, and leave at most that one, but those that ask for `own`."""
    end_all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "command_of", small_server.command_of)
        yield
    end_all()


@pytest.fixture
def own() -> Iterator[None]:
    """No server of another test, and none for another."""
    end_all()
    yield
    end_all()


def run(code: str, folder: Path, seconds: float = 60) -> Ended | None:
    """The end of a worker that runs this code in this folder."""
    return forked(ARCH, [str(folder)], code, seconds)


def process_of(server: workers._Server) -> int:
    return server._process.pid


def gone(process: int) -> None:
    """Waits for the end of a process that is no child of this one, and fails if there is none."""
    try:
        file = os.pidfd_open(process)
    except ProcessLookupError:
        return
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        assert selector.select(60), f"process {process} is left"
    os.close(file)


# Serving


def test_each_worker_is_a_process_of_its_own_that_a_server_forks(tmp_path: Path) -> None:
    code = "import json, os; print(json.dumps([os.getpid(), os.getppid(), os.getcwd(), os.getpgrp()]))"
    found = [json.loads(ended.message) for _ in range(2) if (ended := run(code, tmp_path))]
    (server,) = workers._servers
    assert found[0][0] != found[1][0]
    for process, parent, folder, group in found:
        assert parent == process_of(server) and folder == str(tmp_path) and group == process


def test_a_worker_leaves_no_state_to_the_next(tmp_path: Path) -> None:
    run("import builtins, os; builtins.left = os.environ['LEFT'] = 'here'", tmp_path)
    ended = run("import builtins, os; print(hasattr(builtins, 'left'), 'LEFT' in os.environ)", tmp_path)
    assert ended == Ended(0, "False False")


def test_a_worker_has_the_environment_of_the_moment(
    own: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os; print(os.environ.get('LATER'), os.environ['CUTE_DSL_ARCH'])"
    assert run(code, tmp_path) == Ended(0, f"None {ARCH.value}")
    monkeypatch.setenv("LATER", "x" * 100_000)
    assert run(code, tmp_path) == Ended(0, f"{'x' * 100_000} {ARCH.value}")
    assert len(workers._servers) == 1
    monkeypatch.setenv("CUTE_DSL_LOG_LEVEL", "10")  # the DSL reads it when it is imported
    run(code, tmp_path)
    assert len(workers._servers) == 2


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("status = 3", 3, "no message"),
        ("print('one'); print('two'); status = 3", 3, "two"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("raise MemoryError('all of it')", 1, "MemoryError: all of it"),
        ("import os; os.abort()", -signal.SIGABRT, "no message"),
        ("import os; print('x' * 1_000_000); os.kill(os.getpid(), 9)", -signal.SIGKILL, "no message"),
    ],
)
def test_the_end_of_a_worker(tmp_path: Path, code: str, status: int, message: str) -> None:
    ended = run(code, tmp_path)
    assert ended is not None and ended.status == status
    assert ended.message == message or status == -signal.SIGKILL
    assert ended.crashed == (status != 3)


def test_workers_run_at_once(tmp_path: Path) -> None:
    """Each of two waits for the other one."""
    pipes = [tmp_path / name for name in ("one", "two")]
    for pipe in pipes:
        os.mkfifo(pipe)
    codes = [
        f"open({str(pipes[0])!r}, 'w').write('x'); print(open({str(pipes[1])!r}).read())",
        f"print(open({str(pipes[0])!r}).read()); open({str(pipes[1])!r}, 'w').write('x')",
    ]
    ended: list[Ended | None] = []
    threads = [threading.Thread(target=lambda code=code: ended.append(run(code, tmp_path))) for code in codes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [Ended(0, "x")] * 2


def test_a_server_serves_all_kernels_of_an_architecture(tmp_path: Path) -> None:
    server = server_for(ARCH)
    for _ in range(2):
        assert run("pass", tmp_path) == Ended(0, "no message")
    assert workers._servers == [server]


# Ends


def test_a_worker_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = (
        "import os, subprocess, signal\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pipe)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "signal.pause()"
    )
    found: list[int] = []
    reader = threading.Thread(target=lambda: found.extend(map(int, pipe.read_text().split())))
    reader.start()
    waits = threading.Event()

    def give_up() -> None:
        reader.join()
        waits.set()
        end_all()

    ending = threading.Thread(target=give_up)
    ending.start()
    with pytest.raises(StoppedError):
        run(code, tmp_path)
    ending.join()
    assert waits.is_set() and len(found) == 2
    for process in found:
        gone(process)


def test_a_worker_that_crashes_leaves_nothing_that_it_started(tmp_path: Path) -> None:
    """Its reply does not wait for a process that keeps its output open."""
    code = (
        "import os, subprocess\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print(child.pid, flush=True)\n"
        "os._exit(7)"
    )
    ended = run(code, tmp_path)
    assert ended is not None and ended.crashed and ended.status == 7
    gone(int(ended.message))


def test_the_time_of_a_worker_has_a_limit(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run("import signal; signal.pause()", tmp_path, seconds=0.001)
    assert run("print('next')", tmp_path) == Ended(0, "next")


def test_a_server_that_is_killed_takes_its_workers_along(own: None, tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getppid(), signal.SIGKILL); signal.pause()"
    assert run(code, tmp_path) is None
    assert run("print('next')", tmp_path) is None  # it served nothing, so another one is not tried


def test_a_server_that_was_killed_after_it_served_is_started_again(tmp_path: Path) -> None:
    run("pass", tmp_path)
    (first,) = workers._servers
    os.kill(process_of(first), signal.SIGKILL)
    gone(process_of(first))
    first._process.wait()
    assert run("print('next')", tmp_path) == Ended(0, "next")
    (second,) = workers._servers
    assert second is not first


def test_a_program_that_closes_all_files_ends_its_server(own: None, tmp_path: Path) -> None:
    run("pass", tmp_path)
    (server,) = workers._servers
    os.close(server._control.fileno())
    assert run("print('forked')", tmp_path) is None
    end_all()
    assert server.has_ended


def test_a_server_without_work_ends_and_is_started_again(
    own: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(small_server.IDLE, "0")
    server_for(ARCH)
    (first,) = workers._servers
    assert first._process.wait(60) == 0 and not first.failed
    monkeypatch.delenv(small_server.IDLE)
    assert run("print('next')", tmp_path) == Ended(0, "next")
    (second,) = workers._servers
    end_all()
    assert [each._control.fileno() for each in (first, second)] == [-1, -1], "their sockets are closed"


def test_a_server_with_threads_does_not_fork(
    own: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(small_server.THREADS, "1")
    assert run("print('forked')", tmp_path) is None
    (server,) = workers._servers
    assert server.failed
    assert run("print('forked')", tmp_path) is None
    assert workers._servers == [server]


def test_no_process_that_compiles_sees_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that finds one starts CUDA, which has a thread."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert run("import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.getppid())", tmp_path) == Ended(
        0, str(workers._servers[-1]._process.pid)
    )


def test_where_no_process_can_be_started_nothing_is_forked(
    own: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **how: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(workers.subprocess, "Popen", refuse)
    assert run("pass", tmp_path) is None
    assert workers._servers == []


def test_without_threads_a_server_serves_and_its_end_is_noticed(
    own: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert run("print('forked')", tmp_path) == Ended(0, "forked")
    (server,) = workers._servers
    os.kill(process_of(server), signal.SIGKILL)
    server._process.wait()
    assert server.has_ended
    assert run("print('next')", tmp_path) == Ended(0, "next")


def test_signals_that_a_program_blocks_reach_its_server_and_workers(own: None, tmp_path: Path) -> None:
    """Without SIGCHLD, a server would never notice that a worker has ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, signal.SIGTERM])
    try:
        ended = run("import signal; print(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))", tmp_path, 20)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert ended == Ended(0, "0")


def test_a_server_that_imports_is_not_waited_for(
    own: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(small_server.IMPORTS, "1")
    server_for(ARCH)
    (server,) = workers._servers
    end_all()
    assert server._process.returncode == -signal.SIGTERM


# Forks while a worker is begun, whose child lives on


@pytest.fixture
def fork(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Forks a child that lives until the test ends, as a worker of a DataLoader does."""
    children: list[int] = []

    def fork() -> None:
        if (child := os.fork()) == 0:
            signal.pause()
        children.append(child)

    yield fork
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_no_child_has_the_ends_of_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While they are passed on, a lock is held for which a fork waits."""
    free: list[bool] = []

    def is_free() -> None:
        if taken := workers._starting.acquire(blocking=False):
            workers._starting.release()
        free.append(taken)

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **how: Any) -> Any:
            other = threading.Thread(target=is_free)
            other.start()
            other.join()
            return function(*arguments, **how)

        return run

    monkeypatch.setattr(workers.socket, "send_fds", watched(socket.send_fds))
    assert run("print('forked')", tmp_path) == Ended(0, "forked")
    monkeypatch.setattr(workers.subprocess, "Popen", watched(subprocess.Popen))
    workers.started(ARCH, [str(tmp_path)], "", 60)
    assert free == [False, False]


def test_a_fork_waits_until_the_ends_of_a_worker_are_passed_on() -> None:
    inside = is_over = False

    def hold() -> None:
        nonlocal inside
        while not is_over:
            with workers._starting:
                inside = True
                time.sleep(0.002)
                inside = False

    thread = threading.Thread(target=hold)
    thread.start()
    seen = {in_child(lambda: inside) for _ in range(20)}
    is_over = True
    thread.join()
    assert seen == {"False"}


def test_a_worker_that_hangs_is_killed_though_a_child_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork: Callable[[], None]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[int] = []

    def give_up(source: socket.socket, until: float) -> bytes:
        found.append(int(pipe.read_text()))
        fork()
        raise TimeoutError

    monkeypatch.setattr(workers, "_all_of", give_up)
    code = f"import os, signal; open({str(pipe)!r}, 'w').write(str(os.getpid())); signal.pause()"
    with pytest.raises(subprocess.TimeoutExpired):
        run(code, tmp_path)
    gone(found[0])


def test_a_worker_has_all_of_its_input_though_a_child_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork: Callable[[], None]
) -> None:
    tell = workers._tell

    def telling(talk: socket.socket, text: str, seconds: float) -> None:
        fork()
        tell(talk, text, seconds)

    def command_of(module: str, *arguments: str) -> list[str]:
        return [sys.executable, "-c", "import sys; print(sys.stdin.read()); sys.exit(3)"]

    monkeypatch.setattr(workers, "_tell", telling)
    assert run("print('forked')", tmp_path, 20) == Ended(0, "forked")
    monkeypatch.setattr(workers, "command_of", command_of)
    assert workers.started(ARCH, [str(tmp_path)], "started", 20) == Ended(3, "started")


# Processes that need kernels, and end

PROGRAM = """
import os, signal, sys, threading
from pathlib import Path
from support.runtime import small_server
from cute_backend.errors import BuildError
from cute_backend.planning import Arch
from cute_backend.runtime.compiling import build as building
from cute_backend.runtime.compiling import workers
from cute_backend.runtime.compiling.build_queue import BuildQueue
workers.command_of = small_server.command_of
folder, how = sys.argv[1:]
def work():
    workers.forked(Arch.SM90A, [folder], "import os, signal; print(os.getpid()); "
        f"open('{folder}/pipe', 'w').write(f'{{os.getppid()}} {{os.getpid()}}'); signal.pause()", 600)
threading.Thread(target=work, daemon=True).start()
print(Path(folder, "pipe").read_text(), flush=True)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "interrupted":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which background jobs of a shell ignore
    os.kill(os.getpid(), signal.SIGINT)
elif how == "_exit":
    os._exit(0)
elif how == "leaves a child" and os.fork() == 0:
    os.close(1), os.close(2)
    signal.pause()
"""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("how", ["ends", "killed", "interrupted", "_exit", "leaves a child"])
def test_nothing_is_left_of_a_process_that_ends_while_kernels_compile(tmp_path: Path, how: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), how]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        assert program.stdout is not None
        server, worker = map(int, program.stdout.readline().split())
        program.wait()
        gone(worker)
        gone(server)
        if how == "leaves a child":
            os.killpg(program.pid, signal.SIGKILL)


def test_a_kernel_that_a_program_needs_at_its_very_end_fails_and_is_not_begun_again(
    own: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that a program has registered before it imported this package runs after ours."""
    monkeypatch.setattr(workers, "_is_over", True)
    queue = BuildQueue(lambda kernel: building._attempted(building._build_in_process, kernel), lambda: 1)
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(tmp_path))
    kernel = kernel_of(make_spec())
    (error,) = queue.collect([kernel], lambda: None).values()
    assert str(error) == "this process is ending, and starts no compilers any more"
    with pytest.raises(BuildError, match="is ending"):
        workers.started(ARCH, [str(tmp_path)], "pass", 60)
    workers.start_early(ARCH)
    assert workers._servers == []


def in_daemon(arguments: tuple[str, str]) -> Ended | None:
    code, folder = arguments
    assert multiprocessing.current_process().daemon
    return run(code, Path(folder))


def test_a_daemonic_process_has_workers(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(in_daemon, [("print('done')", str(tmp_path))]) == [Ended(0, "done")]


def test_a_forked_child_has_a_server_of_its_own(tmp_path: Path) -> None:
    """The parent's stays as it is."""
    run("pass", tmp_path)
    (server,) = workers._servers
    code = "import os; print(os.getppid())"

    def child() -> object:
        own = run(code, tmp_path)
        end_all()
        return None if own is None else int(own.message)

    assert int(in_child(child)) != process_of(server)
    assert run(code, tmp_path) == Ended(0, str(process_of(server)))
    assert workers._servers == [server]
