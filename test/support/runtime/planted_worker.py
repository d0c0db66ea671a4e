"""The build worker with a fault: `python planted_worker.py STAGE TIMES COUNTER BUILT ROOT [RESULT]`.

At the stage `abort` or `kill`, the compiler ends the process. At any other one, the folder of the cache is
removed: as the process starts, before a method of the cache of this name, while the kernel is compiled, or at
the `end`. This happens for the first TIMES processes, which the file COUNTER counts by lines. The compiler's
result is the pickled BUILT.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> int:
    stage, times, counter, pickled, root, *_ = sys.argv[1:]
    del sys.argv[1:5]

    def fault() -> None:
        with open(counter, "a") as file:
            file.write(f"{stage}\n")
        if len(Path(counter).read_text().splitlines()) > int(times):
            return
        if stage == "abort":
            os.abort()
        if stage == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        shutil.rmtree(root)

    if stage == "start":
        fault()
        os.getcwd()  # an import of a compiler may do so
    from cute_backend.runtime.compiling import compile, worker
    from cute_backend.runtime.disk.cache import KernelCache

    def compile_kernel(*arguments: Any) -> Any:
        if stage in ("abort", "kill", "compile"):
            fault()
        return pickle.loads(Path(pickled).read_bytes())

    def faulty(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            fault()
            return method(*arguments)

        return run

    compile.compile_kernel = compile_kernel
    if hasattr(KernelCache, stage):
        setattr(KernelCache, stage, faulty(getattr(KernelCache, stage)))
    status = worker.main()
    if stage == "end":
        fault()
    return status


if __name__ == "__main__":
    sys.exit(main())
