"""Operands whose M or N has several modes, for the loads of specs that have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cute_backend.spec import Load, LoadKind, Stride

Made = TypeVar("Made")

_LONGEST = 5


def extents(load: Load, m: int) -> tuple[int, ...]:
    """Sizes that multiply to `m`, one for each mode of M: short rows of a batch, many batches."""
    if not load.m_modes:
        return (m,)
    inner = next(size for size in range(_LONGEST, 0, -1) if m % size == 0)
    return (m // inner, *[1] * (len(load.m_modes) - 2), inner)


def shape_of(load: Load, m: int, n: int) -> tuple[int, ...]:
    """The shape of a load with several modes of M or N."""
    rows = () if load.kind is LoadKind.ROWVEC else extents(load, m)
    if load.kind is LoadKind.COLVEC:
        return rows
    blocks = load.blocks
    return (*rows, *((n,) if blocks is None else (n // blocks.step, blocks.columns)))


def with_modes(load: Load, m: int, n: int, values: Callable[[tuple[int, ...]], Made]) -> Made:
    """An operand of several modes, made of the values of a dense shape. Modes that don't vary are expanded
    from one index. If N, or the mode that varies within a block, is not contiguous, every second column is
    taken."""
    shape = shape_of(load, m, n)
    strides = [*load.m_modes] if load.m_modes else [load.stride_m] * (load.kind is LoadKind.EXACT)
    if load.blocks is not None:
        strides += [load.blocks.outer, load.blocks.inner]
    elif load.kind is not LoadKind.COLVEC:
        strides.append(load.stride_n)
    varied = [1 if mode is Stride.ZERO else size for mode, size in zip(strides, shape, strict=True)]
    if load.kind is not LoadKind.COLVEC and strides[-1] is Stride.OTHER:
        return values((*varied[:-1], 2 * varied[-1]))[..., 1::2].expand(shape)  # type: ignore[index]
    return values(tuple(varied)).expand(shape)  # type: ignore[attr-defined]
