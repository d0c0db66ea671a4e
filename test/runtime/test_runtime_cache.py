"""Compiled kernels on disk: what finds them again, what is refused, and what survives what."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.utils import counters

from cute_backend import config
from cute_backend.errors import BuildError
from cute_backend.memory_ops.emit import emit
from cute_backend.planning import Alignment, Arch, plan, tile_table
from cute_backend.runtime.compiling import build as building
from cute_backend.runtime.compiling.build import build_into, load_known, obtain
from cute_backend.runtime.compiling.compile import compile_kernel
from cute_backend.runtime.disk import cache as caching
from cute_backend.runtime.disk.cache import CacheFolderError, KernelCache
from cute_backend.runtime.host import notices
from cute_backend.runtime.kernels import kernel as naming
from cute_backend.runtime.kernels import link as linking
from cute_backend.runtime.kernels.built import Built
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.spec import DType, EpilogueSpec, LoadKind, Major, Order, Stride
from support.archs import COMPILED
from support.compile_once import build_here
from support.imports import reached_from
from support.runtime import build_once
from support.runtime.handmade import kernel_of, make_spec, source
from support.runtime.other_users import OTHER, as_root, run_as, shared  # noqa: F401
from support.runtime.warned import runtime_warnings

SPEC = make_spec()
KERNEL = kernel_of(SPEC)
SCRIPT = Path(build_once.__file__)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, in a process that knows no kernel and has warned of nothing."""
    root = tmp_path / "kernels"
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(root))
    monkeypatch.setattr(building, "_loaded", {})
    monkeypatch.setattr(notices, "_warned", set())
    monkeypatch.setattr("cute_backend.memory_ops.emit.emit", lambda plan, *how: source(plan.spec))
    monkeypatch.setattr(caching, "_own", [])
    caching._cache_at.cache_clear()
    counters.clear()
    yield root
    caching._cache_at.cache_clear()
    counters.clear()


@pytest.fixture
def compilations(compiled_here: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are compiled, all by this process."""
    build_here(monkeypatch)
    return compiled_here


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that this process compiles."""
    names: list[str] = []

    def counting(kernel: Kernel, text: str, path: Path) -> Built:
        names.append(kernel.name)
        return compile_kernel(kernel, text, path)

    monkeypatch.setattr("cute_backend.runtime.compiling.compile.compile_kernel", counting)
    return names


def start(root: Path, kernels: int = 1) -> subprocess.Popen[str]:
    surroundings = {
        **os.environ,
        "CUTE_BACKEND_CACHE_DIR": str(root),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(kernels)], env=surroundings, stdout=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


def forget() -> None:
    """Forgets all kernels, as a new process."""
    building._loaded.clear()
    notices._warned.clear()


# Finding kernels again


def test_a_second_process_loads_what_the_first_compiled_without_the_dsl(folder: Path) -> None:
    first, second = finish(start(folder)), finish(start(folder))
    assert (first["compiled"], first["loaded"]) == (1, 1)
    assert (second["compiled"], second["loaded"]) == (0, 1)
    assert second["imported_cutlass"] is False
    assert first["warnings"] == second["warnings"] == []


@pytest.mark.exhaustive
def test_of_two_processes_at_once_one_compiles(folder: Path) -> None:
    reports = [finish(process) for process in [start(folder, 2), start(folder, 2)]]
    assert [report["loaded"] for report in reports] == [2, 2]
    assert sum(report["compiled"] for report in reports) == 2
    assert all(report["warnings"] == [] for report in reports)


def test_an_entry_can_be_inspected(folder: Path, compilations: list[str]) -> None:
    obtain([KERNEL])
    assert (folder / f"{KERNEL.name}.py").read_text() == source(SPEC)
    entry = json.loads((folder / f"{KERNEL.name}.json").read_text())
    assert Kernel.from_dict(entry["kernel"]) == KERNEL
    assert entry["spill_bytes"] == 0 and entry["registers"] > 0
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not list(folder.glob("new-*"))


def test_a_process_loads_a_kernel_once(folder: Path, compilations: list[str]) -> None:
    first = obtain([KERNEL])[KERNEL]
    for path in folder.iterdir():
        path.unlink()
    assert obtain([KERNEL])[KERNEL] is first
    assert compilations == [KERNEL.name]
    assert counters["cute_backend"]["kernels_built"] == 1


def changed_op(spec: EpilogueSpec) -> EpilogueSpec:
    return replace(spec, ops=(*spec.ops[:-1], replace(spec.ops[-1], op="sub")))


@pytest.mark.parametrize(
    "other",
    [
        kernel_of(changed_op(SPEC)),
        kernel_of(make_spec(store=DType.F16)),
        kernel_of(make_spec(order=Order.COLUMN)),
        kernel_of(make_spec(b_major=Major.MN)),
        kernel_of(SPEC, alignment=Alignment.PLAIN),
        kernel_of(SPEC, index=1),
        kernel_of(SPEC, arch=Arch.SM100A),
    ],
    ids=["op", "store dtype", "store order", "operand major", "alignment", "tile", "architecture"],
)
def test_whatever_changes_a_kernel_changes_its_name(other: Kernel) -> None:
    assert other.name != KERNEL.name


def test_the_spec_changes_a_name_by_its_meaning_alone() -> None:
    assert kernel_of(EpilogueSpec.from_json(SPEC.to_json())).name == KERNEL.name
    load = SPEC.loads_of(LoadKind.COLVEC)[0]
    loads = tuple(replace(item, stride_m=Stride.ONE) if item is load else item for item in SPEC.loads)
    assert kernel_of(replace(SPEC, loads=loads)).name != KERNEL.name


@pytest.mark.parametrize("part", range(len(naming.environment())))
def test_another_version_of_anything_is_a_miss(
    part: int, folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    obtain([kernel_of(SPEC)])
    forget()
    surroundings = list(naming.environment())
    surroundings[part] += " (another)"
    for module in (naming, caching):
        monkeypatch.setattr(module, "environment", lambda: tuple(surroundings))
    assert load_known([kernel_of(SPEC)]) == {}
    assert notices._warned == set()


def test_the_version_follows_every_source_that_makes_the_code_of_kernels() -> None:
    root = naming._PACKAGE
    folders = ("memory_ops", "planning", "templates")
    reached = reached_from(path for folder in folders for path in root.rglob(f"{folder}/**/*.py"))
    left_out = {path.relative_to(root).as_posix() for path in reached - set(naming.code_sources())}
    assert {each for each in left_out if not each.startswith("runtime/")} == SAY_NOTHING


SAY_NOTHING = {"config.py", "errors.py", "variables.py"}
"""Settings, which a plan has as far as they decide it, and texts of errors."""


def test_the_sources_that_make_kernels_are_part_of_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = naming._source_digest()
    package = tmp_path / "cute_backend"
    for path in (naming._PACKAGE).rglob("*.py"):
        copy = package / path.relative_to(naming._PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(naming, "_PACKAGE", package)
    assert naming._source_digest() == before
    of_runtime = ("compiling/compile.py", "kernels/host_code.py", "kernels/kernel.py")
    of_runtime = tuple(f"runtime/{each}" for each in of_runtime)
    for makes_code in ("templates/sm90.py", "kinds/reductions/sums.py", "numerics.py", *of_runtime):
        with (package / makes_code).open("a") as file:
            file.write("# changed\n")
        assert naming._source_digest() != before, makes_code
        before = naming._source_digest()


# What is not a sound entry


def put(path: Path, content: bytes) -> None:
    """Another file in the place of `path`, which this process may have mapped."""
    path.unlink()
    path.write_bytes(content)


def truncate_code(folder: Path) -> None:
    path = folder / f"{KERNEL.name}.so"
    put(path, path.read_bytes()[:1000])


def swap_code(folder: Path) -> None:
    put(folder / f"{KERNEL.name}.so", b"\x7fELF and something else")


def truncate_entry(folder: Path) -> None:
    path = folder / f"{KERNEL.name}.json"
    path.write_text(path.read_text()[:100])


def write_list(folder: Path) -> None:
    (folder / f"{KERNEL.name}.json").write_text("[1, 2]")


def rename_another(folder: Path) -> None:
    other = kernel_of(make_spec(second_store=True))
    obtain([other])
    for suffix in (".json", ".so"):
        (folder / f"{other.name}{suffix}").replace(folder / f"{KERNEL.name}{suffix}")


def state_another_version(folder: Path) -> None:
    path = folder / f"{KERNEL.name}.json"
    entry = json.loads(path.read_text())
    entry["environment"][0] = "cute_backend of another time"
    path.write_text(json.dumps(entry))


@pytest.mark.parametrize(
    "damage",
    [truncate_code, swap_code, truncate_entry, write_list, rename_another, state_another_version],
    ids=lambda damage: damage.__name__,
)
def test_what_is_corrupt_or_foreign_is_a_miss_with_one_warning(
    damage: Callable[[Path], None], folder: Path, compilations: list[str]
) -> None:
    obtain([KERNEL])
    damage(folder)
    forget()
    compilations.clear()
    with pytest.warns(RuntimeWarning, match="is not used: .* compiled afresh") as warned:
        assert callable(obtain([KERNEL])[KERNEL])
    assert len(runtime_warnings(warned)) == 1
    assert compilations == [KERNEL.name]
    forget()
    obtain([KERNEL])
    assert compilations == [KERNEL.name]  # what was written in its place is sound


def test_code_without_an_entry_is_no_kernel(folder: Path, compilations: list[str]) -> None:
    obtain([KERNEL])
    (folder / f"{KERNEL.name}.json").unlink()
    forget()
    assert load_known([KERNEL]) == {} and notices._warned == set()


def test_a_writer_killed_at_any_instant_leaves_a_whole_kernel_or_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    obtain([KERNEL])
    text = source(SPEC)
    built = compile_kernel(KERNEL, text, folder / f"{KERNEL.name}.py")
    monkeypatch.setattr("cute_backend.runtime.compiling.compile.compile_kernel", lambda *arguments: built)
    whole = []
    for instant in itertools.count(1):
        shutil.rmtree(folder)
        survived = build_until(instant, folder)
        forget()
        whole.append(load_known([KERNEL]) != {})
        assert notices._warned == set(), instant
        if survived:
            break
    assert len(whole) > 10 and not whole[0] and whole[-1]


def build_until(instant: int, folder: Path) -> bool:
    """Build in a process that is killed at its `instant`-th system call of interest; whether it lived."""
    child = os.fork()
    if child == 0:
        left = itertools.count(instant, -1)

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            if event.split(".")[0] in ("open", "os", "tempfile", "subprocess", "shutil") and next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        build_into(KernelCache(folder), KERNEL)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


# Folders


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(CacheFolderError, match=r"can't be trusted: others may write .* \(mode 777\)"):
        KernelCache(tmp_path)


@as_root
def test_a_folder_that_another_user_owns_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, OTHER, OTHER)
    with pytest.raises(CacheFolderError, match=f"{tmp_path} belongs to user {OTHER}, not to root"):
        KernelCache(tmp_path)


def test_a_folder_below_one_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(CacheFolderError, match=r"others may write .*/cache \(mode 777\)"):
        KernelCache(tmp_path / "cache" / "kernels")


def test_folders_above_are_made_for_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        KernelCache(tmp_path / "home" / ".cache" / "kernels")
    finally:
        os.umask(before)
    assert (tmp_path / "home" / ".cache").stat().st_mode & 0o777 == 0o755


@as_root
def test_a_cache_of_roots_is_read_by_another_user(shared: Path) -> None:  # noqa: F811
    root = shared / "kernels"
    KernelCache(root)
    root.chmod(0o755)
    assert (
        run_as(OTHER, lambda: (KernelCache(root).writable, KernelCache(root).load(KERNEL))) == "(False, None)"
    )
    assert root.stat().st_mode & 0o777 == 0o755


def test_a_folder_that_others_may_read_is_closed_to_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    KernelCache(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_without_a_folder_kernels_are_compiled_for_the_process_with_one_warning(
    folder: Path, compilations: list[str]
) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others may write .* compiled anew in each process") as warned:
        kernels = [KERNEL, kernel_of(make_spec(second_store=True))]
        for kernel in kernels:
            assert callable(obtain([kernel])[kernel])
    assert len(runtime_warnings(warned)) == 1
    assert list(folder.iterdir()) == []


def test_a_file_in_the_folders_place_is_no_crash(folder: Path, compilations: list[str]) -> None:
    folder.write_text("not a folder")
    with pytest.warns(RuntimeWarning, match="can't be used: "):
        assert callable(obtain([KERNEL])[KERNEL])


def test_a_folder_whose_name_has_a_quote_is_passed_over(
    folder: Path, compilations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is the temporary one. MLIR ends the text of an option at the quote (4.8.1)."""
    for name in ("one's kernels", "one's temporary files"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(tmp_path / "one's kernels"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "one's temporary files"))
    with pytest.warns(RuntimeWarning, match="can't be written .the compiler takes no name with a quote"):
        assert callable(obtain([KERNEL])[KERNEL])
    *refused, used = caching.caches()
    assert [cache.writable for cache in refused] == [False, False]
    assert "'" not in str(used.root) and used.has(KERNEL)


def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom no list of users has, as in a container, and no variable that names a home."""

    def unknown(user: int) -> None:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME", "CUTE_BACKEND_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


def a_folder_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def cwd() -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", "kernels")
    monkeypatch.setattr(os, "getcwd", cwd)


@pytest.mark.parametrize("lacking", [no_home, a_folder_that_is_gone], ids=lambda lacking: lacking.__name__)
def test_a_user_without_a_cache_folder_compiles_with_one_warning(
    lacking: Callable[[pytest.MonkeyPatch], None],
    folder: Path,
    compilations: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking(monkeypatch)
    assert caching.existing_caches() == []
    with pytest.warns(RuntimeWarning, match="there is no cache folder: .* compiled anew") as warned:
        assert callable(obtain([KERNEL])[KERNEL])
    assert len(runtime_warnings(warned)) == 1


@as_root
def test_the_home_of_another_user_is_no_cache_folder(
    shared: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a container is root's image, and runs as somebody else."""
    (shared / "home").mkdir(mode=0o700)
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(shared / "home" / "kernels"))
    monkeypatch.setattr(notices, "_warned", {("cache folder", shared / "home" / "kernels")})
    assert run_as(OTHER, lambda: (caching.existing_caches(), caching.caches())) == "([], [])"


def test_a_read_only_folder_is_read_and_warned_of_once(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = kernel_of(make_spec(second_store=True))
    obtain([KERNEL])
    forget()
    compilations.clear()
    caching._cache_at.cache_clear()
    before = sorted(folder.iterdir())
    folder.chmod(0o500)
    if os.geteuid() == 0:  # whom no mode keeps out
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
    try:
        with pytest.warns(RuntimeWarning, match="can't be written .it is read-only") as warned:
            outcomes = [obtain([kernel])[kernel] for kernel in (KERNEL, other, other)]
    finally:
        folder.chmod(0o700)
    assert len(runtime_warnings(warned)) == 1 and all(map(callable, outcomes))
    assert compilations == [other.name]
    assert sorted(folder.iterdir()) == before


def test_a_full_disk_costs_the_cache_not_the_kernel(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = KernelCache.save

    def full(cache: KernelCache, kernel: Kernel, built: Built) -> None:
        if cache.root == folder:
            raise OSError(28, "No space left on device")
        save(cache, kernel, built)

    monkeypatch.setattr(KernelCache, "save", full)
    with pytest.warns(RuntimeWarning, match="can't be written .it is out of space: No space left") as warned:
        assert callable(obtain([KERNEL])[KERNEL])
    assert len(runtime_warnings(warned)) == 1


# Building


def test_without_a_linker_the_dsl_loads_the_object(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linking, "find_linker", lambda: None)
    assert callable(obtain([KERNEL])[KERNEL])
    assert {path.suffix for path in folder.iterdir()} >= {".o", ".json"}
    assert not (folder / f"{KERNEL.name}.so").exists()
    forget()
    assert callable(obtain([KERNEL])[KERNEL])
    assert compilations == [KERNEL.name]


def test_a_loaded_kernel_checks_what_it_is_given(folder: Path, compilations: list[str]) -> None:
    import torch

    a, b = torch.zeros(2, 8).bfloat16(), torch.zeros(16, 8).bfloat16().t()
    plane = torch.zeros(2, 16).bfloat16()
    loads = [torch.zeros(1), torch.zeros(16), torch.zeros(2), plane]
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        obtain([KERNEL])[KERNEL](a, b, *loads, plane, 132)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("arch", COMPILED)
def test_several_generated_kernels_are_built_in_processes_of_their_own(
    arch: Arch, folder: Path, compiled_here: list[str]
) -> None:
    # What this process would put in the place of generated text does not reach another.
    kernels = [Kernel(plan(SPEC, tile_table(arch, SPEC)[-1], alignment)) for alignment in Alignment]
    outcomes = obtain(kernels)
    assert all(callable(outcomes[kernel]) for kernel in kernels), outcomes
    assert compiled_here == []
    for kernel in kernels:
        text = (folder / f"{kernel.name}.py").read_text()
        assert text == emit(kernel.plan)
        entry = json.loads((folder / f"{kernel.name}.json").read_text())
        assert entry["spill_bytes"] == 0 and entry["smem_bytes"] > 0


@pytest.mark.filterwarnings("ignore:cute_backend")
def test_what_goes_wrong_in_another_process_is_told(folder: Path) -> None:
    kernels = [replace(KERNEL, edited=f"raise RuntimeError('{word}')") for word in ("one", "two")]
    for (kernel, outcome), word in zip(obtain(kernels).items(), ("one", "two"), strict=True):
        assert isinstance(outcome, BuildError)
        assert kernel.name in str(outcome) and f"does not compile: RuntimeError: {word}" in str(outcome)


def test_a_failed_build_leaves_no_entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cute_backend.memory_ops.emit.emit", lambda plan, *how: "raise RuntimeError('no')")
    with pytest.raises(BuildError, match="does not compile: RuntimeError: no"):
        build_into(KernelCache(folder), KERNEL)
    # Python may keep the bytecode of a module that it has imported.
    assert {path.suffix for path in folder.iterdir() if path.name != "__pycache__"} <= {".py", ".lock"}


def test_the_number_of_compiling_processes_is_a_setting() -> None:
    assert building.most_at_once() == len(os.sched_getaffinity(0))
    with config.patch(compile_jobs=3):
        assert building.most_at_once() == 3
