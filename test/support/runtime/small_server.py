"""A server of compilers without the DSL: the real one, but its workers run the Python code that they read.

Environment variables make it end at once (IDLE), have a thread (THREADS), or import without an end (IMPORTS).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

IDLE, THREADS, IMPORTS = (f"TESTS_OF_CUTE_BACKEND_{name}" for name in ("IDLE", "THREADS", "IMPORTS"))


def command_of(module: str, *arguments: str) -> list[str]:
    """The command of such a server, with the interface of `interpreter`."""
    return [sys.executable, str(Path(__file__)), *arguments]


def work() -> int:
    """Runs the code, whose `status` is the exit status, or else 0."""
    names: dict[str, int] = {}
    exec(compile(sys.stdin.read(), "worker", "exec"), names)
    return names.get("status", 0)


def main() -> int:
    from cute_backend.runtime.compiling import server, worker

    worker.main = work
    server._import_all = signal.pause if os.environ.get(IMPORTS) else lambda: None
    if idle := os.environ.get(IDLE):
        server.IDLE_SECONDS = float(idle)
    if os.environ.get(THREADS):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return server.main()


if __name__ == "__main__":
    sys.exit(main())
