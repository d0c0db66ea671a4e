"""A pytest plugin that compiles each C++ kernel of Inductor once, whatever tests, workers and runs need it.

Tests with an empty Inductor cache compile the kernels of others again, which was a third of their processor
time. Inductor names a library by a digest of its text and of the compiler's command line. Under this name and
torch's version, libraries are kept in pytest's cache beside our own kernels (`compile_once`), which removes
those that no run has used for a week. Graphs are lowered afresh all the same.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock
from torch._inductor.cpp_builder import CppBuilder

from support.compile_once import FOLDER

KERNEL = ".main.so"
"""The end of the name of a library of kernels, in contrast to programs that find out what a processor has."""


def once(build: Callable[[CppBuilder], None]) -> Callable[[CppBuilder], None]:
    @functools.wraps(build)
    def kept(builder: CppBuilder) -> None:
        folder, target = os.environ.get(FOLDER), Path(builder.get_target_file_path())
        if folder is None or not target.name.endswith(KERNEL):
            return build(builder)
        place = Path(folder, f"{torch.__version__}-{target.name}")
        place.parent.mkdir(exist_ok=True)
        with FileLock(f"{place}.lock"):
            if place.exists():
                os.utime(place)
                # A copy, as the loader takes a link to a library that is loaded for that library.
                shutil.copy(place, target)
                return None
            build(builder)
            # A run that is killed leaves no part of a library under the name that others read.
            unfinished = place.with_suffix(".new")
            shutil.copy(target, unfinished)
            unfinished.replace(place)
            return None

    return kept


CppBuilder.build = once(CppBuilder.build)  # type: ignore[method-assign]
