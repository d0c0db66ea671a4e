"""The ops of a chain and their operands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Union

from cute_backend.dtypes import DType


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

ROTATE_HALF = "block_rotate_half"
"""The op that maps each block of columns (x, y), where x and y are its halves, to (-y, x), as rotary
embeddings do."""

ROTATE_FIRST = "block_rotate_first"
"""The op that does the same to the first columns of each block, and leaves its other columns as they are. Its
second operand, a number, counts them."""

FIRST_VISITS = (32, 64)
"""The columns of visits in which first columns of blocks are rotated, if blocks are multiples of them, and
they have all columns that are rotated. Otherwise a visit has whole blocks."""

BLOCK_PART = "block_part"
"""The op that numbers the parts of blocks: for an element in column n, it is n % block // its operand, a
number that divides the block. So a program may work on the first columns of each head alone."""


@dataclass(frozen=True)
class Op:
    """One step of the chain: `name = op(*operands)`, rounded to `dtype`.

    An op that reduces blocks of columns has their size in `block`, which divides N. In every row of its
    result, all elements of a block have one value: the reduction of the operand's elements of that block.
    ROTATE_HALF has a `block` too, which is even, and so has BLOCK_PART. The `block` of ROTATE_FIRST is the
    period of the columns that are rotated, which are the first of every `block` columns. Tables of cosines
    and sines for these columns have the same period (`Blocks.period`).
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
    def first_columns(self) -> int:
        """The columns that a ROTATE_FIRST rotates, of each block; 0 for other ops."""
        if self.op != ROTATE_FIRST:
            return 0
        _, columns = self.operands
        return int(columns.value) if isinstance(columns, Const) else 0

    def fits_visit(self, columns: int) -> bool:
        """Whether visits of this number of columns have all columns that a ROTATE_FIRST rotates."""
        return self.block % columns == 0 and self.first_columns <= columns

    @property
    def reduced_columns(self) -> int:
        """The columns of the blocks that the op needs whole, as it reduces them, or rotates their first
        columns and no visit of `FIRST_VISITS` has these; 0 if it needs none."""
        if self.op in (ROTATE_HALF, BLOCK_PART):
            return 0
        has_first = self.op == ROTATE_FIRST and any(map(self.fits_visit, FIRST_VISITS))
        return 0 if has_first else self.block
