"""Compiled kernels on disk.

A kernel has three files of one name: its source (`.py`, for people to read), its code (`.so`, or `.o` if no
linker was found) and, written last, its entry (`.json`: what the kernel was made from, the code's SHA-256,
registers and spills). Each is written under a temporary name and renamed, by the one process that holds the
kernel's lock. So a process that is killed at any instant leaves no incomplete kernel: files without a valid
entry do not count.

Code from the cache runs in the process, so the folder and every file that is used must be trusted (`trust`),
nothing in it is ever unpickled, and code that does not match its entry is not loaded. The modification time
of an entry is the time of its last use, by which `upkeep` chooses the kernels that it removes.

A folder that can't be written, or has no space left, is only read. This process keeps further kernels in a
folder of its own, which is removed when the process ends; that folder is in memory if the temporary folder is
full.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cute_backend.runtime.host.documents import parse
from cute_backend.runtime.host.forks import free_in_children
from cute_backend.runtime.host.notices import warn_once
from cute_backend.runtime.host.private_folder import private_folder
from cute_backend.runtime.host.space import out_of_space
from cute_backend.runtime.host.trust import UntrustedError, check_folder, read_trusted
from cute_backend.runtime.kernels.kernel import Kernel, environment
from cute_backend.runtime.kernels.link import LIBRARY, OBJECT, KernelFunction, link, load
from cute_backend.variables import CACHE_DIR_VARIABLE

if TYPE_CHECKING:
    from filelock import FileLock

    from cute_backend.runtime.kernels.built import Built

SCRATCH = "new-"
"""The prefix of the names of files that are being written."""

MAX_ENTRY, MAX_CODE = 16 << 20, 256 << 20
"""The most bytes of an entry, with the module of an edited kernel, and of a kernel's code: more than a
hundred times the largest so far."""

_ROOM = 8 << 20
"""The bytes that a kernel needs on disk while it is built: its code twice, PTX and cubin, some 1 MiB."""


class CacheFolderError(RuntimeError):
    """A folder can't serve as a cache; the message says which and why."""


def cache_root() -> Path:
    """The folder in which kernels are kept: CUTE_BACKEND_CACHE_DIR, or the user's cache folder. Raises
    CacheFolderError if the user's home is not known, or if the name is relative to a folder that is gone."""
    named = os.environ.get(CACHE_DIR_VARIABLE)
    try:
        if named:
            return Path(named).expanduser().absolute()
        from platformdirs import user_cache_path

        root = user_cache_path("cute_backend")
    except (OSError, RuntimeError) as error:
        raise CacheFolderError(f"there is no cache folder: {error}") from error
    if not root.is_absolute():  # "~/.cache", of an older platformdirs
        raise CacheFolderError(f"there is no cache folder: {root} has no home")
    return root


class _ForeignError(Exception):
    """An entry is not that of the kernel that its file name stands for."""


class KernelCache:
    """Kernels in one folder. Raises CacheFolderError if the folder is not safe to load code from."""

    def __init__(self, root: Path) -> None:
        self.root = root
        _make_private(root)
        self.writable = os.access(root, os.W_OK)
        self.why_not = "it is read-only"
        if "'" in str(root):  # MLIR writes files below it, and finds no end of a text with a quote
            self.writable, self.why_not = False, "the compiler takes no name with a quote"

    def load(self, kernel: Kernel) -> KernelFunction | None:
        """The kernel, or None if it is absent, corrupt, or that of another version. A warning reports the
        last two, once."""
        entry = self._path(kernel, ".json")
        try:
            code, _, _ = self._read(kernel)
            function = load(code)
            with suppress(OSError):  # no kernel is removed to make room in a read-only folder
                os.utime(entry)
            return function
        except FileNotFoundError:
            return None  # the entry is missing or, between two renames, its code
        except (_ForeignError, UntrustedError) as error:
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
        """The code of a kernel and its entry, or None if it is absent, corrupt, or that of another
        version."""
        try:
            _, code, entry = self._read(kernel)
            return code, entry
        except (_ForeignError, UntrustedError, OSError, KeyError, TypeError, ValueError):
            return None

    def _entry(self, kernel: Kernel) -> dict[str, Any]:
        entry: dict[str, Any] = parse(read_trusted(self._path(kernel, ".json"), MAX_ENTRY))
        if entry["kernel"] != kernel.to_dict() or tuple(entry["environment"]) != environment():
            raise _ForeignError("it is of another kernel or version")
        return entry

    def _read(self, kernel: Kernel) -> tuple[Path, bytes, dict[str, Any]]:
        entry = self._entry(kernel)
        path = self._path(kernel, LIBRARY if entry["linked"] else OBJECT)
        code = read_trusted(path, MAX_CODE)
        if hashlib.sha256(code).hexdigest() != entry["sha256"]:
            raise _ForeignError(f"{path.name} does not match its checksum")
        return path, code, entry

    def spill_bytes(self, kernel: Kernel) -> int | None:
        """The bytes that each thread of a kernel spills; None if this cache has no such kernel."""
        try:
            return int(self._entry(kernel)["spill_bytes"])
        except (_ForeignError, UntrustedError, OSError, KeyError, TypeError, ValueError):
            return None

    def save(self, kernel: Kernel, built: Built) -> None:
        """Writes a kernel completely or not at all. The caller holds its lock. Raises OSError."""
        with scratch_folder(self.root) as scratch:
            code = scratch / f"code{OBJECT}"
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
            # Both are written before either is renamed into place, so a disk that is full by then leaves
            # neither.
            text = scratch / "entry"
            text.write_bytes(json.dumps(entry, indent=1).encode())
            # If an earlier entry is left, of code that did not load, it must not stand beside new code.
            self._path(kernel, ".json").unlink(missing_ok=True)
            code.replace(self._path(kernel, code.suffix))
            text.replace(self._path(kernel, ".json"))

    def has(self, kernel: Kernel) -> bool:
        """Whether there is an entry of a kernel, valid or not."""
        return self._path(kernel, ".json").exists()

    def has_kernels(self) -> bool:
        """Whether there is an entry of any kernel, valid or not."""
        return any(self.root.glob("cute_*.json"))

    @contextmanager
    def watched(self) -> Iterator[Callable[[], bool]]:
        """A context in which a function says whether the folder was removed since. A folder that is missing
        at the beginning is made. Raises OSError."""
        try:
            _make_private(self.root)
        except CacheFolderError as error:
            raise OSError(str(error)) from error
        # As long as the folder is open, no other one has its number.
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)

        def is_removed() -> bool:
            try:
                return not os.path.samestat(os.fstat(folder), self.root.stat())
            except FileNotFoundError:
                return True

        try:
            yield is_removed
        finally:
            os.close(folder)

    def discard(self, kernel: Kernel) -> None:
        """Removes the files of a kernel that could not be written. The caller holds its lock."""
        for suffix in (".json", LIBRARY, OBJECT, ".py"):
            with suppress(OSError):
                self._path(kernel, suffix).unlink()

    def write_source(self, kernel: Kernel, source: str) -> Path:
        """Writes a kernel's text to the file that is compiled, and that people read."""
        path = self._path(kernel, ".py")
        self.write(path, source.encode())
        return path

    def lock(self, kernel: Kernel) -> FileLock:
        """The lock of a kernel, which its builder holds."""
        _make_private(self.root)  # FileLock would make a folder that was removed, for others to read
        return self.lock_named(f"{kernel.name}.lock")

    def lock_named(self, name: str) -> FileLock:
        """A lock in the folder, which other processes respect."""
        from filelock import FileLock  # here, as it imports asyncio, and a warm start needs no lock

        return FileLock(self.root / name, mode=0o600)

    def give_up_writing(self, error: OSError) -> None:
        """Notes that the folder can't take the kernels of this process."""
        self.writable = False
        self.why_not = f"it is out of space: {error.strerror}" if out_of_space(error) else str(error)

    def _path(self, kernel: Kernel, suffix: str) -> Path:
        return self.root / f"{kernel.name}{suffix}"

    def write(self, path: Path, content: bytes) -> None:
        """Writes a file of the folder completely or not at all. Raises OSError."""
        handle, name = tempfile.mkstemp(prefix=SCRATCH, dir=self.root)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise


@contextmanager
def scratch_folder(root: Path) -> Iterator[Path]:
    """A folder in `root` that is removed at the end of the block. If the process is killed, `upkeep` removes
    it.

    Python's own temporary folders can't be used: a process that was forked meanwhile would remove them when
    it ends.
    """
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_private(root: Path) -> None:
    """Creates `root` for this user alone, or makes sure that it is trusted and that no one else reads it."""
    try:
        for parent in reversed(root.parents):
            if not parent.exists():
                parent.mkdir(mode=0o755, exist_ok=True)  # `parents=True` would leave it to the umask
        root.mkdir(mode=0o700, exist_ok=True)
        status = check_folder(root)
    except OSError as error:
        raise CacheFolderError(f"the cache folder {root} can't be used: {error.strerror}") from error
    except UntrustedError as error:
        raise CacheFolderError(f"the cache folder {root} can't be trusted: {error}") from error
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        with suppress(OSError):
            root.chmod(stat.S_IMODE(status.st_mode) & 0o700)


@cache
def _cache_at(root: Path) -> KernelCache | None:
    try:
        return KernelCache(root)
    except CacheFolderError as error:
        warn_once(
            ("cache folder", root), f"cute_backend: {error}; kernels are compiled anew in each process."
        )
        return None


_own: list[KernelCache] = []
"""Caches of this process's own, removed when it ends; only the last one is written."""

_making = free_in_children(threading.Lock())

# A forked child makes its own, since it may outlive its parent, which removes these.
os.register_at_fork(after_in_child=_own.clear)


def _users() -> KernelCache | None:
    """The user's cache, or None, with a warning, if there is none."""
    try:
        return _cache_at(cache_root())
    except CacheFolderError as error:
        warn_once("cache folder", f"cute_backend: {error}; kernels are compiled anew in each process.")
        return None


def caches() -> list[KernelCache]:
    """The caches that may have a kernel, in the order of search."""
    user = _users()
    return [*([] if user is None else [user]), *_own]


def existing_caches() -> list[KernelCache]:
    """The same, without making a folder for the user's."""
    try:
        exists = cache_root().is_dir()
    except (CacheFolderError, OSError):  # as in another user's home
        exists = False
    return caches() if exists else list(_own)


def writable_cache() -> KernelCache:
    """The cache that kernels are written to: the user's or, with a warning, one of this process's own.

    Raises OSError if no folder can be written.
    """
    user = _users()
    if user is not None:
        if user.writable:
            return user
        warn_once(
            ("unwritable", user.root),
            f"cute_backend: the cache folder {user.root} can't be written ({user.why_not}); kernels that it "
            "lacks are compiled anew in each process.",
        )
    with _making:
        return next((cache for cache in _own if cache.writable), None) or _make_own()


def _make_own() -> KernelCache:
    from multiprocessing.util import Finalize  # here, since few processes need a folder of their own

    while True:
        root = private_folder(_ROOM, without={cache.root.parent for cache in _own})
        atexit.register(_remove_in, os.getpid(), root)
        # A process that multiprocessing has forked ends without the functions of atexit.
        Finalize(None, _remove_in, (os.getpid(), root), exitpriority=0)
        _own.append(KernelCache(root))
        if _own[-1].writable:
            return _own[-1]


def _remove_in(process: int, root: Path) -> None:
    """Removes a folder when the process that made it ends. A forked child does not remove it."""
    if os.getpid() == process:
        shutil.rmtree(root, ignore_errors=True)
