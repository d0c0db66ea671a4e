"""Timings of problems, remembered on disk: one JSON file in the cache folder.

An entry belongs to a problem on one model of GPU, and is valid for the versions that it was made with: of
this package's sources, the DSL and torch. A problem whose operands did not fit into memory has an entry,
too, so that it is not tried in every process. The file is replaced whole, under a lock, and never
unpickled. An entry that can't be read causes one warning and is tuned again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import torch

from cute_backend.planning import Alignment, TileConfig
from cute_backend.runtime.disk.cache import KernelCache, caches, writable_cache
from cute_backend.runtime.disk.pack import packs
from cute_backend.runtime.host.documents import parse
from cute_backend.runtime.host.notices import warn_once
from cute_backend.runtime.host.trust import UntrustedError, read_trusted
from cute_backend.runtime.kernels.kernel import environment
from cute_backend.spec import EpilogueSpec

log = logging.getLogger(__name__)

NOISE = 0.03
"""The fraction of the best kernel's time by which Inductor's own code must be faster before a region is left
to Inductor. Medians of one run on one GPU repeat within a third of it, and the graph around a region is not
timed."""

_FORMAT = 2

MALFORMED = (KeyError, TypeError, ValueError, AttributeError)
"""The exceptions that `Result.from_dict` raises for malformed data."""

_MAX_FILE = 64 << 20
"""The most bytes of a file of results; usual files have some hundred thousand."""


@dataclass(frozen=True)
class Key:
    """The key of a result. `m` is M or, if M varies, `bucket_of(M)`; `device` names a model of GPU, and
    `groups` is the number of groups of rows of a grouped product."""

    spec: EpilogueSpec
    alignment: Alignment
    m: int
    n: int
    k: int
    device: str
    groups: int | None = None

    @property
    def text(self) -> str:
        """The key in the file."""
        sizes = f"M {self.m}, N {self.n}, K {self.k}"
        if self.groups is not None:
            sizes += f", groups {self.groups}"
        return f"{self.device}; {self.spec.key} {self.alignment.value}; {sizes}"


def wins(unfused_us: float, us: float) -> bool:
    """Whether code that takes `unfused_us` microseconds is faster than a kernel of `us`, by more than
    noise."""
    return unfused_us < (1 - NOISE) * us


@dataclass(frozen=True)
class Result:
    """The fastest configuration of a problem, its time in microseconds and that of Inductor's own code.

    `unfused_us` is None if Inductor's code was not timed. `thorough` says that all candidates of tuning were
    timed, and not only those that the cost model could not tell from the fastest.
    """

    config: TileConfig
    us: float
    unfused_us: float | None
    thorough: bool = True

    @property
    def unfused_wins(self) -> bool:
        """Whether the region is better left to Inductor, by more than noise."""
        return self.unfused_us is not None and wins(self.unfused_us, self.us)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values, with the versions that it is valid for."""
        return {
            "config": self.config.to_dict(),
            "us": self.us,
            "unfused_us": self.unfused_us,
            "thorough": self.thorough,
            "environment": _environment(),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Result | None:
        """The inverse of `to_dict`; None for a result of other versions. Malformed data raises the error that
        Python raises for it."""
        if data["environment"] != _environment():
            return None
        unfused_us = data["unfused_us"]
        return Result(
            TileConfig.from_dict(data["config"]),
            float(data["us"]),
            None if unfused_us is None else float(unfused_us),
            bool(data["thorough"]),
        )


@dataclass(frozen=True)
class NoRoom:
    """The entry of a problem that was not timed: its operands did not fit into the bytes of the GPU's memory
    that were free."""

    free_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The entry as plain values, with the versions that it is valid for."""
        return {"free_bytes": self.free_bytes, "environment": _environment()}


_Entry = Union[Result, NoRoom]


def _entry_of(data: Mapping[str, Any]) -> _Entry | None:
    """The entry that plain values stand for; None for one of other versions. Malformed data raises one of
    MALFORMED."""
    if "free_bytes" not in data:
        return Result.from_dict(data)
    return NoRoom(int(data["free_bytes"])) if data["environment"] == _environment() else None


def _environment() -> list[str]:
    return [*environment(), f"torch {torch.__version__}"]


class TunedFile:
    """The results in one cache folder, as this process last read them."""

    def __init__(self, cache: KernelCache) -> None:
        self._cache = cache
        self._path = cache.root / "tuned.json"
        self._seen: tuple[int, int, int] | None = None
        self._results: dict[str, _Entry] = {}
        self._unwritten: dict[str, _Entry] = {}

    def get(self, key: Key) -> _Entry | None:
        """The entry of a problem, or None if it was not tuned, or by other versions only."""
        self._refresh()
        return self._unwritten.get(key.text) or self._results.get(key.text)

    def put(self, results: Mapping[Key, _Entry]) -> None:
        """Adds entries to those in the file. If the file can't be written, only this process remembers
        them."""
        new = {key.text: result for key, result in results.items()}
        try:
            with self._cache.lock_named("tuned.lock"):
                entries = self._read()
                entries.update({text: result.to_dict() for text, result in new.items()})
                content = json.dumps({"format": _FORMAT, "problems": entries}, indent=1, sort_keys=True)
                self._cache.write(self._path, content.encode())
        except OSError as error:
            self._unwritten.update(new)
            warn_once(
                ("tuned file unwritable", self._path),
                f"cute_backend: {self._path} can't be written ({error}); what is tuned is forgotten when "
                "this process ends.",
            )

    @contextmanager
    def exclusively(self, patience_s: float) -> Iterator[bool]:
        """A lock that a process holds while it times: two processes that time at once would disturb each
        other. Yields False if another process still holds it after `patience_s` seconds.

        If the folder can't be written, or is full, none is held.
        """
        free = True
        with ExitStack() as held:
            try:
                lock = self._cache.lock_named("tuning.lock")
                lock.timeout = patience_s
                held.enter_context(lock)
            except OSError as error:
                free = not isinstance(error, TimeoutError)
                log.info("tuning takes no lock in %s: %s", self._cache.root, error)
            yield free

    def _refresh(self) -> None:
        """Reads the file again if it has changed."""
        try:
            status = self._path.stat()
            seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError:
            self._seen, self._results = None, {}
            return
        if seen == self._seen:
            return
        results = {text: self._parse(entry) for text, entry in self._read().items()}
        self._seen, self._results = seen, {text: each for text, each in results.items() if each is not None}

    def _parse(self, entry: Any) -> _Entry | None:
        try:
            return _entry_of(entry)
        except MALFORMED as error:
            self._complain(f"it has an entry that is none ({error!r})")
            return None

    @property
    def results(self) -> Mapping[str, _Entry]:
        """All entries that are valid here, by the texts of their keys."""
        self._refresh()
        return {**self._results, **self._unwritten}

    def _read(self) -> dict[str, Any]:
        """The entries of the file; none if there is no valid file."""
        try:
            data = parse(read_trusted(self._path, _MAX_FILE))
            if data["format"] == _FORMAT:
                return dict(data["problems"])
            self._complain(f"it has format {data['format']}, and this version reads {_FORMAT}")
        except FileNotFoundError:
            pass
        except UntrustedError as error:
            self._complain(f"it can't be trusted ({error})")
        except (OSError, KeyError, TypeError, ValueError) as error:
            self._complain(f"it can't be read ({error!r})")
        return {}

    def _complain(self, why: str) -> None:
        warn_once(
            ("tuned file", self._path),
            f"cute_backend: {self._path} is not used: {why}; its problems are tuned again on request.",
        )


class Records:
    """All results that this process can see: those of every cache folder, written to the last, and those of
    packs."""

    def __init__(self, files: list[TunedFile], packed: Sequence[Mapping[str, Any]] = ()) -> None:
        self._files = files
        self._packed = packed

    def get(self, key: Key) -> Result | None:
        """The result of a problem, or None."""
        here = self._here(key)
        if isinstance(here, Result):
            return here
        return next((found for timed in self._packed if (found := _packed(timed, key))), None)

    def room_lacked(self, key: Key) -> int | None:
        """The bytes of memory that were free when a problem did not fit, or None if it never failed to."""
        here = self._here(key)
        return here.free_bytes if isinstance(here, NoRoom) else None

    def _here(self, key: Key) -> _Entry | None:
        return next((found for file in reversed(self._files) if (found := file.get(key))), None)

    def devices(self) -> set[str]:
        """The models of GPUs that the results in cache folders are of."""
        return {text.partition("; ")[0] for file in self._files for text in file.results}

    def winners(self, keys: Iterable[Key]) -> dict[int, TileConfig]:
        """The fastest configurations of problems that differ in M alone, by M."""
        found = {key.m: self.get(key) for key in keys}
        return {m: result.config for m, result in found.items() if result is not None}

    def put(self, results: Mapping[Key, _Entry]) -> None:
        """Remembers entries, in this process and in the last folder."""
        for file in self._files[-1:]:
            file.put(results)

    def exclusively(self, patience_s: float) -> AbstractContextManager[bool]:
        """A lock that a process holds while it times, as `TunedFile.exclusively` does."""
        return self._files[-1].exclusively(patience_s) if self._files else nullcontext(True)


def _packed(timed: Mapping[str, Any], key: Key) -> Result | None:
    try:
        return Result.from_dict(timed[key.text])
    except MALFORMED:  # most likely, the pack has no such key
        return None


_files: dict[Path, TunedFile] = {}


def remembered() -> Records:
    """The memory beside the kernels of this process."""
    try:
        found = caches() or [writable_cache()]
    except OSError:
        found = []  # nothing can be compiled either, and a warning has said so
    files = [_files.setdefault(cache.root, TunedFile(cache)) for cache in found]
    return Records(files, [pack.timed for pack in packs()])
