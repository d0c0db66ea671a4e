"""Weights that kernels convert for few rows, and that are converted in memory for more."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_backend.planning import MOST_CONVERTED_ROWS, Constraints
from cute_backend.runtime.arguments.operands import Tensors
from cute_backend.runtime.calls.launcher import Launcher
from cute_backend.runtime.calls.spec_kernels import KnownSizes
from cute_backend.runtime.host.notices import count
from cute_backend.spec import EpilogueSpec


class WideningLauncher(Launcher):
    """Launches of a spec whose weight is converted. For many rows, `of` gives the launcher of the spec that
    reads the converted weight: each tile of rows would convert it again."""

    def __init__(
        self,
        spec: EpilogueSpec,
        device: int,
        constraints: Constraints,
        of: Callable[[EpilogueSpec, int, Constraints], Launcher],
    ) -> None:
        super().__init__(spec, device, constraints)
        self._format = spec.product.format
        self._of_many_rows = lambda: of(spec.widened, device, constraints)

    def consider(
        self, a: Tensors, b: Tensors, loads: Tensors, sizes: KnownSizes, given: Tensors | None
    ) -> list[Tensor]:
        if sizes[0] <= MOST_CONVERTED_ROWS:
            return super().consider(a, b, loads, sizes, given)
        count("weights_widened")
        # The rows of its transpose are contiguous, and stay so if they are a slice of longer ones.
        with torch.no_grad():
            values = (each if self._format is None else self._format.unpacked(each) for each in b)
            wide = [each.mT.to(a[0].dtype, memory_format=torch.contiguous_format).mT for each in values]
        return self._of_many_rows()(a, wide, loads, given)
