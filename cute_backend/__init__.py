"""Fuses fp8 scaled_mm (and bf16, fp16 matmul) with the pointwise work after it into one CuTe DSL kernel.

    torch.compile(model, backend="cute")

is all that most programs need. `explain` tells what was fused and why the rest was not, `generate` shows the
kernel, `build` compiles it without a GPU, `simulate` runs it without one, and `gemm` runs
it eagerly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .runtime import op as _op  # noqa: F401  a graph from Inductor's cache calls the op without meeting the pass

if TYPE_CHECKING:
    from .api import Build, Explanation, build, explain, gemm, generate
    from .backend import epilogue_pass
    from .simulator.api import simulate

__version__ = "0.1.0"

__all__ = [
    "Build",
    "Explanation",
    "__version__",
    "build",
    "epilogue_pass",
    "explain",
    "gemm",
    "generate",
    "simulate",
]

_HOME = {
    "Build": ".api",
    "Explanation": ".api",
    "build": ".api",
    "epilogue_pass": ".backend",
    "explain": ".api",
    "gemm": ".api",
    "generate": ".api",
    "simulate": ".simulator.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
