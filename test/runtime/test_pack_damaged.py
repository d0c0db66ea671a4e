"""Packs that are damaged, hostile or others': each is refused in one sentence, with what it takes bounded."""

from __future__ import annotations

import json
import os
import random
import resource
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cute_backend import PackError
from cute_backend.planning.tiles import Arch
from cute_backend.runtime.disk import pack as packing
from cute_backend.runtime.disk.pack import MANIFEST, Content, Pack, packed_kernels, write_pack
from cute_backend.runtime.host import notices
from cute_backend.runtime.kernels.kernel import environment
from cute_backend.runtime.kernels.reach import Problem
from support.runtime.handmade import kernel_of, make_spec
from support.runtime.other_users import OTHER, as_root, run_as, shared  # noqa: F401
from support.runtime.warned import runtime_warnings

SPEC = make_spec()
KERNEL = kernel_of(SPEC)
FIGURES = {"registers": 32, "spill_bytes": 0, "smem_bytes": 0}


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A pack whose kernel is no code: opening one does not load it."""
    environment()
    return make(tmp_path / "model.cutepack")


def make(path: Path) -> Path:
    write_pack(path, Content({KERNEL: (b"\x7fELF" * 50, FIGURES)}, [Problem(SPEC, None, 128, 64)], None))
    return path


def refused(path: Path) -> str:
    with pytest.raises(PackError) as refusal:
        Pack(path)
    sentence = str(refusal.value)
    assert str(path) in sentence and "\n" not in sentence and len(sentence) < 600
    return sentence


# Zip's many ways


def patch(path: Path, signature: bytes, offset: int, value: bytes, which: int = 0) -> None:
    """Write into the record that begins with a signature, the first of its kind or another."""
    content = bytearray(path.read_bytes())
    at = -1
    for _ in range(which + 1):
        at = content.index(signature, at + 1)
    content[at + offset : at + offset + len(value)] = value
    path.write_bytes(content)


LOCAL, LISTED, END = b"PK\3\4", b"PK\1\2", b"PK\5\6"


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("signature", "offset", "value", "why"),
    [
        (LISTED, 8, b"\1\0", "is encrypted or has other flags"),
        (LISTED, 8, b"\x20\0", "is encrypted or has other flags"),
        (LISTED, 10, b"\x63\0", "is compressed"),
        (LISTED, 10, b"\x08\0", "is compressed"),
        (LISTED, 6, b"\xff\0", "version"),
        (LISTED, 24, b"\xff\xff\xff\x7f", "is not as long as it says"),
        (LISTED, 42, b"\xff\xff\xff\x7f", "lies beyond the end"),
        (LOCAL, 28, b"\xff\xff", "not a valid pack"),
        (LISTED, 16, b"1234", "CRC"),
    ],
)
def test_what_zip_allows_and_packs_have_not(
    which: int, signature: bytes, offset: int, value: bytes, why: str, pack: Path
) -> None:
    patch(pack, signature, offset, value, which)
    assert why in refused(pack)


def test_an_end_that_is_no_packs(pack: Path) -> None:
    sound = pack.read_bytes()
    patch(pack, END, 20, b"\xff\xff")
    assert "its list of members is not that" in refused(pack)
    pack.write_bytes(sound)
    patch(pack, END, 12, struct.pack("<L", 1 << 31))
    assert "its list of members is not that" in refused(pack)
    pack.write_bytes(sound + b"more")
    assert "does not end as a zip archive does" in refused(pack)
    for length in (0, 10, 21, len(sound) - 1):
        pack.write_bytes(sound[:length])
        assert "does not end as a zip archive does" in refused(pack)
    with pack.open("wb") as file:
        file.truncate(5 << 30)
    assert "more than 4294967296" in refused(pack)


@pytest.fixture
def little_memory() -> Any:
    """No room for more than 512 MiB beyond what the process has."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (512 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", [MANIFEST, f"{KERNEL.name}.so"])
def test_three_megabytes_that_unpack_to_three_gigabytes(name: str, pack: Path, little_memory: None) -> None:
    """Deflate's densest stream, repeated, rather than three gigabytes that are compressed for a test."""
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
    squeezed = squeeze.compress(bytes(1 << 20)) + squeeze.flush(zlib.Z_FULL_FLUSH)
    with zipfile.ZipFile(pack) as archive:
        members = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(pack, "w") as archive:
        for each, content in members.items():
            archive.writestr(each, squeezed * 3072 if each == name else content)
    which = list(members).index(name)
    for signature, offset in ((LOCAL, 22), (LISTED, 24)):
        patch(pack, signature, offset, struct.pack("<L", 3 << 30), which)
    for signature, offset in ((LOCAL, 8), (LISTED, 10)):
        patch(pack, signature, offset, struct.pack("<H", zipfile.ZIP_DEFLATED), which)
    assert pack.stat().st_size < 4 << 20
    assert "is compressed" in refused(pack)


# Manifests


def restate(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a pack anew with a changed manifest."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(members[MANIFEST])
    changed = change(manifest)
    members[MANIFEST] = changed if isinstance(changed, bytes) else json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.mark.parametrize("levels", [65, 500, 100_000])
@pytest.mark.parametrize("bracket", ["[]", "{}"])
def test_a_deeply_nested_manifest(levels: int, bracket: str, pack: Path) -> None:
    opening = '{"a":' if bracket == "{}" else "["
    restate(pack, lambda manifest: (opening * levels + "0" + bracket[1] * levels).encode())
    assert "nested too deeply" in refused(pack)


def change_kernel(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["kernels"][KERNEL.name][name] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        change_kernel("spec", 3),
        change_kernel("tile", {"arch": "sm_90a"}),
        change_kernel("tile", []),
        change_kernel("alignment", "swizzled"),
        change_kernel("spill_bytes", "none"),
        change_kernel("spill_bytes", None),
        change_kernel("sha256", [1]),
        lambda manifest: manifest["kernels"].update({"../../escape": manifest["kernels"][KERNEL.name]}),
        lambda manifest: manifest.update(problems=[["spec", 1, 2]]),
        lambda manifest: manifest.update(problems=[["spec", 1, "two", None, ""]]),
        lambda manifest: manifest.update(problems=[[["spec"], 1, 2, None, ""]]),
        lambda manifest: manifest.update(problems=[["spec", 1, 2, None, False]]),
        lambda manifest: manifest.update(problems=[["spec", 1, 2, None, "[" * 10**6]]),
        lambda manifest: manifest.update(environment="x"),
        lambda manifest: manifest.update(environment=None),
        lambda manifest: manifest.update(format=[1]),
        lambda manifest: b"[]",
        lambda manifest: b"1" * 5000,
        lambda manifest: b"\xff\xfe",
    ],
)
def test_a_manifest_that_says_something_else(change: Callable[[dict[str, Any]], Any], pack: Path) -> None:
    """Also what is only looked at when a kernel is asked for: it must not raise in a program that runs."""
    restate(pack, change)
    refused(pack)


def test_bytes_changed_at_random_are_refused_or_change_nothing(pack: Path) -> None:
    sound, chance, taken = pack.read_bytes(), random.Random(17), 0
    for _ in range(400):
        content = bytearray(sound)
        for _ in range(chance.choice((1, 1, 1, 2, 8))):
            content[chance.randrange(len(content))] = chance.randrange(256)
        if chance.random() < 0.1:
            at = chance.randrange(len(content))
            content[at:at] = chance.randbytes(chance.randrange(1, 9))
        pack.write_bytes(content)
        try:
            opened = Pack(pack)
        except PackError as error:
            assert str(pack) in str(error) and "\n" not in str(error), str(error)
        else:
            taken += 1
            assert opened.kernels(SPEC, Arch.SM90A) in ([KERNEL], [])
            assert opened.read(KERNEL) in ((b"\x7fELF" * 50, opened._kernels.get(KERNEL.name)), None)
            assert opened.spill_bytes(KERNEL) >= 0
    assert 0 < taken < 200


# CUTE_BACKEND_PACK


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: patch(path, LISTED, 8, b"\1\0"),
        lambda path: patch(path, LISTED, 10, b"\x63\0"),
        lambda path: patch(path, LOCAL, 28, b"\xff\xff"),
        lambda path: restate(path, lambda manifest: b"[" * 100_000),
        lambda path: path.chmod(0o666),
    ],
    ids=["encrypted", "method", "extra", "nested", "mode"],
)
def test_the_environments_pack_is_warned_of(
    damage: Callable[[Path], None], pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(pack)
    monkeypatch.setenv("CUTE_BACKEND_PACK", str(pack))
    monkeypatch.setattr(packing, "_packs", {})
    monkeypatch.setattr(packing, "_refused", set())
    monkeypatch.setattr(notices, "_warned", set())
    with pytest.warns(RuntimeWarning, match="kernels are compiled") as warned:
        assert packed_kernels(SPEC, Arch.SM90A) == [] == packed_kernels(SPEC, Arch.SM90A)
    assert len(runtime_warnings(warned)) == 1


# Whose it is


@as_root
def test_a_pack_of_another_user(pack: Path) -> None:
    os.chown(pack, OTHER, OTHER)
    assert refused(pack) == f"the pack {pack} can't be trusted: {pack} belongs to user {OTHER}, not to root"


@as_root
def test_a_link_to_a_pack_of_another_user_and_anothers_link(pack: Path) -> None:
    link = pack.with_name("link")
    link.symlink_to(pack)
    Pack(link)
    os.chown(pack, OTHER, OTHER)
    assert f"{link} belongs to user {OTHER}" in refused(link)
    os.chown(pack, 0, 0)
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    assert f"{link} belongs to user {OTHER}" in refused(link)


def test_a_pack_below_a_folder_that_others_write(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "mine"
    folder.mkdir(parents=True)
    pack = make(folder / "model.cutepack")
    folder.parent.chmod(0o777)
    assert f"others may write {folder.parent} (mode 777)" in refused(pack)
    folder.parent.chmod(0o1777)
    assert Pack(pack).archs == {Arch.SM90A}


@as_root
def test_roots_pack_serves_another_user(shared: Path) -> None:  # noqa: F811
    pack = make(shared / "model.cutepack")
    assert run_as(OTHER, lambda: Pack(pack).kernels(SPEC, Arch.SM90A) == [KERNEL]) == "True"


@as_root
def test_a_pack_that_is_given_away_under_the_process_is_not_loaded_from(pack: Path) -> None:
    opened = Pack(pack)
    os.chown(pack, OTHER, OTHER)
    with pytest.raises(PackError, match="belongs to user"):
        opened.read(KERNEL)
