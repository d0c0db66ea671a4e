"""The mainloop of products that convert a stored weight themselves: their rows, registers and time.

A thread converts two values of K at a time. If the weight has groups of K, it also subtracts zeros and
multiplies by scales.
"""

from __future__ import annotations

from dataclasses import replace

from cute_backend.planning.mainloop import Constructor, Mainloop
from cute_backend.planning.targets import Demand, Target
from cute_backend.planning.tiles import TileConfig
from cute_backend.spec import Accumulator, WeightGroups

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

PAIR_IN_GROUPS = 52
"""Further registers of a thread for a pair in groups of K. Without them, tiles of 56 and 64 columns would be
chosen, which spill 8 to 48 bytes; int8 with 48 columns in groups of 128, or 64 without zeros, does not. With
them, nibbles in groups of 128 spill 8 bytes in 32 columns, and none in 24 and 40. The smallest tile, which
was taken in place of one that spills, took 2.8 times as long as two kernels for 64 x 14336 x 4096 (int8 and 4
bits, H200)."""

CONVERTING_COLUMNS = 256
"""Columns of a tile that converts its rows from which on a k tile takes twice as long as one of operands of 8
bits alone, or four times if a byte has two values: the tensor cores then do as much more work for the same
bytes of the rows. With few columns, the bytes take the time, and the conversion is hidden behind them. An
estimate from instruction counts, which no timing has confirmed."""

CONVERTING_US = {1: 2.1, 2: 1.8}
"""Microseconds in which a multiprocessor converts 64 rows by 1,024 bytes of K, of one value each, in
`INSTRUCTIONS[1]` instructions of each warp for each 128 bytes, by the warpgroups that share a tile: two have
little to do in each other's pauses. Of int8, 64 rows took 1.9 us, of nibbles 2.5 to 2.7, and of nibbles in
groups of 128 4.0 to 4.2 by one warpgroup and 3.4 by two (H200, 8 and 16 columns)."""

BLOCKS_IN_GROUPS = 1.4
"""How many times as long 64 rows take in groups of K if a warpgroup has two blocks of them or more: 4.8 us in
place of 3.4 (the same weights)."""

SUMS_IN_TURN = 16
"""The most accumulators of a thread that have a second set, to which every other MMA adds. An MMA waits for
the one before it if both add to the same sums, which few columns don't hide. In tiles of 8 and 16 columns,
nibbles in groups of 128 took 0.97 to 1.00 times as long with it, int8 0.98 to 1.00, and with four sets 0.94
to 1.02; with 64 columns and two sets 0.98 to 1.02 (four linears of Llama 8B, H200)."""

ALONE_IN_FP32 = 1.28
"""How many times as long one warpgroup takes for groups of K that are computed in fp32, whose steps wait for
each other: 64 rows of int8 took 17.3 us where two warpgroups, which hide each other's waits, took 14.2 for
two halves of K (16 x 6144 x 4096, groups of 128, H200)."""

CONVERTING_US_OF_COLUMNS = 0.015
"""Microseconds that each column of a tile adds for each 64 rows by 1,024 bytes of K of two values: these took
4.9 us with 64 columns, in tiles of 64 and of 128 rows (H200). Bytes of one value have half of the
products."""

INSTRUCTIONS = {1: 251, 2: 355}
"""The instructions of a warp for 128 bytes of K of each of its 16 rows, without groups, by the values in a
byte."""

PAIRS = 32
"""The pairs of values that a thread converts in them, for each value in a byte."""

_ROWS = 2
"""Rows of which a thread has values, of each 64 of a tile."""

_HALF_K_TILE = 64
"""Values of K whose groups a thread multiplies by at once."""


class Converting(Mainloop):
    """Values that are converted are the rows of the MMA, which wgmma takes from registers."""

    demand = Demand.CONVERTED
    stacks = True

    @classmethod
    def serves(cls, product: Accumulator, target: Target) -> bool:
        return product.is_converted

    @staticmethod
    def lacking(product: Accumulator, target: Target) -> str:
        if not product.is_converted or product.b_dtype in target.converts:
            return ""
        pair = f"{product.b_dtype.value} to {product.a_dtype.value}"
        return f"no mainloop of {target.name} converts {pair}, as {product.name} has it"

    @property
    def groups(self) -> WeightGroups | None:
        """The groups of K of the weight."""
        return self.product.weight_groups

    def suited(self, config: TileConfig) -> TileConfig | None:
        """Requires that the rows are the values that are converted. The CTAs of a cluster share no operands:
        few rows of D leave little to share. Both warpgroups convert at the same time, so there is no
        ping-pong, under which one waits while the other multiplies. The rows of all products lie below each
        other in the MMA."""
        able = self.product.a_dtype in self.target.converts and config.products == config.stacked
        able = able and not config.multicasts and not config.pingpong
        return replace(config, converts=True, packing=self.product.packing) if able else None

    def registers(self, config: TileConfig) -> int:
        """For each 64 rows: of the values, and of the scales and zeros of a chunk of groups, of the next one,
        and of the groups of half of a k tile. An address takes two. For wgmma, a pair has the values of half
        as much of K, and the groups of both values of a byte, and few accumulators have a second set."""
        blocks = config.blocks * config.stacked
        values = CONVERTED * (config.blocks if self.target.by_wgmma else blocks)
        if self.target.by_wgmma and config.thread_accumulators <= SUMS_IN_TURN:
            values += config.thread_accumulators
        if self.groups is None:
            return values
        at_once = max(_HALF_K_TILE // self.groups.values, 1)
        of_chunks = 4 + at_once
        if config.stacked > 1 and self.target.by_wgmma:
            values += PAIR_IN_GROUPS
            of_chunks += at_once * (self.product.packing - 1)
        return values + _ROWS * blocks * len(self.groups.vectors) * of_chunks

    def k_times(self, config: TileConfig) -> float:
        return 1 + (2 * self.product.packing - 1) * config.mma_n / CONVERTING_COLUMNS

    def microseconds(self, config: TileConfig) -> float:
        packing = self.product.packing
        instructions = INSTRUCTIONS[packing] + PAIRS * packing * self._steps_of_pair
        each = CONVERTING_US[config.sharing] * instructions / INSTRUCTIONS[1]
        if self.groups is not None:
            each *= BLOCKS_IN_GROUPS if config.blocks > 1 else 1
            each *= ALONE_IN_FP32 if self.groups.is_scaled_wide and config.sharing == 1 else 1
        each += CONVERTING_US_OF_COLUMNS * packing / 2 * config.mma_n
        return each * config.mma_m / config.block_m

    @property
    def _steps_of_pair(self) -> int:
        """Instructions for the zero and the scale of two values, beyond those that convert them: one for both
        in 16 bits. In fp32 each has its own, and nibbles are not made numbers of 16 bits at once."""
        if self.groups is None:
            return 0
        has_zero = self.groups.zero is not None
        is_exact = self.groups.subtracts_exactly(self.product.stored)
        if self.groups.is_scaled_wide:
            return (2 if self.product.packing == 1 else 6) + (0 if is_exact or not has_zero else 2)
        return 1 + has_zero + (has_zero and not is_exact)

    def constructor(self, config: TileConfig) -> Constructor:
        groups, arguments = self.groups, [f"DType.{self.product.stored.name}"]
        if groups is not None:
            dtypes = (groups.scale, groups.product, groups.zero, groups.difference)
            names = [f"DType.{dtype.name}" for dtype in dtypes if dtype is not None]
            arguments.append(f"WeightGroups({', '.join([str(groups.values), *names])})")
        module, name = "cute_backend.templates.converted", "Sm90Converted"
        if not self.target.planes_by_tma:
            module, name = "cute_backend.templates.warp_converted", "Sm80Converted"
            # Without conversions of fp8, bits are moved.
            arguments += ["by_bits=True"] * (self.product.stored.is_fp8 and not self.target.fp8)
        return Constructor(module, name, ", ".join(arguments))
