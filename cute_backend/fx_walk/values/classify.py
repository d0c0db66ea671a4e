"""The class of an operand: how it varies over the (M, N) plane, read from its strides, never from its sizes.

The operand is viewed as broadcast to the shape of the op that reads it. An axis of size 1 counts as stride 0,
whatever the tensor's stride is, and the leading axes collapse to M. The class depends on which of the two
strides are zero:

    s_m     s_n     class
    0       0       scalar
    0       not 0   rowvec
    not 0   0       colvec
    not 0   not 0   exact

If the leading axes do not collapse to one stride, as for (B, 1, N), M has several modes, one for each axis.
If the plane is viewed as (..., N / b, b) and these two axes don't collapse to one stride either, N has two
modes: the columns are in blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from sys import maxsize
from typing import Any

import torch
from torch import fx

from cute_backend.fx_walk.graph.frame import BlockPart, Frame
from cute_backend.fx_walk.graph.static import (
    DTYPES,
    Size,
    collapsed_stride,
    describe,
    fake,
    known,
    product,
)
from cute_backend.fx_walk.refusals.reasons import Reason, Refused, user_label
from cute_backend.spec import Blocks, DType, LoadKind, Stride


@dataclass(frozen=True)
class ColumnSlice:
    """Columns of a plane: `count` of them from `start` on, `step` apart."""

    start: Size
    step: Size
    count: Size

    @property
    def end(self) -> Size:
        """The index at which a slice of these columns may end."""
        return self.start + self.count if known(self.step == 1) else maxsize

    def __str__(self) -> str:
        last = f"{self.end}" if known(self.step == 1) else f":{self.step}"
        return f"[{self.start}:{last}]"


@dataclass(frozen=True)
class Mode:
    """One of several modes of M or N: axes of the plane, longer than 1. Extents are compared by `expression`,
    because a comparison of symbolic sizes may add a guard."""

    stride: Stride
    extent: Size = field(compare=False)
    expression: Any

    @staticmethod
    def of(stride: Stride, extent: Size) -> Mode:
        return Mode(stride, extent, extent.node.expr if isinstance(extent, torch.SymInt) else extent)


@dataclass(frozen=True)
class LoadView:
    """An operand with its class, and the axes of its tensor along which it varies.

    The canonical view of the load keeps `m_axes` and `n_axes`, each collapsed to one, in this order, and
    takes index 0 of every other axis: (M, N) for an exact load, (N,) for a rowvec, (M,) for a colvec, 0-d for
    a scalar. If M has several `modes`, `m_axes` are not collapsed, but expanded to their extents; -1 stands
    for an axis that the tensor doesn't have, after one that it has. If columns are in blocks, `n_modes` has
    both modes, and `n_axes` the axes of each. With `columns`, the view takes that slice of the columns. With
    `pieces`, the tensor is a vector of that many pieces, and the axes are those of the table of its pieces.
    """

    node: fx.Node
    kind: LoadKind
    dtype: DType
    stride_m: Stride
    stride_n: Stride
    m_axes: tuple[int, ...]
    n_axes: tuple[tuple[int, ...], ...]
    columns: ColumnSlice | None = None
    modes: tuple[Mode, ...] = ()
    n_modes: tuple[Mode, ...] = ()
    period: int = 0
    pieces: Size | None = None

    @property
    def blocks(self) -> Blocks | None:
        """The blocks of columns over which the operand varies, or None."""
        if not self.n_modes:
            return None
        outer, inner = self.n_modes
        return Blocks(int(inner.extent), outer.stride, inner.stride, self.period)

    def of_slice(self, columns: ColumnSlice) -> LoadView:
        """The view of the operand when the plane is cut down to some of its columns."""
        if not self.n_axes:
            return self
        stride = self.stride_n if known(columns.step == 1) else Stride.OTHER
        return replace(self, stride_n=stride, columns=columns)


def classify(
    node: fx.Node,
    shape: Sequence[Size],
    device: torch.device,
    frame: Frame | None = None,
    dtypes: Mapping[torch.dtype, DType] = DTYPES,
) -> LoadView:
    """The class of `node` as an operand of a pointwise op with result `shape`, whose place on the plane is
    `frame`, by default (..., N). Its dtype is one of `dtypes`.

    Raises Refused if no kernel on `device` can read the operand, or if static knowledge does not determine
    its class.
    """
    tensor = fake(node)
    dtype = check_load(node, tensor, device, dtypes)
    rank = tensor.dim()
    missing = len(shape) - rank
    strides: list[Size] = [0] * missing
    for size, stride, extent in zip(tensor.shape, tensor.stride(), list(shape)[missing:], strict=True):
        if known(size == 1):
            strides.append(0)
        elif known(size == extent):
            strides.append(stride)
        else:
            raise Refused(Reason.SIZE_UNPROVEN, operand=user_label(node), size=size, plane=extent)
    operand = _Operand(node, shape, strides, missing)
    if frame is None:
        last = len(shape) - 1
        frame = Frame(tuple(axis for axis in range(last) if not known(shape[axis] == 1)), (last,))
    if frame.joins and not all(known(stride == 0) for stride in strides):
        sizes, apart = describe(shape), describe(strides)
        raise Refused(Reason.BLOCKS, operand=user_label(node), sizes=sizes, strides=apart)
    stride_m, m_axes, modes = operand.rows(frame.m_axes)
    # Of vectors, kernels read one element for each column, so a vector of a part has to be regular.
    is_vector = stride_m is Stride.ZERO and (
        bool(frame.m_axes) or frame.part is None or frame.part.is_regular
    )
    is_apart = frame.part is not None and frame.part.is_read_apart and not is_vector
    stride_n, n_axes, n_modes = operand.columns(frame, is_apart)
    if is_apart and n_modes and stride_m is Stride.ZERO:
        # If there is one row, an irregular part is a table of batches and positions, one of each.
        stride_m, m_axes = Stride.OTHER, (-1, -1)
        modes = (Mode.of(Stride.ZERO, 1), Mode.of(Stride.OTHER, 1))
    if stride_m is Stride.ONE and any(mode.stride is Stride.ONE for mode in n_modes):
        stride_m = Stride.OTHER  # windows that overlap: a compiled layout has one contiguous axis
    return LoadView(
        node=node,
        kind=LoadKind.of(stride_m is not Stride.ZERO, stride_n is not Stride.ZERO),
        dtype=dtype,
        stride_m=stride_m,
        stride_n=stride_n,
        m_axes=m_axes,
        n_axes=n_axes,
        modes=modes,
        n_modes=n_modes,
        period=frame.part.columns if frame.part is not None and is_apart and n_modes else 0,
    )


def classify_vector(node: fx.Node, kind: LoadKind, device: torch.device) -> LoadView:
    """A vector given as (L,), (1, L) or (L, 1), read along M (colvec) or N (rowvec); a scalar for L of 1.

    It is for operands whose axis is fixed by the op's contract, such as the scales of `_scaled_mm_v2`.
    """
    tensor = fake(node)
    dtype = check_load(node, tensor, device)
    axes = [axis for axis, size in enumerate(tensor.shape) if not known(size == 1)]
    if not axes:
        return LoadView(node, LoadKind.SCALAR, dtype, Stride.ZERO, Stride.ZERO, (), ())
    (axis,) = axes
    stride = _stride_class(node, tensor.stride(axis))
    if stride is Stride.ZERO:
        return LoadView(node, LoadKind.SCALAR, dtype, Stride.ZERO, Stride.ZERO, (), ())
    if kind.by_row:
        return LoadView(node, kind, dtype, stride, Stride.ZERO, (axis,), ())
    return LoadView(node, kind, dtype, Stride.ZERO, stride, (), ((axis,),))


def classify_table(node: fx.Node, device: torch.device) -> LoadView | None:
    """A table (G, N) with a row for each group of a grouped product; None if it is expanded along an axis,
    or that is not known."""
    tensor = fake(node)
    dtype = check_load(node, tensor, device)
    if not all(known(stride > 0) for stride in tensor.stride()):
        return None
    of_groups, of_columns = (Stride.ONE if known(stride == 1) else Stride.OTHER for stride in tensor.stride())
    if of_columns is Stride.ONE:
        of_groups = Stride.OTHER  # compiled layouts have one contiguous axis
    return LoadView(node, LoadKind.GROUPVEC, dtype, of_groups, of_columns, (0,), ((1,),))


def classify_group_scalar(node: fx.Node, device: torch.device) -> LoadView:
    """A vector (G,) with a number for each group of a grouped product, as a table (G, N) whose columns are
    all the same."""
    dtype = check_load(node, fake(node), device)
    stride = _stride_class(node, fake(node).stride(0))
    return LoadView(node, LoadKind.GROUPVEC, dtype, stride, Stride.ZERO, (0,), ())


def classify_pieces(node: fx.Node, pieces: Size, device: torch.device) -> LoadView | None:
    """A vector (G * N,) of a piece for each group of a grouped product, as a table (G, N); None if it is not
    contiguous, or that is not known."""
    tensor = fake(node)
    dtype = check_load(node, tensor, device)
    if not known(tensor.stride(0) == 1):
        return None
    return LoadView(node, LoadKind.GROUPVEC, dtype, Stride.OTHER, Stride.ONE, (0,), ((1,),), pieces=pieces)


def check_load(
    node: fx.Node,
    tensor: torch.Tensor,
    device: torch.device,
    dtypes: Mapping[torch.dtype, DType] = DTYPES,
) -> DType:
    """The dtype of an operand. Raises Refused if no kernel on `device` can read the operand."""
    if tensor.device != device:
        raise Refused(Reason.LOAD_DEVICE, operand=user_label(node), device=tensor.device, anchor=device)
    if tensor.layout is not torch.strided:
        raise Refused(Reason.LOAD_LAYOUT, operand=user_label(node))
    return dtypes.get(tensor.dtype) or supported_dtype(user_label(node), tensor.dtype)


def supported_dtype(of: fx.Node | str, dtype: torch.dtype) -> DType:
    """The spec's dtype for a torch dtype. Raises Refused if there is none; float64 has a reason of its
    own."""
    if dtype is torch.float64:
        raise Refused(Reason.FLOAT64, operand=of)
    if dtype not in DTYPES:
        raise Refused(Reason.UNSUPPORTED_DTYPE, operand=of, dtype=dtype)
    return DTYPES[dtype]


def _stride_class(node: fx.Node, stride: Size) -> Stride:
    if known(stride == 0):
        return Stride.ZERO
    if known(stride == 1):
        return Stride.ONE
    if known(stride != 0):
        return Stride.OTHER
    raise Refused(Reason.STRIDE_UNKNOWN, operand=user_label(node), stride=stride)


@dataclass(frozen=True)
class _Operand:
    """An operand as broadcast to the plane's shape: a stride for each of its axes, 0 for the `missing` first
    ones, which the tensor doesn't have."""

    node: fx.Node
    shape: Sequence[Size]
    strides: list[Size]
    missing: int

    def rows(self, axes: tuple[int, ...]) -> tuple[Stride, tuple[int, ...], tuple[Mode, ...]]:
        """The class of the stride over M, the axes of the tensor that make up M, and its modes if it has
        several. The axes are the plane's, outermost first."""
        classes = [self._class(axis) for axis in axes]
        if all(each is Stride.ZERO for each in classes):
            return Stride.ZERO, (), ()
        own = tuple(dropwhile(lambda axis: axis < 0, (max(axis - self.missing, -1) for axis in axes)))
        stride = self._collapsed(axes)
        if stride is not None:
            return _stride_class(self.node, stride), own, ()
        modes = [
            Mode.of(Stride.ZERO if each is Stride.ZERO else Stride.OTHER, self.shape[axis])
            for axis, each in zip(axes, classes, strict=True)
        ]
        return Stride.OTHER, own, tuple(modes)

    def columns(
        self, frame: Frame, apart: bool
    ) -> tuple[Stride, tuple[tuple[int, ...], ...], tuple[Mode, ...]]:
        """The same as `rows`, for N. It has at most two modes: the axes from block to block, and those within
        a block, which a frame of blocks doesn't have. `apart` says of an operand of a part of each block that
        it is read for that part alone."""
        axes = frame.n_axes
        if all(self._class(axis) is Stride.ZERO for axis in axes):
            return Stride.ZERO, (), ()
        if frame.part is not None:
            return self._part_columns(frame, frame.part, apart)
        stride = self._collapsed(axes)
        if stride is not None and frame.block > 1:
            blocks = product(self.shape[axis] for axis in axes)
            outer_mode = Mode.of(_stride_class(self.node, stride), blocks)
            return (
                Stride.OTHER,
                (self._own(axes, stride), ()),
                (outer_mode, Mode.of(Stride.ZERO, frame.block)),
            )
        if stride is not None:
            return _stride_class(self.node, stride), (self._own(axes, stride),), ()
        for start in range(1, len(axes) if frame.block == 1 else 0):
            groups = axes[:start], axes[start:]
            outer, inner = map(self._collapsed, groups)
            extents = [product(self.shape[axis] for axis in group) for group in groups]
            if outer is None or inner is None or not isinstance(extents[1], int):
                continue
            classes = [_stride_class(self.node, outer), _stride_class(self.node, inner)]
            if classes == [Stride.ONE, Stride.ONE]:
                classes[0] = Stride.OTHER  # windows too
            modes = tuple(Mode.of(stride, extent) for stride, extent in zip(classes, extents, strict=True))
            return Stride.OTHER, (self._own(groups[0], outer), self._own(groups[1], inner)), modes
        raise Refused(
            Reason.BLOCKS,
            operand=user_label(self.node),
            sizes=describe([self.shape[axis] for axis in axes]),
            strides=describe([self.strides[axis] for axis in axes]),
        )

    def _part_columns(
        self, frame: Frame, part: BlockPart, apart: bool
    ) -> tuple[Stride, tuple[tuple[int, ...], ...], tuple[Mode, ...]]:
        """`columns` for an operand that varies along a part of each block. A kernel reads it for all columns,
        as if every part of a block were this one, or for this part alone."""
        within = frame.within(self.shape)
        assert within is not None
        outer, inner = frame.n_axes[:-within], frame.n_axes[-within:]
        stride = self._collapsed(inner)
        shared = all(self._class(axis) is Stride.ZERO for axis in outer)
        if stride is None or not shared or not (part.is_regular or apart):
            raise Refused(Reason.PART_OPERAND, operand=user_label(self.node), part=part)
        parts = product(self.shape[axis] for axis in outer) * (1 if apart else part.columns // part.count)
        modes = Mode.of(Stride.ZERO, parts), Mode.of(_stride_class(self.node, stride), part.count)
        return Stride.OTHER, ((), self._own(inner, stride)), modes

    def _class(self, axis: int) -> Stride:
        return _stride_class(self.node, self.strides[axis])

    def _collapsed(self, axes: tuple[int, ...]) -> Size | None:
        return collapsed_stride([self.shape[axis] for axis in axes], [self.strides[axis] for axis in axes])

    def _own(self, axes: tuple[int, ...], stride: Size) -> tuple[int, ...]:
        """The tensor's axes among those that have this stride together; none if the stride is 0."""
        return () if known(stride == 0) else tuple(axis - self.missing for axis in axes)
