"""Values of which the compiler can't see what they are computed from."""

from __future__ import annotations

from typing import Any, TypeVar

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

Value = TypeVar("Value", Int32, Float32)


@dsl_user_op
def opaque(value: Value, *, loc: Any = None, ip: Any = None) -> Value:
    """The value, in a register. The compiler neither computes it again elsewhere, nor knows that what is
    computed from the result equals what is computed from `value`."""
    kind = type(value)
    letter = "f" if kind is Float32 else "r"
    word = llvm.inline_asm(
        kind.mlir_type,
        [value.ir_value(loc=loc, ip=ip)],
        "mov.b32 $0, $1;",
        f"={letter},{letter}",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return kind(word)
