"""Forks while other threads are at work: the child finds every lock free, and spares what is its parent's."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import pytest

import cute_backend.runtime
from cute_backend.runtime.calls import spec_kernels
from cute_backend.runtime.calls.prepare import prepare
from cute_backend.runtime.compiling import build as building
from cute_backend.runtime.compiling import workers
from cute_backend.runtime.compiling.build import load_known, obtain
from cute_backend.runtime.disk import cache as caching
from cute_backend.runtime.disk.cache import KernelCache, writable_cache
from cute_backend.runtime.host import notices
from cute_backend.runtime.kernels.kernel import Kernel
from support.runtime.forks import in_child
from support.runtime.handmade import kernel_of, make_spec

KERNEL = kernel_of(make_spec())
LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)


@contextmanager
def held_elsewhere(*locks: threading.Lock) -> Iterator[None]:
    """Locks that another thread holds."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        taken.set()
        done.wait()
        for lock in locks:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    yield
    done.set()
    thread.join()


def every_lock() -> dict[str, threading.Lock]:
    """Those of modules and of cached properties, in the whole runtime."""
    found = {}
    for info in pkgutil.walk_packages(cute_backend.runtime.__path__, "cute_backend.runtime."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if isinstance(value, LOCKS):
                found[f"{info.name}.{name}"] = value
            for each in vars(value).values() if isinstance(value, type) else ():
                if isinstance(each, cached_property) and hasattr(each, "lock"):
                    found[f"{info.name}.{name}.{each.attrname}"] = each.lock
    return found


def test_no_lock_of_the_runtime_is_held_in_a_child() -> None:
    locks = every_lock()
    names = (
        "compiling.build._loading",
        "compiling.workers._starting",
        "calls.spec_kernels.STATE",
        "compiling.compile._DSL",
        "disk.cache._making",
    )
    assert {f"cute_backend.runtime.{name}" for name in names} <= set(locks)
    assert sys.version_info >= (3, 12) or "cute_backend.runtime.kernels.kernel.Kernel.name" in locks
    held = {id(lock): lock for lock in locks.values() if lock is not workers._starting}  # a fork waits for it
    with held_elsewhere(*held.values()):
        stuck = in_child(lambda: [name for name, lock in locks.items() if not lock.acquire(blocking=False)])
        assert not building._loading.acquire(blocking=False)  # the parent's are as they were
    assert stuck == "[]"


def test_a_child_loads_while_its_parent_was_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(tmp_path / "kernels"))
    with held_elsewhere(building._loading, building._queue._changed, spec_kernels.STATE):
        assert in_child(lambda: load_known([KERNEL])) == "{}"
        assert "hangs" not in in_child(lambda: prepare([], -1))


def test_a_child_compiles_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does its parent. A lock that the DSL's native code held in another thread when the process was
    forked is never released."""
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(building, "_loaded", {})

    def refuse(name: str) -> Callable[[KernelCache, Kernel], None]:
        def builder(cache: KernelCache, kernel: Kernel) -> None:
            raise building.BuildError(name)

        return builder

    monkeypatch.setattr(building, "build_into", refuse("here"))
    monkeypatch.setattr(building, "_build_in_process", refuse("apart"))
    assert "apart" in str(obtain([KERNEL])[KERNEL])
    assert "apart" in in_child(lambda: obtain([KERNEL])[KERNEL])


def test_a_child_leaves_its_parents_folder_and_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = tmp_path / "kernels"
    refused.mkdir()
    refused.chmod(0o777)
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(refused))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    removals: list[tuple[object, ...]] = []
    monkeypatch.setattr(caching.atexit, "register", lambda *call: removals.append(call))
    caching._cache_at.cache_clear()
    caching._own.clear()
    with pytest.warns(RuntimeWarning, match="can't be trusted"):
        ours = writable_cache().root
    ((remove, *arguments),) = removals

    def child() -> bool:
        theirs = writable_cache().root
        remove(*arguments)
        return ours.is_dir() and theirs != ours

    assert in_child(child) == "True"
    assert writable_cache().root == ours
    remove(*arguments)
    assert not ours.exists()
    caching._own.clear()
    caching._cache_at.cache_clear()


def test_a_process_of_multiprocessing_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels").touch()
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(notices, "_warned", {("cache folder", tmp_path / "kernels")})
    context = multiprocessing.get_context("fork")
    theirs, ours = context.Pipe()
    child = context.Process(target=lambda: ours.send((os.getpid(), writable_cache().root.is_dir())))
    child.start()
    assert theirs.recv() == (child.pid, True)
    child.join()
    assert [path.name for path in tmp_path.iterdir()] == ["kernels"]
