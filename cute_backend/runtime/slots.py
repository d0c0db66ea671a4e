"""The places of a kernel's arguments: what layout each was compiled for, and how a tensor is made to fit.

The layout of a tensor at launch need not be the one that the spec was made from: Inductor may pad or permute
what it owns. Whatever a kernel can't read as it lies is re-strided where its size permits, else copied, and
the copies are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..planning import plane_order
from ..spec import DType, EpilogueSpec, Load, LoadKind, Major, Order, Stride
from .notices import count, warn_once
from .operands import TMA_ALIGN


@dataclass(frozen=True)
class Plane:
    """A 2-D argument at `index`, or a batch of them, that was compiled as contiguous along axis `unit`, -1 or
    -2.

    A `product` is always read by TMA, so its base and all other strides must be multiples of 16 bytes; an
    epilogue's plane that is not so aligned is served by another variant of the kernel.
    """

    index: int
    name: str
    unit: int
    bytes: int
    product: bool

    def fits(self, tensor: Tensor) -> bool:
        """Whether the tensor is contiguous along `unit` and aligned for TMA."""
        *steps, rows, columns = tensor.stride()
        unit, pitch = (columns, rows) if self.unit == -1 else (rows, columns)
        aligned = tensor.data_ptr()
        for step in (pitch, *steps):
            if step == 0:
                return False
            aligned |= step * self.bytes
        return unit == 1 and not aligned % TMA_ALIGN

    def conform(self, tensor: Tensor) -> Tensor:
        """The same values, so that they fit, by other strides or by a copy.

        An epilogue's plane that is contiguous but not aligned stays as it is.
        """
        strides = list(tensor.stride())
        elements = TMA_ALIGN // self.bytes
        pitch = -(-tensor.shape[self.unit] // elements) * elements
        for mode, size in enumerate(tensor.shape):
            if size == 1:  # the stride of a mode of one element is never used
                strides[mode] = 1 if mode == tensor.dim() + self.unit else pitch
        restrided = tensor.as_strided(tensor.shape, strides)
        if self.fits(restrided) or (strides[self.unit] == 1 and not self.product):
            return restrided
        count("operands_copied")
        warn_once(
            ("copied", self.name, self.unit),
            f"cute_backend: {self.name}, {tuple(tensor.shape)} with strides {tensor.stride()}, is copied at "
            f"each call: its kernel wants mode {tensor.dim() + self.unit} contiguous"
            + (f" and, for TMA, base and pitch in multiples of {TMA_ALIGN} bytes." if self.product else "."),
        )
        by_unit = tensor.transpose(self.unit, -1)
        buffer = tensor.new_empty((*by_unit.shape[:-1], pitch))[..., : by_unit.shape[-1]]
        return buffer.transpose(self.unit, -1).copy_(tensor)


def planes(spec: EpilogueSpec) -> list[Plane]:
    """What has a layout that a kernel leans on: A and B of every product, exact loads with a unit stride."""
    found = []
    acc = spec.product
    a_unit = -1 if acc.a_major is Major.K else -2
    b_unit = -2 if acc.b_major is Major.K else -1
    found.append(Plane(0, f"A of {acc.name}", a_unit, acc.a_dtype.bits // 8, product=True))
    for i, acc in enumerate(spec.accumulators[: spec.b_count]):
        found.append(Plane(1 + i, f"B of {acc.name}", b_unit, acc.b_dtype.bits // 8, product=True))
    for index, load in enumerate(spec.loads, 1 + spec.b_count):
        order = plane_order(load) if load.kind is LoadKind.EXACT else None
        if order is not None:
            found.append(
                Plane(index, load.name, -1 if order is Order.ROW else -2, load.dtype.bits // 8, product=False)
            )
    return found


def views(spec: EpilogueSpec) -> list[tuple[int, Callable[[Tensor], Tensor]]]:
    """The arguments that every launch passes as another view: 0-d scalars as vectors, bools as bytes."""
    found: list[tuple[int, Callable[[Tensor], Tensor]]] = []
    for index, load in enumerate(spec.loads, 1 + spec.b_count):
        if load.kind is LoadKind.SCALAR:
            found.append((index, _as_vector))
        if load.dtype is DType.BOOL:
            found.append((index, _as_bytes))
    return found


def adapters(spec: EpilogueSpec) -> list[tuple[int, Callable[[Tensor], Tensor]]]:
    """How what is no plane is made to fit where it doesn't; those that fit come back as they are."""
    found: list[tuple[int, Callable[[Tensor], Tensor]]] = []
    for index, load in enumerate(spec.loads, 1 + spec.b_count):
        if load.kind is LoadKind.SCALAR:
            found.append((index, _one_element))
        elif load.m_modes:
            found.append((index, partial(_of_modes, load)))
        elif load.kind is not LoadKind.EXACT and _vector_stride(load) is Stride.ONE:
            found.append((index, _contiguous_vector))
    return found


def _as_vector(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.unsqueeze(0)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _vector_stride(load: Load) -> Stride:
    return load.stride_n if load.kind is LoadKind.ROWVEC else load.stride_m


def _one_element(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride() == (1,) else tensor.reshape(()).as_strided((1,), (1,))


def _of_modes(load: Load, tensor: Tensor) -> Tensor:
    """With a stride of 0 along what does not vary, and N contiguous where its class says so."""
    strides = list(tensor.stride())
    for axis, mode in enumerate(load.m_modes):
        strides[axis] = 0 if mode is Stride.ZERO else strides[axis]
    if load.stride_n is Stride.ONE and tensor.shape[-1] == 1:
        strides[-1] = 1  # the stride of a mode of one element is never used
    if load.stride_n is Stride.ONE and strides[-1] != 1:
        count("operands_copied")
        return _of_modes(load, tensor.contiguous())
    return tensor if tensor.stride() == tuple(strides) else tensor.as_strided(tensor.shape, strides)


def _contiguous_vector(tensor: Tensor) -> Tensor:
    if tensor.stride() == (1,):
        return tensor
    if tensor.numel() == 1:
        return tensor.as_strided((1,), (1,))
    count("operands_copied")
    return tensor.contiguous()
