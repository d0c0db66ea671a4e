"""The sums of a product: the type of an accumulator in a register, by the types of the operands."""

from __future__ import annotations

from cutlass import Float32, Int8, Int32, Numeric


def sums_of(*operands: type[Numeric]) -> type[Numeric]:
    """The type in which tensor cores add up products of operands of these types (`Accumulator.dtype`)."""
    return Int32 if all(operand is Int8 for operand in operands) else Float32
