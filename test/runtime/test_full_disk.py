"""Out of space: the process works from memory, warns once, and leaves nothing half-made."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cute_backend.errors import BuildError
from cute_backend.planning import Alignment
from cute_backend.runtime.compiling import build as building
from cute_backend.runtime.compiling import compile as compiling
from cute_backend.runtime.compiling import worker, workers
from cute_backend.runtime.compiling.build import obtain
from cute_backend.runtime.disk import cache as caching
from cute_backend.runtime.disk.cache import KernelCache, caches
from cute_backend.runtime.host import notices
from cute_backend.runtime.host import private_folder as host_folders
from cute_backend.runtime.host.private_folder import private_folder
from cute_backend.runtime.host.space import check_room, out_of_space
from cute_backend.runtime.kernels import link as linking
from cute_backend.runtime.kernels.built import Built
from cute_backend.runtime.tuning import tuning_results
from support.compile_once import afresh as compile_kernel
from support.compile_once import build_here
from support.runtime.handmade import kernel_of, make_spec, source
from support.runtime.warned import runtime_warnings

KERNELS = [kernel_of(make_spec(), alignment=alignment) for alignment in Alignment]
KERNEL = KERNELS[0]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    path = tmp_path_factory.mktemp("built") / "kernel.py"
    path.write_text(source(KERNEL.plan.spec))
    return compile_kernel(KERNEL, source(KERNEL.plan.spec), path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Built) -> Iterator[Path]:
    """A cache folder of the test's own, a temporary one and one in memory; a compiler that is quick."""
    root = tmp_path / "kernels"
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(root))
    monkeypatch.setattr(building, "_loaded", {})
    monkeypatch.setattr(notices, "_warned", set())
    monkeypatch.setattr("cute_backend.memory_ops.emit.emit", lambda plan, *how: source(plan.spec))
    monkeypatch.setattr("cute_backend.runtime.compiling.compile.compile_kernel", lambda *arguments: built)
    monkeypatch.setattr(caching, "_own", [])
    for name in ("temporary", "memory"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(host_folders, "_MEMORY", str(tmp_path / "memory"))
    caching._cache_at.cache_clear()
    yield root
    caching._cache_at.cache_clear()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process, and of those that it starts, gets longer: a limit of the system's."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full(monkeypatch: pytest.MonkeyPatch, *folders: Path, number: int = errno.ENOSPC) -> None:
    """Have nothing written in some folders, by this process, which builds the kernels."""
    build_here(monkeypatch)
    write, make = Path.write_bytes, tempfile.mkstemp

    def is_full(path: Any) -> bool:
        return any(Path(path).is_relative_to(folder) for folder in folders)

    def write_bytes(path: Path, content: bytes) -> int:
        if is_full(path):
            raise OSError(number, os.strerror(number), str(path))
        return write(path, content)

    def mkstemp(prefix: str, dir: Path) -> tuple[int, str]:
        if is_full(dir):
            raise OSError(number, os.strerror(number), str(dir))
        return make(prefix=prefix, dir=dir)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    monkeypatch.setattr(caching.tempfile, "mkstemp", mkstemp)


def what_is_left(folder: Path) -> list[str]:
    """All but locks, which are never removed."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


@pytest.mark.sweep(14)
@pytest.mark.parametrize("part", range(41))
def test_wherever_space_ends_a_kernel_is_whole_or_absent(part: int, folder: Path, built: Built) -> None:
    """Its object, its library, which the linker writes, and its entry, with less than all of the space."""
    cache = KernelCache(folder)
    size = max(len(built.host_object), 1) * part // 20
    try:
        with largest_file(size):
            cache.save(KERNEL, built)
    except OSError as error:
        assert out_of_space(error) is error
        assert what_is_left(folder) == []
    else:
        assert [Path(name).suffix for name in what_is_left(folder)] == [".json", ".so"]
        assert cache.load(KERNEL) is not None
        assert part > 5
    assert notices._warned == set()


def test_a_link_without_space_is_no_missing_linker(folder: Path, built: Built) -> None:
    """All of the object fits, and nothing more does."""
    work = KernelCache(folder).root
    (work / "code.o").write_bytes(built.host_object)
    with largest_file(len(built.host_object) // 2), pytest.raises(OSError, match="File too large"):
        linking.link(work / "code.o", work / "code.so")
    assert what_is_left(work) == ["code.o"]
    assert linking.link(work / "code.o", work / "code.so")


def test_a_linker_that_fails_for_another_reason_is_none(tmp_path: Path) -> None:
    (tmp_path / "code.o").write_bytes(b"no object")
    assert not linking.link(tmp_path / "code.o", tmp_path / "code.so")
    assert what_is_left(tmp_path) == ["code.o"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_cache_folder(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch, folder, number=number)
    with pytest.warns(RuntimeWarning, match=f"it is out of space: {os.strerror(number)}") as warned:
        for kernel in KERNELS:
            assert callable(obtain([kernel])[kernel])
    assert len(runtime_warnings(warned)) == 1 and what_is_left(folder) == []
    user, own = caches()
    assert user.root == folder and own.root.parent.name == "temporary"
    assert all(own.read(kernel) for kernel in KERNELS)


def test_a_full_disk_leaves_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = folder.parent / "temporary"
    full(monkeypatch, folder, temporary)
    with pytest.warns(RuntimeWarning, match="it is out of space") as warned:
        for kernel in KERNELS:
            assert callable(obtain([kernel])[kernel])
    assert len(runtime_warnings(warned)) == 1 and what_is_left(folder) == [] == what_is_left(temporary)
    assert caches()[-1].root.parent.name == "memory"


def test_space_that_ends_in_the_temporary_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There was room when it was made, and there is none when a kernel comes."""
    full(monkeypatch, folder)
    with pytest.warns(RuntimeWarning, match="it is out of space"):
        obtain([KERNELS[0]])
        full(monkeypatch, folder, folder.parent / "temporary")
        assert callable(obtain([KERNELS[1]])[KERNELS[1]])
    assert [cache.writable for cache in caches()] == [False, False, True]
    assert caches()[-1].root.parent.name == "memory"


def test_no_space_anywhere_is_a_build_that_failed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch, folder.parent)
    with pytest.warns(RuntimeWarning, match="it is out of space"):
        outcomes = obtain([KERNEL])
    assert isinstance(outcomes[KERNEL], BuildError)
    assert "has no folder to be built in: " in str(outcomes[KERNEL])
    assert "No space left" in str(outcomes[KERNEL])
    assert what_is_left(folder) == []


def test_the_compilers_lack_of_space_is_no_fault_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernel.py"
    path.touch()

    def fail(*arguments: object) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("the compiler's own words") from error

    monkeypatch.setattr(compiling, "_import_source", fail)
    with pytest.raises(OSError, match="No space left"):
        compile_kernel(KERNEL, "", path)
    monkeypatch.setattr(compiling, "_import_source", lambda *arguments: None)
    with pytest.raises(BuildError), largest_file(2 << 20):
        compile_kernel(KERNEL, "", path)
    with pytest.raises(OSError, match="File too large"), largest_file(1 << 19):
        compile_kernel(KERNEL, "", path)
    monkeypatch.setattr(compiling, "_compile", lambda *arguments: None)
    monkeypatch.setattr(compiling, "_collect", lambda *arguments: None)
    with pytest.raises(OSError, match="File too large"), largest_file(1 << 19):
        compile_kernel(KERNEL, "", path)  # what it left may be half of it, and it does not say so
    assert what_is_left(tmp_path) == ["kernel.py"]


def test_a_worker_without_space_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_space(cache: KernelCache, kernel: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded", "somewhere")

    monkeypatch.setattr(worker, "build_into", no_space)
    monkeypatch.setattr(sys, "argv", ["worker", str(folder)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(KERNEL.to_dict())))
    status = worker.main()
    said = capsys.readouterr().out

    ended = workers.Ended(status, said.splitlines()[-1])
    monkeypatch.setattr(building, "forked", lambda *asked: ended)
    with pytest.raises(OSError) as raised:
        building._build_in_process(KernelCache(folder), KERNEL)
    assert out_of_space(raised.value) and raised.value.strerror == "Disk quota exceeded"


def test_a_process_that_can_not_be_started_is_no_full_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(command: list[str], **how: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    workers.end_all()
    monkeypatch.setattr(workers.subprocess, "Popen", start)
    outcomes = obtain(KERNELS)
    assert all("none can be started" in str(outcome) for outcome in outcomes.values())
    assert caches()[0].writable and notices._warned == set()


def test_what_is_tuned_needs_no_lock_and_no_space(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch, folder)

    def no_lock(cache: KernelCache, name: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(KernelCache, "lock_named", no_lock)
    memory, key = (
        tuning_results.remembered(),
        tuning_results.Key(KERNEL.plan.spec, KERNEL.plan.alignment, 64, 128, 64, "a GPU"),
    )
    with (
        memory.exclusively(0.0) as alone,
        pytest.warns(RuntimeWarning, match="forgotten when this process ends"),
    ):
        assert alone  # as far as can be known
        memory.put({key: tuning_results.Result(KERNEL.plan.tile, 1.0, None)})
    assert tuning_results.remembered().get(key) is not None
    assert what_is_left(folder) == []


def test_temporary_folders_that_others_may_write_are_passed_over(folder: Path) -> None:
    (folder.parent / "temporary").chmod(0o777)
    assert private_folder(10).parent.name == "memory"
    (folder.parent / "temporary").chmod(0o1777)
    assert private_folder(10).parent.name == "temporary"
    with pytest.raises(OSError, match="did not take a kernel"):
        private_folder(10, without=[folder.parent / "temporary", folder.parent / "memory"])


def test_what_room_is_checked_for_goes_again(tmp_path: Path) -> None:
    check_room(tmp_path, 100)
    with largest_file(50), pytest.raises(OSError):
        check_room(tmp_path, 100)
    assert list(tmp_path.iterdir()) == []


def test_errors_that_are_no_lack_of_space() -> None:
    assert out_of_space(None) is None and out_of_space(ValueError()) is None
    assert out_of_space(PermissionError(errno.EACCES, "Permission denied")) is None
