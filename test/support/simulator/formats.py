"""Bits and values of 8-bit and 16-bit floating-point types, as torch converts them."""

from __future__ import annotations

import numpy as np
import torch

TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "e4m3": 0x7F, "e5m2": 0x7F}


def values_of(bits: np.ndarray, name: str) -> np.ndarray:
    """The values of these bits as torch reads them, as float32."""
    if name in ("e4m3", "e5m2"):
        return torch.from_numpy(bits.astype(np.uint8)).view(TORCH[name]).float().numpy()
    return torch.from_numpy(bits.view(np.int16)).view(TORCH[name]).float().numpy()


def bits_of(x: np.ndarray, name: str) -> np.ndarray:
    """Torch's bits of float32 values that the type holds or rounds to nearest."""
    tensor = torch.from_numpy(np.ascontiguousarray(x)).to(TORCH[name])
    width = np.uint8 if name in ("e4m3", "e5m2") else np.uint16
    return tensor.view(torch.uint8 if width is np.uint8 else torch.int16).numpy().view(width)
