"""Programs in which torchao quantises the product of two products to MXFP8, and planes for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
_STEPS = (0, 1, 1 << 22, (1 << 22) - 1, (1 << 22) + 1, 0x600000, 0x600001, 0x5FFFFF, 0x700000, 0x7F0000)
"""Mantissas at which a mode rounds up, or their neighbours."""


def to_mx_behind_products(mode: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The program (a, b, c, plane) -> scales in tiles and values of plane * (a b) * (a c)."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scaling = ScaleCalculationMode[mode]

    def program(a: Tensor, b: Tensor, c: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
        return to_mx((a @ b).float() * (a @ c).float() * plane, E4M3, 32, scaling, is_swizzled_scales=True)

    return program


def plane_of_largest(m: int, n: int) -> tuple[Tensor, ...]:
    """Operands of products of ones, and a plane (m, n) whose blocks of 32 have largest values of every
    exponent, infinity, NaN and random bits."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(256, dtype=torch.int32) << 23
    chosen = torch.cat([(exponents + step) & 0x7FFFFFFF for step in (*_STEPS, -1)])
    count = m * n // 32 - len(chosen)
    assert count >= 0
    random = torch.randint(2**31 - 1, (count,), generator=generator, dtype=torch.int64).to(torch.int32)
    largest = torch.cat([chosen, random]).view(torch.float32).view(m, n // 32, 1)
    values = torch.rand(m, n // 32, 32, generator=generator) * 2 - 1
    values[..., 5] = torch.tensor([1.0, -1.0]).repeat(m * n // 64).view(m, n // 32)
    a, b = torch.zeros(m, 16, dtype=BF16), torch.zeros(16, n, dtype=BF16)
    a[:, 0], b[0] = 1, 1
    return a, b, b.clone(), (values.double() * largest.double()).float().flatten(1)


def same_fp8(left: Tensor, right: Tensor) -> bool:
    """Whether two fp8 tensors are equal to the bit. NaN has any sign."""
    a, b = (torch.where(each.float().isnan(), 0x7F, each.view(torch.uint8)) for each in (left, right))
    return torch.equal(a, b)
