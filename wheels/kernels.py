"""Makes a wheel of the kernels of all models in docs/models.md and of `bench --models`, for one architecture.

    pip install '.[models]' 'setuptools>=77'
    python wheels/kernels.py --arch sm_90a -o dist

Needs no GPU. Installed beside the package, the wheel is found by itself, and the first call of such a model
compiles no kernel, with the releases of torch and transformers that the wheel was made with: others may have
other graphs. It has the tiles for unknown sizes. A size that is a constant of an epilogue, such as the width
of heads, is that of these models.

Half as many processes trace programs as there are CPUs, one program each, and kernels are compiled as soon as
a program is traced. `config.compile_jobs` limits both.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from cute_backend import __version__
from cute_backend.aot import Request, begin, find_problems, make_pack
from cute_backend.bench.models import MODELS, Model, select
from cute_backend.planning import Arch, Constraints
from cute_backend.runtime.compiling.build import most_at_once
from cute_backend.runtime.disk.pack import INSTALLED
from cute_backend.runtime.kernels.reach import Problem
from cute_backend.spec import EpilogueSpec

ROOT = Path(__file__).resolve().parent.parent

Program = tuple[Callable[..., Any], tuple[Any, ...]]

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


def names() -> list[str]:
    """The programs by name: those of docs/models.md, then those of `bench --models`."""
    of_files = [f"{file}.py:{name}" for file, defined in _module("models").MODELS.items() for name in defined]
    return [*of_files, *_module("architectures").ARCHITECTURES, *(model.name for model in MODELS)]


def program(name: str) -> Program:
    """A program and its arguments. Of images the batch alone is symbolic: with symbolic heights and widths,
    sympy simplifies the sizes of Swin's windows for many minutes."""
    file, _, defined = name.partition(".py:")
    if defined:
        module = _module(file)
        return getattr(module, defined), module.example_inputs()
    architectures = _module("architectures")
    if name in architectures.ARCHITECTURES:
        fn, args = architectures.architecture(name)
    else:
        (model,) = select([name])
        fn, args = _without_memory(model)
    for image in args:
        if image.dim() == 4:
            torch._dynamo.mark_static(image, [1, 2, 3])
    return fn, args


def _without_memory(model: Model) -> Program:
    """A model of real widths, of fake tensors if they can be drawn. For fp8 torchao asks for a GPU, without
    using it."""
    unchecked = mock.patch("torchao.quantization.quant_api._check_hardware_support")
    with unchecked if model.fp8 else nullcontext():
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                return model.build()
        except DataDependentOutputException:  # ViT draws its weights until they lie within bounds
            return model.build()


def _module(name: str) -> ModuleType:
    """A module of docs or examples, which are no packages."""
    sys.path += [folder for each in ("docs", "examples") if (folder := str(ROOT / each)) not in sys.path]
    return importlib.import_module(name)


def traced(arch: Arch, name: str) -> list[tuple[str, str]]:
    """The products of a program for any size: the texts of each one's spec and constraints, which processes
    can exchange."""
    torch._dynamo.reset()
    found = find_problems(*program(name), arch, any_m=True, any_size=True)
    return [(each.spec.to_json(), each.constraints.text) for each in found]


def requests(arch: Arch, wanted: Sequence[str]) -> Iterator[Request]:
    """The products of each of these programs, in order. As many processes trace as half of the CPUs."""
    processes = max(1, min(most_at_once() // 2, len(wanted)))
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for name, texts in zip(wanted, pool.map(partial(traced, arch), wanted), strict=True):
            print(f"traced {name}, products: {len(texts)}", file=sys.stderr)
            yield Request({arch: [_problem(*each) for each in texts]})


def _problem(spec: str, constraints: str) -> Problem:
    parsed = EpilogueSpec.from_json(spec)
    return Problem(parsed, None, None, None, constraints=Constraints.parse(constraints))


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
    parser.add_argument("--only", metavar="PATTERN", default="*", help="the programs whose names match")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args(words)
    wanted = [name for name in names() if fnmatchcase(name, arguments.only)]
    if not wanted:
        parser.error(f"--only {arguments.only!r} matches none of {', '.join(names())}")
    problems: list[Problem] = []
    for each in requests(arguments.arch, wanted):
        begin(each)
        problems += each.problems[arguments.arch]
    arguments.output.mkdir(parents=True, exist_ok=True)
    make_wheel(Request({arguments.arch: problems}), arguments.arch, arguments.output)


if __name__ == "__main__":
    main()
