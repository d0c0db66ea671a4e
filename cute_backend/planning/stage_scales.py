"""The space that scales of blocks take beside A and B, in shared memory and in tensor memory."""

from __future__ import annotations

from cute_backend.planning.tiles import TileConfig

TMEM_COLUMNS = 512
"""Columns of tensor memory (PTX ISA, "Tensor Memory")."""

ACC_STAGES = 2
"""Accumulators in tensor memory, if they hold the sums of all k tiles. With two, the epilogue of one tile
runs under the MMA of the next. There is one if two leave no columns for scales."""


class StageScales:
    """The scales that come with a k tile of A and B. These are none."""

    by_warps = False
    """Whether warps copy them to shared memory, for the threads that scale sums."""
    by_tma = False
    """Whether TMA brings them with A and B, for the MMA."""
    most_accumulators = ACC_STAGES
    """The most accumulators in tensor memory beside them."""

    def stage_bytes(self, config: TileConfig) -> int:
        """Shared memory of one CTA for the scales of a k tile."""
        return 0

    def ahead_bytes(self, config: TileConfig) -> int:
        """Shared memory for their stages beyond those of A and B."""
        return 0

    def columns(self, config: TileConfig) -> int:
        """Columns of tensor memory for them."""
        return 0

    def tmem_columns(self, config: TileConfig) -> int:
        """The columns of tensor memory to allocate for them and all accumulators, a power of two (PTX ISA,
        tcgen05.alloc)."""
        columns = self.acc_stages(config) * config.mma_n + self.columns(config)
        return 1 << (columns - 1).bit_length()

    def acc_stages(self, config: TileConfig) -> int:
        """How many accumulators tensor memory has beside them; 0 if none fits."""
        return min(self.most_accumulators, (TMEM_COLUMNS - self.columns(config)) // config.mma_n)


NO_SCALES = StageScales()
