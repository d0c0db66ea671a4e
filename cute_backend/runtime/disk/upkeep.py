"""Upkeep of a cache folder: its size limit, and the commands that list, verify and clear it.

Kernels are removed while other processes read, write and run them. A loaded kernel stays loaded: Linux keeps
a mapped file until no process maps it. A kernel that is about to be loaded has just been used, and recently
used kernels stay. A kernel that is being written is locked, and skipped. The entry is removed before the
code, so that a process that is killed in between leaves code without an entry, which is not a kernel. Locks
are never removed: the holder of a removed lock and the process that creates it again would both believe that
they hold it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from filelock import Timeout

from cute_backend.runtime.disk.cache import MAX_CODE, MAX_ENTRY, SCRATCH, KernelCache
from cute_backend.runtime.host.documents import parse
from cute_backend.runtime.host.trust import UntrustedError, read_trusted
from cute_backend.runtime.kernels.kernel import digest_of, environment
from cute_backend.runtime.kernels.link import LIBRARY, OBJECT

log = logging.getLogger(__name__)

KEPT_S = 600
"""The seconds after its last use in which a kernel is never removed: another process may have written it and
be about to load it."""

_LEFT_BEHIND_S = 3600
"""The seconds after which an unfinished file counts as left by a process that was killed."""

ENTRY = ".json"
_NAME = re.compile(r"(cute_\w+_[0-9a-f]{8}|sm_\d+a_\w+)_[0-9a-f]{16}")
"""The file names of kernels, including older ones, which did not say what a kernel computes."""


@dataclass(frozen=True)
class Entry:
    """The files of one kernel: their size together in bytes and when they were last used, in Unix time."""

    name: str
    files: tuple[Path, ...]
    size: int
    used: float

    @property
    def is_kernel(self) -> bool:
        """Whether the files are a kernel, and not only a source that was never compiled, or code without an
        entry."""
        return any(path.suffix == ENTRY for path in self.files)


def entries(root: Path) -> list[Entry]:
    """The entries of a folder, the least recently used first; none if the folder does not exist."""
    found: dict[str, dict[Path, os.stat_result]] = defaultdict(dict)
    for path in root.glob("*_*"):
        if _NAME.fullmatch(path.stem) and path.suffix in (ENTRY, LIBRARY, OBJECT, ".py"):
            with suppress(FileNotFoundError):
                found[path.stem][path] = path.stat()
    listed = []
    for name, files in found.items():
        size = sum(status.st_size for status in files.values())
        used = max(status.st_mtime for status in files.values())
        listed.append(Entry(name, tuple(files), size, used))
    return sorted(listed, key=lambda entry: entry.used)


def evict(cache: KernelCache, limit: int) -> list[str]:
    """Removes kernels, those that were used longest ago first, until the rest takes at most `limit` bytes.

    Kernels that were used in the last KEPT_S seconds stay. Returns the names of the files that were removed.
    """
    sweep(cache.root)
    listed = entries(cache.root)
    excess, removed = sum(entry.size for entry in listed) - limit, []
    for entry in listed:
        if excess <= 0 or entry.used > time.time() - KEPT_S:
            break
        if remove(cache, entry):
            excess -= entry.size
            removed.append(entry.name)
    if removed:
        log.info("%s exceeded %d bytes: removed %s", cache.root, limit, ", ".join(removed))
    return removed


def remove(cache: KernelCache, entry: Entry) -> bool:
    """Removes one kernel. Returns False if a process is writing it, or if the folder can't be written."""
    try:
        with cache.lock_named(f"{entry.name}.lock").acquire(timeout=0):
            for path in sorted(entry.files, key=lambda path: path.suffix != ENTRY):
                path.unlink(missing_ok=True)
    except (Timeout, OSError):
        return False
    return True


def sweep(root: Path) -> None:
    """Removes files that killed processes left."""
    for path in root.glob(f"{SCRATCH}*"):
        with suppress(OSError):
            if path.stat().st_mtime > time.time() - _LEFT_BEHIND_S:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def clear(cache: KernelCache) -> tuple[int, int]:
    """Removes every kernel, and the results of tuning. Returns the numbers of kernels and of bytes that it
    removed."""
    sweep(cache.root)
    gone = [entry for entry in entries(cache.root) if remove(cache, entry)]
    (cache.root / "tuned.json").unlink(missing_ok=True)
    return sum(entry.is_kernel for entry in gone), sum(entry.size for entry in gone)


class Soundness(Enum):
    """The verdict of `judge` on a kernel's files."""

    SOUND = "sound"
    STALE = "of other versions"
    CORRUPT = "corrupt"


def judge(entry: Entry) -> tuple[Soundness, str]:
    """Checks whether a kernel agrees with its entry, and says how it differs. The code is read, not loaded.

    STALE is a kernel that is intact, but was made by other versions, which these do not load.
    """
    path = next(path for path in entry.files if path.suffix == ENTRY)
    try:
        data: dict[str, Any] = parse(read_trusted(path, MAX_ENTRY))
        code = path.with_suffix(LIBRARY if data["linked"] else OBJECT)
        if not entry.name.endswith(digest_of(data["kernel"], data["environment"])):
            return Soundness.CORRUPT, "it is of another kernel than its name says"
        if hashlib.sha256(read_trusted(code, MAX_CODE)).hexdigest() != data["sha256"]:
            return Soundness.CORRUPT, f"{code.name} does not match its checksum"
    except UntrustedError as error:
        return Soundness.CORRUPT, f"it can't be trusted: {error}"
    except (OSError, KeyError, TypeError, ValueError) as error:
        return Soundness.CORRUPT, f"it can't be read: {error}"
    stale = tuple(data["environment"]) != environment()
    return (Soundness.STALE if stale else Soundness.SOUND), ""
