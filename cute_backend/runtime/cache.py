"""Compiled kernels on disk.

A kernel takes three files of one name: its source (`.py`, for people), its code (`.so`, or `.o` where nothing
could link it) and, written last, its entry (`.json`: what it was made from, the code's SHA-256, its figures).
Each is written under a temporary name and renamed, by the one process that holds the kernel's lock. So a
process may be killed at any instant and leave no half kernel: without a sound entry there is none.

Code from the cache runs in the process, so the folder must be the user's own and closed to others, nothing
in it is ever unpickled, and code that does not match its entry is not loaded. The time of an entry is that of
its last use, by which `upkeep` makes room.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .kernel import Kernel, environment
from .link import LIBRARY, OBJECT, KernelFunction, link, load
from .notices import warn_once

if TYPE_CHECKING:
    from filelock import FileLock

    from .compile import Built

CACHE_DIR_VARIABLE = "CUTE_BACKEND_CACHE_DIR"

SCRATCH = "new-"
"""How the names of files begin that are being written."""


class CacheFolderError(RuntimeError):
    """A folder can't serve as a cache; the message says which and why."""


def cache_root() -> Path:
    """Where kernels are kept: CUTE_BACKEND_CACHE_DIR, or the user's cache folder."""
    named = os.environ.get(CACHE_DIR_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("cute_backend")


class _ForeignError(Exception):
    """An entry is not what its name says."""


class KernelCache:
    """Kernels in one folder. Raises CacheFolderError where the folder is not safe to load code from."""

    def __init__(self, root: Path) -> None:
        self.root = root
        _make_private(root)
        self.writable = os.access(root, os.W_OK)
        self.why_not = "it is read-only"

    def load(self, kernel: Kernel) -> KernelFunction | None:
        """The kernel, or None where it is absent, or is corrupt or foreign, which is warned of once."""
        entry = self._path(kernel, ".json")
        try:
            code, _ = self._read(kernel)
            function = load(code)
            with suppress(OSError):  # where the folder is read-only, no kernel goes for want of room
                os.utime(entry)
            return function
        except FileNotFoundError:
            return None  # of the entry or, between two renames, of its code
        except _ForeignError as error:
            why = str(error)
        except (KeyError, TypeError, ValueError) as error:
            why = f"it is no kernel's entry ({error!r})"
        except (OSError, RuntimeError, AttributeError) as error:
            if not entry.exists():
                return None  # it was removed for room while it was being read
            why = f"its code does not load ({error})"
        warn_once(
            ("entry", entry), f"cute_backend: {entry} is not used: {why}; the kernel is compiled afresh."
        )
        return None

    def read(self, kernel: Kernel) -> tuple[bytes, dict[str, Any]] | None:
        """The code of a kernel and its entry, or None where it is absent, corrupt or foreign."""
        try:
            path, entry = self._read(kernel)
            return path.read_bytes(), entry
        except (_ForeignError, OSError, KeyError, TypeError, ValueError):
            return None

    def _read(self, kernel: Kernel) -> tuple[Path, dict[str, Any]]:
        entry: dict[str, Any] = json.loads(self._path(kernel, ".json").read_bytes())
        if entry["kernel"] != kernel.to_dict() or tuple(entry["environment"]) != environment():
            raise _ForeignError("it is of another kernel or version")
        code = self._path(kernel, LIBRARY if entry["linked"] else OBJECT)
        if hashlib.sha256(code.read_bytes()).hexdigest() != entry["sha256"]:
            raise _ForeignError(f"{code.name} is not what was written")
        return code, entry

    def spill_bytes(self, kernel: Kernel) -> int:
        """The bytes that each thread of a kernel that was loaded from here spills; 0 where it is not here."""
        try:
            return int(json.loads(self._path(kernel, ".json").read_bytes())["spill_bytes"])
        except FileNotFoundError:
            return 0

    def save(self, kernel: Kernel, built: Built) -> None:
        """Write a kernel. The caller holds its lock."""
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=self.root) as scratch:
            code = Path(scratch) / f"code{OBJECT}"
            code.write_bytes(built.host_object)
            library = code.with_suffix(LIBRARY)
            linked = link(code, library)
            if linked:
                code = library
            entry = {
                "kernel": kernel.to_dict(),
                "environment": environment(),
                "linked": linked,
                "sha256": hashlib.sha256(code.read_bytes()).hexdigest(),
                "registers": built.registers,
                "spill_bytes": built.spill_bytes,
                "smem_bytes": built.smem_bytes,
            }
            # An entry from before, of code that did not load, must not stand beside other code.
            self._path(kernel, ".json").unlink(missing_ok=True)
            code.replace(self._path(kernel, code.suffix))
            self.write(self._path(kernel, ".json"), json.dumps(entry, indent=1).encode())

    def write_source(self, kernel: Kernel, source: str) -> Path:
        """Put a kernel's text where it is compiled from and where people find it."""
        path = self._path(kernel, ".py")
        self.write(path, source.encode())
        return path

    def lock(self, kernel: Kernel) -> FileLock:
        """Whoever builds a kernel holds its lock."""
        return self.lock_named(f"{kernel.name}.lock")

    def lock_named(self, name: str) -> FileLock:
        """A lock of the folder, which other processes see."""
        from filelock import FileLock  # here, for it imports asyncio, and a warm start takes no lock

        return FileLock(self.root / name, mode=0o600)

    def give_up_writing(self, error: OSError) -> None:
        """The folder turned out not to take what this process compiles."""
        self.writable = False
        self.why_not = str(error)

    def _path(self, kernel: Kernel, suffix: str) -> Path:
        return self.root / f"{kernel.name}{suffix}"

    def write(self, path: Path, content: bytes) -> None:
        """Put a file of the folder in place, whole or not at all. Raises OSError."""
        handle, name = tempfile.mkstemp(prefix=SCRATCH, dir=self.root)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise


def _make_private(root: Path) -> None:
    """Create `root` for this user alone, or make sure that no one else owns it, writes it or reads it."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = root.stat()
    except OSError as error:
        raise CacheFolderError(f"the cache folder {root} can't be used: {error.strerror}") from error
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid != os.geteuid():
        raise CacheFolderError(
            f"the cache folder {root} belongs to user {info.st_uid}, not to {os.geteuid()}"
        )
    if mode & 0o022:
        raise CacheFolderError(
            f"others may write the cache folder {root} (mode {mode:o}); kernels in it can't be trusted"
        )
    if mode & 0o055:
        with suppress(OSError):
            root.chmod(mode & 0o700)


@cache
def _cache_at(root: Path) -> KernelCache | None:
    try:
        return KernelCache(root)
    except CacheFolderError as error:
        warn_once(
            ("cache folder", root), f"cute_backend: {error}; kernels are compiled anew in each process."
        )
        return None


@cache
def _scratch_cache() -> KernelCache:
    """A cache of this process's own, gone when it ends."""
    root = Path(tempfile.mkdtemp(prefix="cute_backend_"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return KernelCache(root)


def caches() -> list[KernelCache]:
    """Where to look for a kernel, in order; the last one can be written."""
    user = _cache_at(cache_root())
    if user is None:
        return [_scratch_cache()]
    if user.writable:
        return [user]
    warn_once(
        ("unwritable", user.root),
        f"cute_backend: the cache folder {user.root} can't be written ({user.why_not}); kernels that it "
        "lacks are compiled anew in each process.",
    )
    return [user, _scratch_cache()]
