"""Operands whose M is several modes, for specs that say so of a load."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cute_backend.spec import Load, LoadKind, Stride

Made = TypeVar("Made")

_LONGEST = 5


def extents(load: Load, m: int) -> tuple[int, ...]:
    """Sizes that multiply to `m`, one for each mode of M: short rows of a batch, many batches."""
    inner = next(size for size in range(_LONGEST, 0, -1) if m % size == 0)
    return (m // inner, *[1] * (len(load.m_modes) - 2), inner)


def shape_of(load: Load, m: int, n: int) -> tuple[int, ...]:
    """The shape of a load with several modes of M."""
    return (*extents(load, m), *((n,) if load.kind is LoadKind.EXACT else ()))


def with_modes(load: Load, m: int, n: int, values: Callable[[tuple[int, ...]], Made]) -> Made:
    """Such an operand of the values of a dense shape: those of one index along what does not vary, expanded,
    and each second column where N is not contiguous."""
    shape = shape_of(load, m, n)
    modes = len(load.m_modes)
    varied = [1 if mode is Stride.ZERO else size for mode, size in zip(load.m_modes, shape, strict=False)]
    if load.stride_n is Stride.OTHER:
        return values((*varied, 2 * n))[..., 1::2].expand(shape)  # type: ignore[index]
    return values((*varied, *shape[modes:])).expand(shape)  # type: ignore[attr-defined]
