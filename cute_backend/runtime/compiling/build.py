"""Obtains kernels in the fastest way: from this process, from disk, or by building several at once.

A kernel is compiled in a process of its own. The DSL compiles one at a time in a process, and an abort inside
it ends the process.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TypeVar, Union

from cute_backend import config
from cute_backend.errors import BuildError, UnavailableError
from cute_backend.planning import Arch
from cute_backend.runtime.compiling.build_queue import BuildQueue, Failure, Then
from cute_backend.runtime.compiling.workers import UNBUILT, UNWRITABLE, Ended, forked, started
from cute_backend.runtime.disk.cache import (
    CACHE_DIR_VARIABLE,
    KernelCache,
    caches,
    scratch_folder,
    writable_cache,
)
from cute_backend.runtime.disk.pack import packs
from cute_backend.runtime.host.forks import free_in_children
from cute_backend.runtime.host.notices import count, warn_once
from cute_backend.runtime.host.space import out_of_space
from cute_backend.runtime.kernels.built import Built
from cute_backend.runtime.kernels.edited import file_name
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.link import KernelFunction
from cute_backend.runtime.kernels.source import text_of, warn_if_edited

log = logging.getLogger(__name__)

MAX_SECONDS = 900.0
"""The most seconds that a kernel may take to compile on a busy machine. The slowest one took two minutes."""

_loaded: dict[Kernel, KernelFunction] = {}
_loading = free_in_children(threading.Lock())

_queue = BuildQueue(lambda kernel: _attempted(_build_in_process, kernel), lambda: most_at_once())


def build(kernel: Kernel) -> Built:
    """Compiles one kernel without reading any cache; its text is kept in the cache folder.

    Raises BuildError, UnavailableError.
    """
    warn_if_edited(kernel)
    return _attempted(_compile_in_process, kernel)


def load_known(kernels: Iterable[Kernel]) -> dict[Kernel, KernelFunction]:
    """Loads those of `kernels` that this process, a pack or a cache has; nothing is compiled."""
    kernels = list(kernels)
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


def obtain(kernels: Iterable[Kernel], *, built: Callable[[], None] | None = None) -> dict[Kernel, Outcome]:
    """Returns each of `kernels`, which it builds if necessary, or the error if a kernel can't be built.

    `built` is called after each kernel; without it, a line on the terminal counts the kernels.
    """
    kernels = list(dict.fromkeys(kernels))
    outcomes: dict[Kernel, Outcome] = dict(load_known(each for each in kernels if each not in _queue))
    missing = [kernel for kernel in kernels if kernel not in outcomes]
    if not missing:
        return outcomes
    warn_of_packs(missing)
    ended = _build_all(missing, built)
    if sound := sum(error is None for error in ended.values()):
        count("kernels_built", sound)
    failures = {kernel: error for kernel, error in ended.items() if error is not None}
    outcomes |= load_known(missing)
    if lost := [
        kernel for kernel in missing if not (kernel in outcomes or kernel in failures or _has(kernel))
    ]:
        again = _build_all(lost, built=lambda: None)
        failures |= {kernel: error for kernel, error in again.items() if error is not None}
        outcomes |= load_known(lost)
    for kernel in missing:
        if kernel not in outcomes:
            outcomes[kernel] = failures.get(kernel) or _unloadable(kernel)
    _make_room()
    return outcomes


def begin(kernel: Kernel, then: Then) -> None:
    """Begins to build a kernel into the cache while the program goes on, and calls `then` with its error or
    None. `obtain` waits for the kernel, and counts it."""
    _queue.submit(kernel, then)


def settle() -> None:
    """Waits until no kernel is built any more. Timings are then of the program alone."""
    _queue.settle()


def is_begun(kernel: Kernel) -> bool:
    """Whether `begin` was called for a kernel, and `obtain` was not called since."""
    return kernel in _queue


def is_at_hand(kernel: Kernel) -> bool:
    """Whether this process, a pack or a cache seems to have a kernel."""
    return kernel in _loaded or any(pack.spill_bytes(kernel) is not None for pack in packs()) or _has(kernel)


def warn_of_packs(missing: Sequence[Kernel]) -> None:
    """Warns of kernels that are in no cache, and not in a pack that this process has. An installed pack is
    not for this program alone."""
    if named := ", ".join(str(pack.path) for pack in packs() if not pack.installed):
        warn_once(
            ("not packed", named),
            f"cute_backend: kernels of a program that are not in {named}: {len(missing)}; they are compiled. "
            "Make the pack again with this program, its sizes and its settings.",
        )


def build_again(kernels: Sequence[Kernel]) -> None:
    """Builds kernels that this process may have loaded, but that went from the cache since. Raises
    BuildError, UnavailableError."""
    for failure in _build_all(kernels, built=None).values():
        if failure is not None:
            raise failure


def _build_all(kernels: Sequence[Kernel], built: Callable[[], None] | None) -> dict[Kernel, Failure | None]:
    """Builds kernels into the cache, and returns the error of each that can't be built, and None of each that
    was. Without `built`, a line on the terminal counts them."""
    with _queue.line() if built is None else nullcontext():
        return _queue.collect(kernels, built or (lambda: None))


def removed(kernel: Kernel) -> BuildError:
    """The error of a kernel that was built twice, and whose files are not in the cache any more."""
    roots = " and ".join(str(cache.root) for cache in caches())
    return BuildError(
        f"{kernel.name} was removed from {roots} twice while kernels were built; leave the folder alone "
        f"until all are built, or name another one in {CACHE_DIR_VARIABLE}"
    )


def _unloadable(kernel: Kernel) -> BuildError:
    """The error of a kernel that was built without an error, but was not loaded."""
    return BuildError(f"{kernel.name} was built but does not load") if _has(kernel) else removed(kernel)


def _has(kernel: Kernel) -> bool:
    return any(cache.has(kernel) for cache in caches())


def most_at_once() -> int:
    """The number of processes that compile in parallel."""
    return config.compile_jobs or len(os.sched_getaffinity(0))


def has_spare_core() -> bool:
    """Whether the process has more than one core. On a single one, whatever else runs delays the program."""
    return len(os.sched_getaffinity(0)) > 1


def _make_room() -> None:
    """Keeps the cache folder within its limit, after a kernel was written."""
    from cute_backend.runtime.disk.upkeep import evict

    for cache in caches():
        if config.cache_limit_mb and cache.writable:
            evict(cache, config.cache_limit_mb << 20)


def build_into(cache: KernelCache, kernel: Kernel) -> None:
    """Builds a kernel into a cache, unless it is there. Raises BuildError, UnavailableError, OSError."""
    with cache.lock(kernel):
        if cache.load(kernel) is None:
            try:
                cache.save(kernel, compiled(cache, kernel))
            except OSError:
                cache.discard(kernel)
                raise


def compiled(cache: KernelCache, kernel: Kernel) -> Built:
    """Compiles a kernel in this process. Its text is kept in a cache. Raises BuildError, UnavailableError,
    OSError."""
    from cute_backend.runtime.compiling.compile import (
        compile_kernel,  # here, since a warm start needs no compiler
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
        name = file_name(kernel.plan)
        raise BuildError(str(error).replace(str(path), name) + f" ({name} was edited)") from error


_Made = TypeVar("_Made")


def _attempted(builder: Callable[[KernelCache, Kernel], _Made], kernel: Kernel) -> _Made:
    """The result of a builder for a kernel. If a folder can't be written, or is full, the next one is tried.
    One that is removed meanwhile is made again, once. Raises BuildError, UnavailableError."""
    made_again = set[KernelCache]()
    while True:
        try:
            cache = writable_cache()
        except OSError as error:
            raise BuildError(f"{kernel.name} has no folder to be built in: {error}") from error
        try:
            return builder(cache, kernel)
        except FileNotFoundError as error:
            if cache in made_again:
                raise removed(kernel) from error
            made_again.add(cache)
        except OSError as error:
            cache.give_up_writing(out_of_space(error) or error)


def _build_in_process(cache: KernelCache, kernel: Kernel) -> None:
    """`build_into` in a process of its own."""
    _run_worker(cache, kernel)


def _compile_in_process(cache: KernelCache, kernel: Kernel) -> Built:
    """`compiled` in a process of its own."""
    with cache.watched(), scratch_folder(cache.root) as scratch:
        result = scratch / "built"
        _run_worker(cache, kernel, str(result))
        return Built.from_json(result.read_text())


def _run_worker(cache: KernelCache, kernel: Kernel, *arguments: str) -> None:
    """Runs `worker` on a kernel, and once more if its process crashes or hangs. Raises BuildError, and
    OSError if the cache can't take the kernel: a FileNotFoundError if its folder was removed meanwhile."""
    asked = kernel.arch, (str(cache.root), *arguments), json.dumps(kernel.to_dict()), MAX_SECONDS
    with cache.watched() as is_removed:
        ended = None
        try:
            ended = forked(*asked)
            if ended is None:
                count("unforked")
        except subprocess.TimeoutExpired:
            log.info("%s was not compiled within %g seconds", kernel.name, MAX_SECONDS)
        if not is_removed() and (ended is None or ended.crashed):
            if ended is not None:
                log.info("%s, and is tried again", _crash(kernel, ended))
            ended = _started_for(kernel, asked, is_removed)
        if (ended is None or ended.status) and is_removed():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(cache.root))
    assert ended is not None
    if ended.status == UNWRITABLE:
        number, _, what = ended.message.partition(" ")
        raise OSError(int(number), what)
    if ended.status:
        raise BuildError(ended.message if ended.status == UNBUILT else _crash(kernel, ended))


def _started_for(
    kernel: Kernel, asked: tuple[Arch, Sequence[str], str, float], is_removed: Callable[[], bool]
) -> Ended:
    """A worker in a process that is started for it. Raises BuildError, and OSError if the folder was
    removed."""
    try:
        return started(*asked)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{kernel.name} was not compiled within {error.timeout:g} seconds") from error
    except OSError as error:
        if is_removed():
            raise
        raise BuildError(
            f"kernels are compiled in processes, and none can be started for {kernel.name}: {error}"
        ) from error


def _crash(kernel: Kernel, ended: Ended) -> str:
    by = f"was ended by {signal.Signals(-ended.status).name}" if ended.status < 0 else "crashed"
    return f"the compiler of {kernel.name} {by}: {ended.message}"
