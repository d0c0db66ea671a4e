"""Scales of blocks in the tiles that the next product's MMA reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cute_backend.dtypes import DType
from cute_backend.kinds.axes import SCALE_TILE, Dim, Extent, Order, Stride, padded
from cute_backend.kinds.results.planes import OfBlocks
from cute_backend.kinds.scales import Scaling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from cute_backend.kinds.reductions.kind import ReductionKind
    from cute_backend.kinds.results.form import Form


@dataclass(frozen=True)
class TiledScales(OfBlocks):
    """Scales of blocks of 32 values of the next product's K, E8M0, in tiles of `SCALE_TILE`, as one vector;
    zeros pad them."""

    order: Order = Order.TILED

    pads_rows = True
    read_as = Scaling.MX

    @classmethod
    def drawn(cls, block: int, kinds: Sequence[ReductionKind]) -> tuple[Form, ...]:
        return (cls(block),)

    def stored_as(self, value: DType) -> tuple[DType, ...]:
        return (DType.E8M0,)

    def contradiction(self, value: DType, stored: DType) -> str:
        if not self.block or stored not in self.stored_as(value):
            return "is in tiles; only scales of blocks, of dtype e8m0, may be"
        return super().contradiction(value, stored)

    def dims(self, width: int) -> tuple[Dim, ...]:
        return (Dim(Extent.TILES, Stride.ONE, self.block, width),)

    def placed(self, elements: Tensor, rows: int, positions: Tensor | None) -> Tensor:
        import torch  # here, since planning works without it

        m, blocks = elements.shape
        rows, columns = padded(m, blocks)
        filled = elements.new_zeros((rows, columns), dtype=torch.uint8)
        filled[:m, :blocks] = elements.view(torch.uint8)
        height, width = SCALE_TILE
        tiles = filled.view(rows // height, 4, height // 4, columns // width, width).permute(0, 3, 2, 1, 4)
        return tiles.reshape(-1).view(elements.dtype)

    def words(self) -> str:
        return f"{super().words()} in tiles"

    def function(self, by_row: bool) -> str:
        return "device_scales.store_scale"

    def statements(self, name: str, columns: int, position: str, by_row: bool) -> list[str]:
        place = f"row, column, sub.tile.m, sub.tile.n, {self.block}"
        store = f"store_scale({name}_glob, {name}_rmem[e], {place})"
        begins = [f"    if column % {self.block} == 0:", f"        {store}"]
        return [
            f"if cutlass.const_expr(sub.begins_block(e, {self.block})):",
            "    row, column, _ = sub.target(e)",
            *(begins if columns % self.block else [f"    {store}"]),
        ]
