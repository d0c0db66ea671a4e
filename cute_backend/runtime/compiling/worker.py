"""Builds the kernel that standard input describes into a cache, whose folder is the first argument. If a file
is the second one, the kernel is compiled whether or not the cache has it, and is written to that file.

`workers` runs it, in a process that `server` forks or that `interpreter` starts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cute_backend.errors import BuildError, UnavailableError
from cute_backend.runtime.compiling.build import build_into, compiled
from cute_backend.runtime.compiling.workers import UNBUILT, UNWRITABLE
from cute_backend.runtime.disk.cache import KernelCache
from cute_backend.runtime.kernels.kernel import Kernel


def main() -> int:
    root, *results = map(Path, sys.argv[1:])
    try:
        cache, kernel = KernelCache(root), Kernel.from_dict(json.load(sys.stdin))
        if not results:
            build_into(cache, kernel)
        for result in results:
            result.write_text(compiled(cache, kernel).to_json())
    except (BuildError, UnavailableError) as error:
        print(" ".join(str(error).split()))
        return UNBUILT
    except OSError as error:
        print(error.errno or 0, error.strerror or error)
        return UNWRITABLE
    return 0
