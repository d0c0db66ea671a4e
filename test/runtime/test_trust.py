"""Whose files are trusted: by owner and mode, along the whole way, at both ends of a link."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest

from cute_backend.runtime.host import trust
from cute_backend.runtime.host.trust import UntrustedError, check_folder, open_trusted, read_trusted
from support.runtime.other_users import OTHER, as_root, run_as, shared  # noqa: F401


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that is trusted, three folders down."""
    path = tmp_path / "above" / "folder" / "file"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"code")
    path.chmod(0o644)
    for folder in (path.parent, path.parents[1]):
        folder.chmod(0o755)
    return path


def refused(path: Path) -> str:
    with pytest.raises(UntrustedError) as refusal:
        os.close(open_trusted(path))
    return str(refusal.value)


def test_ones_own_file_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_trusted(file, 4) == b"code"
    monkeypatch.chdir(file.parent)
    assert read_trusted(Path("file"), 4) == b"code"
    assert read_trusted(Path("../folder/./file"), 4) == b"code"
    with pytest.raises(ValueError, match="file has more than 3 bytes"):
        read_trusted(file, 3)
    with pytest.raises(FileNotFoundError):
        read_trusted(file.parent / ".." / "absent", 4)


@pytest.mark.parametrize("mode", [0o666, 0o646, 0o602])
def test_a_file_that_others_write(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert refused(file) == f"others may write {file} (mode {mode:o})"


@pytest.mark.parametrize("level", [0, 1])
def test_a_folder_above_that_others_write(file: Path, level: int) -> None:
    folder = file.parents[level]
    folder.chmod(0o777)
    assert refused(file) == f"others may write {folder} (mode 777)"
    folder.chmod(0o1777)
    assert read_trusted(file, 4) == b"code"


def test_a_sticky_folder_is_no_place_for_files_that_are_found_by_name(file: Path) -> None:
    assert check_folder(file.parent)
    file.parent.chmod(0o1777)
    with pytest.raises(UntrustedError, match=r"others may write .* \(mode 1777\)"):
        check_folder(file.parent)


@as_root
def test_what_another_user_owns(file: Path) -> None:
    os.chown(file, OTHER, OTHER)
    assert refused(file) == f"{file} belongs to user {OTHER}, not to root"
    os.chown(file, 0, OTHER)
    assert read_trusted(file, 4) == b"code"
    file.chmod(0o664)
    assert refused(file) == f"others may write {file} (mode 664)"
    file.chmod(0o644)
    os.chown(file.parents[1], OTHER, OTHER)
    assert refused(file) == f"{file.parents[1]} belongs to user {OTHER}, not to root"
    file.parents[1].chmod(0o1777)  # its owner may still remove files in it
    assert "belongs to user" in refused(file)


@as_root
def test_what_root_owns_serves_others(shared: Path) -> None:  # noqa: F811
    path = shared / "file"
    path.write_bytes(b"code")
    path.chmod(0o644)
    assert run_as(OTHER, lambda: read_trusted(path, 4)) == "b'code'"
    os.chown(path, OTHER, OTHER)
    assert run_as(OTHER, lambda: read_trusted(path, 4)) == "b'code'"
    os.chown(path, OTHER + 1, OTHER)
    expected = f"UntrustedError: {path} belongs to user {OTHER + 1}, not to {OTHER} or root"
    assert run_as(OTHER, lambda: read_trusted(path, 4)) == expected


@as_root
def test_both_ends_of_a_link_are_judged(file: Path) -> None:
    link = file.parents[1] / "link"
    link.symlink_to(file)
    assert read_trusted(link, 4) == b"code"
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    assert refused(link) == f"{link} belongs to user {OTHER}, not to root"
    os.chown(link, 0, 0, follow_symlinks=False)
    os.chown(file, OTHER, OTHER)
    assert "belongs to user" in refused(link)
    os.chown(file, 0, 0)
    file.parent.chmod(0o777)  # where only the target is
    assert refused(link) == f"others may write {file.parent} (mode 777)"


def test_links_to_folders_are_followed_one_by_one(file: Path) -> None:
    top = file.parents[2]
    (top / "first").symlink_to("above")
    (top / "second").symlink_to(top / "first" / "folder")
    (file.parent / "up").symlink_to("..")
    assert read_trusted(top / "second" / "up" / "folder" / "file", 4) == b"code"
    assert check_folder(top / "second" / "up").st_ino == file.parents[1].stat().st_ino
    (file.parents[1]).chmod(0o777)
    assert refused(top / "second" / "file") == f"others may write {file.parents[1]} (mode 777)"
    (top / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        open_trusted(top / "loop")
    with pytest.raises(OSError, match="Too many levels"):
        check_folder(top / "loop")


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert refused(tmp_path / "fifo") == f"{tmp_path / 'fifo'} is no regular file"
    assert refused(tmp_path) == f"{tmp_path} is no regular file"
    assert refused(Path("/dev/zero")) == "/dev/zero is no regular file"
    with pytest.raises(NotADirectoryError):
        check_folder(tmp_path / "fifo")


def test_the_file_that_is_judged_is_the_one_that_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner swaps the file between its being opened and the way's being judged."""
    way = trust._check_way

    def swapped(path: Path) -> os.stat_result:
        path.rename(path.with_name("before"))
        path.write_bytes(b"other")
        return way(path)

    monkeypatch.setattr(trust, "_check_way", swapped)
    assert refused(file) == f"{file} was replaced while it was opened"


@pytest.mark.parametrize(("members", "is_private"), [([], True), (["me"], True), (["me", "you"], False)])
def test_a_group_of_ones_own_is_oneself(
    members: list[str], is_private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust._private_group.cache_clear()
    monkeypatch.setattr(pwd, "getpwuid", lambda user: pwd.struct_passwd(("me", "x", user, 77, "", "", "")))
    monkeypatch.setattr(grp, "getgrgid", lambda group: grp.struct_group(("me", "x", group, members)))
    assert trust._private_group(1000) == (77 if is_private else None)
    assert trust._private_group(0) is None
    monkeypatch.setattr(grp, "getgrgid", lambda group: grp.struct_group(("users", "x", group, [])))
    trust._private_group.cache_clear()
    assert trust._private_group(1000) is None
    trust._private_group.cache_clear()


def test_the_documents_state_the_rule() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "operating.md").read_text().split())
    assert (
        "**A file or folder is trusted if it, and every folder above it, belongs to the process's user"
        in text
    )
