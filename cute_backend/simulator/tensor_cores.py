"""Matrix products of the tensor cores: operands out of shared memory, products and sums.

A product is formed in double precision and added to the accumulator with one rounding to its type. This is at
least as exact as the hardware, which aligns and truncates. Integer products are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from cute_backend.simulator.formats import decode
from cute_backend.simulator.layouts import MatrixDescriptor, matrix_bytes

if TYPE_CHECKING:
    from cute_backend.simulator.cta import SharedMemory

WIDTHS = {"e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "tf32": 4}
PADDED = {"e2m1": 4, "e2m3": 6, "e3m2": 6}
"""The bits of padded formats: 16 elements occupy the first bytes of 16 bytes (PTX ISA 5.5.1.1,
.b4x16_p64)."""


@dataclass(frozen=True)
class Gather:
    """How to collect a matrix from shared memory: by 16-byte units if its rows consist of them, else by
    bytes."""

    units: np.ndarray | None
    bytes: np.ndarray | None
    cells: np.ndarray
    low: int
    high: int


@lru_cache(maxsize=2048)
def plan(descriptor: MatrixDescriptor, rows: int, k: int, width: int, mn_major: bool) -> Gather:
    where = matrix_bytes(descriptor, rows, k, width, mn_major)
    low, high = int(where.min()), int(where.max()) + 1
    if not mn_major and k * width % 16 == 0:
        units = where[:, ::16] >> 4
        return Gather(units, None, (units.reshape(-1)[:, None] * 4 + np.arange(4)).reshape(-1), low, high)
    return Gather(None, where, np.unique(where >> 2), low, high)


def collect(shared: SharedMemory, gather: Gather, kind: str) -> np.ndarray:
    """The matrix (rows, k) as float64."""
    if gather.units is not None:
        raw = shared.units[gather.units].reshape(len(gather.units), -1)
    else:
        raw = shared.data[gather.bytes]
    return values(np.ascontiguousarray(raw), kind)


def values(raw: np.ndarray, kind: str) -> np.ndarray:
    """Bytes (rows, k * width) as float64 values (rows, k). A byte of e2m1x2 has two elements, the first in
    its low bits."""
    if kind in PADDED:
        return decode(_padded(raw, PADDED[kind]), kind).astype(np.float64)
    if kind == "e2m1x2":
        codes = np.stack([raw & 15, raw >> 4], axis=-1)
        return decode(codes.reshape(len(raw), -1), "e2m1").astype(np.float64)
    if kind in ("e4m3", "e5m2"):
        return decode(raw, kind).astype(np.float64)
    if kind == "s8":
        return raw.view(np.int8).astype(np.float64)
    if kind == "u8":
        return raw.astype(np.float64)
    return decode(raw.view(f"u{WIDTHS[kind]}"), kind).astype(np.float64)


def _padded(raw: np.ndarray, bits: int) -> np.ndarray:
    """The codes of `bits` bits each, of which every 16 occupy the first bytes of 16 bytes."""
    units = raw.reshape(len(raw), -1, 16)[:, :, : 2 * bits]
    stream = np.unpackbits(units, axis=-1, bitorder="little").reshape(len(raw), -1, bits)
    return (stream << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)


def accumulate(
    old: np.ndarray | None, a: np.ndarray, b: np.ndarray, kind: str, saturate: bool = False
) -> np.ndarray:
    """old + a @ b.T in the accumulator's type: raw 32-bit cells for f32 and s32, f16 in their low halves."""
    product = _product(a, b)
    if kind == "s32":
        total = product if old is None else product + old.view(np.int32)
        if saturate:
            total = np.clip(total, -(2.0**31), 2.0**31 - 1)
        return (total.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)
    if kind == "f16":
        if old is not None:
            product = product + (old & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16)
        return product.astype(np.float16).view(np.uint16).astype(np.uint32)
    if old is not None:
        product = product + old.view(np.float32)
    return product.astype(np.float32).view(np.uint32)


ONE_THREAD = 1 << 18
"""Multiplications up to which OpenBLAS stays on one thread. Beyond, it wakes threads that spin: on a busy
machine a product of 128 x 128 x 32 then takes 18 ms instead of 0.3."""


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    rows = max(1, ONE_THREAD // b.size)
    if len(a) <= rows:
        return a @ b.T
    return np.concatenate([a[i : i + rows] @ b.T for i in range(0, len(a), rows)])
