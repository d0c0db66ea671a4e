"""Blocks whose scales the MMA applies (MXFP8, MXFP4 and NVFP4): their mainloop, and their space in memory.

A word holds four scales of one row, consecutive along K. A tile of 128 such words is 512 bytes, which
tcgen05.cp copies to four columns of tensor memory (PTX ISA, tcgen05.cp.32x128b.warpx4).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from cute_backend.planning.block_scaled import BlockScaled
from cute_backend.planning.mainloop import Constructor
from cute_backend.planning.stage_scales import ACC_STAGES, StageScales
from cute_backend.planning.targets import Demand, Target
from cute_backend.planning.tiles import TILE_K_BYTES, TileConfig
from cute_backend.spec import SCALE_TILE, Accumulator, DType, Scaling

_ROWS, _A_WORD = SCALE_TILE
_TILE_BYTES = _ROWS * _A_WORD
_TILE_COLUMNS = 4


@dataclass(frozen=True)
class MmaScales(StageScales):
    """The scales of one k tile of operands of `dtype`."""

    scaling: Scaling
    dtype: DType

    by_tma = True

    @property
    def words(self) -> int:
        """Words of a row for one k tile."""
        values = TILE_K_BYTES * 8 // self.dtype.bits * self.dtype.values
        return values // (_A_WORD * self.scaling.facts.k)

    def a_tiles(self, config: TileConfig) -> int:
        """Tiles of 128 rows in a CTA's rows of A."""
        return config.cta_rows // _ROWS

    def b_tiles(self, config: TileConfig) -> int:
        """Tiles of 128 columns of one B that an output tile may overlap, wherever it begins. Each CTA of a
        pair keeps the scales of all columns."""
        columns = config.mma_n // config.pieces
        return -(-(columns + _ROWS - gcd(columns, _ROWS)) // _ROWS)

    def stage_bytes(self, config: TileConfig) -> int:
        tiles = self.a_tiles(config) + config.pieces * self.b_tiles(config)
        return tiles * self.words * _TILE_BYTES

    def a_columns(self, config: TileConfig) -> int:
        """Columns of tensor memory for the scales of A."""
        return self.a_tiles(config) * self.words * _TILE_COLUMNS

    def columns(self, config: TileConfig) -> int:
        tiles = self.a_tiles(config) + config.pieces * self.b_tiles(config)
        return tiles * self.words * _TILE_COLUMNS


class MmaScaled(BlockScaled):
    """The MMA multiplies both operands by their scales as it reads them."""

    demand = Demand.SCALED
    splits = False

    @classmethod
    def serves(cls, product: Accumulator, target: Target) -> bool:
        return product.a_scaling.by_mma and super().serves(product, target)

    @property
    def scales(self) -> MmaScales:
        return MmaScales(self.product.a_scaling, self.product.a_dtype)

    def suited(self, config: TileConfig) -> TileConfig | None:
        """Requires room in tensor memory for two accumulators beside the scales. With two Bs, one is enough,
        because no other tile remains: tcgen05.cp copies tiles of 128 columns of B, so each B's share of the
        MMA must begin and end with such a tile."""
        alone = config.pieces == 1
        whole = alone or (config.ctas == 1 and config.piece_n % SCALE_TILE[0] == 0)
        fits = self.scales.acc_stages(config) >= (ACC_STAGES if alone else 1)
        return config if whole and fits else None

    def constructor(self, config: TileConfig) -> Constructor:
        arguments = f"Scaling.{self.product.a_scaling.name}, DType.{self.product.a_dtype.name}"
        return Constructor("cute_backend.templates.mma_scaled", "Sm100MmaScaled", arguments)
