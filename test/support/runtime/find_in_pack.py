"""A process beside an installed wheel of kernels: `python find_in_pack.py NAME`, NAME a program of the wheel.

It traces the program for Hopper, with its sizes and for any size. It prints as JSON the names of the kernels
for any size, by whether they can be loaded from the wheel. It can't compile any.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[3] / "wheels"))
import kernels as wheels

from cute_backend import aot
from cute_backend.planning import Arch
from cute_backend.runtime.compiling.build import load_known
from cute_backend.runtime.compiling.rungs import standing
from cute_backend.runtime.disk.pack import is_packed, packs
from cute_backend.runtime.kernels.reach import reachable_kernels


def refuse(*arguments: object, **how: object) -> NoReturn:
    raise AssertionError("a process was started")


def main() -> None:
    fn, args = wheels.program(sys.argv[1])
    subprocess.run = subprocess.Popen = refuse
    assert len(packs()) == 1
    kernels = {}
    for any_size in (True, False):
        for problem in aot.find_problems(fn, args, Arch.SM90A, any_m=any_size, any_size=any_size):
            assert is_packed(problem, Arch.SM90A)
            if any_size:
                kernels |= dict.fromkeys(map(standing, reachable_kernels(problem, Arch.SM90A, 132)))
    loaded = load_known(kernels)
    missing = [kernel.name for kernel in kernels if kernel not in loaded]
    print(json.dumps({"loaded": [kernel.name for kernel in loaded], "missing": missing}))


if __name__ == "__main__":
    main()
