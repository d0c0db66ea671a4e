"""Arithmetic with two numbers of 16 bits in a register."""

from __future__ import annotations

from cutlass import BFloat16, Int32, Numeric

from cute_backend.templates.instructions import assembled

_MINUS_ONES, _MINUS_ZEROS = 0xBF80BF80 - (1 << 32), 0x80008000 - (1 << 32)
"""Pairs of bf16, as signed integers."""


def sub(left: Int32, right: Int32 | int, of: type[Numeric]) -> Int32:
    """The differences of two pairs of dtype `of`."""
    if of is BFloat16:
        return _fma(right, _MINUS_ONES, left)
    return assembled("sub.rn.f16x2 $0, $1, $2;", left, right)


def mul(left: Int32, right: Int32 | int, of: type[Numeric]) -> Int32:
    """The products of two pairs of dtype `of`."""
    if of is BFloat16:
        return _fma(left, right, _MINUS_ZEROS)
    return assembled("mul.rn.f16x2 $0, $1, $2;", left, right)


def _fma(left: Int32 | int, right: Int32 | int, addend: Int32 | int) -> Int32:
    """left * right + addend, in pairs of bf16: before Hopper, bf16 has no other arithmetic (PTX ISA, add,
    sub, mul and fma of bf16x2). With a factor of 1, or an addend of -0, it has the results of the others."""
    return assembled("fma.rn.bf16x2 $0, $1, $2, $3;", left, right, addend)
