"""Kernels that are built for later processes, since a pack for any size serves this one.

In a process, calls with the same operands have the same bits. So a kernel with a better tile does not take
the place of a pack's as soon as it is built: the next process finds it in the cache.
"""

from __future__ import annotations

import torch

from cute_backend.runtime.compiling.build import has_spare_core
from cute_backend.runtime.compiling.rungs import begin_standing
from cute_backend.runtime.host.notices import count
from cute_backend.runtime.kernels.kernel import Kernel


class LaterKernels:
    """The kernels of a spec that this process does without. Launches ask for some of them."""

    def __init__(self) -> None:
        self._begun: dict[Kernel, bool] = {}

    def __contains__(self, kernel: Kernel) -> bool:
        return kernel in self._begun

    def add(self, kernel: Kernel) -> None:
        """Leaves a kernel to later processes."""
        self._begun.setdefault(kernel, False)

    def discard(self, kernel: Kernel) -> None:
        """Notes that this process has a use for a kernel."""
        self._begun.pop(kernel, None)

    def ask(self, kernel: Kernel) -> None:
        """Begins to build a kernel, if it is one of these, while the program goes on. Nothing is built on the
        only core, which the program needs, or under deterministic algorithms, whose runs have to repeat."""
        if self._begun.get(kernel, True):
            return
        if has_spare_core() and not torch.are_deterministic_algorithms_enabled():
            self._begun[kernel] = True
            count("built_for_later", len(begin_standing([kernel])))
