"""Facts about the installed DSL, found without importing it: which CUDA library it uses, and where its
runtime is.

`nvidia_cutlass_dsl` ships a library for each CUDA major version, `cu12` always and `cu13` with the extra of
that name. On import the DSL takes the newest one that the driver supports, or the newest of all without a
driver (nvidia_cutlass_dsl/.../_mlir_libs/__init__.py, 4.8.1). So if both are installed and the driver is of
CUDA 13, it takes CUDA 13's. This module follows the same rule, so that a cached kernel can be loaded without
importing the DSL.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from cute_backend.errors import UnavailableError

_RUNTIME = "libcute_dsl_runtime.so"


@cache
def cuda_major() -> int:
    """The CUDA major version whose library the DSL uses. Raises UnavailableError if it can use none."""
    driver = _driver_major()
    usable = [major for major in _flavors() if driver is None or major <= driver]
    if not usable:
        raise UnavailableError(
            f"nvidia-cutlass-dsl has libraries for CUDA {sorted(_flavors())}; the driver is of CUDA {driver}"
        )
    return max(usable)


def runtime_library() -> Path:
    """The shared library that compiled host code calls to load and launch kernels."""
    return _flavors()[cuda_major()]


@cache
def _flavors() -> dict[int, Path]:
    package = find_spec("nvidia_cutlass_dsl")
    if package is None or not package.submodule_search_locations:
        raise UnavailableError(
            "nvidia-cutlass-dsl is not installed: pip install 'nvidia-cutlass-dsl[cu13]==4.8.*'"
        )
    root = Path(next(iter(package.submodule_search_locations)))
    found = {}
    for folder in root.glob("cu*"):
        match = re.fullmatch(r"cu(\d+)", folder.name)
        if match and (folder / "lib" / _RUNTIME).exists():
            found[int(match[1])] = folder / "lib" / _RUNTIME
    if not found:
        raise UnavailableError(f"nvidia-cutlass-dsl at {root} has no runtime library: reinstall it")
    return found


def _driver_major() -> int | None:
    """The newest CUDA major version that the driver supports, or None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000
