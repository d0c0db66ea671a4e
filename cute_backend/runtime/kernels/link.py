"""Makes compiled host code callable: linked as a shared library where a linker exists, otherwise by the DSL.

A library loads through TVM-FFI alone in milliseconds. An object that could not be linked is loaded by the
DSL's own dynamic linker, which requires importing the DSL. Any ELF linker can be used; nothing is compiled.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from cute_backend.runtime.host.space import check_room
from cute_backend.runtime.kernels.toolkit import runtime_library

SYMBOL = "gemm_epilogue"
"""The name under which an object exports its `launch`."""

LIBRARY, OBJECT = ".so", ".o"

KernelFunction = Callable[..., Any]
"""`launch(a, b, <loads>, <stores>, max_active_clusters)` on torch tensors and the current stream."""

_LINKERS = ("ld", "ld.lld", "ld.bfd", "ld.gold", "cc", "gcc", "clang")


@cache
def find_linker() -> str | None:
    """The linker on this machine's path, or None. If there is no linker by itself, a compiler driver is used.

    Relative and empty entries of the path are ignored, since they are the current folder or one in it.
    """
    path = os.pathsep.join(filter(os.path.isabs, os.get_exec_path()))
    return next((found for name in _LINKERS if (found := shutil.which(name, path=path))), None)


def link(host_object: Path, library: Path) -> bool:
    """Links an object into a shared library. Returns False, without a library, if no linker can do it.

    Raises OSError if there is no space for a library, which says nothing about the linker.
    """
    linker = find_linker()
    if linker is None:
        return False
    hardening = "-Wl,-z,noexecstack" if Path(linker).name in ("cc", "gcc", "clang") else "-znoexecstack"
    command = [linker, "-shared", hardening, "-o", str(library), str(host_object)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60, cwd=library.parent)
    except (OSError, subprocess.SubprocessError):
        library.unlink(missing_ok=True)
        check_room(library.parent, 2 * host_object.stat().st_size)
        return False
    return True


def load(path: Path) -> KernelFunction:
    """Loads the kernel in a shared library or an object file. Raises RuntimeError or OSError if the file is
    neither."""
    _runtime()
    if path.suffix == LIBRARY:
        import tvm_ffi

        return tvm_ffi.load_module(str(path))[SYMBOL]
    import cutlass.cute as cute

    return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[SYMBOL]


@cache
def _runtime() -> ctypes.CDLL:
    """The DSL's runtime, its symbols visible to the libraries that are loaded after it."""
    return ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)
