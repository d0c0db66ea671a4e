"""Names of the entries of kernels, in PTX, in cubins, and so in every profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def named(kernel: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A template's `kernel`, whose entry is called `name`, "cutlass" and a number, which the DSL appends.

    "cutlass" stays, since CUDA 13.4's ptxas assembles kernels that have it in their names differently: a
    linear with rowwise scales, bias, gelu and residual takes 75 registers on sm_100a with it, and 110
    without.

    Without a name the DSL makes one from the arguments' types. It stores the name with the function, which
    all instances of a template share: so each instance sets it again, right before it is traced, and a
    process makes one trace at a time (`runtime.compile`).
    """
    kernel.set_name_prefix(name, keep_mangled_name=not name)  # type: ignore[attr-defined]
    return kernel
