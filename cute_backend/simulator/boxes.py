"""The box of a tensor map: its elements in global memory, its place in shared memory (PTX ISA 5.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_backend.simulator.formats import F32, TF32, round_to
from cute_backend.simulator.isa.atomics import atomic_function
from cute_backend.simulator.layouts import swizzle_units
from cute_backend.simulator.memory import GlobalMemory
from cute_backend.simulator.simulation_errors import DescriptorError, IllegalAccess
from cute_backend.simulator.tensormap import ElementType, Fill, Packing, TensorMap

_PADDING = 0xA5
ATOMIC_KINDS = {
    ElementType.U8: "b8", ElementType.U16: "b16", ElementType.U32: "u32", ElementType.U64: "u64",
    ElementType.F16: "f16", ElementType.F32: "f32", ElementType.F64: "f64", ElementType.BF16: "bf16",
    ElementType.TF32: "f32",
}  # fmt: skip


def box_shape(tmap: TensorMap) -> tuple[int, ...]:
    """Elements of the box in shared memory, outermost dimension first."""
    return tuple(
        (size + stride - 1) // stride
        for size, stride in zip(reversed(tmap.box), reversed(tmap.element_strides), strict=False)
    )


def box_bytes(tmap: TensorMap) -> int:
    """Bytes of a box in global memory, which an mbarrier counts."""
    total = tmap.dtype.nbytes
    for size in box_shape(tmap):
        total *= size
    return total


@dataclass(frozen=True)
class BoxPart:
    """The part of a box that lies in the tensor: `nbytes` bytes from its first element, at `start`, to its
    last; its shape and strides in bytes, outermost dimension first; and the slices of the box that it fills.
    """

    start: int
    nbytes: int
    width: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    where: tuple[slice, ...]


def box_part(tmap: TensorMap, coordinates: tuple[int, ...]) -> BoxPart | None:
    """The part of a box that lies in the tensor, None if no element does."""
    width = tmap.dtype.nbytes
    strides = (width, *tmap.strides_bytes)
    start, last, shape, steps, where = tmap.address, tmap.address, [], [], []
    for size, box, coordinate, stride, step in zip(
        tmap.sizes, tmap.box, coordinates, strides, tmap.element_strides, strict=False
    ):
        count = (box + step - 1) // step
        first = 0 if coordinate >= 0 else (-coordinate + step - 1) // step
        end = min(count, (size - coordinate + step - 1) // step) if size > coordinate else 0
        if end <= first:
            return None
        low = coordinate + first * step
        start += low * stride
        last += (coordinate + (end - 1) * step) * stride
        shape.append(end - first)
        steps.append(step * stride)
        where.append(slice(first, end))
    return BoxPart(
        start,
        last - start + width,
        width,
        tuple(reversed(shape)),
        tuple(reversed(steps)),
        tuple(reversed(where)),
    )


@dataclass(frozen=True)
class BoxFootprint:
    """The bytes of a box for its shadow, in the range that begins at `base`."""

    part: BoxPart
    base: int

    def runs(self) -> tuple[np.ndarray, int]:
        """The offset of each row, or of each element if a row's are not contiguous, and its length."""
        part = self.part
        shape, strides, length = part.shape, part.strides, part.width
        if strides[-1] == length:
            length *= shape[-1]
            shape, strides = shape[:-1], strides[:-1]
        offsets = np.array([part.start - self.base])
        for size, stride in zip(shape, strides, strict=True):
            offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
        return offsets, length


def box_view(
    tmap: TensorMap, coordinates: tuple[int, ...], memory: GlobalMemory
) -> tuple[np.ndarray, Any] | None:
    """The part of a box that lies in the tensor: a view of global memory (outermost dimension first, raw
    unsigned elements), and the slices of the box that it fills. None if no element lies inside."""
    part = box_part(tmap, coordinates)
    if part is None:
        return None
    raw, width = memory.view(part.start, part.nbytes), part.width
    dtype = np.dtype(f"u{width}")
    flat = np.lib.stride_tricks.as_strided(
        raw[: len(raw) // width * width].view(dtype) if raw.ctypes.data % width == 0 else raw.view(np.uint8),
        shape=part.shape,
        strides=part.strides,
    )
    return flat, part.where


def load_box(tmap: TensorMap, coordinates: tuple[int, ...], memory: GlobalMemory) -> np.ndarray:
    """The bytes of a box in shared memory before swizzling, with out-of-bounds elements filled. Padding of
    4-bit elements has no meaning."""
    dtype = np.dtype(f"u{tmap.dtype.nbytes}")
    fill = _nan_bits(tmap.dtype) if tmap.fill is Fill.NAN else 0
    dense = np.full(box_shape(tmap), fill, dtype)
    part = box_view(tmap, coordinates, memory)
    if part is not None:
        view, where = part
        if tmap.dtype is ElementType.TF32:
            dense[where] = round_to(view.view(np.float32), TF32, "rna").astype(np.float32).view(np.uint32)
        else:
            dense[where] = view
    data = dense.reshape(-1).view(np.uint8)
    if tmap.packing is Packing.ALIGN_16B:
        return np.pad(data.reshape(-1, 8), ((0, 0), (0, 8)), constant_values=_PADDING).reshape(-1)
    return data


def _nan_bits(dtype: ElementType) -> int:
    return {
        2: 0x7FFF if dtype in (ElementType.F16, ElementType.BF16) else 0xFFFF,
        4: F32.nan,
        8: 0x7FFFFFFFFFFFFFFF,
    }.get(dtype.nbytes, 0xFF)


def box_units(tmap: TensorMap, offset: int) -> np.ndarray:
    """The 16-byte units of shared memory that a box at `offset` fills, in the order of its elements."""
    inner = tmap.row_bytes
    if offset % 128:
        raise IllegalAccess(
            f"a tensor copy with the shared address {offset:#x}; multiples of 128 are allowed"
        )
    if inner % 16:
        raise DescriptorError(f"a box whose rows have {inner} bytes; multiples of 16 are allowed")
    if tmap.swizzle.span and inner > tmap.swizzle.span:
        raise DescriptorError(
            f"a box whose rows have {inner} bytes with a swizzle of {tmap.swizzle.span} bytes"
        )
    count = box_bytes(tmap) * inner // (box_shape(tmap)[-1] * tmap.dtype.nbytes) // 16
    if tmap.swizzle.span and inner < tmap.swizzle.span:
        raise DescriptorError(
            f"rows of a box of {inner} bytes, less than its swizzle of {tmap.swizzle.span}, are not supported"
        )
    return swizzle_units((offset >> 4) + np.arange(count), tmap.swizzle.span, tmap.swizzle.atom)


def unit_cells(units: np.ndarray) -> np.ndarray:
    """Shadow cells of 16-byte units."""
    return (units[:, None] * 4 + np.arange(4)).reshape(-1)


def store_box(
    tmap: TensorMap,
    coordinates: tuple[int, ...],
    memory: GlobalMemory,
    reduction: str | None,
    data: np.ndarray,
) -> None:
    """Writes a box (bytes) to its tensor, or reduces it into it; elements outside are dropped."""
    part = box_view(tmap, coordinates, memory)
    if part is None:
        return
    view, where = part
    dense = data.view(view.dtype).reshape(box_shape(tmap))[where]
    if reduction is None:
        view[...] = dense
        return
    kind = ATOMIC_KINDS[tmap.dtype]
    function = atomic_function(reduction, kind)
    native = {"f32": np.float32, "f64": np.float64}.get(kind)
    if native is not None:
        view.view(native)[...] = function(view.view(native), np.ascontiguousarray(dense).view(native))
    else:
        view[...] = function(np.ascontiguousarray(view), np.ascontiguousarray(dense))
