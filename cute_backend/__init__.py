"""Fuses fp8 scaled_mm (and bf16, fp16 matmul) with the ops after it into one CuTe DSL kernel.

    torch.compile(model, backend="cute")

That line is all that most programs need. `explain` says what was fused and why the rest was not, `generate`
shows the kernel, `build` compiles it without a GPU, `simulate` runs it without one, `gemm` runs it eagerly,
`sample` draws tokens without their logits, `load_pack` serves kernels that were compiled ahead of time, and
`config` holds the settings.
"""

from __future__ import annotations

import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any


def _is_command() -> bool:
    """Whether this process is `python -m cute_backend` or its script, which imports torch only when it needs
    it.

    While Python looks for the module of `-m`, `sys.argv` has "-m" in place of its file.
    """
    if sys.argv[:1] == ["-m"]:
        return ("-m", __name__) in pairwise(sys.orig_argv)
    return bool(sys.argv) and Path(sys.argv[0]).name == __name__


def _search_here_last() -> None:
    """Moves the current folder, which `python -m` searches first, to the end of the search path: a program
    there, such as random.py, is no module of Python's library."""
    if sys.argv[:1] == ["-m"] and sys.path and Path(sys.path[0] or ".").resolve() == Path.cwd():
        sys.path.append(sys.path.pop(0))


if _is_command():
    _search_here_last()
else:
    # A graph from Inductor's cache calls the ops, although the pass has not run in this process.
    from cute_backend.runtime.calls import flops as _flops  # noqa: F401
    from cute_backend.runtime.calls import op as _op  # noqa: F401
    from cute_backend.runtime.calls import sample_op as _sample  # noqa: F401

if TYPE_CHECKING:
    from cute_backend import config
    from cute_backend.api import Explanation, build, explain, generate
    from cute_backend.backend import epilogue_pass
    from cute_backend.eager.call import gemm
    from cute_backend.errors import BuildError, UnavailableError, UsageError
    from cute_backend.runtime.arguments.device import UnsupportedDeviceError
    from cute_backend.runtime.disk.pack import PackError, load_pack
    from cute_backend.sampling import sample
    from cute_backend.simulator.simulate import simulate
    from cute_backend.simulator.simulation_errors import SimulationError

__version__ = "0.1.0"

__all__ = [
    "BuildError",
    "Explanation",
    "PackError",
    "SimulationError",
    "UnavailableError",
    "UnsupportedDeviceError",
    "UsageError",
    "__version__",
    "build",
    "config",
    "epilogue_pass",
    "explain",
    "gemm",
    "generate",
    "load_pack",
    "sample",
    "simulate",
]

_HOME = {
    "BuildError": "errors",
    "Explanation": "api",
    "PackError": "runtime.disk.pack",
    "SimulationError": "simulator.simulation_errors",
    "UnavailableError": "errors",
    "UnsupportedDeviceError": "runtime.arguments.device",
    "UsageError": "errors",
    "build": "api",
    "epilogue_pass": "backend",
    "explain": "api",
    "gemm": "eager.call",
    "generate": "api",
    "load_pack": "runtime.disk.pack",
    "sample": "sampling",
    "simulate": "simulator.simulate",
}


def __getattr__(name: str) -> Any:
    if name == "config":
        return import_module(".config", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
