"""The sums of a product: the type of an accumulator in a register, by the type of the operands."""

from __future__ import annotations

from cutlass import Float32, Int8, Int32, Numeric


def sums_of(operand: type[Numeric]) -> type[Numeric]:
    """The type in which tensor cores add up products of operands of this type (`DType.sums`)."""
    return Int32 if operand is Int8 else Float32
