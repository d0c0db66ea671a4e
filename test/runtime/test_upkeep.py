"""The cache folder: its limit, what goes and what stays, and what the command says of it."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cute_backend import config
from cute_backend.__main__ import main
from cute_backend.planning import Alignment, Arch, Plan
from cute_backend.runtime.compiling import build as building
from cute_backend.runtime.compiling.build import load_known, obtain
from cute_backend.runtime.compiling.compile import compile_kernel
from cute_backend.runtime.disk import cache as caching
from cute_backend.runtime.disk import upkeep
from cute_backend.runtime.disk.cache import KernelCache
from cute_backend.runtime.disk.upkeep import KEPT_S, Soundness, clear, entries, evict, judge
from cute_backend.runtime.host import notices
from cute_backend.runtime.kernels import link as linking
from cute_backend.runtime.kernels.built import Built
from cute_backend.runtime.kernels.kernel import Kernel
from support.compile_once import build_here
from support.runtime.handmade import kernel_of, make_spec, source
from support.runtime.other_users import OTHER, as_root

KERNELS = [
    kernel_of(make_spec(second_store=second), alignment=alignment, arch=arch)
    for second in (False, True)
    for alignment in Alignment
    for arch in (Arch.SM90A, Arch.SM100A)
]
"""Eight kernels, by name alone: what is written under them is one and the same object, or bytes."""


def emit(plan: Plan, *how: object) -> str:
    return source(plan.spec)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    kernel = KERNELS[0]
    path = tmp_path_factory.mktemp("built") / "kernel.py"
    text = source(kernel.plan.spec)
    path.write_text(text)
    return compile_kernel(kernel, text, path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Built) -> Iterator[Path]:
    """A cache folder of the test's own, and a compiler that takes no time."""
    root = tmp_path / "kernels"
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(root))
    monkeypatch.setattr(building, "_loaded", {})
    monkeypatch.setattr(notices, "_warned", set())
    monkeypatch.setattr("cute_backend.memory_ops.emit.emit", emit)
    monkeypatch.setattr("cute_backend.runtime.compiling.compile.compile_kernel", lambda *arguments: built)
    build_here(monkeypatch)
    caching._cache_at.cache_clear()
    yield root
    caching._cache_at.cache_clear()


def names(root: Path) -> list[str]:
    return [entry.name for entry in entries(root) if entry.is_kernel]


def age(root: Path, kernel: Kernel, seconds: float) -> None:
    """Have a kernel used so long ago."""
    for path in root.glob(f"{kernel.name}.*"):
        os.utime(path, (time.time() - seconds,) * 2)


def written(root: Path, *ages: float) -> KernelCache:
    """A folder with kernels, by the seconds since they were last used."""
    for kernel, seconds in zip(KERNELS, ages, strict=False):
        obtain([kernel])
        age(root, kernel, seconds)
    building._loaded.clear()
    return KernelCache(root)


# The limit


def test_what_was_used_longest_ago_goes_first(folder: Path) -> None:
    cache = written(folder, 2 * KEPT_S, 4 * KEPT_S, 3 * KEPT_S)
    size = max(entry.size for entry in entries(folder))
    assert evict(cache, 3 * size) == []
    assert evict(cache, 2 * size) == [KERNELS[1].name]
    assert names(folder) == [KERNELS[2].name, KERNELS[0].name]
    left = {path.name for path in folder.iterdir() if path.name.startswith(KERNELS[1].name)}
    assert left <= {f"{KERNELS[1].name}.lock"}


def test_a_load_is_a_use(folder: Path) -> None:
    cache = written(folder, 4 * KEPT_S, 3 * KEPT_S)
    assert load_known([KERNELS[0]])
    assert evict(cache, 1) == [KERNELS[1].name]
    assert names(folder) == [KERNELS[0].name]


def test_what_was_used_just_now_stays_whatever_the_limit(folder: Path) -> None:
    cache = written(folder, KEPT_S - 30, 2 * KEPT_S, 0)
    assert evict(cache, 0) == [KERNELS[1].name]


def test_a_kernel_that_someone_writes_is_passed_over(folder: Path) -> None:
    cache = written(folder, 3 * KEPT_S, 2 * KEPT_S)
    with cache.lock(KERNELS[0]):
        assert evict(cache, 0) == [KERNELS[1].name]
    assert evict(cache, 0) == [KERNELS[0].name]


def test_a_loaded_kernel_outlives_its_file(folder: Path) -> None:
    import torch

    cache = written(folder, 2 * KEPT_S)
    function = load_known([KERNELS[0]])[KERNELS[0]]
    age(folder, KERNELS[0], 2 * KEPT_S)
    assert evict(cache, 0) == [KERNELS[0].name]
    assert not list(folder.glob("*.so"))
    gc.collect()
    plane = torch.zeros(2, 16).bfloat16()
    loads = [torch.zeros(1), torch.zeros(16), torch.zeros(2), plane]
    with pytest.raises(ValueError, match="expected device_type=cuda"):  # says its compiled code
        function(torch.zeros(2, 8).bfloat16(), torch.zeros(16, 8).bfloat16().t(), *loads, plane, 132)


def test_a_kernel_that_goes_while_it_is_read_is_absent_without_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, built: Built
) -> None:
    cache, load = KernelCache(folder), linking.load
    cache.save(KERNELS[0], built)  # and not loaded: what is, dlopen finds by its name
    age(folder, KERNELS[0], 2 * KEPT_S)

    def late(path: Path) -> object:
        evict(cache, 0)
        return load(path)

    monkeypatch.setattr(caching, "load", late)
    assert load_known([KERNELS[0]]) == {}
    assert notices._warned == set()


def test_building_makes_room(folder: Path) -> None:
    written(folder, 2 * KEPT_S, 3 * KEPT_S)
    megabyte = folder / f"{KERNELS[1].name}.py"
    megabyte.write_bytes(bytes(2**20))
    age(folder, KERNELS[1], 3 * KEPT_S)
    with config.patch(cache_limit_mb=0):
        obtain([KERNELS[2]])
    assert len(names(folder)) == 3
    with config.patch(cache_limit_mb=1):
        assert callable(obtain([KERNELS[3]])[KERNELS[3]])
    assert names(folder) == [KERNELS[0].name, KERNELS[2].name, KERNELS[3].name]


def test_only_old_unfinished_files_are_swept(folder: Path) -> None:
    cache = written(folder, 0)
    for name in ("new-old", "new-young"):
        (folder / name).mkdir()
        (folder / name / "code.o").write_bytes(b"half")
    (folder / "new-file").write_bytes(b"half")
    for name in ("new-old", "new-file"):
        os.utime(folder / name, (time.time() - 7200,) * 2)
    evict(cache, 2**40)
    assert [path.name for path in folder.glob("new-*")] == ["new-young"]


def test_other_files_of_the_folder_are_let_be(folder: Path) -> None:
    cache = written(folder, 2 * KEPT_S)
    mine = {"sm_90a_mine.so", "notes.txt", "sm_90a_of_mine_0123456789abcdef.png", "cute_0123456789abcdef.so"}
    for name in mine:
        (folder / name).write_text("mine")
        os.utime(folder / name, (1, 1))
    clear(cache)
    evict(cache, 0)
    kept = {path.name for path in folder.iterdir() if path.suffix != ".lock"}
    assert kept == mine


def test_kernels_from_before_they_were_named_by_what_they_do_go_too(folder: Path) -> None:
    cache = written(folder, 0)
    for suffix in (".py", ".so", ".json"):
        (folder / f"sm_90a_64x64_1x1_tma_0123456789abcdef{suffix}").write_text("old")
    assert clear(cache)[0] == 2
    assert names(folder) == []


# Killed at any instant


@pytest.mark.exhaustive
def test_writers_killed_at_random_instants_leave_whole_entries_only(
    folder: Path, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caching, "link", lambda code, library: False)
    monkeypatch.setattr(upkeep, "KEPT_S", 0)
    cache, chance, seen = KernelCache(folder), random.Random(7), set()
    for turn in range(400):
        if turn >= 40 and len(seen) > 3:
            break
        children = [start_writing(cache, built, random.Random(2 * turn + i)) for i in range(2)]
        time.sleep(chance.uniform(0.002, 0.05) * (1 + turn // 40))  # more, the busier the machine
        for child in children:
            os.kill(child, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        whole = [entry for entry in entries(folder) if entry.is_kernel]
        assert [judge(entry) for entry in whole] == [(Soundness.SOUND, "")] * len(whole), turn
        seen.add(tuple(entry.name for entry in whole))
    assert len(seen) > 3  # they wrote and they evicted
    assert any(path.name.startswith("new-") for path in folder.iterdir())  # and were killed at it


def start_writing(cache: KernelCache, built: Built, chance: random.Random) -> int:
    """A process that writes and evicts kernels, over and over, with new code each time."""
    child = os.fork()
    while child == 0:
        kernel = chance.choice(KERNELS)
        with cache.lock(kernel):
            cache.save(kernel, replace(built, host_object=chance.randbytes(200_000)))
        evict(cache, 800_000)
    return child


# The command


def test_info_counts_kernels_and_bytes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(folder, 0, 100)
    assert main(["cache", "info"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert lines["folder"] == str(folder)
    assert lines["kernels"] == f"2, {size / 2**20:.1f} MiB; limit 4096 MiB"
    assert lines["tuned"] == "nothing"
    assert "x86-64-v2" in lines["versions"] or "generic" in lines["versions"]


def test_info_names_the_kernels_that_were_used_last(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(folder, *(100 * i for i in range(8)))
    assert main(["cache", "info"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["latest"] == ", ".join(kernel.entry for kernel in KERNELS[:5])


def test_show_without_a_name_lists_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(folder, 0, 100)
    (folder / "sm_90a_64x64_1x1_tma_0123456789abcdef.json").write_text("{}")
    os.utime(folder / "sm_90a_64x64_1x1_tma_0123456789abcdef.json", (1, 1))
    assert main(["cache", "show"]) == 0
    listed = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert listed == [KERNELS[0].entry, KERNELS[1].entry, "sm_90a_64x64_1x1_tma_0123456789abcdef"]


@pytest.mark.parametrize(
    "calls", [lambda k: k.entry[-8:], lambda k: f"{k.entry}_cutlass_0", lambda k: f"{k.name}.py"]
)
def test_show_says_what_a_digest_is(
    calls: Callable[[Kernel], str], folder: Path, built: Built, capsys: pytest.CaptureFixture[str]
) -> None:
    written(folder, 0, 100)
    kernel = KERNELS[1]
    assert main(["cache", "show", calls(kernel)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == kernel.entry
    assert lines[1].split(maxsplit=1) == [
        "computes",
        "out0 = bf16(acc * scalar0 + rowvec0 + colvec0 + exact0)",
    ]
    assert "  reads    scalar0, scalar, f32\n           rowvec0, rowvec, f32\n" in out
    assert (
        f"  target   {kernel.arch.value}, tile {kernel.plan.tile.name}, planes aligned to 16 bytes\n" in out
    )
    assert f"  needs    {built.registers} registers, {built.spill_bytes} bytes spilled, " in out
    assert f"  module   {folder / kernel.name}.py\n" in out and "not what is installed" not in out


def test_show_prints_each_version_of_a_kernel(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(folder, 0)
    for module in ("runtime.kernels.kernel", "runtime.disk.cache", "command.cache_command"):
        monkeypatch.setattr(f"cute_backend.{module}.environment", lambda: ("later",))
    monkeypatch.setattr(building, "_loaded", {})
    again = replace(KERNELS[0])
    obtain([again])
    assert main(["cache", "show", again.entry]) == 0
    newer, older = sorted(capsys.readouterr().out.split("\n\n"), key=lambda text: "not what" in text)
    assert newer.splitlines()[0] == older.splitlines()[0] == again.entry
    assert newer.rstrip().endswith("versions later") and older.rstrip().endswith(": not what is installed")


def test_show_says_that_there_is_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir(mode=0o700)
    assert main(["cache", "show"]) == 0
    assert capsys.readouterr().out == f"{folder} has no kernels\n"


def test_show_refuses_what_it_has_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(folder, 0)
    for name in ("0a1b2c3d", "gemm"):
        assert main(["cache", "show", name]) == 2
        refused = f"cute_backend: {folder} has no kernel {name!r}; expected one that `cache show` lists, or "
        assert capsys.readouterr().err.startswith(refused)
    (folder / f"{KERNELS[0].name}.json").write_text("{}")
    assert main(["cache", "show", KERNELS[0].entry]) == 2
    assert f"{KERNELS[0].name}.json can't be read: " in capsys.readouterr().err
    assert main(["cache", "info", "0a1b2c3d"]) == 2
    assert capsys.readouterr().err == "cute_backend: cache info takes no name; cache show does\n"


def test_path_is_all_that_path_prints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "path"]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert not folder.exists()
    assert main(["cache", "info"]) == 0
    assert capsys.readouterr().out == f"{folder} does not exist yet: nothing was compiled\n"


def flip_a_byte(folder: Path, kernel: Kernel) -> str:
    path = folder / f"{kernel.name}.so"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    path.write_bytes(content)
    return f"{path.name} does not match its checksum"


def take_anothers_name(folder: Path, kernel: Kernel) -> str:
    other = kernel_of(make_spec(exact=False))
    for suffix in (".json", ".so"):
        (folder / f"{other.name}{suffix}").write_bytes((folder / f"{kernel.name}{suffix}").read_bytes())
        (folder / f"{kernel.name}{suffix}").unlink()
    (folder / f"{kernel.name}.py").unlink()
    return "it is of another kernel than its name says"


def lose_its_code(folder: Path, kernel: Kernel) -> str:
    (folder / f"{kernel.name}.so").unlink()
    return "it can't be read: "


def cut_its_entry(folder: Path, kernel: Kernel) -> str:
    (folder / f"{kernel.name}.json").write_text('{"kernel"')
    return "it can't be read: "


def nest_its_entry(folder: Path, kernel: Kernel) -> str:
    (folder / f"{kernel.name}.json").write_text("[" * 100_000 + "]" * 100_000)
    return "it can't be read: it is nested too deeply"


def nest_a_part_of_its_entry(folder: Path, kernel: Kernel) -> str:
    """To a depth that Python reads, and then can't write."""
    path = folder / f"{kernel.name}.json"
    nested = '"more": ' + "[" * 900 + "]" * 900
    path.write_text(path.read_text().replace('"spec": {', f'{nested}, "spec": {{', 1))
    return "it can't be read: it is nested too deeply"


def open_its_code_to_others(folder: Path, kernel: Kernel) -> str:
    path = folder / f"{kernel.name}.so"
    path.chmod(0o666)
    return f"it can't be trusted: others may write {path} (mode 666)"


def link_its_entry_elsewhere(folder: Path, kernel: Kernel) -> str:
    """To where others may put another."""
    path, elsewhere = folder / f"{kernel.name}.json", folder.parent / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    path.rename(elsewhere / "entry")
    path.symlink_to(elsewhere / "entry")
    return f"it can't be trusted: others may write {elsewhere} (mode 777)"


UNSOUND = [
    nest_its_entry,
    nest_a_part_of_its_entry,
    open_its_code_to_others,
    link_its_entry_elsewhere,
]


@pytest.mark.parametrize("name", ["so", "json"])
@as_root
def test_a_file_of_another_user_is_not_used(name: str, folder: Path) -> None:
    written(folder, 0)
    os.chown(folder / f"{KERNELS[0].name}.{name}", OTHER, OTHER)
    with pytest.warns(RuntimeWarning, match=f"is not used: .*{name} belongs to user {OTHER}, not to root"):
        assert load_known([KERNELS[0]]) == {}
    assert KernelCache(folder).read(KERNELS[0]) is None
    assert KernelCache(folder).read(KERNELS[0]) is None


@pytest.mark.parametrize("damage", UNSOUND, ids=lambda damage: damage.__name__)
def test_what_verify_refuses_is_not_loaded(damage: Callable[[Path, Kernel], str], folder: Path) -> None:
    written(folder, 0)
    damage(folder, KERNELS[0])
    with pytest.warns(RuntimeWarning, match="is not used: .*; the kernel is compiled afresh"):
        assert load_known([KERNELS[0]]) == {}
    assert KernelCache(folder).read(KERNELS[0]) is None


@pytest.mark.parametrize(
    "damage",
    [flip_a_byte, take_anothers_name, lose_its_code, cut_its_entry, *UNSOUND],
    ids=lambda damage: damage.__name__,
)
def test_verify_names_what_is_corrupt(
    damage: Callable[[Path, Kernel], str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(folder, 0, 0)
    assert main(["cache", "verify"]) == 0
    assert capsys.readouterr().out == "2 sound, 0 of other versions, 0 corrupt\n"
    why = damage(folder, KERNELS[0])
    assert main(["cache", "verify"]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("cute_") and f": {why}" in first
    assert last == "1 sound, 0 of other versions, 1 corrupt"


def test_a_kernel_of_other_versions_is_no_fault(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(folder, 0)
    monkeypatch.setattr(upkeep, "environment", lambda: ("later",))
    assert main(["cache", "verify"]) == 0
    assert capsys.readouterr().out == "0 sound, 1 of other versions, 0 corrupt\n"


def test_clear_removes_kernels_and_what_was_tuned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = written(folder, 0, 0, 0)
    (folder / "tuned.json").write_text("{}")
    with cache.lock(KERNELS[2]):
        assert main(["cache", "clear"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"removed from {folder}: kernels: 2, ") and second.startswith("left 1 ")
    assert names(folder) == [KERNELS[2].name] and not (folder / "tuned.json").exists()


def test_a_folder_that_others_may_write_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    assert main(["cache", "clear"]) == 2
    assert capsys.readouterr().err.startswith("cute_backend: the cache folder")
