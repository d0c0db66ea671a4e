"""Launches of one spec on one device: each runs the right kernel for its shapes and addresses on the caller's
stream, without compiling.

The host cost of a call matters more than anything else here. All that depends on the spec, the device and the
sizes is looked up; then the outputs are allocated and the kernel is called. The compiled host code, through
TVM-FFI, checks dtypes, sizes, strides and addresses against what it was compiled for, before it launches
anything, and switches to the operands' device and finds its current stream. So Python code inspects operands
only when their sizes are new, or when that check has refused operands of these sizes before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_backend.planning import Constraints
from cute_backend.runtime.arguments.operands import (
    Tensors,
    check_operands,
    groups_of,
    outputs_like,
    plane_of,
)
from cute_backend.runtime.arguments.outputs import check_call, deliver
from cute_backend.runtime.calls.spec_kernels import Fitted, KnownSizes, Ready, SpecKernels
from cute_backend.runtime.host.notices import count, warn_once
from cute_backend.spec import EpilogueSpec

REFUSED = (TypeError, ValueError)
"""The exceptions with which compiled host code refuses operands; any other is an error."""

_LOOKS = 16
"""After operands were refused, the number of launches in a row whose operands must fit before operands are
passed on unchecked again."""


class Launcher:
    """The facts about a spec on a device that do not depend on operands."""

    def __init__(self, spec: EpilogueSpec, device: int, constraints: Constraints) -> None:
        self.spec = spec
        self.kernels = SpecKernels(spec, device, constraints)
        self._choices = self.kernels.choices

    def __call__(self, a: Tensors, b: Tensors, loads: Tensors, given: Tensors | None = None) -> list[Tensor]:
        """Runs a kernel. Returns the results, which may be `given`."""
        try:
            sizes = *plane_of(self.spec, a, b), a[0].shape[-1], groups_of(self.spec, a)
            choice = self._choices.get(sizes)
            if choice is None or choice.fitted is None:
                return self.consider(a, b, loads, sizes, given)
            try:
                return choice.fitted.run(a, b, loads, given)
            except REFUSED:  # the host code found layouts that differ from the earlier ones
                choice.fitted, choice.looks = None, _LOOKS
                return self.consider(a, b, loads, sizes, given)
        except Exception:
            check_call(self.spec, a, b, loads, given)  # raises a better message if the operands are at fault
            raise

    def fitted(self, a: Tensors, b: Tensors) -> Fitted | None:
        """The kernel that ran on the last operands of these sizes without copies or views, or None."""
        sizes = *plane_of(self.spec, a, b), a[0].shape[-1], groups_of(self.spec, a)
        choice = self._choices.get(sizes)
        return None if choice is None else choice.fitted

    def consider(
        self, a: Tensors, b: Tensors, loads: Tensors, sizes: KnownSizes, given: Tensors | None
    ) -> list[Tensor]:
        """A launch that inspects the addresses and strides of its operands."""
        m, n, k, groups = sizes
        if not (m and n and k) or groups == 0:
            return deliver(self.spec, self._empty_product(a, b, loads, m, n), loads, given)
        bound = self.kernels.binding.bind(a, b, loads)
        while True:
            choice = self._choices.get(sizes) or self.kernels.choose(sizes)
            aligned = choice.stores_aligned and bound.aligned
            ready = choice.tma if aligned else choice.plain
            if isinstance(ready, Ready):
                break
            if not self.kernels.obtain_missing(choice, ready):
                return deliver(self.spec, self._replay(a, b, loads), loads, given)
        outputs = ready.run(bound.tensors, m, n, given)
        self.kernels.later.ask(choice.kernels[not aligned])
        if not (bound.as_given and aligned is choice.stores_aligned):
            choice.looks = _LOOKS if choice.looks else 0
        elif choice.looks:
            choice.looks -= 1
        else:
            choice.fitted = Fitted(self.kernels, ready, m, n)
        return outputs

    def _replay(self, a: Tensors, b: Tensors, loads: Tensors) -> list[Tensor]:
        count("replayed")
        warn_once(
            ("replayed", self.spec),
            f"cute_backend: the epilogue {self.spec.key} has no kernel for these operands and is replayed "
            "with aten, slowly; an earlier warning says why.",
        )
        return _replayed(self.spec, a, b, loads)

    def _empty_product(self, a: Tensors, b: Tensors, loads: Tensors, m: int, n: int) -> list[Tensor]:
        """The results for a plane without elements, or for a K of 0. Neither needs a kernel."""
        check_operands(self.spec, a, b, loads)
        if (m == 0 or n == 0) and not self.spec.reductions:
            return outputs_like(self.spec, a[0], m, n)
        return _replayed(self.spec, a, b, loads)


@torch.no_grad()
def _replayed(spec: EpilogueSpec, a: Tensors, b: Tensors, loads: Tensors) -> list[Tensor]:
    from cute_backend.replay import replay  # here, since few processes need it

    return replay(spec, a, b, loads)
