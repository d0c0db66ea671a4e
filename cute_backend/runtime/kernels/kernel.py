"""The key of a kernel, which the compiler, the cache and the launcher share."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cute_backend.errors import UnavailableError
from cute_backend.planning import Arch, Plan
from cute_backend.planning.naming import entry_name
from cute_backend.runtime.kernels.edited import edited_text

_PACKAGE = Path(__file__).parents[2]

_HOST_CPUS = {"x86_64": "x86-64-v2", "aarch64": "generic"}
"""The LLVM CPU that host code is compiled for, by machine: a fixed baseline, independent of the machine that
compiles."""

_HOST_FEATURES = {
    "x86-64-v2": (
        "cx16",
        "fxsr",
        "mmx",
        "popcnt",
        "sahf",
        "sse",
        "sse2",
        "sse3",
        "ssse3",
        "sse4.1",
        "sse4.2",
    ),
    "generic": ("fp-armv8", "neon"),
}
"""The CPU features that LLVM may use: those of version 2 of the x86-64 psABI, or of ARMv8.0."""


def host_cpu() -> str:
    """LLVM's name of the CPU that host code is compiled for. Raises UnavailableError on another machine."""
    machine = platform.machine()
    if machine not in _HOST_CPUS:
        raise UnavailableError(f"kernels are built for hosts {', '.join(_HOST_CPUS)}, not for {machine}")
    return _HOST_CPUS[machine]


def host_features() -> tuple[str, ...]:
    """LLVM's names of that CPU's features. Raises UnavailableError as `host_cpu` does."""
    return _HOST_FEATURES[host_cpu()]


def host() -> str:
    """The triple and the baseline CPU of host code, such as "x86_64-linux-gnu x86-64-v2": torch's wheels for
    Linux are all for glibc. Raises UnavailableError on another machine."""
    if platform.system() != "Linux":
        raise UnavailableError(f"kernels are built for hosts that run Linux, not {platform.system()}")
    return f"{platform.machine()}-linux-gnu {host_cpu()}"


@dataclass(frozen=True)
class Kernel:
    """One compiled object: a plan, and the text that a person has made of its module."""

    plan: Plan
    edited: str | None = None
    """The text of the module, if a person has edited it."""

    @staticmethod
    def found(plan: Plan) -> Kernel:
        """The kernel to use in this process, with the edited module that `edited_text` finds, if there is
        one. Raises UsageError as `edited_text` does."""
        return Kernel(plan, edited_text(plan))

    @property
    def arch(self) -> Arch:
        return self.plan.arch

    @cached_property
    def entry(self) -> str:
        """The kernel's name in profilers. It depends neither on versions nor on whether the module was
        edited."""
        return entry_name(self.plan)

    @cached_property
    def name(self) -> str:
        """A file name that is unique to this kernel and to the versions that compile it."""
        return f"{self.entry}_{digest_of(self.to_dict(), environment())}"

    def to_dict(self) -> dict[str, Any]:
        """Everything that another process needs to build the kernel, as plain values."""
        return {**self.plan.to_dict(), **({} if self.edited is None else {"edited": self.edited})}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Kernel:
        """The inverse of `to_dict`. Raises ValueError as `Plan.from_dict` does."""
        return Kernel(Plan.from_dict(data), data.get("edited"))


def digest_of(kernel: dict[str, Any], surroundings: Sequence[str]) -> str:
    """The digest at the end of a kernel's file name, from the values of `Kernel.to_dict` and an
    `environment`."""
    identity = json.dumps([kernel, surroundings], sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


@cache
def environment() -> tuple[str, ...]:
    """Further facts that a compiled object depends on: versions, the sources that make kernels, the host's
    triple and CPU."""
    from cute_backend import __version__
    from cute_backend.runtime.kernels.toolkit import cuda_major

    return (
        f"cute_backend {__version__} {_source_digest()}",
        f"nvidia-cutlass-dsl {version_of('nvidia-cutlass-dsl')} cu{cuda_major()}",
        f"apache-tvm-ffi {version_of('apache-tvm-ffi')}",
        host(),
    )


def version_of(distribution: str) -> str:
    """The installed version of a distribution, or "none"."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"


_CODE_FOLDERS = ("kinds", "spec", "planning", "memory_ops", "templates")

_CODE_FILES = ("dtypes.py", "formula.py", "numerics.py", "ops.py", "philox.py", "signature.py")

_CODE_COMPILERS = ("compiling/compile.py", "kernels/host_code.py", "kernels/kernel.py")
"""Files of the runtime."""


def code_sources() -> list[Path]:
    """Every Python file of the package that influences the code of a kernel."""
    files = [_PACKAGE / name for name in _CODE_FILES]
    files += [_PACKAGE / "runtime" / name for name in _CODE_COMPILERS]
    return files + [path for folder in _CODE_FOLDERS for path in sorted((_PACKAGE / folder).rglob("*.py"))]


def _source_digest() -> str:
    """A digest of `code_sources`, by path."""
    digest = hashlib.sha256()
    for path in code_sources():
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
