"""Operands of tensor-core tests: matrices as bytes in shared memory, from the definition of the layouts.

A layout is given by strides of (8 x 16-byte) core matrices, and is then permuted by the swizzle, bit by bit.
The simulator computes the same from descriptors, in another way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

TORCH = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "s8": torch.int8,
    "u8": torch.uint8,
}


def small_integers(rows: int, k: int, kind: str, seed: int) -> np.ndarray:
    low = 0 if kind == "u8" else -3
    return np.random.default_rng(seed).integers(low, 4, (rows, k)).astype(np.float32)


def raw_elements(values: np.ndarray, kind: str) -> np.ndarray:
    """(rows, k, bytes of an element)."""
    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(TORCH[kind])
    return tensor.view(torch.uint8).numpy().reshape(*values.shape, -1)


@dataclass(frozen=True)
class Stored:
    """A matrix in a buffer that starts at a multiple of 1024 bytes, and the fields of its descriptor."""

    data: np.ndarray
    leading: int
    stride: int
    span: int

    def descriptor(self, arch: str) -> int:
        """The descriptor without its start address, which the kernel adds."""
        fields = (self.leading >> 4) << 16 | (self.stride >> 4) << 32
        if arch == "sm_100a":
            return fields | 1 << 46 | {0: 0, 128: 2, 64: 4, 32: 6}[self.span] << 61
        return fields | {0: 0, 128: 1, 64: 2, 32: 3}[self.span] << 62


def stored(values: np.ndarray, kind: str, span: int, mn_major: bool) -> Stored:
    """Lays out a (rows, k) matrix, along the major direction in runs of one swizzle span, or of 16 bytes
    without a swizzle."""
    elements = raw_elements(values, kind)
    if mn_major:
        elements = elements.transpose(1, 0, 2)
    outer, inner, width = elements.shape  # `inner` is contiguous
    run = span or 16
    groups, runs = -(-outer // 8), -(-inner * width // run)
    # Groups of 8 outer lines are 8 * run bytes; runs follow each other after all groups.
    group_step, run_step = 8 * run, 8 * run * groups
    data = np.zeros(run_step * runs, np.uint8)
    for o in range(outer):
        line = elements[o].reshape(-1)
        for b in range(0, inner * width, 16):
            offset = (o % 8) * run + (o // 8) * group_step + (b // run) * run_step + b % run
            if span:
                offset ^= ((offset >> 7) & (span // 16 - 1)) << 4
            data[offset : offset + 16] = line[b : b + 16]
    if mn_major and not span:
        return Stored(data, group_step, run_step, span)
    return Stored(data, run_step, group_step, span)
