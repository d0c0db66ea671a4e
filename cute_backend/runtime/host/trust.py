"""The users whose files may put code into this process; only this module decides it.

A file or folder is trusted if it, and every folder above it, belongs to the process's user or to root, and
nobody else can write it. Root is included, because images are built as root and serve as another user. Three
details:

- A folder above that others can write is trusted if it is sticky, as /tmp is: there nobody else can rename or
  remove what a trusted user owns. The folder that is checked itself must not be sticky: others could add
  files to it.
- A symbolic link is followed one step at a time. The link, the folders above it, its target and the folders
  above the target are checked.
- A group that has the user's name and no other member is the user (the private group of most distributions,
  whose umask leaves files writable by it). Root's group is not, as containers share it.

A file is opened first; then its descriptor is checked, and read. Nobody else can change the path to a file
that was found trusted, so the file may be opened by its path again.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from functools import cache
from pathlib import Path

_MAX_LINKS = 40
"""The most symbolic links on the way to a file; with more it counts as a loop, as in Linux."""


class UntrustedError(Exception):
    """Other users could replace the file, or put one into the folder; the message says which file or folder
    allows this, and how."""


def check_folder(folder: Path) -> os.stat_result:
    """Raises UntrustedError unless a folder and all folders above it are trusted, OSError if it doesn't
    exist."""
    status = _check_way(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    _judge(folder, status)
    return status


def open_trusted(path: Path) -> int:
    """A descriptor of a regular file, to be read and closed by the caller.

    Raises UntrustedError unless the file and the way to it are trusted, OSError where it can't be read.
    """
    # A FIFO would keep a plain open waiting for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedError(f"{path} is no regular file")
        _judge(path, status)
        if not os.path.samestat(_check_way(path), status):
            raise UntrustedError(f"{path} was replaced while it was opened")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_trusted(path: Path, limit: int) -> bytes:
    """Reads a trusted file. Raises as `open_trusted` does, and ValueError for more than `limit` bytes."""
    with os.fdopen(open_trusted(path), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path.name} has more than {limit} bytes")
    return content


def _check_way(path: Path) -> os.stat_result:
    """Checks every folder and link on the way to a path. Returns the status of the file or folder that it
    leads to."""
    at, links = Path("/"), 0
    _judge_above(at, os.lstat(at))
    left = list(reversed(path.absolute().parts[1:]))
    while left:
        name = left.pop()
        if name == "..":
            at = at.parent
            continue
        step = at / name
        status = os.lstat(step)
        if stat.S_ISLNK(status.st_mode):
            _judge_owner(step, status)
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = Path(os.readlink(step))
            at = Path("/") if target.is_absolute() else at
            left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        else:
            at = step
            if left:
                _judge_above(step, status)
    return os.lstat(at)


def _judge(path: Path, status: os.stat_result) -> None:
    _judge_owner(path, status)
    if _others_write(status):
        raise UntrustedError(_writable(path, status))


def _judge_above(folder: Path, status: os.stat_result) -> None:
    """Checks a folder above. The owner of "/" controls every path, and is accepted: in a user namespace it
    may not be root."""
    _judge_owner(folder, status, os.lstat("/").st_uid)
    if _others_write(status) and not status.st_mode & stat.S_ISVTX:
        raise UntrustedError(_writable(folder, status))


def _judge_owner(path: Path, status: os.stat_result, *also: int) -> None:
    if status.st_uid not in (os.geteuid(), 0, *also):
        ours = "root" if os.geteuid() == 0 else f"{os.geteuid()} or root"
        raise UntrustedError(f"{path} belongs to user {status.st_uid}, not to {ours}")


def _others_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and status.st_gid != _private_group(os.geteuid())


def _writable(path: Path, status: os.stat_result) -> str:
    return f"others may write {path} (mode {stat.S_IMODE(status.st_mode):o})"


@cache
def _private_group(user: int) -> int | None:
    """The user's private group, which has no other member."""
    if user == 0:
        return None
    try:
        person = pwd.getpwuid(user)
        group = grp.getgrgid(person.pw_gid)
    except KeyError:
        return None
    alone = group.gr_name == person.pw_name and set(group.gr_mem) <= {person.pw_name}
    return group.gr_gid if alone else None
