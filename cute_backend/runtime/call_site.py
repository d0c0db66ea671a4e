"""A call in generated code: `launch`, but what served the last call serves the next of equal sizes at once.

A launch looks its spec, its device and its sizes up. At one place of a graph these are what they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .launch import Settled, launch, settled_for


@dataclass(frozen=True)
class _Served:
    """The last call: its spec, the sizes of A and of the first B, and what served it."""

    spec: str
    a_shape: torch.Size
    b_shape: torch.Size
    settled: Settled


class CallSite:
    """Takes and gives what `launch` does. Its calls are alike in `batch_invariant` and device."""

    def __init__(self) -> None:
        self._last: _Served | None = None

    def __call__(
        self,
        a: Sequence[Tensor],
        b: Sequence[Tensor],
        loads: Sequence[Tensor],
        spec: str,
        batch_invariant: bool = False,
    ) -> list[Tensor]:
        last = self._last
        if (
            last is not None
            and last.spec is spec
            and a[0].shape == last.a_shape
            and b[0].shape == last.b_shape
        ):
            try:
                return last.settled.run(a, b, loads)
            except Exception:  # as in a launch: these do not lie as those before them
                self._last = None
        results = launch(a, b, loads, spec, batch_invariant)
        settled = settled_for(a, b, spec, batch_invariant)
        if settled is not None:
            self._last = _Served(spec, a[0].shape, b[0].shape, settled)
        return results
