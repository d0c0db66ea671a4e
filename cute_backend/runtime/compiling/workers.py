"""Runs workers, each in a process of its own: one that a server forks, or one that is started for it.

A forked worker needs no imports, which take longer than most kernels. A server is started for the first
kernel of an architecture, and serves the later ones. It ends with this process, and the workers with it, in
whatever way this process ends: a socket that closes then is all that keeps them. A forked child of this
process starts a server of its own.

Where no server can be started, or where forking would not be safe, each worker has a process that is started
for it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from cute_backend.errors import BuildError
from cute_backend.planning import Arch
from cute_backend.runtime.host.forks import free_in_children
from cute_backend.runtime.host.interpreter import command_of, environment_of

log = logging.getLogger(__name__)

SERVER, WORKER = "cute_backend.runtime.compiling.server", "cute_backend.runtime.compiling.worker"
"""The modules that the processes run."""

UNBUILT, UNWRITABLE = 3, 4
"""Exit statuses of a worker. UNBUILT: the kernel can't be built. UNWRITABLE: the cache folder can't be
written, and the output is the number and the text of the system's error."""

HAS_THREADS = 5
"""The exit status of a server that can't fork safely, since an import has started a thread."""

UNFORKED = "unforked"
"""The first word of a server's reply for a kernel for which no process could be forked."""

_READ_BY_IMPORTS = ("CUDA_", "CUTE_DSL_", "CUTE_EXPERIMENTAL_", "LD_", "PYTHON")
"""The beginnings of the names of environment variables that imports read. A worker has the environment of the
moment, but if one of these has changed since a server was started, another one is."""


class StoppedError(BuildError):
    """A kernel was given up, since `end_all` was called while it compiled."""


_starting = free_in_children(threading.RLock())
"""A lock that is held while a process is started, or sockets are passed to one. No other thread forks then:
the child would have copies of the process's ends, which never seem to be closed as long as it lives."""

os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release)


@dataclass(frozen=True)
class Ended:
    """A worker that has ended: its exit status, which is negative for a signal, and the last line of its
    message."""

    status: int
    message: str

    @property
    def crashed(self) -> bool:
        """Whether it ended otherwise than a worker does, even one without a kernel."""
        return self.status not in (0, UNBUILT, UNWRITABLE)


class _Server:
    """A server that this process has started, for the kernels of one architecture."""

    def __init__(self, command: Sequence[str], surroundings: dict[str, str]) -> None:
        self.identity = _identity(command, surroundings)
        self._command = command
        self._has_served = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, _closed_if_raised(self._control):
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                # OpenBLAS would start threads, with which the server could not fork safely.
                env={**surroundings, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        with suppress(RuntimeError):  # no more threads: its end is noticed when it is asked for
            threading.Thread(target=self._process.wait, name="end of a server", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def failed(self) -> bool:
        """Whether it ended before it served, and not for want of work. Another one would fail as well."""
        return not self._has_served and bool(self._process.poll())

    def run(self, arguments: Sequence[str], arch: Arch, request: str, seconds: float) -> Ended | None:
        """Runs a worker. Returns None if the server has ended, or could not fork. Raises TimeoutExpired,
        OSError."""
        head = json.dumps([_surroundings(arch), list(arguments)])
        with _starting:
            (status, theirs), (talk, their_talk) = socket.socketpair(), socket.socketpair()
            with theirs, their_talk, _closed_if_raised(status, talk):
                socket.send_fds(self._control, [b"kernel"], [theirs.fileno(), their_talk.fileno()])
        with _shut(status), _shut(talk):
            until = time.monotonic() + seconds
            try:
                _tell(talk, f"{head}\n{request}", seconds)
                said, reply = (_all_of(each, until).decode(errors="replace") for each in (talk, status))
            except TimeoutError:
                raise subprocess.TimeoutExpired(list(self._command), seconds) from None
        if not reply:
            ended_with = self._process.wait()
            if self.failed:
                why = (
                    "an import starts a thread"
                    if ended_with == HAS_THREADS
                    else f"its exit status is {ended_with}"
                )
                log.info("the server of compilers can't serve: %s", why)
            return None
        self._has_served = True
        if reply.startswith(UNFORKED):
            log.info("no worker can be forked: %s", os.strerror(int(reply.split()[1])))
            return None
        return Ended(int(reply), _last_line(said))

    def end(self) -> None:
        """Ends the server and its workers, if it has not ended."""
        with suppress(OSError):  # the program may have closed all files that it does not know
            self._control.shutdown(socket.SHUT_RDWR)
        self._process.terminate()  # it may be importing; later it takes no notice
        self._process.wait()
        with suppress(OSError):
            self._control.close()

    def leave(self) -> None:
        """Closes what a forked child has of its parent's server."""
        with suppress(OSError):
            self._control.close()
        self._process.returncode = 0  # the child does not wait for it


def _surroundings(arch: Arch) -> dict[str, str]:
    """The environment of a process that compiles. It sees no GPU and needs none: TVM-FFI's import asks for
    GPUs, which would start CUDA with a thread of its own, and a server with threads can't fork."""
    return environment_of(
        CUTE_DSL_ARCH=arch.value, CUDA_VISIBLE_DEVICES="", PYTORCH_NVML_BASED_CUDA_CHECK="1"
    )


def _identity(command: Sequence[str], surroundings: dict[str, str]) -> tuple[object, ...]:
    """The facts by which servers differ."""
    read = {name: value for name, value in surroundings.items() if name.startswith(_READ_BY_IMPORTS)}
    return tuple(command), tuple(sorted(read.items()))


@contextmanager
def _closed_if_raised(*ends: socket.socket) -> Iterator[None]:
    """Closes sockets if the block raises. Then nobody else will."""
    try:
        yield
    except BaseException:
        for end in ends:
            end.close()
        raise


@contextmanager
def _shut(end: socket.socket) -> Iterator[None]:
    """Closes a socket at the end of the block, also for those to whom a forked child's copy keeps it open."""
    with end:
        try:
            yield
        finally:
            with suppress(OSError):  # the other end is closed
                end.shutdown(socket.SHUT_RDWR)


def _tell(talk: socket.socket, text: str, seconds: float) -> None:
    """Sends a worker all of its input. Raises TimeoutError."""
    with suppress(BrokenPipeError, ConnectionResetError):  # it ended, and its status says how
        talk.settimeout(seconds)
        talk.sendall(text.encode())
        talk.shutdown(socket.SHUT_WR)


def _all_of(source: socket.socket, until: float) -> bytes:
    """The bytes that a socket receives until it is closed. Raises TimeoutError."""
    parts = []
    with suppress(ConnectionResetError):
        while True:
            source.settimeout(max(until - time.monotonic(), 1e-6))
            if not (part := source.recv(1 << 16)):
                break
            parts.append(part)
    return b"".join(parts)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


_servers: list[_Server] = []
"""The servers of this process, of which the last of its kind is used."""

_started: set[subprocess.Popen[str]] = set()
"""The workers with processes that were started for them."""

_is_over = False
"""Whether this process is ending."""

_OVER = "this process is ending, and starts no compilers any more"

_stops = 0
"""The number of calls of `end_all`."""


def server_for(arch: Arch) -> _Server | None:
    """The server of an architecture, which is started if there is none. Returns None if none can serve.
    Raises OSError, and BuildError if this process is ending."""
    command, surroundings = command_of(SERVER), _surroundings(arch)
    identity = _identity(command, surroundings)
    with _starting:
        for server in _servers:
            if server.identity == identity and (server.failed or not server.has_ended):
                return None if server.failed else server
        for server in [each for each in _servers if each.has_ended and not each.failed]:
            server.end()
            _servers.remove(server)
        if _is_over:
            raise BuildError(_OVER)
        _servers.append(_Server(command, surroundings))
        return _servers[-1]


def start_early(arch: Arch) -> None:
    """Starts the server of an architecture while the caller has other work, so that its imports are done when
    the first kernel comes."""
    try:
        server_for(arch)
    except (OSError, BuildError) as error:
        log.info("no server of compilers can be started: %s", error)


def forked(arch: Arch, arguments: Sequence[str], request: str, seconds: float) -> Ended | None:
    """Runs a worker that a server forks. Returns None if that can't be done, or if the server was killed.
    Raises TimeoutExpired, StoppedError, and BuildError if this process is ending."""
    before = _stops
    try:
        server = server_for(arch)
        if server is not None and (ended := server.run(arguments, arch, request, seconds)) is not None:
            return ended
    except OSError as error:
        log.info("no worker is forked: %s", error)
    if _stops != before:
        raise StoppedError("the compiler was ended")
    return None


def started(arch: Arch, arguments: Sequence[str], request: str, seconds: float) -> Ended:
    """Runs a worker in a process that is started for it. Raises TimeoutExpired, StoppedError, OSError if no
    process can be started, and BuildError if this process is ending."""
    before = _stops
    command = command_of(WORKER, *arguments)
    with _starting:
        if _is_over:
            raise BuildError(_OVER)
        given, theirs = socket.socketpair()
        with theirs, _closed_if_raised(given):
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=_surroundings(arch),
                cwd=arguments[0],
                start_new_session=True,
            )
        _started.add(process)
    try:
        with _shut(given):
            _tell(given, request, seconds)
        output, complaint = process.communicate(timeout=seconds)
    except TimeoutError:
        raise subprocess.TimeoutExpired(command, seconds) from None
    finally:
        with process:  # closes its pipes, and waits for it
            _kill(process)
        _started.discard(process)
    status = process.returncode
    if status < 0 and _stops != before:
        raise StoppedError("the compiler was ended")
    return Ended(status, _last_line(output if status in (UNBUILT, UNWRITABLE) else complaint))


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills a worker that runs, and the linker that it may have started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def end_all() -> None:
    """Ends all servers and workers of this process. Later kernels have others."""
    global _stops
    with _starting:
        _stops += 1
        servers, _servers[:] = list(_servers), []
        for process in list(_started):
            _kill(process)
    for server in servers:
        server.end()


def _end_with_process() -> None:
    global _is_over
    _is_over = True
    end_all()


def _leave_to_parent() -> None:
    for server in _servers:
        server.leave()
    _servers.clear()
    for process in _started:
        process.returncode = 0
    _started.clear()


atexit.register(_end_with_process)
os.register_at_fork(after_in_child=_leave_to_parent)
