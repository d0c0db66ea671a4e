"""References for results: the program in float64, and the difference that is allowed."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

import torch
from torch import Tensor

from support.epilogues import Epilogue

TOLERANCE = {
    torch.bfloat16: 4e-3,
    torch.float16: 6e-4,
    torch.float32: 4e-6,
    torch.float8_e4m3fn: 5e-2,
    torch.int64: 1e-9,
}
"""The allowed difference of a result from its reference, relative in norm: a unit in the last place of its
dtype, and 0 for an index."""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The relative error in norm. It is NaN if an element was not written, as outputs are filled with NaN.
    Infinities that are expected and are there leave no error, and don't count in the norm."""
    actual, expected = actual.double(), expected.double()
    same = expected.isinf() & (actual == expected)
    actual, expected = actual.masked_fill(same, 0), expected.masked_fill(same, 0)
    return ((actual - expected).norm() / expected.norm()).item()


def _scaled_mm_f64(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None, **_
) -> Tensor:
    if scale_a.dtype is not torch.float32:
        product = of_tiles(a, scale_a) @ of_tiles(b.t(), scale_b).t()
    elif scale_a.dim() == 2 and (scale_a.shape[1], scale_b.shape[0]) != (1, 1):
        a, b = _scaled_blocks(a, scale_a), _scaled_blocks(b.t(), scale_b.t()).t()
        product = a @ b
    else:
        product = (a.double() @ b.double()) * scale_a.double() * scale_b.double()
    return product if bias is None else product + bias.double()


def _scaled_blocks(operand: Tensor, scales: Tensor) -> Tensor:
    """(rows, k) multiplied by the scales of its blocks, by their shape 1 x 128 or 128 x 128."""
    rows, k = operand.shape
    lines = 1 if scales.shape[0] == rows else 128
    return (
        operand.double() * scales.double().repeat_interleave(lines, 0)[:rows].repeat_interleave(128, 1)[:, :k]
    )


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def of_tiles(operand: Tensor, scales: Tensor) -> Tensor:
    """(lines, K) multiplied by the scales of blocks that lie in tiles of 128 lines by 4."""
    if operand.dtype is torch.float4_e2m1fn_x2:
        codes = operand.contiguous().view(torch.uint8)
        values = torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=torch.float64)
        values[:, ::2], values[:, 1::2] = _E2M1[(codes & 15).long()], _E2M1[(codes >> 4).long()]
    else:
        values = operand.double()
    lines, k = values.shape
    block = 32 if scales.dtype is torch.float8_e8m0fnu else 16
    line, scale = torch.arange(lines)[:, None], torch.arange(k)[None, :] // block
    wide = ((k + block - 1) // block + 3) // 4
    place = (line // 128 * wide + scale // 4) * 512 + line % 32 * 16 + line % 128 // 32 * 4 + scale % 4
    return values * scales.view(torch.uint8)[place].view(scales.dtype).double()


def _scaled_mm_v2_f64(
    a: Tensor, b: Tensor, of_a: list[Tensor], _a: object, of_b: list[Tensor], *_: object
) -> Tensor:
    """`F.scaled_mm` by scales of blocks, and of whole operands."""
    product = of_tiles(a, of_a[0]) @ of_tiles(b.t(), of_b[0]).t()
    return product * of_a[1].double() * of_b[1].double()


def _addmm_f64(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return bias.double() + a.double() @ b.double()


def _int_mm_f64(a: Tensor, b: Tensor) -> Tensor:
    return a.double() @ b.double()


def _baddbmm_f64(addend: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * addend.double() + alpha * (a.double() @ b.double())


def _grouped_mm_f64(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    ends = list(enumerate(pairwise((0, *offs.tolist()))))
    if a.dim() == 3:
        return torch.cat([a[group].double() @ b[:, first:end].double() for group, (first, end) in ends], 1)
    if b.dim() == 2:
        return torch.stack([a[:, first:end].double() @ b[first:end].double() for _, (first, end) in ends])
    return torch.cat([a[first:end].double() @ b[group].double() for group, (first, end) in ends])


def _scaled_grouped_mm_f64(
    a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, offs: Tensor, **_: object
) -> Tensor:
    if of_a.dtype is torch.float8_e8m0fnu:
        return _mx_groups_f64(a, b, of_a, of_b, offs.tolist())
    if b.dim() == 2:
        of_rows, of_columns = (each.double().view(len(offs), -1) for each in (of_a, of_b))
        return _grouped_mm_f64(a, b, offs=offs) * of_rows[:, :, None] * of_columns[:, None]
    rows = torch.arange(a.shape[0], device=a.device)
    group = torch.searchsorted(offs, rows, right=True)
    return _grouped_mm_f64(a, b, offs=offs) * of_a[:, None].double() * of_b.double()[group]


def _mx_groups_f64(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, ends: list[int]) -> Tensor:
    """Each group's rows, whose scales begin with a tile of 128 rows of their own, by its B."""
    products, tile = [], 0
    for group, (first, end) in enumerate(pairwise((0, *ends))):
        tiles = -(-(end - first) // 128)
        own = of_a[128 * tile : 128 * (tile + tiles)].flatten()
        tile += tiles
        if end > first:
            columns = of_tiles(b[group].t(), of_b[group])
            products.append(of_tiles(a[first:end], own) @ columns.t())
    return torch.cat(products)


def in_float64(epilogue: Epilogue, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of the program with its products, and so all ops after them, in float64."""
    with (
        patch("torch._scaled_mm", _scaled_mm_f64),
        patch("torch._int_mm", _int_mm_f64),
        patch("torch.addmm", _addmm_f64),
        patch("torch.baddbmm", _baddbmm_f64),
        patch("torch.nn.functional.scaled_mm", _scaled_mm_v2_f64),
        patch("torch.nn.functional.grouped_mm", _grouped_mm_f64),
        patch("torch._scaled_grouped_mm", _scaled_grouped_mm_f64),
    ):
        return as_tuple(epilogue.fn(*inputs))


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
