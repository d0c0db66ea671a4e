"""Packs: kernels that were compiled ahead of time, in one file, which many processes and machines read and
share, and which no process writes to.

A pack is a zip archive. Its first member, `manifest.json`, has the versions that made it and, for each
kernel, its description and the SHA-256 of its code. Each of the other members is one kernel's code, a shared
library. Nothing is pickled. The whole file is checked when it is opened, and each kernel again when it is
loaded, so that a running process notices if the file is replaced or damaged.

Code from a pack runs in the process: the file must be trusted (`trust`). The file may still come from
elsewhere and be checked by its SHA-256 only. So no size that it states is relied on: `archive` reads no more
than the bytes of the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from cute_backend.planning import Alignment, Arch, Constraints, Plan, TileConfig
from cute_backend.runtime.host.archive import Archive, ArchiveError
from cute_backend.runtime.host.documents import parse
from cute_backend.runtime.host.notices import warn_once
from cute_backend.runtime.host.private_folder import private_folder
from cute_backend.runtime.host.trust import UntrustedError, open_trusted
from cute_backend.runtime.kernels.kernel import Kernel, environment
from cute_backend.runtime.kernels.link import LIBRARY, KernelFunction, load
from cute_backend.runtime.kernels.reach import Problem
from cute_backend.spec import EpilogueSpec
from cute_backend.variables import PACK_VARIABLE

log = logging.getLogger(__name__)


MANIFEST = "manifest.json"

_FORMAT = 4

_WHEN = (1980, 1, 1, 0, 0, 0)
"""The date of every member, so that the same kernels make the same file."""


class PackError(RuntimeError):
    """A pack can't be used; the message says in one sentence which pack, and why."""


@dataclass(frozen=True)
class Content:
    """The content of a pack: the code and the resources of each kernel, and the problems whose kernels are
    all in it.

    `m` is the range of M that they serve, or None if each problem has the M of its example. `timed` are the
    timings of these problems, as plain values by the texts of their keys.
    """

    kernels: Mapping[Kernel, tuple[bytes, Mapping[str, Any]]]
    problems: Iterable[Problem]
    m: tuple[int, int] | None
    timed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def write_pack(path: Path, content: Content) -> str:
    """Writes a pack completely or not at all. Returns the SHA-256 of its manifest, which has the SHA-256 of
    all code."""
    manifest = _manifest(content)
    text = json.dumps(manifest, indent=1, sort_keys=True).encode()
    handle, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr(_member(MANIFEST), text)
            for kernel, (code, _) in sorted(content.kernels.items(), key=lambda item: item[0].name):
                archive.writestr(_member(f"{kernel.name}{LIBRARY}"), code)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return hashlib.sha256(text).hexdigest()


def _member(name: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name, _WHEN)
    member.external_attr = 0o644 << 16
    return member


def _manifest(content: Content) -> dict[str, Any]:
    specs = {each.plan.spec.key: json.loads(each.plan.spec.to_json()) for each in content.kernels}
    problems = {
        json.dumps([each.spec.key, each.n, each.k, each.groups, each.constraints.text]): each
        for each in content.problems
    }
    return {
        "format": _FORMAT,
        "environment": environment(),
        "traced_by": f"torch {torch.__version__}",
        "m": content.m,
        "specs": specs,
        "problems": [json.loads(text) for text in sorted(problems)],
        "timed": content.timed,
        "kernels": {
            kernel.name: {
                "spec": kernel.plan.spec.key,
                "tile": kernel.plan.tile.to_dict(),
                "alignment": kernel.plan.alignment.value,
                "sha256": hashlib.sha256(code).hexdigest(),
                **figures,
            }
            for kernel, (code, figures) in content.kernels.items()
        },
    }


class Pack:
    """The kernels of a pack. Raises PackError for a file that is not a pack, that was changed, or that other
    versions made.

    If `sha256` is given, the pack's manifest must have this SHA-256. An installed pack may hold kernels of
    many programs, of which a process needs few: their code is checked when it is loaded, and not before.
    """

    def __init__(self, path: Path, sha256: str | None = None, *, installed: bool = False) -> None:
        self.path, self.installed = path, installed
        with self._open() as archive:
            text = archive.read(MANIFEST)
            found = hashlib.sha256(text).hexdigest()
            if sha256 not in (None, found):
                raise PackError(f"the pack {path} has a manifest of SHA-256 {found}, not {sha256}")
            manifest = parse(text)
            if manifest["format"] != _FORMAT:
                raise PackError(
                    f"the pack {path} has format {manifest['format']!r}; this version reads {_FORMAT}"
                )
            self._check_versions(manifest["environment"])
            self._kernels: dict[str, dict[str, Any]] = manifest["kernels"]
            for name, entry in self._kernels.items():
                _check_entry(name, entry)
                if not installed:
                    self._code(archive, name)
            self.archs = frozenset(Arch(each["tile"]["arch"]) for each in self._kernels.values())
            self.timed: dict[str, Any] = dict(manifest["timed"])
            self.traced_by = str(manifest["traced_by"])
            self._problems = {tuple(each) for each in manifest["problems"]}
            for spec, n, k, groups, constraints in self._problems:
                _check_types((spec, str), *((size, int | None) for size in (n, k, groups)))
                Constraints.parse(constraints)

    @contextmanager
    def _open(self) -> Iterator[Archive]:
        """Opens the current file, if it is trusted. Errors in it, now or in the block, become PackErrors."""
        try:
            with os.fdopen(open_trusted(self.path), "rb") as file:
                yield Archive(file)
        except UntrustedError as error:
            raise PackError(f"the pack {self.path} can't be trusted: {error}") from error
        except OSError as error:
            raise PackError(f"the pack {self.path} can't be read: {error.strerror or error}") from error
        except (ArchiveError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise PackError(f"{self.path} is not a valid pack: {' '.join(str(error).split())}") from error

    def _check_versions(self, theirs: list[str]) -> None:
        ours = environment()
        for its, here in zip(theirs, ours, strict=True):
            if its != here:
                raise PackError(f"the pack {self.path} is for {its}, and this is {here}; make it again")

    def _code(self, archive: Archive, name: str) -> bytes:
        code = archive.read(f"{name}{LIBRARY}")
        if hashlib.sha256(code).hexdigest() != self._kernels[name]["sha256"]:
            raise PackError(f"the pack {self.path} was changed: {name} does not match its checksum")
        return code

    def load(self, kernel: Kernel) -> KernelFunction | None:
        """Loads a kernel. Returns None if the pack lacks it, or, with a warning, if the pack was changed."""
        try:
            found = self.read(kernel)
            if found is None:
                return None
            folder = private_folder(len(found[0]))
            try:
                code = folder / f"{kernel.name}{LIBRARY}"
                code.write_bytes(found[0])
                return load(code)  # a mapped library stays mapped when its file is removed
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        except (PackError, OSError, RuntimeError, AttributeError) as error:
            warn_once(
                ("pack", self.path),
                f"cute_backend: a kernel of {self.path} is not used, as it fails: {error}",
            )
            return None

    def read(self, kernel: Kernel) -> tuple[bytes, dict[str, Any]] | None:
        """The code of a kernel and its entry, or None if the pack lacks it.

        Raises PackError for a file that was changed.
        """
        if kernel.name not in self._kernels:
            return None
        with self._open() as archive:
            return self._code(archive, kernel.name), self._kernels[kernel.name]

    def spill_bytes(self, kernel: Kernel) -> int | None:
        """The bytes that each thread of a kernel spills; None if the pack lacks the kernel."""
        entry = self._kernels.get(kernel.name)
        return None if entry is None else int(entry["spill_bytes"])

    def kernels(self, spec: EpilogueSpec, arch: Arch) -> list[Kernel]:
        """Every kernel of a spec for an architecture."""
        found = (each for each in self._kernels.values() if each["spec"] == spec.key)
        kernels = [
            Kernel.found(Plan.of(spec, TileConfig.from_dict(each["tile"]), Alignment(each["alignment"])))
            for each in found
        ]
        return [kernel for kernel in kernels if kernel.arch is arch]

    def serves(self, problem: Problem, arch: Arch) -> bool:
        """Whether the pack has the kernels of a problem for all M that it was made for.

        A problem with an unknown N or K is served if the pack was made for any problem with its epilogue. A
        pack that was made for unknown sizes serves all.
        """
        return arch in self.archs and any(
            all(None in pair or pair[0] == pair[1] for pair in zip(sizes, problem.sizes, strict=True))
            for sizes in self._sizes_of(problem)
        )

    def is_for_sizes_of(self, problem: Problem, arch: Arch) -> bool:
        """Whether the pack was made for the N, K and groups of a problem, and so has the best tiles for
        them."""
        return arch in self.archs and problem.sizes in self._sizes_of(problem)

    def _sizes_of(self, problem: Problem) -> list[tuple[int | None, ...]]:
        """N, K and the groups of the pack's problems that have the epilogue and the constraints of this
        one."""
        return [
            tuple(sizes)
            for spec, *sizes, constraints in self._problems
            if spec == problem.spec.key and constraints == problem.constraints.text
        ]


def _check_entry(name: str, entry: Mapping[str, Any]) -> None:
    """Raises the errors of malformed data when the pack is opened, so that looking up a kernel raises
    none."""
    TileConfig.from_dict(entry["tile"])
    Alignment(entry["alignment"])
    _check_types((name, str), (entry["spec"], str), (entry["sha256"], str), (entry["spill_bytes"], int))


def _check_types(*values: tuple[Any, Any]) -> None:
    for value, kind in values:
        if not isinstance(value, kind):
            raise TypeError(f"{value!r:.40} is not of type {getattr(kind, '__name__', kind)}")


INSTALLED = "cute_backend.kernels"
"""The group of entry points by which installed packs are found. The value of one is `package:file`, a pack in
the folder of a package."""

_packs: dict[Path, Pack] = {}
_refused: set[Path] = set()


def load_pack(path: str | os.PathLike[str], sha256: str | None = None) -> None:
    """Makes launches use the kernels of a pack that `python -m cute_backend aot` made; only kernels that it
    lacks are compiled.

    Call it before the first call of a compiled function; the environment variable CUTE_BACKEND_PACK does the
    same for a program that doesn't call it. With `sha256`, the digest that `aot` printed, no other pack is
    accepted.

    Raises PackError, in one sentence, for a file that is not a pack or can be written by others, one whose
    content does not match its checksums, one made by other versions or for another host, and, where there is
    a GPU, one without kernels for its architecture.
    """
    named = Path(path).absolute()
    pack = Pack(named, sha256)
    if torch.cuda.is_available():
        _check_arch(pack, Arch.of_capability(torch.cuda.get_device_capability()))
    _packs[named] = pack
    log.info("kernels are taken from %s", named)


def packs() -> list[Pack]:
    """The packs of this process: those that are loaded or that the environment names, then those that are
    installed. A pack that is refused causes one warning."""
    named = os.environ.get(PACK_VARIABLE)
    if named:
        try:
            path = Path(named).expanduser().absolute()
        except (OSError, RuntimeError) as error:  # of a folder that is gone, or of a home that is not known
            warn_once(
                ("pack", named), f"cute_backend: there is no pack {named}: {error}; kernels are compiled."
            )
        else:
            if path not in _packs and path not in _refused:
                _packs.update(_usable(path))
    return [*_packs.values(), *_installed().values()]


def is_packed(problem: Problem, arch: Arch) -> bool:
    """Whether a pack of this process has the kernels of a problem."""
    return any(pack.serves(problem, arch) for pack in packs())


def is_packed_for_any_size(problem: Problem, arch: Arch) -> bool:
    """Whether only installed packs serve a problem of known sizes, and they have no kernels but the few for
    unknown sizes."""
    serving = [pack for pack in packs() if pack.serves(problem, arch)]
    known = None not in (problem.m, problem.n, problem.k)
    any_size = (pack.installed and not pack.is_for_sizes_of(problem, arch) for pack in serving)
    return known and bool(serving) and all(any_size)


def _usable(path: Path, *, installed: bool = False) -> dict[Path, Pack]:
    try:
        return {path: Pack(path, installed=installed)}
    except PackError as error:
        _refused.add(path)
        warn_once(("pack", path), f"cute_backend: {error}; kernels are compiled.")
        return {}


@cache
def _installed() -> dict[Path, Pack]:
    """The packs of installed packages. Their modules are not imported."""
    found: dict[Path, Pack] = {}
    for each in entry_points(group=INSTALLED):
        module = find_spec(each.module)
        if module is not None and module.submodule_search_locations:
            found |= _usable(Path(module.submodule_search_locations[0], each.attr), installed=True)
    return found


def packed_kernels(spec: EpilogueSpec, arch: Arch) -> list[Kernel]:
    """The kernels of a spec in all packs that don't spill. Warns once of a pack that is only for other GPUs,
    unless it is installed."""
    for pack in packs():
        try:
            _check_arch(pack, arch)
        except PackError as error:
            if pack.installed:
                continue
            warn_once(("pack", pack.path), f"cute_backend: {error}; kernels are compiled.")
    return [kernel for pack in packs() for kernel in pack.kernels(spec, arch) if not pack.spill_bytes(kernel)]


def _check_arch(pack: Pack, arch: Arch | None) -> None:
    if arch not in pack.archs:
        theirs = " and ".join(sorted(each.value for each in pack.archs))
        here = "is none that kernels are for" if arch is None else f"is {arch.value}"
        raise PackError(f"the pack {pack.path} is for {theirs}, and this GPU {here}")
