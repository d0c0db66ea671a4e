"""The mainloop of MXFP8, MXFP4 and NVFP4: the MMA itself multiplies every block of A and B by its scale.

TMA loads the scales of a k tile into the same stage as its A and B. tcgen05.cp copies them to tensor memory,
where tcgen05.mma reads them. Both instructions run in one pipe, in the order of their issue. So the scales of
a k tile can overwrite those of the previous one without a wait, and the commit that releases A and B releases
their scales, too. In shared memory, scales are laid out as in global memory: a tile of 512 bytes holds 4
scales of each of 128 rows. Each such tile takes 4 columns of tensor memory.

Where two CTAs share an MMA, each has the scales of its own rows of A, and those of all columns of B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.blockscaled_layout as layouts
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from cute_backend.planning import TileConfig
from cute_backend.planning.mma_scales import MmaScales
from cute_backend.spec import SCALE_TILE, DType, Scaling
from cute_backend.templates.crew import SMEM_ALIGN
from cute_backend.templates.mainloop import Sm100Operands
from cute_backend.templates.scheduler import Place, ScaledPlace

_PAIRS = SCALE_TILE[0] * SCALE_TILE[1] // 2
"""16-bit elements of a tile of scales. TMA takes its bytes in pairs, since a box has at most 256 elements
along an axis."""

_COLUMN_ROWS = 32
"""Rows whose scales fit in one column of tensor memory."""


@dataclass(frozen=True)
class ScaleSide:
    """The scales of A, or of all Bs together, in shared memory. `smem` has all stages as tcgen05.cp reads
    them; `boxes` has them as TMA fills them, one tensor (256, words, tiles, stages) for A or for each B."""

    smem: cute.Tensor
    boxes: list[cute.Tensor]


@dataclass(frozen=True)
class ScaleCopy:
    """A copy of one side's scales from shared memory to tensor memory. The last mode of `source` is the
    stage."""

    copy: cute.TiledCopy
    source: cute.Tensor
    target: cute.Tensor

    def run(self, stage: Int32) -> None:
        cute.copy(self.copy, self.source[(None, None, None, None, stage)], self.target)


@dataclass(frozen=True)
class ScaleOperands:
    """The copies of both sides' scales, and the tensor memory where the MMA reads them."""

    copies: list[ScaleCopy]
    a: cute.Tensor
    b: cute.Tensor


@dataclass(frozen=True)
class ScaleBoxes:
    """The scales that the MMA applies, of A and of each B: their maps, and for all k tiles of an output tile
    their stages and boxes."""

    tmas: list[cpasync.TmaInfo]
    boxes: list[tuple[cute.Tensor, cute.Tensor]]

    def bring(self, k: Int32, stage: Int32, barrier: cute.Pointer) -> None:
        for tma, (stages, boxes) in zip(self.tmas, self.boxes, strict=True):
            cute.copy(tma.atom, boxes[(None, k)], stages[(None, stage)], tma_bar_ptr=barrier)


class Sm100MmaScaled:
    """tcgen05.mma with block_scale, for operands of `dtype` with the blocks and scales of `scaling`."""

    def __init__(self, scaling: Scaling, dtype: DType) -> None:
        self.scaling = MmaScales(scaling, dtype)
        self.is_packed = dtype is DType.E2M1X2
        scales = {DType.E8M0: cutlass.Float8E8M0FNU, DType.E4M3: cutlass.Float8E4M3FN}
        self.scale_dtype, self.block = scales[scaling.facts.dtype], scaling.facts.k

    def values(self, operand: cute.Tensor) -> cute.Tensor:
        """A view of an operand by its values. An fp4 operand comes in bytes of two neighbours along K."""
        return cute.recast_tensor(operand, cutlass.Float4E2M1FN) if self.is_packed else operand

    def instruction(
        self, dtypes: Sequence[Any], majors: Sequence[Any], group: tcgen05.CtaGroup, tile: tuple
    ) -> cute.TiledMma:
        """The MMA of a tile (M, N) of operands of these types and majors."""
        return blackwell.make_blockscaled_trivial_tiled_mma(
            *dtypes, *majors, self.scale_dtype, self.block, group, tile
        )

    def maps(
        self, scales: Sequence[cute.Tensor], lines: Sequence[Int32], k: Int32, config: TileConfig
    ) -> list[cpasync.TmaInfo]:
        """The tensor maps that load the scales of one k tile, for A and for each B. `lines` has A's number of
        rows, and each B's number of columns. If each group has a B, the scales of B have an axis of groups,
        and the map of A's scales has all whole tiles that lie in memory."""
        words = cute.ceil_div(k, self.block * SCALE_TILE[1])
        tiles = [self.scaling.a_tiles(config), *[self.scaling.b_tiles(config)] * (len(scales) - 1)]
        found = []
        is_grouped = cute.rank(scales[-1]) == 2
        for tensor, count, high in zip(scales, lines, tiles, strict=True):
            shape: tuple = (_PAIRS, words, cute.ceil_div(count, SCALE_TILE[0]))
            strides: tuple = (1, _PAIRS, _PAIRS * words)
            if cute.rank(tensor) == 2:
                step = cute.assume(tensor.stride[0] // 2, divby=_PAIRS)
                shape, strides = (*shape, tensor.shape[0]), (*strides, step)
            elif is_grouped:
                shape = (_PAIRS, words, cute.size(tensor) // (2 * _PAIRS * words))
            view = cute.make_tensor(
                cute.recast_ptr(tensor.iterator, dtype=cutlass.Int16),
                cute.make_layout(shape, stride=strides),
            )
            box = (_PAIRS, self.scaling.words, high)
            op = cpasync.CopyBulkTensorTileG2SOp(_group(config))
            found.append(cpasync.make_tiled_tma_atom(op, view, cute.make_layout(box), box))
        return found

    def allocate(
        self, smem: SmemAllocator, mma: cute.TiledMma, tile: tuple[int, int, int], stages: int, pieces: int
    ) -> list[ScaleSide]:
        """Shared memory for the scales of A, and for those of all Bs, one after another."""
        found = []
        makers = ((layouts.make_smem_layout_sfa, 1), (layouts.make_smem_layout_sfb, pieces))
        for make, count in makers:
            layout = make(mma, tile, self.block, stages)
            stage_bytes = cute.cosize(cute.filter_zeros(layout)) // stages
            tensor = smem.allocate_tensor(self.scale_dtype, layout, SMEM_ALIGN)
            step = stage_bytes // 2
            first = cute.recast_ptr(tensor.iterator, dtype=cutlass.Int16)
            box = (_PAIRS, self.scaling.words, step // (_PAIRS * self.scaling.words * count), stages)
            strides = (1, _PAIRS, _PAIRS * self.scaling.words, step)
            boxes = [
                cute.make_tensor(first + i * (step // count), cute.make_layout(box, stride=strides))
                for i in range(count)
            ]
            found.append(ScaleSide(tensor, boxes))
        return found

    def boxes(
        self,
        tmas: Sequence[cpasync.TmaInfo],
        scales: Sequence[ScaleSide],
        place: Place,
        tile: tuple[Int32, Int32],
        config: TileConfig,
    ) -> list[tuple[cute.Tensor, cute.Tensor]]:
        """For A and each B, the stages of its scales and the boxes of its scales for all k tiles of an output
        tile, partitioned for TMA."""
        row, column = tile
        a_first = row * self.scaling.a_tiles(config)
        if isinstance(place, ScaledPlace):
            a_first += place.first_tile
        b_first = column * (config.mma_n // config.pieces) // SCALE_TILE[0]
        firsts = [a_first, *[b_first] * (len(tmas) - 1)]
        found, stages = [], [box for side in scales for box in side.boxes]
        for tma, s_boxes, first in zip(tmas, stages, firsts, strict=True):
            own = tma.tma_tensor
            if cute.rank(own) == 4:
                own = own[(None, None, None, place.batch)]
            tiles = cute.domain_offset((0, 0, first), own)
            g_boxes = cute.local_tile(tiles, s_boxes.shape[:3], (0, None, 0))
            grouped = (cute.group_modes(s_boxes, 0, 3), cute.group_modes(g_boxes, 0, 3))
            found.append(cpasync.tma_partition(tma.atom, 0, cute.make_layout(1), *grouped))
        return found

    def scale_operands(
        self,
        scales: Sequence[ScaleSide],
        mma: cute.TiledMma,
        tile: tuple[int, int, int],
        start: cute.Pointer,
        config: TileConfig,
    ) -> ScaleOperands:
        """The copies of all scales to tensor memory, from `start` on: those of A, then those of every B."""
        copies, places = [], []
        makers = (layouts.make_tmem_layout_sfa, layouts.make_tmem_layout_sfb)
        for side, make, first in zip(scales, makers, (0, self.scaling.a_columns(config)), strict=True):
            layout = make(mma, tile, self.block, cute.slice_(side.smem.layout, (None, None, None, 0)))
            place = cute.make_tensor(cute.recast_ptr(start + first, dtype=self.scale_dtype), layout)
            source, target = cute.filter_zeros(side.smem), cute.filter_zeros(place)
            atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(_group(config)), self.scale_dtype)
            copy = tcgen05.make_s2t_copy(atom, target)
            one = copy.get_slice(0)
            described = tcgen05.get_s2t_smem_desc_tensor(copy, one.partition_S(source))
            copies.append(ScaleCopy(copy, described, one.partition_D(target)))
            places.append(place)
        return ScaleOperands(copies, *places)

    def of_tile(self, operands: Sm100Operands, column: Int32, config: TileConfig) -> Sm100Operands:
        """The operands, with the scales of B moved on to begin at the tile's first column. The scales that
        were copied may begin at an earlier column of B, and every 32 columns of B take one column of tensor
        memory."""
        before = column * (config.mma_n // config.pieces) % SCALE_TILE[0]
        of_b = operands.scales.b
        words = cute.recast_ptr(of_b.iterator, dtype=cutlass.Float32) + before // _COLUMN_ROWS
        shifted = cute.make_tensor(cute.recast_ptr(words, dtype=self.scale_dtype), of_b.layout)
        return replace(operands, scales=replace(operands.scales, b=shifted))

    def begin(self, mma: cute.TiledMma) -> cute.TiledMma:
        mma.set(tcgen05.Field.ACCUMULATE, False)
        return mma

    def step(
        self, mma: cute.TiledMma, acc: cute.Tensor, operands: Sm100Operands, stage: Any
    ) -> cute.TiledMma:
        a, b, scales = operands.a, operands.b, operands.scales
        for copy in scales.copies:
            copy.run(stage)
        for k_block in range(cute.size(a, mode=[2])):
            place, block = (None, None, k_block, stage), (None, None, k_block)
            cute.gemm(mma, acc, [a[place], scales.a[block]], [b[place], scales.b[block]], acc)
            mma.set(tcgen05.Field.ACCUMULATE, True)
        return mma


def _group(config: TileConfig) -> tcgen05.CtaGroup:
    return tcgen05.CtaGroup.TWO if config.ctas == 2 else tcgen05.CtaGroup.ONE
