"""A call in generated code. It does the same as `launch`, but reuses the kernel of earlier calls of equal
sizes.

A launch looks up its spec, its device and its sizes. One call of a graph has one spec, one device and few
sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_backend.runtime.arguments.operands import Tensors
from cute_backend.runtime.calls.launch import fitted_for, launch
from cute_backend.runtime.calls.launcher import REFUSED
from cute_backend.runtime.calls.spec_kernels import Fitted

_MAX_SIZES = 64
"""The number of sizes that a call site remembers."""


class CallSite:
    """Has the arguments and results of `launch`. All calls have equal arguments from `spec` on, and one
    device."""

    def __init__(self) -> None:
        self._last: tuple[str, dict[tuple[torch.Size, torch.Size], Fitted]] = "", {}

    def __call__(
        self,
        a: Tensors,
        b: Tensors,
        loads: Tensors | None,
        spec: str,
        constraints: str = "",
        results: Tensors | None = None,
    ) -> list[Tensor]:
        last_spec, known = self._last
        sizes = a[0].shape, b[0].shape
        if spec is last_spec and (fitted := known.get(sizes)) is not None and fitted.is_current:
            try:
                return fitted.run(a, b, loads or (), results)
            except REFUSED:  # as in a launch: strides or alignments differ from those before
                pass
        returned = launch(a, b, loads, spec, constraints, results)
        if spec is not last_spec or len(known) >= _MAX_SIZES:
            known = {}
        fitted = fitted_for(a, b, spec, constraints)
        if fitted is None:
            known.pop(sizes, None)
        else:
            known[sizes] = fitted
        self._last = spec, known
        return returned
