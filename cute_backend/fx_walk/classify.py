"""How an operand varies over the (M, N) plane: read off its strides, never off its sizes.

The operand is viewed as broadcast to the shape of the op that reads it. An axis of size 1 has stride 0
whatever the tensor says, and the leading axes collapse to M. Which of the two strides are zero is then the
class:

    s_m     s_n     class
    0       0       scalar
    0       not 0   rowvec
    not 0   0       colvec
    not 0   not 0   exact

Where the leading axes have no stride as one, as those of (B, 1, N) have not, M is several modes: one for
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from sys import maxsize
from typing import Any

import torch
from torch import fx

from cute_backend.fx_walk.reasons import Reason, Refused, user_label
from cute_backend.fx_walk.static import (
    DTYPES,
    Size,
    collapsed_stride,
    fake,
    known,
)
from cute_backend.spec import DType, LoadKind, Stride


@dataclass(frozen=True)
class Part:
    """Columns of a plane: `count` of them from `start` on, `step` apart."""

    start: Size
    step: Size
    count: Size

    @property
    def end(self) -> Size:
        """Where a slice of these columns may end."""
        return self.start + self.count if known(self.step == 1) else maxsize

    def __str__(self) -> str:
        last = f"{self.end}" if known(self.step == 1) else f":{self.step}"
        return f"[{self.start}:{last}]"


@dataclass(frozen=True)
class Mode:
    """One of several modes of M: a leading axis of the plane, longer than 1. `expression` is what the extent
    is compared by, because a comparison of symbolic sizes may add a guard."""

    stride: Stride
    extent: Size = field(compare=False)
    expression: Any

    @staticmethod
    def of(stride: Stride, extent: Size) -> Mode:
        return Mode(stride, extent, extent.node.expr if isinstance(extent, torch.SymInt) else extent)


@dataclass(frozen=True)
class LoadView:
    """An operand with its class, and the axes of its tensor that carry it.

    The canonical view of the load keeps `m_axes`, collapsed to one, and `n_axis`, and takes index 0 of every
    other axis: (M, N) for an exact load, (N,) for a rowvec, (M,) for a colvec, 0-d for a scalar. Where M has
    several `modes`, `m_axes` are not collapsed, but expanded to their extents. With a `part` it takes these
    of the columns.
    """

    node: fx.Node
    kind: LoadKind
    dtype: DType
    stride_m: Stride
    stride_n: Stride
    m_axes: tuple[int, ...]
    n_axis: int | None
    part: Part | None = None
    modes: tuple[Mode, ...] = ()

    def of_part(self, part: Part) -> LoadView:
        """What is left of the operand where the plane is cut down to some of its columns."""
        if self.n_axis is None:
            return self
        stride = self.stride_n if known(part.step == 1) else Stride.OTHER
        return replace(self, stride_n=stride, part=part)


def classify(node: fx.Node, shape: Sequence[Size], device: torch.device) -> LoadView:
    """The class of `node` as an operand of a pointwise op with result `shape`, which is (..., N).

    Raises Refused where the operand is not one that a kernel on `device` could read, or where static
    knowledge does not settle its class.
    """
    tensor = fake(node)
    dtype = check_load(node, tensor, device)
    rank = tensor.dim()
    plane = list(shape)[len(shape) - rank :]
    strides: list[Size] = []
    for size, stride, extent in zip(tensor.shape, tensor.stride(), plane, strict=True):
        if known(size == 1):
            strides.append(0)
        elif known(size == extent):
            strides.append(stride)
        else:
            raise Refused(Reason.SIZE_UNPROVEN, operand=user_label(node), size=size, plane=extent)
    stride_n = _stride_class(node, strides[-1]) if rank else Stride.ZERO
    stride_m, m_axes, modes = _leading(node, list(shape)[:-1], strides[:-1])
    return LoadView(
        node=node,
        kind=kind_of(stride_m, stride_n),
        dtype=dtype,
        stride_m=stride_m,
        stride_n=stride_n,
        m_axes=m_axes,
        n_axis=None if stride_n is Stride.ZERO else rank - 1,
        modes=modes,
    )


def classify_vector(node: fx.Node, kind: LoadKind, device: torch.device) -> LoadView:
    """A vector given as (L,), (1, L) or (L, 1), read along M (colvec) or N (rowvec); a scalar for L of 1.

    For operands whose place the op's contract fixes, such as the scales of `_scaled_mm_v2`.
    """
    tensor = fake(node)
    dtype = check_load(node, tensor, device)
    axes = [axis for axis, size in enumerate(tensor.shape) if not known(size == 1)]
    if not axes:
        return LoadView(node, LoadKind.SCALAR, dtype, Stride.ZERO, Stride.ZERO, (), None)
    (axis,) = axes
    stride = _stride_class(node, tensor.stride(axis))
    if stride is Stride.ZERO:
        return LoadView(node, LoadKind.SCALAR, dtype, Stride.ZERO, Stride.ZERO, (), None)
    if kind is LoadKind.COLVEC:
        return LoadView(node, kind, dtype, stride, Stride.ZERO, (axis,), None)
    return LoadView(node, kind, dtype, Stride.ZERO, stride, (), axis)


def kind_of(stride_m: Stride, stride_n: Stride) -> LoadKind:
    """The class for two strides."""
    if stride_m is Stride.ZERO:
        return LoadKind.SCALAR if stride_n is Stride.ZERO else LoadKind.ROWVEC
    return LoadKind.COLVEC if stride_n is Stride.ZERO else LoadKind.EXACT


def check_load(node: fx.Node, tensor: torch.Tensor, device: torch.device) -> DType:
    """The dtype of an operand that a kernel on `device` can read; Refused for any other."""
    if tensor.device != device:
        raise Refused(Reason.LOAD_DEVICE, operand=user_label(node), device=tensor.device, anchor=device)
    if tensor.layout is not torch.strided:
        raise Refused(Reason.LOAD_LAYOUT, operand=user_label(node))
    return supported_dtype(user_label(node), tensor.dtype)


def supported_dtype(name: str, dtype: torch.dtype) -> DType:
    """The spec's dtype for a torch dtype; Refused where there is none, float64 under its own reason."""
    if dtype is torch.float64:
        raise Refused(Reason.FLOAT64, operand=name)
    if dtype not in DTYPES:
        raise Refused(Reason.UNSUPPORTED_DTYPE, operand=name, dtype=dtype)
    return DTYPES[dtype]


def _stride_class(node: fx.Node, stride: Size) -> Stride:
    if known(stride == 0):
        return Stride.ZERO
    if known(stride == 1):
        return Stride.ONE
    if known(stride != 0):
        return Stride.OTHER
    raise Refused(Reason.STRIDE_UNKNOWN, operand=user_label(node), stride=stride)


def _leading(
    node: fx.Node, plane: Sequence[Size], strides: Sequence[Size]
) -> tuple[Stride, tuple[int, ...], tuple[Mode, ...]]:
    """The class of the collapsed M stride, the axes of the tensor that make M, and its modes where it is
    several. The strides are those of the tensor's leading axes, which may be fewer than the plane's."""
    missing = len(plane) - len(strides)
    classes = [Stride.ZERO] * missing + [_stride_class(node, stride) for stride in strides]
    long = [axis for axis, size in enumerate(plane) if not known(size == 1)]
    if all(classes[axis] is Stride.ZERO for axis in long):
        return Stride.ZERO, (), ()
    axes = tuple(axis - missing for axis in long if axis >= missing)
    stride = collapsed_stride(plane, [0] * missing + [*strides])
    if stride is not None:
        return _stride_class(node, stride), axes, ()
    modes = [
        Mode.of(Stride.ZERO if classes[axis] is Stride.ZERO else Stride.OTHER, plane[axis]) for axis in long
    ]
    return Stride.OTHER, axes, tuple(modes)
