"""Random operands, for timings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cute_backend.kinds.axes import Extent
from cute_backend.numerics import TORCH_DTYPES
from cute_backend.signature import Argument, Use, of_use, signature
from cute_backend.spec import SCALE_TILE, BColumns, EpilogueSpec, ProductKind


def random_tensor(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Normal values, or small integers, of any layout, on the device of `generator`."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size > 1)
    memory = torch.empty(elements, dtype=dtype, device=generator.device)
    if dtype in (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu):
        # Operands in fp4 get any codes, and scales powers of two near 1.
        low, high = (0, 256) if dtype is torch.float4_e2m1fn_x2 else (120, 134)
        memory.view(torch.uint8).random_(low, high, generator=generator)
    elif dtype.is_floating_point:
        source = memory if dtype.itemsize > 1 else torch.empty_like(memory, dtype=torch.bfloat16)
        source.normal_(generator=generator)
        memory.copy_(source)
    else:
        memory.random_(0, 2, generator=generator)
    return memory.as_strided(shape, strides)


def random_operands(
    spec: EpilogueSpec, m: int, n: int, k: int, generator: torch.Generator, groups: int = 1
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Random A, B and loads for an op of these sizes, laid out as the spec says and aligned for TMA.

    If blocks have scales, A and B come with them, and A comes with the offsets of its groups, which have as
    many rows, or as much of K, as one another. A product with batches gets one, and the innermost mode of M
    has all of M.
    """
    sizes = {
        Extent.M: m,
        Extent.N: n,
        Extent.K: k,
        Extent.BATCHES: 1,
        Extent.GROUPS: groups,
        Extent.ROWS: m,
        Extent.COLUMNS: 2 * n,
        Extent.MODE: 1,
    }
    # Each group of rows ends with a tile of scales of its own.
    rows, values = m + SCALE_TILE[0] * (groups - 1), k * spec.product.a_dtype.values
    columns = 2 * n if spec.b_columns is BColumns.INTERLEAVED else n
    for (side, scales), lines in zip(spec.scaled, (rows, columns), strict=True):
        sizes = scales.sizes(side, lines, values) | sizes
    arguments = signature(spec)

    def made(*roles: Use) -> list[Tensor]:
        return [_random(argument, sizes, generator) for role in roles for argument in of_use(arguments, role)]

    last = k if spec.product.kind is ProductKind.K_GROUPED else m
    offsets = [ends.copy_(even_split(last, groups)) for ends in made(Use.OFFSETS)]
    of_a = made(Use.A) + offsets + made(Use.A_SCALES)
    return of_a, made(Use.B, Use.B_SCALES), made(Use.LOAD)


def even_split(last: int, groups: int) -> Tensor:
    """Offsets (groups,) that divide `last` rows, or as much of K, into groups of one size, on the CPU."""
    return torch.arange(1, groups + 1) * last // max(groups, 1)


def skewed_split(last: int, groups: int) -> Tensor:
    """Offsets like those of `even_split`, except that the first group has half of the rows."""
    half = last // 2 if groups > 1 else last
    return half + torch.arange(groups) * (last - half) // max(groups - 1, 1)


def _random(argument: Argument, sizes: Mapping[Extent, int], generator: torch.Generator) -> Tensor:
    shape = list(argument.shape(sizes)) or [1]
    modes = sum(dim.extent is Extent.MODE for dim in argument.dims)
    if modes:
        shape[modes - 1] = sizes[Extent.M]
    align = argument.align(tma=True) * 8 // argument.dtype.bits if argument.is_plane else 1
    if argument.inner is not None:
        strides = (1, shape[0]) if argument.inner == 0 else (shape[1], 1)
    else:
        # An argument that need not be contiguous gets a stride of two elements, unless it has to be
        # row-major.
        step = 1 if argument.unit is not None or modes == len(argument.dims) else 2
        strides = argument.packed(shape, align, step) or (1,)
    return random_tensor(shape, strides, TORCH_DTYPES[argument.dtype], generator)
