"""Operand values that tell ops apart: signed zeros, infinities, NaN, halves, extremes, and random ones."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from cute_backend.spec import DType

_FLOATS = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, 2.5, -2.5, 3.0, -7.25, 20.5, 88.0, -104.0, 1e-3, -3e-5]
_BOUNDARIES = [448.0, 464.0, 480.0, 57344.0, 61440.0, -61440.0, 65504.0, 2.0**-9, 2.0**-10, 2.0**-17]
"""The ends of the ranges of fp8 formats and of fp16."""

_EXTREMES = [1e-40, -1e-45, 1.17e-38, 3e38, -3.4e38, 16777217.0, float("inf"), float("-inf"), float("nan")]
_INTEGERS = [0, 1, -1, 2, -3, 7, 100, -100, 127, -128, 1000, -65536, 2**31 - 1, -(2**31)]


def specials(register: DType) -> Tensor:
    """The values of a register dtype that matter most."""
    if register is DType.F32:
        return torch.tensor(_FLOATS + _BOUNDARIES + _EXTREMES)
    if register is DType.I32:
        return torch.tensor(_INTEGERS, dtype=torch.int32)
    return torch.tensor([False, True])


def randoms(register: DType, count: int, seed: int) -> Tensor:
    """Random values: floats of all magnitudes that functions treat differently, half of them within 10."""
    generator = torch.Generator().manual_seed(seed)
    if register is DType.BOOL:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if register is DType.I32:
        bits = torch.randint(0, 32, (count,), generator=generator, dtype=torch.int32)
        return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32) >> bits
    wide = torch.exp2(torch.rand(count, generator=generator) * 250 - 125)
    near = torch.rand(count, generator=generator) * 10
    magnitude = torch.where(torch.rand(count, generator=generator) < 0.5, wide, near)
    return torch.where(torch.rand(count, generator=generator) < 0.5, magnitude, -magnitude)


def operands(registers: tuple[DType, ...], count: int = 4096) -> list[Tensor]:
    """One 1-D tensor for each operand: every combination of special values, then random ones."""
    grids = [specials(register) for register in registers]
    picks = list(product(*(range(len(grid)) for grid in grids)))
    columns = torch.tensor(picks).unbind(1)
    return [
        torch.cat([grid[column], randoms(register, count, seed)])
        for seed, (grid, column, register) in enumerate(zip(grids, columns, registers, strict=True))
    ]
