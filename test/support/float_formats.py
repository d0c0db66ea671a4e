"""Small float formats from their definitions, in numpy and by search: an independent check of `numerics`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cute_backend.spec import DType, Overflow


@dataclass(frozen=True)
class Format:
    """A sign, an exponent and a mantissa. An `ieee` format has infinities; in others all ones is the only
    NaN."""

    exponent_bits: int
    mantissa_bits: int
    ieee: bool = True

    @cached_property
    def magnitudes(self) -> npt.NDArray[np.float64]:
        """The value of every code without sign, in order; those that are not finite are left out."""
        codes = np.arange(1 << (self.exponent_bits + self.mantissa_bits))
        exponents, mantissas = codes >> self.mantissa_bits, codes & ((1 << self.mantissa_bits) - 1)
        bias = (1 << (self.exponent_bits - 1)) - 1
        scale = np.exp2(np.maximum(exponents, 1) - bias - self.mantissa_bits)
        values = (mantissas + (exponents > 0) * (1 << self.mantissa_bits)) * scale
        finite = exponents < (1 << self.exponent_bits) - 1 if self.ieee else codes < codes[-1]
        return values[finite]

    def decode(self, codes: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
        """The values of codes with sign."""
        sign_bit = 1 << (self.exponent_bits + self.mantissa_bits)
        index = codes & (sign_bit - 1)
        table = np.full(sign_bit, np.nan)
        table[: len(self.magnitudes)] = self.magnitudes
        if self.ieee:
            table[len(self.magnitudes)] = np.inf
        return np.where(codes & sign_bit, -table[index], table[index])

    def round(self, values: npt.NDArray[np.float32], overflow: Overflow | None) -> npt.NDArray[np.float32]:
        """The nearest value, ties to the even code; `overflow` None is IEEE's: infinity."""
        values = np.where(np.isnan(values), np.float32(np.nan), values)
        table = self.magnitudes
        step = table[-1] - table[-2]
        extended = np.append(table, table[-1] + step)
        magnitude = np.abs(values.astype(np.float64))
        bounded = np.minimum(magnitude, extended[-1])
        above = np.clip(np.searchsorted(extended, bounded), 1, len(extended) - 1)
        low, high = extended[above - 1], extended[above]
        take_low = (bounded - low < high - bounded) | ((bounded - low == high - bounded) & (above % 2 == 1))
        code = np.where(take_low, above - 1, above)
        result = extended[code]
        if overflow is Overflow.SATURATE:
            result = np.minimum(result, table[-1])
        else:
            result = np.where(code == len(table), np.inf if self.ieee else np.nan, result)
        result = np.where(np.isnan(magnitude), np.nan, result)
        return np.copysign(result, values).astype(np.float32)


FORMATS = {
    DType.E4M3: Format(4, 3, ieee=False),
    DType.E5M2: Format(5, 2),
    DType.F16: Format(5, 10),
    DType.BF16: Format(8, 7),
}
