"""Kernels are compiled in processes of their own: what ends these, and folders that are removed meanwhile."""

from __future__ import annotations

import errno
import json
import pickle
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.utils import counters

from cute_backend import aot
from cute_backend.errors import BuildError
from cute_backend.planning import Alignment
from cute_backend.runtime.compiling import build as building
from cute_backend.runtime.compiling import compile as compiling
from cute_backend.runtime.compiling import workers
from cute_backend.runtime.compiling.build import build, obtain
from cute_backend.runtime.disk import cache as caching
from cute_backend.runtime.disk.cache import KernelCache
from cute_backend.runtime.host import notices
from cute_backend.runtime.kernels.built import Built
from cute_backend.runtime.kernels.kernel import Kernel
from support.compile_once import afresh, apart
from support.runtime import planted_worker
from support.runtime.forks import in_child
from support.runtime.handmade import kernel_of, make_spec
from support.runtime.planted_worker import UNFORKED

SPEC = make_spec()
KERNEL = kernel_of(SPEC)
KERNELS = [KERNEL, kernel_of(SPEC, alignment=Alignment.PLAIN)]


@pytest.fixture(scope="module")
def built() -> Built:
    return build(KERNEL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, in a process that knows no kernel and has warned of nothing."""
    root = tmp_path / "kernels"
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(root))
    monkeypatch.setattr(building, "_loaded", {})
    monkeypatch.setattr(building, "_compile_in_process", apart)
    monkeypatch.setattr(notices, "_warned", set())
    monkeypatch.setattr(caching, "_own", [])
    caching._cache_at.cache_clear()
    counters.clear()
    yield root
    caching._cache_at.cache_clear()
    counters.clear()


Plant = Callable[..., Path]


@pytest.fixture(scope="module")
def planted_servers() -> Iterator[None]:
    """Tests share servers with faulty workers, since one takes 2.4 seconds to start."""
    yield
    workers.end_all()


@pytest.fixture
def plant(
    planted_servers: None, tmp_path: Path, folder: Path, built: Built, monkeypatch: pytest.MonkeyPatch
) -> Plant:
    """Makes the workers of this process faulty, and returns the file that counts them."""
    pickled, counter = tmp_path / "built", tmp_path / "counter"
    pickled.write_bytes(pickle.dumps(built))
    counter.touch()

    def planted(stage: str, times: int = 1) -> Path:
        kind = UNFORKED if stage == UNFORKED else "forks"

        def command_of(module: str, *arguments: str) -> list[str]:
            return [sys.executable, str(Path(planted_worker.__file__)), kind, module, *arguments]

        monkeypatch.setenv(planted_worker.PLAN, json.dumps([stage, times, str(counter), str(pickled)]))
        monkeypatch.setattr(workers, "command_of", command_of)
        return counter

    return planted


# What ends a process


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kernels", [KERNELS[:1], KERNELS], ids=["one", "several"])
@pytest.mark.parametrize(
    ("stage", "how"),
    [
        ("abort", "was ended by SIGABRT: "),
        ("kill", "was ended by SIGKILL: "),
        ("memory", "crashed: MemoryError"),
    ],
)
def test_a_compiler_that_ends_twice_is_a_build_that_failed(
    plant: Plant, stage: str, how: str, kernels: list[Kernel]
) -> None:
    plant(stage, times=2 * len(kernels))
    for kernel, outcome in obtain(kernels).items():
        assert isinstance(outcome, BuildError)
        assert str(outcome).startswith(f"the compiler of {kernel.name} {how}")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", ["abort", "kill", "memory"])
def test_a_compiler_that_ends_once_is_tried_again(plant: Plant, stage: str) -> None:
    processes = plant(stage)
    assert callable(obtain([KERNEL])[KERNEL])
    assert processes.read_text().splitlines() == [stage, stage]
    assert "builds_failed" not in counters["cute_backend"]


def test_the_compiler_of_build_does_not_end_the_program(plant: Plant) -> None:
    plant("abort", times=2)
    with pytest.raises(BuildError, match="was ended by SIGABRT"):
        build(KERNEL)


def test_a_compiler_that_hangs_is_ended(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant("hang", times=9)
    monkeypatch.setattr(building, "MAX_SECONDS", 0.001)
    with pytest.raises(BuildError, match=f"^{KERNEL.name} was not compiled within 0.001 seconds$"):
        build(KERNEL)


def test_a_compiler_that_hangs_once_is_tried_again(
    plant: Plant, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("none")
    monkeypatch.setattr(building, "forked", lambda *asked: workers.forked(*asked[:-1], 0.001))
    assert build(KERNEL) == built


def test_a_server_that_cannot_fork_is_done_without(plant: Plant, built: Built) -> None:
    forks = plant(UNFORKED)
    assert build(KERNEL) == built
    assert forks.read_text().splitlines() == [UNFORKED]


def test_two_processes_that_want_a_kernel_compile_it_once(plant: Plant) -> None:
    compilations = plant("abort", times=0)
    outcomes: list[object] = []
    here = threading.Thread(target=lambda: outcomes.extend(obtain([KERNEL]).values()))
    here.start()
    assert in_child(lambda: callable(obtain([KERNEL])[KERNEL])) == "True"
    here.join()
    assert all(map(callable, outcomes)) and len(outcomes) == 1
    assert compilations.read_text().splitlines() == ["abort"]


def test_what_another_process_builds_meanwhile_is_waited_for(
    folder: Path, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, seeks, lock = KernelCache(folder), threading.Event(), KernelCache.lock

    def compile_it(*arguments: object) -> Built:
        compilations.append(KERNEL)
        seeks.set()
        return built

    def locking(cache: KernelCache, kernel: Kernel) -> Any:
        seeks.set()
        return lock(cache, kernel)

    compilations: list[Kernel] = []
    monkeypatch.setattr(building, "compiled", compile_it)
    with lock(cache, KERNEL):
        monkeypatch.setattr(KernelCache, "lock", locking)
        other = threading.Thread(target=lambda: building.build_into(KernelCache(folder), KERNEL))
        other.start()
        assert seeks.wait(60)
        cache.save(KERNEL, built)
    other.join()
    assert compilations == [] and cache.has(KERNEL)


def test_build_returns_what_its_process_compiled(plant: Plant, built: Built) -> None:
    plant("none")
    assert build(KERNEL) == built


@pytest.mark.parametrize("kernels", [KERNELS[:1], KERNELS], ids=["one", "several"])
def test_without_processes_nothing_is_compiled(
    folder: Path, kernels: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*arguments: object, **how: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    workers.end_all()

    def compile_kernel(*arguments: object) -> None:
        pytest.fail("it was compiled here")

    monkeypatch.setattr(workers.subprocess, "Popen", start)
    monkeypatch.setattr("cute_backend.runtime.compiling.compile.compile_kernel", compile_kernel)
    for kernel, outcome in obtain(kernels).items():
        assert str(outcome) == (
            f"kernels are compiled in processes, and none can be started for {kernel.name}: "
            "[Errno 1] Operation not permitted"
        )
    with pytest.raises(BuildError, match="none can be started"):
        build(KERNEL)


@pytest.mark.parametrize(("executable", "frozen"), [(None, False), ("", False), (sys.executable, True)])
def test_a_program_that_embeds_python_compiles_nothing(
    folder: Path, executable: str | None, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    assert "none can be started" in str(obtain([KERNEL])[KERNEL])
    assert "sys.executable names no interpreter" in str(obtain([KERNEL])[KERNEL])


# Folders that are removed


@pytest.mark.parametrize("stage", ["start", "lock", "load", "write_source", "compile", "save", "end"])
def test_a_folder_that_is_removed_once_is_made_again(plant: Plant, folder: Path, stage: str) -> None:
    processes = plant(stage)
    assert callable(obtain([KERNEL])[KERNEL])
    assert processes.read_text().splitlines() == [stage] * (1 if stage == "lock" else 2)
    assert (folder / f"{KERNEL.name}.json").exists()
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("stage", ["start", "write_source", "end"])
def test_a_folder_that_is_removed_again_and_again_is_named(plant: Plant, folder: Path, stage: str) -> None:
    processes = plant(stage, times=9)
    outcome = obtain([KERNEL])[KERNEL]
    assert str(outcome) == (
        f"{KERNEL.name} was removed from {folder} twice while kernels were built; leave the folder alone "
        "until all are built, or name another one in CUTE_BACKEND_CACHE_DIR"
    )
    assert len(processes.read_text().splitlines()) == 2


def test_build_makes_a_removed_folder_again(plant: Plant, built: Built) -> None:
    plant("compile")
    assert build(KERNEL) == built


def test_kernels_of_which_one_removes_the_folder_are_all_built(plant: Plant) -> None:
    plant("end")
    assert all(callable(outcome) for outcome in obtain(KERNELS).values())


def test_a_folder_that_is_removed_before_a_process_starts_is_made(
    plant: Plant, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("none")
    start, removed = building.started, list[Path]()

    def removing(*asked: Any) -> workers.Ended:
        if not removed:
            removed.append(folder)
            shutil.rmtree(folder)
        return start(*asked)

    monkeypatch.setattr(building, "forked", lambda *asked: None)
    monkeypatch.setattr(building, "started", removing)
    assert callable(obtain([KERNEL])[KERNEL])
    assert removed


@pytest.mark.parametrize("times", [1, 9])
def test_a_kernel_that_is_removed_before_it_is_packed_is_built_again(
    plant: Plant, folder: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    plant("none")
    read, left = aot._read, [times]

    def removing(kernel: Kernel) -> object:
        if left[0]:
            left[0] -= 1
            shutil.rmtree(folder)
        return read(kernel)

    monkeypatch.setattr(aot, "_read", removing)
    if times == 1:
        assert set(aot._compiled([KERNEL])) == {KERNEL}
    else:
        with pytest.raises(BuildError, match=f"was removed from {folder} twice"):
            aot._compiled([KERNEL])


@pytest.mark.parametrize("removed", ["folder", "text"])
def test_a_compiler_whose_files_are_removed_does_not_blame_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: str
) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    path = folder / "kernel.py"
    path.touch()

    def remove(*arguments: object) -> None:
        shutil.rmtree(folder) if removed == "folder" else path.unlink()
        raise RuntimeError("the compiler's own words")

    monkeypatch.setattr(compiling, "_import_source", remove)
    with pytest.raises(FileNotFoundError):
        afresh(KERNEL, "", path)
