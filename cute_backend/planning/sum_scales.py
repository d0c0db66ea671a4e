"""Blocks whose fp32 scales multiply the sums of k tiles, as in DeepSeek's fp8: their mainloops, where
accumulators are in registers and where they are in tensor memory, and the space of the scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import ClassVar

from cute_backend.planning.block_scaled import BlockScaled
from cute_backend.planning.budget import register_budget
from cute_backend.planning.mainloop import Constructor
from cute_backend.planning.stage_scales import StageScales
from cute_backend.planning.targets import Cut, Demand, Target
from cute_backend.planning.tiles import TileConfig
from cute_backend.spec import Accumulator, DType, Scaling

SCALE_ALIGN = 16
"""Alignment of each stage of scales in bytes, so that no gap precedes the next buffer."""


@dataclass(frozen=True)
class SumScales(StageScales):
    """The scales of one k tile, in shared memory, where threads read them."""

    a: Scaling
    b: Scaling

    by_warps = True
    most_accumulators = 4
    """Stages of tensor memory for the sums of k tiles. While the epilogue reads those of the last k tile, the
    MMA fills the others with those of the next tile."""

    def widths(self, config: TileConfig) -> tuple[int, int]:
        """Returns how many neighbouring rows, and columns of one B, share a scale wherever a tile begins.

        For a tile of 192 columns it is 64, since the tile may begin in the middle of a block of 128.
        """
        return gcd(config.cta_rows, self.a.lines), gcd(config.mma_n // config.pieces, self.b.lines)

    def counts(self, config: TileConfig) -> tuple[int, int]:
        """Returns how many scales a k tile has: for the tile's rows, and for the columns of all Bs
        together."""
        rows, columns = self.widths(config)
        return config.cta_rows // rows, config.mma_n // columns

    def pitch(self, count: int) -> int:
        """Returns the distance from one stage of scales to the next, in scales."""
        step = SCALE_ALIGN * 8 // DType.F32.bits
        return -(-count // step) * step

    def stage_bytes(self, config: TileConfig) -> int:
        return sum(map(self.pitch, self.counts(config))) * DType.F32.bits // 8

    def ahead(self, config: TileConfig) -> int:
        """Returns how many more stages the scales have than A and B. In tensor memory, the sums of a k tile
        wait for their scales after its stage of A and B was released. With one stage more, the load warp
        would never wait for scales: it waits for A and B, and the MMA for these sums."""
        return 0 if config.target.accumulators.in_registers else self.acc_stages(config) - 1

    def ahead_bytes(self, config: TileConfig) -> int:
        return self.ahead(config) * self.stage_bytes(config)


class ScaledSums(BlockScaled):
    """Threads of the epilogue scale the sums of a k tile, and add them up."""

    frees_epilogue = False
    untimed_error = 0.2
    """With 0.2, the chosen tile takes 1.017 times as long as the fastest for 146 problems of an H100 and an
    H200, with 0.11, 1.018 (benchmarks/results/*-block-scaled-{tiles,epilogues}.csv)."""
    in_registers: ClassVar[bool]
    """Whether it is for accumulators in registers."""

    @classmethod
    def serves(cls, product: Accumulator, target: Target) -> bool:
        able = target.accumulators.in_registers is cls.in_registers and not product.a_scaling.by_mma
        return able and super().serves(product, target)

    @property
    def scales(self) -> SumScales:
        return SumScales(self.product.a_scaling, self.product.b_scaling)

    @property
    def timed(self) -> Mapping[Cut, float]:
        timing = self.target.timing
        return timing.by_lines if self.product.b_scaling is Scaling.LINE else timing.by_blocks

    @property
    def _blocks(self) -> str:
        return f"Scaling.{self.product.a_scaling.name}, Scaling.{self.product.b_scaling.name}"


class SumsInTensorMemory(ScaledSums):
    """A thread adds up the sums of all of its columns at once."""

    in_registers = False

    def registers(self, config: TileConfig) -> int:
        return config.products * config.group_n

    def constructor(self, config: TileConfig) -> Constructor:
        return Constructor("cute_backend.templates.partial_sums", "Sm100BlockScaled", self._blocks)


class SumsInRegisters(ScaledSums):
    """There are as many sets and pieces of sums as accumulators leave registers for."""

    demand = Demand.PROMOTED
    in_registers = True

    def registers(self, config: TileConfig) -> int:
        return self.sets(config) * config.thread_accumulators // self.pieces(config)

    def sets(self, config: TileConfig) -> int:
        """The sets of sums of a thread beside its accumulators. With two, it adds one while the tensor cores
        work on the other."""
        return 2 if self._leaves(config, 2) else 1

    def pieces(self, config: TileConfig) -> int:
        """The number of pieces that a tile's columns are cut into.

        A thread has the sums of one piece at a time. There are two pieces if the accumulators leave no
        registers for all sums: halves of the columns if a warpgroup has 64 rows. If it has two blocks of 64
        rows, and rows and columns have scales of their own, they are the pieces, and scales of columns stay
        in registers for both.
        """
        lines = self.product.a_scaling is self.product.b_scaling is Scaling.LINE
        able = config.blocks == 1 or (config.blocks == 2 and lines)
        return 2 if able and not self._leaves(config, 1) else 1

    def _leaves(self, config: TileConfig, sets: int) -> bool:
        """Whether a tile's accumulators leave registers for this many sets of sums."""
        return (1 + sets) * config.thread_accumulators <= register_budget(config, self.spec)

    def k_tiles(self, config: TileConfig) -> int:
        """The k tiles of a step of the main loop.

        With one set of sums, 4096 rows took 0.96 to 1.00 times as long with eight k tiles as with two, if
        columns share scales and the epilogue reads no plane. If it reads one, 4096 x 24576 x 1536 took 1.05
        times as long with eight. If each column has a scale, 256 x 128 is the fastest with two, and 128 x 256
        with four (H100, benchmarks/findings.md).
        """
        if self.sets(config) > 1:
            return 4
        if self.product.b_scaling is Scaling.LINE:
            return 2 if config.cta_rows > config.block_m * config.sharing else 4
        return 2 if self.spec.loaded_planes else 8

    def constructor(self, config: TileConfig) -> Constructor:
        pieces = self.pieces(config)
        in_pieces = f", pieces={pieces}" if pieces > 1 else ""
        arguments = f"{self._blocks}, sets={self.sets(config)}, k_tiles={self.k_tiles(config)}{in_pieces}"
        return Constructor("cute_backend.templates.block_scaled", "Sm90BlockScaled", arguments)
