"""The processes that compile, with a fault: `python planted_worker.py SERVER MODULE ...`.

The environment variable PLAN is the JSON of `[stage, times, counter, built]`. A worker has that of the
moment, so one server serves many plans. At the stage `abort`, `kill`, `memory` or `hang`, the compiler ends
its process, asks for more memory than it gets, or never ends. If SERVER is `unforked`, the server can fork
no process. At any other stage, the folder of the cache is removed: as the worker starts, before a method of
the cache of this name, while the kernel is compiled, or at the `end`. This happens for the first `times`
workers, which the file `counter` counts by lines. The compiler's result is the pickled `built`. MODULE is
the worker's module or the server's, and has the other arguments.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

PLAN = "TESTS_OF_CUTE_BACKEND_PLAN"
UNFORKED = "unforked"


def main() -> int:
    kind, module, *arguments = sys.argv[1:]
    sys.argv[1:] = arguments

    def fault() -> None:
        stage, times, counter, _ = json.loads(os.environ[PLAN])
        with open(counter, "a") as file:
            file.write(f"{stage}\n")
        if len(Path(counter).read_text().splitlines()) > times:
            return
        if stage == "abort":
            os.abort()
        if stage == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if stage == "memory":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))
            bytearray(1 << 41)
        if stage == "hang":
            signal.pause()
        if stage == UNFORKED:
            raise OSError(errno.EAGAIN, "no more processes")
        shutil.rmtree(sys.argv[1])

    from cute_backend.runtime.compiling import compile, worker
    from cute_backend.runtime.disk.cache import KernelCache

    def compile_kernel(*arguments: Any) -> Any:
        stage, _, _, pickled = json.loads(os.environ[PLAN])
        if stage in ("abort", "kill", "memory", "hang", "compile"):
            fault()
        return pickle.loads(Path(pickled).read_bytes())

    def faulty(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            fault()
            return function(*arguments)

        return run

    def work() -> int:
        stage, *_ = json.loads(os.environ[PLAN])
        if hasattr(KernelCache, stage):
            setattr(KernelCache, stage, faulty(getattr(KernelCache, stage)))
        if stage == "start":
            fault()
            os.getcwd()  # an import of a compiler may do so
        status = right()
        if stage == "end":
            fault()
        return status

    compile.compile_kernel = compile_kernel
    right, worker.main = worker.main, work
    if kind == UNFORKED:
        os.fork = faulty(os.fork)
    return import_module(module).main()


if __name__ == "__main__":
    sys.exit(main())
