"""Converts values to the formats of block-scaled operands, and computes the values that operands stand
for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp4(values: Tensor) -> Tensor:
    """Packs values that E2M1 represents, (..., K), into `float4_e2m1fn_x2`, (..., K / 2)."""
    codes = torch.bucketize(values.abs(), torch.tensor(_E2M1, device=values.device, dtype=values.dtype))
    codes = (codes + 8 * (values < 0)).to(torch.uint8)
    return (codes[..., ::2] | codes[..., 1::2] << 4).view(torch.float4_e2m1fn_x2)


def tiled(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Lays out scales (lines, blocks of K) in tiles of 128 by 4, one after the other (SWIZZLE_32_4_4)."""
    lines, blocks = scales.shape
    padded = F.pad(scales.float(), (0, -blocks % 4, 0, -lines % 128), value=1.0)
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4)).permute(0, 3, 2, 1, 4)
    return tiles.flatten().to(dtype)


def scaled(values: Tensor, scales: Tensor, lines: int, depth: int) -> Tensor:
    """Multiplies values (rows, K) by the scales of blocks of `lines` rows and `depth` of K."""
    rows, k = values.shape
    return values * scales.repeat_interleave(lines, 0)[:rows].repeat_interleave(depth, 1)[:, :k]
