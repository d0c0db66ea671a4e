"""The matrix products of a spec: shapes, columns and scales of their operands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from cute_backend.dtypes import DType
from cute_backend.kinds.kind import LEFT_OUT
from cute_backend.kinds.scales import Scales, Scaling, WeightGroups
from cute_backend.kinds.stored import STORED, Stored


class Major(str, Enum):
    """The mode of a GEMM operand that is contiguous: A is (M, K), B is (K, N)."""

    K = "k"
    MN = "mn"


class ProductKind(str, Enum):
    """The matrices of a product, and the rows of it that are the plane of the epilogue."""

    DENSE = "dense"
    """A (M, K) times B (K, N): (M, N) is the plane."""
    BATCHED = "batched"
    """A (B, M, K) times B (B, K, N), one for each batch: their rows, (B * M, N), are the plane."""
    GROUPED = "grouped"
    """A (M, K), whose rows lie in groups that follow each other, times B (G, K, N), one for each group: the
    plane is (M, N). An argument of the kernel, the offsets (G,), says where each group ends; rows beyond the
    last one are not written."""
    K_GROUPED = "k_grouped"
    """A (M, K) times B (K, N), where K lies in groups that follow each other, one product for each group:
    their rows, (G * M, N), are the plane. The offsets (G,) say where each group ends. 16-bit operands are not
    contiguous along K, and groups end anywhere. fp8 operands are, as the MMA wants them, and all groups but
    the last end at multiples of `FP8_K_STEP`."""

    @property
    def has_offsets(self) -> bool:
        """Whether a kernel reads on the device where groups end."""
        return self in (ProductKind.GROUPED, ProductKind.K_GROUPED)


FP8_K_STEP = 16
"""The multiples at which groups of K begin in fp8, as torch wants them: TMA moves multiples of 16 bytes. A
kernel rounds other ends down, except for that of the last group."""


STORED_DTYPES = tuple(STORED)
"""The dtypes of weights that are converted to the 16 bits of the other operand as they are multiplied."""


class Columns(str, Enum):
    """The columns of B that an accumulator is the product with."""

    ALL = "all"
    EVEN = "even"
    ODD = "odd"


class BColumns(str, Enum):
    """The distribution of columns of B among the accumulators."""

    APART = "apart"
    """Each accumulator has a B of its own."""
    INTERLEAVED = "interleaved"
    """Two share one B, (K, 2 N): the even columns are the first one's, the odd ones the second one's."""
    SEGMENTS = "segments"
    """Each has a B of its own, (K, `width`), and the columns of the plane are those of all B side by side.
    Their values never meet: they are regions of one A that share a launch. In the transposed product each has
    an A of its own, (`height`, K), and their rows lie below each other."""


@dataclass(frozen=True)
class Accumulator:
    """One matrix product of A and B, accumulated in fp32, or of int8 in int32; `kind` has their shapes.

    B may be stored in 8 or 4 bits beside an A of 16, as a weight that was quantised to save memory is. The
    kernel converts its values to A's dtype, which has all of them, between shared memory and the MMA. Where
    an element has two values, which are neighbours along K, B is (K / 2, N). If they have
    `weight_groups` (groups of K), it also subtracts zeros there, and multiplies by scales.

    The accumulators of a spec share one A, and one MMA computes them all. Accumulators of EVEN and ODD
    columns come as a pair, in this order, and share a B of (K, 2 N) as well.

    If `width` is not 0, the accumulator's columns are a segment of `width` columns of the plane, which begins
    with a new tile. In the transposed product its rows are one of `height` rows.

    With a `b_block`, the columns of B are blocks of that many, at any distance from one another, as those of
    queries in a weight that has queries, keys and values head by head: B is (K, N / b_block, b_block).

    `fast_accum` is `_scaled_mm`'s `use_fast_accum`: without it, Hopper's fp8 MMA promotes its partial sums to
    fp32 registers at intervals. It has no meaning for operands of 16 bits and of int8, where it is True.

    With `a_scaling` and `b_scaling` it is the sum over K's blocks b of A_b B_b * (scale_a[m, b] * scale_b[b,
    n]). Scales of fp32 multiply each term in fp32: the MMA adds up no more than a block, and `fast_accum` is
    False. MX and NV scales are multiplied by the MMA itself, which adds up all of K.
    """

    name: str
    a_dtype: DType
    b_dtype: DType
    a_major: Major = Major.K
    b_major: Major = Major.K
    fast_accum: bool = True
    columns: Columns = Columns.ALL
    kind: ProductKind = ProductKind.DENSE
    a_scaling: Scaling = Scaling.NONE
    b_scaling: Scaling = Scaling.NONE
    width: int = 0
    height: int = field(default=0, metadata=LEFT_OUT)
    b_block: int = field(default=0, metadata=LEFT_OUT)
    weight_groups: WeightGroups | None = field(default=None, metadata=LEFT_OUT)

    @property
    def segment(self) -> int:
        """The columns, or the rows, of the plane that are its own; 0 if all are."""
        return self.width or self.height

    @property
    def dtype(self) -> DType:
        """The dtype of its sums."""
        return self.multiplied.sums

    @property
    def multiplied(self) -> DType:
        """The dtype in which the MMA takes both operands, or in fp8 that of A."""
        return max(self.a_dtype, self.b_dtype, key=lambda dtype: dtype.bits)

    @property
    def mma_operands(self) -> set[DType]:
        """The dtypes of the operands of the MMA. An operand that is converted has the other one's."""
        return {self.multiplied} if self.is_converted else {self.a_dtype, self.b_dtype}

    @property
    def stored(self) -> DType:
        """The dtype of the operand that is converted, if one `is_converted`."""
        return min(self.a_dtype, self.b_dtype, key=lambda dtype: dtype.bits)

    @property
    def is_converted(self) -> bool:
        """Whether the values of one operand, of `STORED_DTYPES`, are converted to the other one's dtype as
        they are multiplied."""
        return self.a_dtype.bits != self.b_dtype.bits

    @property
    def format(self) -> Stored | None:
        """The format of the operand that is converted, if one `is_converted`."""
        return STORED[self.stored] if self.is_converted else None

    @property
    def packing(self) -> int:
        """The elements along K of the other operand for each of the one that is converted; 1 if none is."""
        return 1 if self.format is None else self.format.values

    def k_bits(self, dtype: DType) -> int:
        """The bits of an operand of this dtype for each element along K of the one that has the most."""
        return dtype.bits // (self.packing if dtype is self.stored else 1)

    @property
    def is_wideable(self) -> bool:
        """Whether a conversion of the whole weight in memory leaves the same product, as it does not where
        groups of K have scales."""
        return self.is_converted and self.weight_groups is None

    @property
    def widened(self) -> Accumulator:
        """The product of the same values, those that are converted stored in the other operand's dtype."""
        return replace(self, a_dtype=self.multiplied, b_dtype=self.multiplied)

    @property
    def b_scales(self) -> Scales:
        """The scales beside each B."""
        return self.weight_groups or self.b_scaling

    @property
    def scales(self) -> tuple[Scales, ...]:
        """All scales that it has fields for."""
        found = (self.weight_groups, self.a_scaling, self.b_scaling)
        return tuple(each for each in found if each is not None)

    @property
    def in_order(self) -> bool:
        """Whether its scales leave rows and columns in the order of the plane (`Scales.in_order`)."""
        return any(each.in_order for each in self.scales)

    @property
    def is_block_scaled(self) -> bool:
        """Whether its operands have scales that vary along K."""
        return self.a_scaling is not Scaling.NONE
