"""A server of compilers: it imports the DSL once, and then forks a process for each kernel.

`workers` starts it, as `interpreter` starts any process. Standard input is a socket. Each message on it comes
with two more sockets. One is the standard input, output and error of the kernel's process, which does the
work of `worker`: the first line of its input has the environment and the arguments. The other one receives
the exit status, as a number that is negative for a signal, or UNFORKED and the number of the system's error.

A kernel whose socket is closed at the other end is given up: its processes are killed. So are all of them
when standard input ends, that is, when the process that needs kernels has ended in whatever way. If the
server itself is killed, the system kills the processes that it forked. Without work, the server ends by
itself.

A fork copies the calling thread alone, and a lock that another one held would stay locked in the copy. So the
server has no other thread, and does not serve if an import has started one.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pkgutil
import selectors
import signal
import socket
import sys
import tempfile
import traceback
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from cute_backend import templates
from cute_backend.runtime.compiling import worker
from cute_backend.runtime.compiling.workers import HAS_THREADS, UNFORKED
from cute_backend.runtime.kernels.kernel import environment

IDLE_SECONDS = 60.0
"""The seconds without a kernel after which a server ends, as Inductor's processes do."""

_PR_SET_PDEATHSIG = 1


def main() -> int:
    control = socket.socket(fileno=os.dup(0))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a program may block signals, which its processes inherit
    _import_all()
    if len(os.listdir("/proc/self/task")) > 1:
        return HAS_THREADS
    gc.collect()
    gc.freeze()  # the collectors of forked processes neither walk nor copy what is there
    _Server(control).serve()
    os._exit(0)  # the end of an interpreter that has imported torch takes half a second


def _import_all() -> None:
    """Imports everything that compiling imports. Without the DSL, each worker says what is missing."""
    with suppress(ImportError):
        import_module("cute_backend.memory_ops.device_math")
        for each in pkgutil.iter_modules(templates.__path__, f"{templates.__name__}."):
            import_module(each.name)
        import_module("tvm_ffi")
    environment()


class _Server:
    """The loop of the server, and the processes that it has forked."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._process = os.getpid()
        self._libc = ctypes.CDLL(None)
        self._woken, wakes = socket.socketpair()
        self._kernels: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._wakes = wakes
        for each in (self._woken, wakes):
            each.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends imports; from now on standard input ends

    def serve(self) -> None:
        """Serves until standard input ends, or nothing happens for IDLE_SECONDS."""
        while events := self._selector.select(None if self._kernels else IDLE_SECONDS):
            for key, _ in events:
                if key.fileobj is self._woken:
                    with suppress(BlockingIOError):
                        self._woken.recv(4096)
                elif key.fileobj is self._control:
                    if not self._accept():
                        self._end_workers()
                        return
                elif key.data in self._kernels:
                    self._selector.unregister(key.fileobj)
                    _kill(key.data)
            self._reap()

    def _accept(self) -> bool:
        """Forks a process for the next kernel. Returns False if there will be none."""
        try:
            message, files, *_ = socket.recv_fds(self._control, 16, 2)
        except ConnectionResetError:
            return False
        if not message:
            return False
        kernel, talk = (socket.socket(fileno=file) for file in files)
        try:
            process = os.fork()
        except OSError as error:
            with suppress(OSError):
                kernel.send(f"{UNFORKED} {error.errno}".encode())
            kernel.close()
        else:
            if process == 0:
                self._work(kernel, talk)
            self._kernels[process] = kernel
            self._selector.register(kernel, selectors.EVENT_READ, process)
        talk.close()
        return True

    def _end_workers(self) -> None:
        """Kills all workers, and waits for them: in a container, nobody else may."""
        for process in self._kernels:
            _kill(process)
        for process in self._kernels:
            os.waitpid(process, 0)

    def _reap(self) -> None:
        """Replies for the processes that have ended, and kills all that they have started. Their numbers are
        theirs until they are waited for."""
        while self._kernels:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            _kill(ended.si_pid)
            process, status = os.waitpid(ended.si_pid, 0)
            kernel = self._kernels.pop(process)
            if kernel in self._selector.get_map():
                self._selector.unregister(kernel)
            with suppress(OSError):  # nobody waits for it any more
                kernel.send(str(os.waitstatus_to_exitcode(status)).encode())
            kernel.close()

    def _work(self, kernel: socket.socket, talk: socket.socket) -> NoReturn:
        """The forked process, from its first to its last instruction."""
        status = 1
        try:
            self._leave(kernel)
            for number in range(3):
                os.dup2(talk.fileno(), number)
            talk.close()
            surroundings, sys.argv[1:] = json.loads(sys.stdin.readline())
            os.environ.clear()
            os.environ.update(surroundings)
            tempfile.tempdir = None  # it is found again in this environment
            os.chdir(sys.argv[1])
            status = worker.main()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _leave(self, kernel: socket.socket) -> None:
        """Gives up all that is the server's: the process ends with the server, in a group of its own."""
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._process:
            os._exit(1)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        for each in (self._control, self._woken, self._wakes, kernel, *self._kernels.values()):
            each.close()


def _kill(process: int) -> None:
    """Kills a worker, and the linker that it may have started."""
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    with suppress(ProcessLookupError):  # it may not have a group of its own yet
        os.kill(process, signal.SIGKILL)
