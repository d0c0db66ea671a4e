"""PTX instructions that the compiler must neither move nor leave out."""

from __future__ import annotations

from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T


def assembled(text: str, *operands: Int32 | Int64 | int, tied: bool = False) -> Int32:
    """An instruction with an int32 result, that LLVM moves neither ahead of the wait for the registers that
    it writes, nor out of the time in which a stage may be read. If it is `tied`, its result is in the
    register of its first operand, and keeps that value where the instruction writes none."""
    given = [each if isinstance(each, Int64) else Int32(each) for each in operands]
    kinds = ["l" if isinstance(each, Int64) else "r" for each in given]
    if tied:
        kinds[0] = "0"
    values = [each.ir_value() for each in given]
    constraints = ",".join(["=r", *kinds])
    return Int32(llvm.inline_asm(T.i32(), values, text, constraints, has_side_effects=True))
