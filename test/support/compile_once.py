"""A pytest plugin that compiles each kernel once, however many tests, workers and runs need it.

It wraps `compile_kernel`, which is below every cache of the package. The result is kept in pytest's cache
under a digest of the module's text and of the kernel's name, which depends on the versions of the compiler
and on every source that makes kernels. Workers share the folder; if two need a kernel at once, one waits for
the other. A run removes kernels that no run has used for a week. Errors are not kept. Tests of compilation
itself use `afresh`.

`build` compiles in the test's process, where `compile_kernel` is wrapped. Tests of the processes in which
kernels of programs are compiled use `apart`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
import time
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

DAYS_KEPT = 7
"""The days after which a kernel that no run has used is removed."""

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
                os.utime(place)
                return pickle.loads(place.read_bytes())
            built = compile_kernel(kernel, source, path)
            # A run that is killed leaves no part of a kernel under the name that others read.
            unfinished = place.with_suffix(".new")
            unfinished.write_bytes(pickle.dumps(built))
            unfinished.replace(place)
            return built

    return kept


module.compile_kernel = once(afresh)

apart = building._compile_in_process
building._compile_in_process = building.compiled


def folder_between_runs(config: pytest.Config) -> Path | None:
    """Where kernels are kept between runs, or None if pytest has no cache (`-p no:cacheprovider`)."""
    kept: pytest.Cache | None = getattr(config, "cache", None)
    return None if kept is None else kept.mkdir("kernels")


def pytest_sessionstart(session: pytest.Session) -> None:
    folder = folder_between_runs(session.config)
    if folder is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        remove_unused(folder)


def remove_unused(folder: Path) -> None:
    oldest = time.time() - DAYS_KEPT * 24 * 3600
    for path in folder.iterdir():
        if path.stat().st_mtime < oldest:
            path.unlink()


def build_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds kernels in the process of the test, which replaces the compiler or the texts of kernels."""

    def here(cache: KernelCache, kernel: Kernel) -> None:
        building.build_into(KernelCache(cache.root), kernel)

    monkeypatch.setattr(building, "_build_in_process", here)
