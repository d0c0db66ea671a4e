"""`python -m cute_backend.runtime.worker FOLDER`: builds the kernel that stdin describes into a cache."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .build import UNBUILT, UNWRITABLE, build_into
from .cache import KernelCache
from .kernel import BuildError, Kernel, UnavailableError


def main() -> int:
    try:
        build_into(KernelCache(Path(sys.argv[1])), Kernel.from_dict(json.load(sys.stdin)))
    except (BuildError, UnavailableError) as error:
        print(" ".join(str(error).split()))
        return UNBUILT
    except OSError as error:
        print(error)
        return UNWRITABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
