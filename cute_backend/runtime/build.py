"""Obtains kernels in the fastest way: from this process, from disk, or by building several at once in
processes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Union

from cute_backend import config
from cute_backend.runtime.cache import CacheFolderError, KernelCache, caches, writable_cache
from cute_backend.runtime.forks import free_in_children
from cute_backend.runtime.interpreter import command_of, environment_of
from cute_backend.runtime.kernel import BuildError, Kernel, UnavailableError
from cute_backend.runtime.link import KernelFunction
from cute_backend.runtime.notices import count, warn_once
from cute_backend.runtime.pack import packs
from cute_backend.runtime.source import file_name, text_of, warn_if_edited
from cute_backend.runtime.space import out_of_space

if TYPE_CHECKING:
    from cute_backend.runtime.compile import Built

log = logging.getLogger(__name__)

UNBUILT, UNWRITABLE = 3, 4
"""The exit statuses of a worker. UNBUILT: the kernel can't be built. UNWRITABLE: the cache folder can't be
written, and the output is the number and the text of the system's error."""

_loaded: dict[Kernel, KernelFunction] = {}
_loading = free_in_children(threading.Lock())
_PROCESS = os.getpid()
"""The ID of the process that imported this module; forked processes have other IDs."""


def build(kernel: Kernel) -> Built:
    """Compiles one kernel without reading any cache; its text is kept in the cache folder.

    Raises BuildError, UnavailableError.
    """
    warn_if_edited(kernel)
    try:
        return _compile(writable_cache(), kernel)
    except OSError as error:
        raise BuildError(f"{kernel.name} has no folder to be built in: {error}") from error


def load_known(kernels: Iterable[Kernel]) -> dict[Kernel, KernelFunction]:
    """Loads those of `kernels` that this process, a pack or a cache has; nothing is compiled."""
    with _loading:
        for kernel in kernels:
            if kernel not in _loaded:
                found = _load(kernel)
                if found is not None:
                    log.debug("%s was loaded", kernel.name)
                    warn_if_edited(kernel)
                    _loaded[kernel] = found
        return {kernel: _loaded[kernel] for kernel in kernels if kernel in _loaded}


def _load(kernel: Kernel) -> KernelFunction | None:
    for pack in packs():
        if function := pack.load(kernel):
            return function
    # A process whose kernels are all in packs needs no cache folder, so it gets no warning about one.
    return next((function for cache in caches() if (function := cache.load(kernel))), None)


Outcome = Union[KernelFunction, BuildError, UnavailableError]


def obtain(
    kernels: Iterable[Kernel], *, apart: bool = False, built: Callable[[], None] | None = None
) -> dict[Kernel, Outcome]:
    """Returns each of `kernels`, which it builds if necessary, or the error if a kernel can't be built.

    With `apart`, no kernel is built in this process, whose other threads may then do other work. `built` is
    called after each kernel; without it, a line on the terminal counts the kernels.
    """
    kernels = list(dict.fromkeys(kernels))
    outcomes: dict[Kernel, Outcome] = dict(load_known(kernels))
    missing = [kernel for kernel in kernels if kernel not in outcomes]
    if not missing:
        return outcomes
    if named := ", ".join(str(pack.path) for pack in packs()):
        warn_once(
            ("not packed", named),
            f"cute_backend: kernels of a program that are not in {named}: {len(missing)}; they are compiled. "
            "Make the pack again with this program, its sizes and its settings.",
        )
    count("kernels_built", len(missing))
    # A forked child lacks the threads of the DSL's native code, and the locks that they held stay locked.
    here = len(missing) == 1 and not (apart or os.getpid() != _PROCESS)
    with _counted(len(missing)) if built is None else nullcontext(built) as step:

        def attempt(kernel: Kernel) -> BuildError | UnavailableError | None:
            start = time.perf_counter()
            failure = _attempt(build_into if here else _build_in_process, kernel)
            log.info("%s %s after %.1f s", kernel.name, failure or "was built", time.perf_counter() - start)
            step()
            return failure

        if here:
            failures = [attempt(missing[0])]
        else:
            with ThreadPoolExecutor(min(len(missing), jobs())) as pool:
                failures = list(pool.map(attempt, missing))
    outcomes.update(load_known(missing))
    for kernel, failure in zip(missing, failures, strict=True):
        if kernel not in outcomes:
            outcomes[kernel] = failure or BuildError(f"{kernel.name} was built but does not load")
    _make_room()
    return outcomes


def jobs() -> int:
    """The number of processes that compile in parallel."""
    return config.compile_jobs or len(os.sched_getaffinity(0))


@contextmanager
def _counted(total: int) -> Iterator[Callable[[], None]]:
    """A line that counts the kernels that are built."""
    from cute_backend.runtime.progress import line

    with line() as bar:
        task = bar.add_task("compiling kernels", total=total)
        yield lambda: bar.advance(task)


def _make_room() -> None:
    """Keeps the cache folder within its limit, after a kernel was written."""
    from cute_backend.runtime.upkeep import evict

    for cache in caches():
        if config.cache_limit_mb and cache.writable:
            evict(cache, config.cache_limit_mb << 20)


def spills(kernel: Kernel) -> bool:
    """Whether a built kernel's threads spill registers."""
    packed = any(pack.spill_bytes(kernel) for pack in packs())
    return packed or any(cache.spill_bytes(kernel) for cache in caches())


def build_into(cache: KernelCache, kernel: Kernel) -> None:
    """Builds a kernel into a cache, unless it is there. Raises BuildError, UnavailableError, OSError."""
    with cache.lock(kernel):
        if cache.load(kernel) is None:
            try:
                cache.save(kernel, _compile(cache, kernel))
            except OSError:
                cache.discard(kernel)
                raise


def _compile(cache: KernelCache, kernel: Kernel) -> Built:
    from cute_backend.runtime.compile import (
        compile_kernel,  # imported here, since a warm start needs no compiler
    )

    try:
        source = text_of(kernel)
    except Exception as error:
        raise BuildError(f"{kernel.name} can't be written: {type(error).__name__}: {error}") from error
    path = cache.write_source(kernel, source)
    try:
        return compile_kernel(kernel, source, path)
    except BuildError as error:
        if kernel.edited is None:
            raise
        name = file_name(kernel.spec, kernel.config, kernel.alignment)
        raise BuildError(str(error).replace(str(path), name) + f" ({name} was edited)") from error


def _attempt(
    builder: Callable[[KernelCache, Kernel], None], kernel: Kernel
) -> BuildError | UnavailableError | None:
    """Returns the error, or None. If a folder can't be written, or is full, the next one is tried."""
    while True:
        try:
            cache = writable_cache()
        except OSError as error:
            return BuildError(f"{kernel.name} has no folder to be built in: {error}")
        try:
            builder(cache, kernel)
            return None
        except (BuildError, UnavailableError) as error:
            return error
        except OSError as error:
            cache.give_up_writing(out_of_space(error) or error)


def _build_in_process(cache: KernelCache, kernel: Kernel) -> None:
    """`build_into` in a process of its own: the DSL compiles one kernel at a time in a process."""
    try:
        KernelCache(cache.root)  # the folder may have been removed or opened to others meanwhile
    except CacheFolderError as error:
        raise OSError(str(error)) from error
    try:
        done = subprocess.run(
            command_of("cute_backend.runtime.worker", str(cache.root)),
            input=json.dumps(kernel.to_dict()),
            capture_output=True,
            text=True,
            env=environment_of(CUTE_DSL_ARCH=kernel.arch.value),
            cwd=cache.root,
        )
    except OSError as error:
        raise BuildError(f"no process can be started for {kernel.name}: {error}") from error
    if done.returncode == 0:
        return
    if done.returncode == UNWRITABLE:
        number, _, what = done.stdout.strip().splitlines()[-1].partition(" ")
        raise OSError(int(number), what)
    complaint = done.stdout if done.returncode == UNBUILT else done.stderr
    last = (complaint.strip().splitlines() or ["no message"])[-1]
    raise BuildError(last if done.returncode == UNBUILT else f"the compiler of {kernel.name} crashed: {last}")
