"""Reductions of a plane, by aten ops: the reference for the replay and the tests.

Each kind has its own rules (`kinds.reductions`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_backend.spec import Axis, Reduction


def reduce(plane: Tensor, reduction: Reduction, accumulate: torch.dtype = torch.float32) -> Tensor:
    """An fp32 (M, N) plane, reduced: (M,), (N,) or 0-d, fp32, or int64 for indices.

    Sums are computed in the dtype `accumulate`. Raises IndexError for an extremum of no elements, as torch
    does.
    """
    if reduction.axis is Axis.ALL:
        plane = plane.reshape(1, -1)
    elif reduction.axis is Axis.COLUMN:
        plane = plane.t()
    result = reduction.kind.reference(plane, accumulate)
    return result.reshape(()) if reduction.axis is Axis.ALL else result
