"""Blocks of an operand that share a scale: fp32, which multiplies sums, or in tiles that the MMA reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from cute_backend.dtypes import DType
from cute_backend.kinds.axes import SCALE_TILE, Dim, Extent, Stride, padded
from cute_backend.kinds.scales.vectors import Scales, Side, Vector, shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cute_backend.kinds.scales.vectors import Round

SCALE_BLOCK = 128
"""The elements of K that share a block's scale. SQUARE blocks have the same number of rows of A, or of
columns of B."""


class Scaling(Scales, str, Enum):
    """How an operand of a product is divided into blocks, each of which has a scale of its own.

    The names are those of `_scaled_mm`'s recipes: the rows of A, or columns of B, in a block, by its values
    of K. Each member's facts are a `BlockFormat`.
    """

    NONE = "none"
    """No blocks. A scale of the tensor, of rows or of columns doesn't vary along K: it is a load."""
    LINE = "1x128"
    SQUARE = "128x128"
    MX = "1x32"
    """MXFP8 and MXFP4 (OCP Microscaling Formats 1.0)."""
    NV = "1x16"
    """NVFP4. Its second, global scale doesn't vary along K: it is a load."""

    @property
    def facts(self) -> BlockFormat:
        """Its blocks and their scales. Raises KeyError for NONE."""
        return _FORMATS[self]

    @property
    def lines(self) -> int:
        """Rows of A, or columns of B, in one block."""
        return 1 if self is Scaling.NONE else self.facts.lines

    @property
    def by_mma(self) -> bool:
        """Whether the MMA multiplies by the scales, as it reads the operands."""
        return self is not Scaling.NONE and self.facts.is_tiled

    def blocks(self, lines: Any) -> Any:
        """The number of blocks in `lines` rows of A, or columns of B."""
        return (lines + self.lines - 1) // self.lines

    def k_blocks(self, k: Any) -> Any:
        """The number of blocks in `k` values of K."""
        return (k + self.facts.k - 1) // self.facts.k

    def tiled(self, lines: Any, k: Any) -> Any:
        """The number of scales, padding included, for `lines` rows by `k` values, if scales are stored in
        tiles of `SCALE_TILE`. Tiles of the same rows follow each other. Within a tile, the scales of row r
        begin at 16 * (r % 32) + 4 * (r // 32)."""
        rows, columns = padded(lines, self.k_blocks(k))
        return rows * columns

    @property
    def scales_sums(self) -> bool:
        return self is not Scaling.NONE and not self.by_mma

    @property
    def word(self) -> str:
        return "scaled" if self.in_order else ""

    @property
    def in_order(self) -> bool:
        return self is not Scaling.NONE

    def fault(self, product: Any) -> str:
        a, b = product.a_scaling, product.b_scaling
        if a is b is Scaling.NONE:
            return ""
        what = f"has scales by blocks, {a.value} of A and {b.value} of B,"
        if Scaling.NONE in (a, b):
            return f"{what} but either both operands have them or neither has"
        for dtype, scaling in ((product.a_dtype, a), (product.b_dtype, b)):
            if dtype not in scaling.facts.operands:
                scaled = " and ".join(each.value for each in scaling.facts.operands)
                return f"{what} and dtype {dtype.value}; {scaling.value} blocks scale {scaled}"
        if a.by_mma or b.by_mma:
            if a is not b:
                return f"{what} but the MMA scales both by blocks of one format"
            if not product.fast_accum:
                return f"{what} and no fast_accum, but the MMA adds up all of K"
        elif product.fast_accum:
            return f"{what} and fast_accum, but its sums are scaled, and so promoted, block by block"
        kind = product.kind.value
        if kind == "dense" or (kind == "grouped" and a.by_mma):
            return ""
        return (
            f"{what} and is {kind}; only a dense product has them, or one with rows in groups whose scales "
            "the MMA applies"
        )

    @property
    def words(self) -> str:
        return self.value

    @property
    def place(self) -> str:
        return _PLACES[self.by_mma]

    def beside(self, side: Side) -> tuple[Vector, ...]:
        if self is Scaling.NONE:
            return ()
        if self.by_mma:
            dims = (*(Dim(each, Stride.OTHER) for each in side.groups), Dim(side.tiles, Stride.ONE))
            return (Vector("scales", "block scale", self.facts.dtype, dims, inner=None, by_tma=True),)
        lines = side.lines if self is Scaling.LINE else side.blocks
        axes = side.along(Dim(lines, Stride.OTHER), Dim(Extent.K_BLOCKS, Stride.OTHER))
        # torch's own kernels take the scales of single lines as neighbours: if those of a line were
        # contiguous, a copy of 128 rows' scales would touch 128 lines of L2. They take scales of 128 x 128
        # along K.
        inner = side.k_axis if self is Scaling.SQUARE else 1 - side.k_axis
        return (Vector("scales", "block scale", self.facts.dtype, axes, inner),)

    def sizes(self, side: Side, lines: Any, k: Any) -> dict[Extent, Any]:
        if self is Scaling.NONE:
            return {}
        if self.by_mma:
            return {side.tiles: self.tiled(lines, k)}
        return {side.lines: lines, side.blocks: self.blocks(lines), Extent.K_BLOCKS: self.k_blocks(k)}

    @property
    def parts(self) -> str:
        return "blocks"

    def taken(self, expected: Sequence[Any]) -> str:
        in_tiles = f", {_TILES}" if self.by_mma else ""
        return f"by blocks of {self.value} they have {shown(expected)}{in_tiles}"

    def misfit(
        self, side: Side, shape: Sequence[Any], k: Any, groups: Any, given: Sequence[Sequence[Any]]
    ) -> str:
        if not (self.by_mma and side.has_rows_in_groups):
            return super().misfit(side, shape, k, groups, given)
        # Only the device knows how many tiles groups have, so the last tile in memory may be incomplete if
        # no group uses it, as it may be in torchao.
        (tiles,) = given
        row = self.tiled(1, k) // SCALE_TILE[0]
        if len(tiles) == 1 and tiles[0] % row == 0:
            return ""
        return (
            f"the scales of {side.name} have shape {shown(tiles)}; for rows in groups, scales of blocks of "
            f"{self.value} have 1 axis, whose length is a multiple of {row}, and lie {_TILES}, where each "
            "group begins with a tile of its own"
        )

    def applied(self, operand: Tensor, vectors: Sequence[Tensor], to: DType, rounded: Round) -> Tensor:
        """The values of an operand, where fp4 has two in a byte, times the scales of its blocks, which lie in
        tiles. The result is fp32, and exact unless a product lies beyond fp32's range."""
        if not self.by_mma:
            return operand
        import torch  # here, since planning works without it

        (scales,) = vectors
        if to is DType.E2M1X2:
            codes = operand.t().view(torch.uint8)
            pairs = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).to(torch.int64)
            values = torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=operand.device)[pairs]
        else:
            values = operand.t().to(torch.float32)
        lines, k = values.shape
        factors = self.untiled(scales, lines, k).to(torch.float32)
        return (values * factors.repeat_interleave(self.facts.k, 1)[:, :k]).t()

    def in_groups(
        self, operand: Tensor, ends: Sequence[int], vectors: Sequence[Tensor], to: DType, rounded: Round
    ) -> Tensor:
        if not self.by_mma:
            return operand
        import torch  # here, since planning works without it

        (scales,) = vectors
        k = operand.shape[1] * to.values
        rows = scales.new_zeros((operand.shape[0], k), dtype=torch.float32)
        first = begin = 0
        for end in ends:
            count = self.tiled(end - first, k)
            if end > first:
                own = operand[first:end].t(), [scales[begin : begin + count]]
                rows[first:end] = self.applied(*own, to, rounded).t()
            first, begin = end, begin + count
        return rows

    def untiled(self, scales: Tensor, lines: int, k: int) -> Tensor:
        """Rearranges scales from tiles of `SCALE_TILE` to (lines, blocks of K), without their padding."""
        import torch  # here, since planning works without it

        count = self.k_blocks(k)
        height, width = SCALE_TILE
        tiles = scales.view(torch.uint8).view(-(-lines // height), -(-count // width), 32, 4, 4)
        rows = tiles.permute(0, 3, 2, 1, 4).reshape(height * len(tiles), -1)
        return rows[:lines, :count].contiguous().view(scales.dtype)

    def of_lines(self, scales: Tensor, axis: int, count: int) -> Tensor:
        """Repeats the scales of blocks, so that there is one for each of `count` lines along `axis`."""
        return scales.repeat_interleave(self.lines, axis).narrow(axis, 0, count)


def sum_of_blocks(
    a: Tensor, b: Tensor, scalings: tuple[Scaling, Scaling], scales: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """A times B, summed in `dtype`. The product of each block of K is multiplied by the scales of its rows
    and columns before it is added."""
    rows, columns = (
        scaling.of_lines(each, axis, operand.shape[axis]).to(dtype)
        for axis, (scaling, each, operand) in enumerate(zip(scalings, scales, (a, b), strict=True))
    )
    product = a.new_zeros((a.shape[0], b.shape[1]), dtype=dtype)
    for block, first in enumerate(range(0, a.shape[1], SCALE_BLOCK)):
        k = slice(first, first + SCALE_BLOCK)
        product += (a[:, k].to(dtype) @ b[k].to(dtype)) * (rows[:, block : block + 1] * columns[block])
    return product


@dataclass(frozen=True)
class BlockFormat:
    """A format of blocks: `lines` rows of A, or columns of B, by `k` values of K share one scale of `dtype`.
    If the MMA multiplies by the scales, they are stored in tiles, as it reads them; other scales may have any
    strides."""

    lines: int
    k: int
    dtype: DType
    operands: tuple[DType, ...]
    """The dtypes that it scales, both operands of a product alike."""
    is_tiled: bool = False


_FP8 = (DType.E4M3, DType.E5M2)
_FORMATS = {
    Scaling.LINE: BlockFormat(1, SCALE_BLOCK, DType.F32, _FP8),
    Scaling.SQUARE: BlockFormat(SCALE_BLOCK, SCALE_BLOCK, DType.F32, _FP8),
    Scaling.MX: BlockFormat(1, 32, DType.E8M0, (*_FP8, DType.E2M1X2), is_tiled=True),
    Scaling.NV: BlockFormat(1, 16, DType.E4M3, (DType.E2M1X2,), is_tiled=True),
}

_PLACES = {
    False: f"{'k_tile_ring':<14}  copied to shared memory ahead of each k tile, by element",
    True: f"{'tensor_memory':<14}  brought by TMA with each k tile, and copied there for the MMA",
}
"""Where block scales are kept and how they are copied there. The key says whether the MMA applies them."""

_TILES = "in tiles of 128 rows by 4 scales (SWIZZLE_32_4_4)"

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of E2M1 by code, whose fourth bit is the sign (OCP Microscaling Formats 1.0, table 5)."""
