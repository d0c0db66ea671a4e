"""The formats in which weights are stored, to be converted to 16 bits as they are multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cute_backend.dtypes import DType

if TYPE_CHECKING:
    from torch import Tensor

PACKED_BITS = 4
"""Bits of a value of which a byte has two."""


@dataclass(frozen=True)
class Stored:
    """A format of values in memory. bf16 and fp16 have all of them.

    Integers lie from the first to the last of `integers`, both included, which is None for floating-point
    formats. Where an element has two values, as `DType.values` says, they are neighbours along K, and each is
    stored as its distance from the first integer.
    """

    dtype: DType
    integers: tuple[int, int] | None = None

    @property
    def values(self) -> int:
        """Values in an element."""
        return self.dtype.values

    @property
    def offset(self) -> int:
        """The number that is added to a value of which an element has several."""
        return -self.integers[0] if self.integers is not None and self.values > 1 else 0

    def unpacked(self, elements: Tensor) -> Tensor:
        """The values (K, lines) of elements, (K / `values`, lines), in a dtype that has them. The values of a
        line that is contiguous lie side by side."""
        if self.values == 1:
            return elements
        lines = elements.mT.unsqueeze(-1).repeat_interleave(2, -1)
        lines[..., 0] &= (1 << PACKED_BITS) - 1
        lines[..., 1] >>= PACKED_BITS
        return (lines.char() - self.offset).flatten(-2).mT


STORED = {
    stored.dtype: stored
    for stored in (
        Stored(DType.I8, (-128, 127)),
        Stored(DType.U8, (0, 255)),
        Stored(DType.E4M3),
        Stored(DType.E5M2),
        Stored(DType.U4X2, (0, 15)),
        Stored(DType.I4X2, (-8, 7)),
    )
}
"""Every format, by the dtype of its elements."""
