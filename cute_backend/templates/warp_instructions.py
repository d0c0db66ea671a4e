"""The instructions of mma.sync, by the type of the operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int8, Int32, Numeric
from cutlass._mlir.dialects.cute_nvgpu import MmaAtomSM80Type
from cutlass.cute.atom import Trait, make_atom
from cutlass.cute.core import _pack_shape
from cutlass.cute.nvgpu import warp
from cutlass.cute.nvgpu.warp.mma import WarpMmaOp
from cutlass.cutlass_dsl import T


def instruction(operand: type[Numeric], shape: tuple[int, int, int]) -> WarpMmaOp:
    """The instruction of a shape (M, N, K) that multiplies operands of this type."""
    if operand is Int8:
        return MmaI8Op(shape)
    op = warp.MmaFP8Op if operand.width == 8 else warp.MmaF16BF16Op
    return op(operand, Float32, shape)


@dataclass(frozen=True)
class MmaI8Op(WarpMmaOp):
    """mma.sync of int8 with sums in int32, which sm_80 and later have (PTX ISA, mma.m16n8k32). The DSL has
    its atom, but no op for it (nvidia-cutlass-dsl 4.8)."""

    shape_mnk: tuple[int, int, int]

    def _make_trait(self, *, loc: Any = None, ip: Any = None, **kwargs: Any) -> Trait:
        shape = _pack_shape(self.shape_mnk, loc=loc, ip=ip)
        # Int8's own type of MLIR has no sign, and the atom takes it for u8.
        kind = MmaAtomSM80Type.get(shape.type.attribute, T.si8(), T.si8(), Int32.mlir_type)
        return Trait(make_atom(kind, loc=loc, ip=ip))

    def _verify_fragment_A(self, input: cute.Tensor, *, loc: Any = None, ip: Any = None) -> None:
        """Does nothing: fragments are those that the instruction itself made."""

    _verify_fragment_B = _verify_fragment_A
