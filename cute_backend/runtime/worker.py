"""Builds the kernel that standard input describes into a cache, whose folder is the argument.

`build` runs it, in a process that `interpreter` starts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cute_backend.runtime.build import UNBUILT, UNWRITABLE, build_into
from cute_backend.runtime.cache import KernelCache
from cute_backend.runtime.kernel import BuildError, Kernel, UnavailableError


def main() -> int:
    try:
        build_into(KernelCache(Path(sys.argv[1])), Kernel.from_dict(json.load(sys.stdin)))
    except (BuildError, UnavailableError) as error:
        print(" ".join(str(error).split()))
        return UNBUILT
    except OSError as error:
        print(error.errno or 0, error.strerror or error)
        return UNWRITABLE
    return 0
