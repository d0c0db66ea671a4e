"""`python -m cute_backend doctor`: what runs here, in a form to paste into a report.

Every row is found by itself: where torch or the CuTe DSL is missing or does not load, its row says so.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from cute_backend import __version__
from cute_backend.errors import UnavailableError
from cute_backend.planning import Arch
from cute_backend.runtime.kernels.toolkit import cuda_major
from cute_backend.variables import PREFIX, variable_of

_PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "numpy", "sympy")

Rows = Iterator[tuple[str, str]]
"""The names of rows and their texts. A row that is named `missing` says what can't be done without it."""


def main(arguments: argparse.Namespace) -> int:
    """Prints the report."""
    rows = [row for part in _PARTS for row in _found(part)]
    lacking = [text for name, text in rows if name == _MISSING]
    rows = [row for row in rows if row[0] != _MISSING]
    width = max(len(name) for name, _ in rows)
    for name, text in [*rows, *((_MISSING, text) for text in lacking or ["nothing"])]:
        print(f"{name:<{width}}  {text}")
    return 0


_MISSING = "missing"


def _found(part: Callable[[], Rows]) -> list[tuple[str, str]]:
    """The rows of a part. A part that fails has a row with its error: a report is made where things fail."""
    try:
        return [*part()]
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "no message")
        return [(_MISSING, f"{part.__name__.strip('_')}: {type(error).__name__}: {reason}")]


def _machine() -> Rows:
    yield "cute_backend", __version__
    yield "python", f"{platform.python_version()} at {sys.executable}"
    yield "system", f"{platform.platform()}, {len(os.sched_getaffinity(0))} CPUs"


def _packages() -> Rows:
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            if name != "triton":  # the build of torch for a CPU has none
                yield _MISSING, f"the package {name}: pip install of this package brings it"
    try:
        yield "cuda", f"kernels are compiled by the DSL's library for CUDA {cuda_major()}"
    except UnavailableError as error:
        yield _MISSING, f"the compiler of kernels: {error}"


def _devices() -> Rows:
    import torch

    from cute_backend.bench.environment import Nvml  # here, as torch

    yield "torch.cuda", str(torch.version.cuda or "none: this build of torch has no CUDA")
    yield "driver", Nvml().driver or "none"
    if not torch.cuda.is_available():
        yield _MISSING, "a GPU that torch can use: on a CPU, aten computes the fused regions"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        arch = Arch.of_capability((properties.major, properties.minor))
        yield (
            f"gpu {index}",
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB, "
            + (f"kernels for {arch.value}" if arch else "for which no kernels are generated"),
        )


def _host_compiler() -> Rows:
    named = os.environ.get("CXX")
    path = shutil.which(named or "g++") or (None if named else shutil.which("clang++"))
    if path is None:
        which = f"the C++ compiler {named}, which CXX names" if named else "a C++ compiler"
        yield _MISSING, f"{which}: Inductor needs one for programs on a CPU"
        return
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10)
    yield "C++", f"{path}: {next(iter(done.stdout.splitlines()), 'no version')}"


def _cache() -> Rows:
    from cute_backend.runtime.disk.cache import CacheFolderError, KernelCache, cache_root
    from cute_backend.runtime.disk.upkeep import entries  # here, since they need packages that may be missing

    try:
        root = cache_root()
        if not os.path.exists(root):
            yield "cache", f"{root}, which does not exist yet"
            return
        KernelCache(root)
    except CacheFolderError as error:
        yield _MISSING, f"a folder for kernels: {error}"
        return
    found = entries(root)
    kernels, size = sum(each.is_kernel for each in found), sum(each.size for each in found) / 2**20
    free = shutil.disk_usage(root).free / 2**30
    yield "cache", f"{root}, kernels: {kernels}, {size:.1f} MiB, {free:.0f} GiB free"


def _packs() -> Rows:
    from cute_backend.runtime.disk.pack import packs  # here, since torch may be missing

    for pack in packs():
        archs = ", ".join(sorted(arch.value for arch in pack.archs))
        installed = ", installed" if pack.installed else ""
        yield "pack", f"{pack.path}, for {archs}, of graphs of {pack.traced_by}{installed}"


def _settings() -> Rows:
    from cute_backend import config

    defaults = config._config  # type: ignore[attr-defined]
    for name in (name for name in defaults if not name.startswith("_")):
        source = f", of {variable_of(name)}" if os.environ.get(variable_of(name)) else ""
        yield "setting", f"{name} = {getattr(config, name)!r}{source}"


def _environment() -> Rows:
    for name, value in sorted(os.environ.items()):
        if name.startswith((PREFIX, "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_", "CUDA_", "CUTE_DSL_")):
            yield "environment", f"{name}={value}"


_PARTS = (_machine, _packages, _devices, _host_compiler, _cache, _packs, _settings, _environment)
