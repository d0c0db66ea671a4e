"""A pytest plugin that compiles each kernel once in a run, however many tests and workers need it.

It wraps `compile_kernel`, which is below every cache of the package. The result for a text is kept in a
folder of this run, which its workers share; if two need a kernel at once, one waits for the other. Errors are
not kept. Tests of compilation itself use `afresh`.

`build` compiles in the test's process, where `compile_kernel` is wrapped. Tests of the processes in which
kernels of programs are compiled use `apart`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from cute_backend.runtime.compiling import build as building
from cute_backend.runtime.compiling import compile as module
from cute_backend.runtime.disk.cache import KernelCache
from cute_backend.runtime.kernels.built import Built
from cute_backend.runtime.kernels.kernel import Kernel

FOLDER = "TESTS_OF_CUTE_BACKEND_BUILT"
"""The environment variable that names the folder; without it nothing is kept."""

Compile = Callable[[Kernel, str, Path], Built]

afresh: Compile = module.compile_kernel


def once(compile_kernel: Compile) -> Compile:
    @functools.wraps(compile_kernel)
    def kept(kernel: Kernel, source: str, path: Path) -> Built:
        folder = os.environ.get(FOLDER)
        # The text on disk is compiled.
        if folder is None or not path.exists() or path.read_text() != source:
            return compile_kernel(kernel, source, path)
        identity = json.dumps([kernel.name, kernel.to_dict(), source], sort_keys=True)
        place = Path(folder, hashlib.sha256(identity.encode()).hexdigest())
        place.parent.mkdir(exist_ok=True)
        with FileLock(f"{place}.lock"):
            if place.exists():
                return pickle.loads(place.read_bytes())
            built = compile_kernel(kernel, source, path)
            place.write_bytes(pickle.dumps(built))
            return built

    return kept


module.compile_kernel = once(afresh)

apart = building._compile_in_process
building._compile_in_process = building.compiled


def build_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds kernels in the process of the test, which replaces the compiler or the texts of kernels."""

    def here(cache: KernelCache, kernel: Kernel) -> None:
        building.build_into(KernelCache(cache.root), kernel)

    monkeypatch.setattr(building, "_build_in_process", here)
