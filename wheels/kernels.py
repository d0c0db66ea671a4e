"""Makes a wheel of the kernels of every model in docs/models.md, for one architecture.

    pip install '.[models]' 'setuptools>=77'
    python wheels/kernels.py --arch sm_90a -o dist

Needs no GPU. Installed beside the package, the wheel is found by itself, and the first call of such a model
compiles no kernel. It has the tiles for unknown sizes, so it serves these models at any width.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cute_backend import __version__
from cute_backend.aot import Request, find_problems, make_pack
from cute_backend.planning import Arch
from cute_backend.runtime.disk.pack import INSTALLED

ROOT = Path(__file__).resolve().parent.parent

Program = tuple[str, Callable[..., Any], tuple[Any, ...]]

PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "Kernels of cute_backend for {arch}, compiled ahead of time"
dependencies = ["cute-backend=={version}"]

[project.entry-points."{group}"]
{arch} = "{package}:{file}"

[tool.setuptools]
packages = ["{package}"]

[tool.setuptools.package-data]
"*" = ["{file}"]
"""

SETTINGS = "[bdist_wheel]\nplat_name = linux_{machine}\n"
"""Code of a kernel is a shared library of the machine's architecture."""

FILE = "kernels.cutepack"


def programs() -> Iterator[Program]:
    """The programs of docs/models.md, each with its name and arguments."""
    sys.path += [str(ROOT / "docs"), str(ROOT / "examples")]
    models, architectures = map(importlib.import_module, ("models", "architectures"))
    for file, names in models.MODELS.items():
        module = importlib.import_module(file)
        for name in names:
            yield f"{file}.py:{name}", getattr(module, name), module.example_inputs()
    for name in architectures.ARCHITECTURES:
        yield name, *architectures.architecture(name)


def request(arch: Arch, found: Iterator[Program]) -> Request:
    """The products of programs, for any size."""
    problems = []
    for name, fn, args in found:
        torch._dynamo.reset()
        print(f"tracing {name}", file=sys.stderr)
        problems += find_problems(fn, args, arch, any_m=True, any_size=True)
    return Request({arch: problems})


def make_wheel(wanted: Request, arch: Arch, folder: Path) -> Path:
    """Compiles the kernels of a request for one architecture, and writes their wheel into a folder. Raises
    what `make_pack` raises, and CalledProcessError."""
    package = f"cute_backend_kernels_{arch.value}"
    with tempfile.TemporaryDirectory() as root:
        project = Path(root)
        (project / package).mkdir()
        (project / package / "__init__.py").write_text('"""Kernels that were compiled ahead of time."""\n')
        written = make_pack(wanted, project / package / FILE)
        text = PROJECT.format(
            name=package.replace("_", "-"),
            version=__version__,
            arch=arch.value,
            group=INSTALLED,
            package=package,
            file=FILE,
        )
        (project / "pyproject.toml").write_text(text)
        (project / "setup.cfg").write_text(SETTINGS.format(machine=platform.machine()))
        pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--wheel-dir", folder, root], check=True)
    (wheel,) = folder.glob(f"{package}-{__version__}-*.whl")
    size = wheel.stat().st_size / 2**20
    print(f"{wheel}: epilogues: {written.epilogues}, kernels: {written.kernels}, {size:.1f} MiB")
    return wheel


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--arch", type=Arch.parse, default=Arch.SM90A)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args(words)
    arguments.output.mkdir(parents=True, exist_ok=True)
    make_wheel(request(arguments.arch, programs()), arguments.arch, arguments.output)


if __name__ == "__main__":
    main()
