"""Products that convert a stored weight themselves: their rows, registers and time.

A thread converts two values of K at a time. If the weight has groups of K, it also subtracts zeros and
multiplies by scales. `Converting` has all that planning asks about a weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_backend.planning.tiles import TileConfig
from cute_backend.spec import DType, EpilogueSpec, WeightGroups

MOST_CONVERTED_ROWS = 1024
"""The most rows of a product whose kernel converts its weight. Each tile of rows converts all of it again,
while another kernel reads and writes it once, and the product reads 16 bits. The latter takes 1.39, 1.28 and
1.07 times as long at 384, 512 and 1,024 rows (int8, geometric means over the four linears of Llama 8B, H200);
more rows were not timed."""

MOST_ROWS_IN_GROUPS = 256
"""The same for a weight in groups of K, whose conversion takes longer. With groups of 128, Inductor's
kernels take 2.0 to 3.1 times as long at 64 rows, and 1.8 to 2.5 at 128 (the same linears, H200); more rows
were not timed."""

CONVERTED = 52
"""Registers of a thread for the values of a k tile of each 64 rows, once converted, and for those of half of
it as they were read, two in each, with those of the 16 that take the place of others."""

CONVERTING_COLUMNS = 256
"""Columns of a tile that converts its rows from which on a k tile takes twice as long as one of operands of 8
bits alone: the tensor cores then do twice as much work for the same bytes of the rows. With few columns, the
bytes take the time, and the conversion is hidden behind them. An estimate from instruction counts, which no
timing has confirmed."""

CONVERTING_US = {1: 2.0, 2: 1.2}
"""Microseconds in which a multiprocessor converts 64 rows by 1,024 values of K, by the warpgroups that share
a tile. It is estimated from 251 instructions of a warp for 128 values of K of each row (sm_90a), at 1.75 GHz;
one warpgroup alone also waits for what it reads, which two do for each other."""

INSTRUCTIONS = 251
"""The instructions of a warp for 128 values of K of each of its 16 rows, without groups."""

PAIRS = 32
"""The pairs of values that a thread converts in them."""

_ROWS = 2
"""Rows of which a thread has values, of each 64 of a tile."""

_HALF_K_TILE = 64
"""Values of K whose groups a thread multiplies by at once."""


@dataclass(frozen=True)
class Converting:
    """The conversion of a weight in a kernel, by the weight's groups of K."""

    groups: WeightGroups | None

    @staticmethod
    def of(spec: EpilogueSpec) -> Converting:
        """Returns the conversion of a spec's weight."""
        return Converting(spec.product.weight_groups)

    @property
    def registers(self) -> int:
        """Registers of a thread for each 64 rows of a tile: of the values, and of the scales and zeros of a
        chunk of groups, of the next one, and of the groups of half of a k tile. An address takes two."""
        if self.groups is None:
            return CONVERTED
        at_once = max(_HALF_K_TILE // self.groups.values, 1)
        return CONVERTED + _ROWS * len(self.groups.vectors) * (4 + at_once)

    def k_times(self, config: TileConfig, k_tile_us: float) -> float:
        """How many times as long a k tile takes as one of operands of 8 bits, which takes `k_tile_us` for
        each 1,024 bytes of K."""
        steps = 1 + PAIRS * self._steps_of_pair / INSTRUCTIONS
        converting = CONVERTING_US[config.sharing] * steps * config.cta_rows / config.block_m
        return max(1 + config.mma_n / CONVERTING_COLUMNS, converting / k_tile_us)

    @property
    def _steps_of_pair(self) -> int:
        """Instructions for the zero and the scale of two values: one for both values in 16 bits, and in fp32
        two, with three that convert them there and back."""
        if self.groups is None:
            return 0
        computed = [each for each in (self.groups.difference, self.groups.product) if each is not None]
        wide = computed.count(DType.F32)
        return len(computed) + wide + (3 if wide else 0)
