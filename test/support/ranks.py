"""Runs a script in two processes of one group, as `torchrun --nproc-per-node 2` does.

    python test/support/ranks.py examples/tensor_parallel.py --cpu

A process imports torch and this package once, and forks both ranks. `run` starts it from a test.
"""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
COUNT = 2


def run(script: Path, *arguments: str) -> str:
    """Returns the output of both ranks. Raises if one fails."""
    # A process with threads of OpenBLAS can't fork safely.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(script), *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def main() -> int:
    """Imports what a script imports, and returns 1 if a rank fails."""

    import cute_backend  # noqa: F401

    os.environ |= {"WORLD_SIZE": str(COUNT), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    ranks = [os.fork() or rank_of(number) for number in range(COUNT)]
    return int(any(os.waitpid(rank, 0)[1] for rank in ranks))


def rank_of(number: int) -> None:
    """Runs the script in this process, which ends with it."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    status = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
