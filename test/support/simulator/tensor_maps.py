"""Tensor maps as the DSL's host code writes them, made by hand for the tests of TMA."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

CODES = {"u8": 0, "u16": 1, "u32": 2, "u64": 4, "f16": 6, "f32": 7, "f64": 9, "bf16": 10}
SWIZZLES = {0: (0, 0), 32: (1, 0), 64: (2, 0), 128: (3, 0), "128/32": (3, 1)}


def tensor_map(
    array: np.ndarray, box: Sequence[int], *, kind: str, swizzle: int | str = 0, nan: bool = False
) -> bytes:
    """The map of a numpy array, whose last axis is dimension 0. `box` has the order of the array's axes."""
    sizes = array.shape[::-1]
    strides = [s // 16 for s in array.strides[::-1][1:]] + [0] * 4
    code, atom = SWIZZLES[swizzle]
    word = 2 | (len(sizes) - 1) << 4 | CODES[kind] << 7 | code << 13 | int(nan) << 15 | atom << 19
    high = sum((s >> 32) << 4 * i for i, s in enumerate(strides[:4]))
    padded = [s - 1 for s in sizes] + [0] * (5 - len(sizes))
    boxes = bytes(b - 1 for b in box[::-1]).ljust(5, b"\0")
    raw = struct.pack("<QI", array.ctypes.data, word) + struct.pack(
        "<4I", *(s & 0xFFFFFFFF for s in strides[:4])
    )
    raw += struct.pack("<I", high) + struct.pack("<5I", *padded)
    raw = raw.ljust(52, b"\0") + b"\0\0\0" + boxes
    return raw.ljust(128, b"\0")
