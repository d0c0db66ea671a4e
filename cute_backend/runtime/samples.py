"""Random operands, for timings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..spec import DType, EpilogueSpec, Load, LoadKind, Major, Stride
from .operands import TMA_ALIGN, TORCH_DTYPES


def random_tensor(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Normal values, or small integers, of any layout, on the device of `generator`."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size > 1)
    memory = torch.empty(elements, dtype=dtype, device=generator.device)
    if dtype.is_floating_point:
        source = memory if dtype.itemsize > 1 else torch.empty_like(memory, dtype=torch.bfloat16)
        source.normal_(generator=generator)
        memory.copy_(source)
    else:
        memory.random_(0, 2, generator=generator)
    return memory.as_strided(shape, strides)


def random_operands(
    spec: EpilogueSpec, m: int, n: int, k: int, generator: torch.Generator
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """A, B and loads for an op of these sizes, laid out as the spec says and TMA likes best."""

    def plane(rows: int, columns: int, dtype: DType, row_major: bool) -> Tensor:
        unit = columns if row_major else rows
        wide = -(-unit * dtype.bits // (8 * TMA_ALIGN)) * TMA_ALIGN * 8 // dtype.bits
        strides = (wide, 1) if row_major else (1, wide)
        return random_tensor((rows, columns), strides, TORCH_DTYPES[dtype], generator)

    def load_of(load: Load) -> Tensor:
        if load.m_modes:
            return of_modes(load)
        if load.kind is LoadKind.EXACT and Stride.ONE in (load.stride_m, load.stride_n):
            return plane(m, n, load.dtype, load.stride_n is Stride.ONE)
        if load.kind is LoadKind.EXACT:
            return random_tensor((m, n), (2 * n, 2), TORCH_DTYPES[load.dtype], generator)
        length = {LoadKind.ROWVEC: n, LoadKind.COLVEC: m, LoadKind.SCALAR: 1}[load.kind]
        step = 2 if Stride.OTHER in (load.stride_m, load.stride_n) else 1
        return random_tensor((length,), (step,), TORCH_DTYPES[load.dtype], generator)

    def of_modes(load: Load) -> Tensor:
        """As for one batch: all of M is the innermost mode."""
        step = 2 if load.stride_n is Stride.OTHER else 1
        tail, pitch = (((n, step),), step * n) if load.kind is LoadKind.EXACT else ((), 1)
        sizes = [1] * (len(load.m_modes) - 1) + [m]
        modes = [
            (size, 0 if mode is Stride.ZERO else pitch)
            for size, mode in zip(sizes, load.m_modes, strict=True)
        ]
        shape, strides = zip(*modes, *tail, strict=True)
        return random_tensor(shape, strides, TORCH_DTYPES[load.dtype], generator)

    acc, columns = spec.product, 2 * n if spec.neighbours else n
    a = [plane(m, k, acc.a_dtype, acc.a_major is Major.K)]
    b = [plane(k, columns, acc.b_dtype, acc.b_major is not Major.K) for _ in range(spec.b_count)]
    if acc.batched:  # as for one batch
        a, b = (
            [each.as_strided((1, *each.shape), (TMA_ALIGN, *each.stride())) for each in side]
            for side in (a, b)
        )
    return a, b, [load_of(load) for load in spec.loads]
