"""Builds the runtime stub and links a function's host code with it, with the system's C compiler."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_backend.errors import UnavailableError
from cute_backend.runtime.disk.cache import CacheFolderError, cache_root
from cute_backend.runtime.host.trust import UntrustedError, check_folder
from cute_backend.simulator.simulation_errors import SimulationError

_STUB = Path(__file__).with_name("runtime_stub.c")
_STUB_FLAGS = ("-std=gnu11", "-O1", "-fPIC", "-fvisibility=hidden")
_UNDEFINED = re.compile(r"undefined (?:reference to|symbol:) [`']?(\w+)")


@dataclass(frozen=True)
class HostLibrary:
    """Host code and stub, loaded; `module` is TVM-FFI's view of the same library."""

    library: ctypes.CDLL
    module: Any


_loaded: dict[str, HostLibrary] = {}


def load_with_stub(object_code: bytes) -> HostLibrary:
    """The host code's object, linked with the stub and loaded: once for each object and process."""
    key = hashlib.sha256(object_code).hexdigest()
    if key not in _loaded:
        _loaded[key] = _link_and_load(object_code)
    return _loaded[key]


def _link_and_load(object_code: bytes) -> HostLibrary:
    import tvm_ffi

    stub = _build_stub()
    with tempfile.TemporaryDirectory(prefix="host-", dir=stub.parent) as folder:
        host, linked = Path(folder, "host.o"), Path(folder, "host.so")
        host.write_bytes(object_code)
        flags = ["-shared", "-Wl,--no-undefined", "-Wl,--as-needed", str(tvm_ffi.libinfo.find_libtvm_ffi())]
        _compile([str(host), str(stub), *flags], linked)
        return HostLibrary(ctypes.CDLL(str(linked)), tvm_ffi.load_module(str(linked)))


def _build_stub() -> Path:
    """The stub's object file in a private folder of the user's cache, compiled there on first use."""
    try:
        folder = cache_root() / "simulator"
    except CacheFolderError as error:
        raise UnavailableError(f"the simulator has no folder to build in: {error}") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        check_folder(folder)
    except OSError as error:
        raise UnavailableError(f"the simulator can't build in {folder}: {error.strerror}") from error
    except UntrustedError as error:
        raise UnavailableError(f"the simulator's folder {folder} can't be trusted: {error}") from error
    built_from = _STUB.read_bytes() + " ".join(_STUB_FLAGS).encode()
    path = folder / f"runtime_stub-{hashlib.sha256(built_from).hexdigest()[:16]}.o"
    if not path.exists():
        _compile(["-c", str(_STUB), *_STUB_FLAGS], path)
    return path


def _compile(arguments: Sequence[str], output: Path) -> None:
    """Runs the C compiler. `output` appears whole or not at all."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise UnavailableError(
            "the simulator needs a C compiler: install cc, gcc or clang, or name one in CC"
        )
    unfinished = output.with_suffix(f".{os.getpid()}")
    command = [*compiler.split(), *arguments, "-o", str(unfinished)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UnavailableError(f"the C compiler {compiler} could not be run: {error.strerror}") from error
    if done.returncode == 0:
        os.replace(unfinished, output)
        return
    missing = sorted(set(_UNDEFINED.findall(done.stderr)))
    if missing:
        raise SimulationError(
            f"the host code calls {', '.join(missing)}, which the simulated runtime lacks: add it to "
            "simulator/runtime_stub.c"
        )
    raise UnavailableError(f"{' '.join(command)} failed: {done.stderr.strip()}")
