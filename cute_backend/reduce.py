"""Reductions of a plane, by aten ops: the reference for the replay and the tests.

The rules are `ReduceKind`'s. Except for sums and products, the result does not depend on the order of the
elements, so a kernel may divide a plane in any way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_backend.spec import Axis, ReduceKind, Reduction


def reduce(plane: Tensor, reduction: Reduction, accumulate: torch.dtype = torch.float32) -> Tensor:
    """An fp32 (M, N) plane, reduced: (M,), (N,) or 0-d, fp32, or int64 for indices.

    Sums are computed in the dtype `accumulate`. Raises IndexError for an extremum of no elements, as torch
    does.
    """
    if reduction.axis is Axis.ALL:
        plane = plane.reshape(1, -1)
    elif reduction.axis is Axis.COLUMN:
        plane = plane.t()
    result = _reduce_rows(plane, reduction.kind, accumulate)
    return result.reshape(()) if reduction.axis is Axis.ALL else result


def _reduce_rows(rows: Tensor, kind: ReduceKind, accumulate: torch.dtype) -> Tensor:
    if kind is ReduceKind.SUM:
        return rows.sum(-1, dtype=accumulate).to(torch.float32)
    if kind is ReduceKind.MEAN:
        return (rows.sum(-1, dtype=accumulate) / rows.shape[-1]).to(torch.float32)
    if kind is ReduceKind.PROD:
        return rows.prod(-1, dtype=accumulate).to(torch.float32)
    if kind is ReduceKind.LOGSUMEXP:
        return rows.to(accumulate).logsumexp(-1).to(torch.float32)
    if kind in (ReduceKind.MIN, ReduceKind.ARGMIN):
        result = _reduce_rows(
            -rows, ReduceKind.MAX if kind is ReduceKind.MIN else ReduceKind.ARGMAX, accumulate
        )
        return -result if kind is ReduceKind.MIN else result
    if kind is ReduceKind.MAX:
        return _unordered(_ordered(rows).amax(-1))
    keys = _ordered(rows + 0.0)  # -0 becomes +0: they are equal, and of equals the first counts
    columns = torch.arange(rows.shape[-1], device=rows.device)
    return torch.where(keys == keys.amax(-1, keepdim=True), columns, rows.shape[-1]).amin(-1)


_NAN = torch.iinfo(torch.int32).max


def _ordered(value: Tensor) -> Tensor:
    """fp32 as int32 that compare as the numbers do, -0 below +0, with NaN above all of them."""
    bits = value.contiguous().view(torch.int32)
    return torch.where(value.isnan(), _NAN, bits ^ ((bits >> 31) & 0x7FFFFFFF))


def _unordered(key: Tensor) -> Tensor:
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return torch.where(key == _NAN, torch.nan, bits.contiguous().view(torch.float32))
