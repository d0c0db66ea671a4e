"""The space of block scales that the MMA applies, in shared memory and in tensor memory.

A word holds four scales of one row, consecutive along K. A tile of 128 such words is 512 bytes, which
tcgen05.cp copies to four columns of tensor memory (PTX ISA, tcgen05.cp.32x128b.warpx4).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Protocol

from cute_backend.planning.tiles import TILE_K_BYTES, TileConfig
from cute_backend.spec import SCALE_TILE, DType, EpilogueSpec, Scaling

TMEM_COLUMNS = 512
"""Columns of tensor memory (PTX ISA, "Tensor Memory")."""

ACC_STAGES = 2
"""Accumulators in tensor memory, if they hold the sums of all k tiles. With two, the epilogue of one tile
runs under the MMA of the next. There is one if two leave no columns for scales."""

_ROWS, _A_WORD = SCALE_TILE
_TILE_BYTES = _ROWS * _A_WORD
_TILE_COLUMNS = 4


@dataclass(frozen=True)
class MmaScales:
    """The scales of one k tile of operands of `dtype`."""

    scaling: Scaling
    dtype: DType

    most_accumulators = ACC_STAGES

    @staticmethod
    def of(spec: EpilogueSpec) -> MmaScales | None:
        """The scales of a spec's products, or None if the MMA scales none."""
        product = spec.product
        return MmaScales(product.a_scaling, product.a_dtype) if product.a_scaling.by_mma else None

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
        """Shared memory of one CTA for the scales of a k tile."""
        tiles = self.a_tiles(config) + config.pieces * self.b_tiles(config)
        return tiles * self.words * _TILE_BYTES

    def a_columns(self, config: TileConfig) -> int:
        """Columns of tensor memory for the scales of A."""
        return self.a_tiles(config) * self.words * _TILE_COLUMNS

    def columns(self, config: TileConfig) -> int:
        """Columns of tensor memory for all scales."""
        tiles = self.a_tiles(config) + config.pieces * self.b_tiles(config)
        return tiles * self.words * _TILE_COLUMNS


class TmemScales(Protocol):
    """The tensor memory that scales of blocks take: `columns` of it, beside at most `most_accumulators`."""

    most_accumulators: int

    def columns(self, config: TileConfig) -> int: ...


def tmem_columns(config: TileConfig, scales: TmemScales | None) -> int:
    """Returns the columns to allocate for all accumulators and scales, a power of two (PTX ISA,
    tcgen05.alloc)."""
    columns = acc_stages(config, scales) * config.mma_n + (scales.columns(config) if scales else 0)
    return 1 << (columns - 1).bit_length()


def acc_stages(config: TileConfig, scales: TmemScales | None) -> int:
    """Returns how many accumulators tensor memory has beside the scales; 0 if none fits."""
    columns, most = (scales.columns(config), scales.most_accumulators) if scales else (0, ACC_STAGES)
    return min(most, (TMEM_COLUMNS - columns) // config.mma_n)
