"""Compiles and loads kernels of one architecture for a GPU of a later one, which has their instructions.

It runs kernels that use mma.sync on a Hopper GPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

from cute_backend.planning import Arch
from cute_backend.runtime.compiling.build import most_at_once
from cute_backend.runtime.compiling.compile import compile_for
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.link import LIBRARY, OBJECT, KernelFunction, link, load
from cute_backend.runtime.kernels.source import text_of


def functions_for(gpu: Arch, kernels: Sequence[Kernel], folder: Path) -> dict[Kernel, KernelFunction]:
    """The kernels as functions that run on `gpu`. They are compiled in several processes and written to
    `folder`.

    These processes import the caller's main module. Raises BuildError for a kernel that can't be built.
    Compiled for `gpu`, a kernel may need more registers than on its own architecture, and spill.
    """
    given = [json.dumps(kernel.to_dict()) for kernel in kernels]
    with ProcessPoolExecutor(most_at_once(), mp_context=get_context("spawn")) as pool:
        made = list(pool.map(_built, repeat(gpu), given, repeat(folder)))
    return {kernel: load(path) for kernel, path in zip(kernels, made, strict=True)}


def _built(gpu: Arch, given: str, folder: Path) -> Path:
    return built_for(gpu, Kernel.from_dict(json.loads(given)), folder)


def built_for(gpu: Arch, kernel: Kernel, folder: Path) -> Path:
    """The path of a kernel that this process compiles for `gpu`, which `load` takes."""
    path = folder / f"{kernel.name}.py"
    path.write_text(text_of(kernel))
    built = compile_for(gpu, kernel, path.read_text(), path)
    path.with_suffix(".ptx").write_text(built.ptx)
    host_object, library = path.with_suffix(OBJECT), path.with_suffix(LIBRARY)
    host_object.write_bytes(built.host_object)
    return library if link(host_object, library) else host_object
