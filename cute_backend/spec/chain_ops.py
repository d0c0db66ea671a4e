"""The ops of a chain and their operands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Union

from cute_backend.dtypes import DType
from cute_backend.kinds.blocks import BLOCK_OPS, BlockOp
from cute_backend.kinds.reductions import ReductionKind


class Overflow(str, Enum):
    """The result of a cast to fp8 of a finite value beyond the largest finite one."""

    SATURATE = "saturate"
    NONFINITE = "nonfinite"
    """NaN in e4m3 (beyond 464), infinity in e5m2 (from 61440 on): torch's casts that do not saturate."""


class Precision(str, Enum):
    """Which casts inside the chain round."""

    FUSED = "fused"
    """Casts to fp8 and to integers round; a cast to bf16 or fp16 does not, as in Inductor's kernels."""
    EAGER = "eager"
    """Every cast rounds, as eager does (`torch._inductor.config.emulate_precision_casts`)."""


@dataclass(frozen=True)
class Const:
    """A number in the chain. Its Python type is part of it: `Const(1)` and `Const(1.0)` differ."""

    value: Union[bool, int, float]

    @property
    def dtype(self) -> DType:
        if isinstance(self.value, bool):
            return DType.BOOL
        return DType.I32 if isinstance(self.value, int) else DType.F32


Operand = Union[str, Const]
"""The name of an earlier value, or a number."""


@dataclass(frozen=True)
class Op:
    """One step of the chain: `name = op(*operands)`, rounded to `dtype`.

    An op over blocks of columns (`kinds.blocks`) has their size in `block`, which divides N.
    """

    name: str
    op: str
    operands: tuple[Operand, ...]
    dtype: DType
    overflow: Overflow = Overflow.SATURATE
    block: int = 0

    @property
    def values(self) -> tuple[str, ...]:
        """The names of the values that it reads."""
        return tuple(operand for operand in self.operands if isinstance(operand, str))

    @property
    def over_blocks(self) -> BlockOp | None:
        """Its kind, if its result depends on blocks of columns; None for other ops."""
        return BLOCK_OPS.get(self.op)

    @property
    def part_columns(self) -> int:
        """The columns of a part of each block, which are the last operand of some ops over blocks; 0 if that
        operand is no whole number, and for other ops."""
        if self.over_blocks is None or not self.over_blocks.has_part:
            return 0
        *_, last = self.operands
        return last.value if isinstance(last, Const) and type(last.value) is int else 0

    @property
    def reads_block(self) -> bool:
        """Whether an element of the result depends on other columns of the operand."""
        return self.over_blocks is not None and self.over_blocks.reads

    @property
    def reduction(self) -> ReductionKind | None:
        """The kind by which the op reduces blocks; None for other ops."""
        return None if self.over_blocks is None else self.over_blocks.reduction

    @property
    def whole_columns(self) -> int:
        """The columns of the blocks that a tile has to hold whole for the op; 0 if it needs none."""
        kind = self.over_blocks
        return 0 if kind is None else kind.whole_columns(self.block, self.part_columns)

    @property
    def columns_together(self) -> int:
        """The number of columns that stay together where halves of smaller blocks are reordered; 0 for an op
        without blocks."""
        kind = self.over_blocks
        return 0 if kind is None else kind.columns_together(self.block, self.part_columns)

    def fits_visit(self, columns: int) -> bool:
        """Whether visits of this number of columns have all that the op needs of a block."""
        return self.over_blocks is None or self.over_blocks.fits_visit(columns, self.block, self.part_columns)

    def resized(self, columns: int) -> Op:
        """An op over blocks with blocks of `columns` columns instead."""
        assert self.over_blocks is not None
        part = self.over_blocks.resized_part(self.part_columns, columns)
        operands: tuple[Operand, ...] = self.operands
        if self.over_blocks.has_part:
            operands = (*self.values, Const(part))
        return replace(self, operands=operands, block=columns)
