"""The places of matrix elements in shared memory: swizzles, and the canonical layouts of descriptors.

Swizzles act on absolute shared addresses, in units of 16 bytes: bits 7 and up are xored into bits 4 and up
(into bits 5 and up where atoms of 32 bytes stay together). PTX ISA 5.5.7 "Swizzling modes", 9.7.15.5 (wgmma)
and 9.7.16.10 (tcgen05) for the layouts and descriptors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cute_backend.simulator.simulation_errors import DescriptorError


def swizzle_units(units: np.ndarray, span: int, atom: int = 16) -> np.ndarray:
    """16-byte unit numbers of shared memory after the swizzle of `span` bytes."""
    if span == 0:
        return units
    mask = span // 16 - 1
    if atom == 32:
        return units ^ (((units >> 3) & (mask >> 1)) << 1)
    return units ^ ((units >> 3) & mask)


@dataclass(frozen=True)
class MatrixDescriptor:
    """A shared-memory matrix descriptor: byte offsets in shared memory, `span` of the swizzle in bytes."""

    start: int
    leading: int
    stride: int
    span: int
    atom: int


_SM90_SWIZZLES = {0: (0, 16), 1: (128, 16), 2: (64, 16), 3: (32, 16)}
_SM100_SWIZZLES = {0: (0, 16), 1: (128, 32), 2: (128, 16), 4: (64, 16), 6: (32, 16)}


def decode_descriptor(raw: int, sm100: bool) -> MatrixDescriptor:
    """The 64-bit descriptor of tcgen05 (PTX ISA 9.7.16.10.4.1) or wgmma (9.7.15.5.1.2.2)."""
    code = (raw >> 61) & 7 if sm100 else (raw >> 62) & 3
    table = _SM100_SWIZZLES if sm100 else _SM90_SWIZZLES
    if code not in table:
        raise DescriptorError(
            f"matrix descriptor {raw:#018x}: swizzle code {code}; {sorted(table)} are defined"
        )
    if sm100 and (raw >> 46) & 7 != 1:
        raise DescriptorError(
            f"matrix descriptor {raw:#018x}: bits 46 to 48 are {(raw >> 46) & 7}; tcgen05 wants 1"
        )
    if (raw >> 49) & 7:
        raise DescriptorError(f"matrix descriptor {raw:#018x}: a base offset other than 0 is not supported")
    if sm100 and (raw >> 52) & 1:
        raise DescriptorError(f"matrix descriptor {raw:#018x}: absolute leading offsets are not supported")
    span, atom = table[code]
    return MatrixDescriptor(
        (raw & 0x3FFF) << 4, ((raw >> 16) & 0x3FFF) << 4, ((raw >> 32) & 0x3FFF) << 4, span, atom
    )


@lru_cache(maxsize=4096)
def matrix_bytes(descriptor: MatrixDescriptor, rows: int, k: int, width: int, mn_major: bool) -> np.ndarray:
    """Byte offsets (rows, k * width) of a matrix in shared memory: element (i, j) at [i, j * width : ...].

    `width` is the element's size in bytes. K-major: groups of 8 rows, `stride` apart, rows of one swizzle
    span. Without swizzle: core matrices of 8 rows of 16 bytes, `stride` apart along rows, `leading` along K.
    MN-major: the same with the roles of rows and K exchanged; `leading` is between spans along MN.
    """
    if mn_major:
        return _mn_major(descriptor, rows, k, width)
    i = np.arange(rows)[:, None]
    byte = np.arange(k * width)[None, :]
    if descriptor.span:
        if k * width > descriptor.span:
            raise DescriptorError(f"K of {k * width} bytes in rows of {descriptor.span} bytes")
        linear = (i % 8) * descriptor.span + (i // 8) * descriptor.stride + byte
    else:
        linear = (i % 8) * 16 + (i // 8) * descriptor.stride + (byte // 16) * descriptor.leading + byte % 16
    return _swizzled(descriptor, linear)


def _mn_major(descriptor: MatrixDescriptor, rows: int, k: int, width: int) -> np.ndarray:
    i = np.arange(rows)[:, None, None]
    j = np.arange(k)[None, :, None]
    part = np.arange(width)[None, None, :]
    along = i * width
    if descriptor.span:
        span = descriptor.span
        depth = 4 if descriptor.atom == 32 else 8
        linear = (
            (along // span) * descriptor.leading
            + along % span
            + (j % depth) * span
            + (j // depth) * descriptor.stride
            + part
        )
    else:
        linear = (
            (along // 16) * descriptor.stride
            + along % 16
            + (j % 8) * 16
            + (j // 8) * descriptor.leading
            + part
        )
    return _swizzled(descriptor, linear.reshape(rows, k * width))


def _swizzled(descriptor: MatrixDescriptor, linear: np.ndarray) -> np.ndarray:
    address = descriptor.start + linear
    units = swizzle_units(address >> 4, descriptor.span, descriptor.atom)
    return (units << 4) | (address & 15)
