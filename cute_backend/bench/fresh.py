"""Times the steps by which a new process gets one kernel. It imports only modules that a program imports."""

from __future__ import annotations

import json
import sys
import time

from cute_backend.runtime.compiling.build import obtain
from cute_backend.runtime.kernels.kernel import Kernel


def main(start: float) -> None:
    """Reads a kernel from standard input, and gets it.

    Writes two times in seconds: of the imports, counted from `start`, and of getting the kernel.
    """
    imported = time.perf_counter()
    kernel = Kernel.from_dict(json.load(sys.stdin))
    began = time.perf_counter()
    outcome = obtain([kernel])[kernel]
    loaded = time.perf_counter()
    if isinstance(outcome, Exception):
        raise outcome
    found = {
        "import_s": imported - start,
        "load_s": loaded - began,
        "imports_cutlass": "cutlass" in sys.modules,
    }
    json.dump(found, sys.stdout)
