"""Batched and grouped products: how boxes are cut from operands and planes of several products.

Tensors of batched products have a batch mode after the two modes from which boxes are cut. In a kernel of a
single product, no tensor has it. In grouped products, only B has it: in A and in planes, the rows of the
products follow each other. Boxes are therefore counted from a product's first row, and a box that extends
beyond its last row reaches into the next product. Where K is divided into groups, planes have a mode of
products, and operands that are `cut_along_k` leave out of a box what lies beyond the end of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.tensor_utils import LayoutEnum

from cute_backend.planning import TileConfig
from cute_backend.signature import TMA_ALIGN
from cute_backend.spec import FP8_K_STEP, ProductKind
from cute_backend.templates.scheduler import (
    BatchSchedule,
    GroupSchedule,
    KGroupSchedule,
    KPlace,
    Place,
    Schedule,
    TileSchedule,
)


def operands(
    a: cute.Tensor, bs: Sequence[cute.Tensor], kind: ProductKind, tile_k: int
) -> tuple[cute.Tensor, list[cute.Tensor]]:
    """Reorders the modes of A and every B, so that boxes are cut from the first two.

    A (M, K) is unchanged, and every B (K, N) becomes (N, K). In a batched product, A (B, M, K) becomes
    (M, K, B). In a batched or grouped one, every B (B, K, N) becomes (N, K, B). Where K is divided into
    groups, A and every B are `cut_along_k`: (M, `tile_k`, K + 1) and (N, `tile_k`, K + 1).
    """
    if kind is ProductKind.K_GROUPED:
        lines = [cute.make_tensor(b.iterator, cute.select(b.layout, [1, 0])) for b in bs]
        return cut_along_k(a, tile_k), [cut_along_k(each, tile_k) for each in lines]
    batched = kind is ProductKind.BATCHED
    order_a = [1, 2, 0] if batched else [0, 1]
    order_b = [1, 0] if kind is ProductKind.DENSE else [2, 1, 0]
    return (
        cute.make_tensor(a.iterator, cute.select(a.layout, order_a)) if batched else a,
        [cute.make_tensor(b.iterator, cute.select(b.layout, order_b)) for b in bs],
    )


def group_step(a: cute.Tensor, k_grouped: bool) -> int:
    """The multiple at which groups of A (M, K) begin, of K if `k_grouped`, otherwise of rows.

    It is 16 bytes if A is contiguous along the axis that is grouped, as torch asserts on the device,
    otherwise 1. TMA must load no box that begins elsewhere along contiguous memory: that ended in an
    illegal instruction (CUDA error 715, H100 and H200).
    """
    contiguous = LayoutEnum.from_tensor(a).is_k_major_a() == k_grouped
    return TMA_ALIGN * 8 // a.element_type.width if contiguous else 1


def products(a: cute.Tensor, offsets: cute.Tensor | None) -> Int32 | None:
    """The size of the mode of products in planes: from A (M, K, B), or from `offsets` where A is
    `cut_along_k`.
    None for A (M, K), where planes have no such mode."""
    if cute.rank(a) == 2:
        return None
    return a.shape[2] if offsets is None else offsets.shape[0]


def plane(tensor: cute.Tensor, m: Int32, count: Int32 | None) -> cute.Tensor:
    """A plane (B * M, N) as (M, N, B), where `count` is B. Without a count, the plane as it is."""
    if count is None:
        return tensor
    (stride_m, stride_n), n = tensor.stride, tensor.shape[1]
    layout = cute.make_layout((m, n, count), stride=(stride_m, stride_n, stride_m * m))
    return cute.make_tensor(tensor.iterator, layout)


def ragged(tensor: cute.Tensor, rows: int) -> cute.Tensor:
    """A plane (M, N) as (rows, N, M + 1), of which TMA moves at most `rows` rows at a time (`ragged_box_at`).

    The first mode and the last both step by one row. A box of `rows` rows that begins at index r of the first
    mode extends r rows beyond its end. TMA treats these last r rows as out of bounds, and does not write
    them. The index in the last mode moves the box to the right address. The tensor begins `rows` rows before
    the plane, but no such box touches that memory.
    """
    (step, _), (m, n) = tensor.stride, tensor.shape
    layout = cute.make_layout((rows, n, m + 1), stride=(step, 1, step))
    return cute.make_tensor(tensor.iterator - rows * step, layout)


def cut_along_k(operand: cute.Tensor, tile_k: int) -> cute.Tensor:
    """An operand (M or N, K) as (M or N, `tile_k`, K + 1), of which TMA brings the k tiles of groups
    (`of_k_tile`).

    The second mode and the last both step along K. A box that begins r before the second mode reads its first
    r as zeros, since they are out of bounds. The index in the last mode moves the box to the right address.
    It steps by one of K or, in an operand that is contiguous along K, by the 16 bytes that TMA wants of a
    stride, so that indices beyond K / 16 are not used. There a box begins at a multiple of 16 bytes, too: at
    any other, TMA ended in an illegal instruction (CUDA error 715, H100 and H200).
    """
    (lines, k), (stride, along) = operand.shape, operand.stride
    step = along if cutlass.const_expr(operand.element_type.width == 16) else FP8_K_STEP
    layout = cute.make_layout((lines, tile_k, k + 1), stride=(stride, along, step))
    return cute.make_tensor(operand.iterator, layout)


def ragged_box_at(tensor: cute.Tensor, box: tuple, row: Int32, column: Int32, count: Int32) -> cute.Tensor:
    """The first `count` rows of the box that begins at `row` of a `ragged` plane; `count` is at least 1."""
    inside = cute.domain_offset((box[0] - count, 0, row + count), tensor)
    return cute.local_tile(inside, box, (0, column, 0))


@dataclass(frozen=True)
class Groups:
    """The groups of a product: the `offsets` at which they end, the multiple `step` at which they begin, and
    if it is not 0 the rows of the tiles in which each group of rows has scales."""

    offsets: cute.Tensor
    step: int = 1
    tile_rows: int = 0


def schedule(
    config: TileConfig, m: Int32, n: Int32, a: cute.Tensor, groups: Groups | None = None
) -> Schedule:
    """The schedule of all products. With `groups`, these are of K if A is `cut_along_k`, otherwise of rows.
    Without, A is (M, K) for one product, or (M, K, B) for B products. Parts of K whose sums go to memory are
    scheduled as products of a batch."""
    if config.sums_in_memory:
        return BatchSchedule.of(config, m, n, Int32(config.split_k))
    if groups is None:
        return (
            TileSchedule.of(config, m, n) if cute.rank(a) == 2 else BatchSchedule.of(config, m, n, a.shape[2])
        )
    if cute.rank(a) == 2:
        return GroupSchedule.of(config, m, n, groups.offsets, groups.tile_rows, groups.step)
    every = BatchSchedule.of(config, m, n, groups.offsets.shape[0])
    return KGroupSchedule(every, a.shape[2] - 1, groups.offsets, groups.step)


def boxes(tensor: cute.Tensor, box: tuple) -> cute.Tensor:
    """All boxes of an operand: (box, box, index, index), and a batch mode where the operand has one."""
    return cute.local_tile(tensor, box, (None,) * cute.rank(tensor))


def of_k_tile(tensor: cute.Tensor, place: Place, k_tile: Int32) -> cute.Tensor:
    """An operand that is `cut_along_k`, offset to a k tile of one product. If the product's group has fewer
    than `tile_k` left, they are the last of the tile, and zeros come before them; if it has none, the whole
    tile is zeros."""
    assert isinstance(place, KPlace)
    tile_k = tensor.shape[1]
    k = place.first_k + k_tile * tile_k
    count = cutlass.max(cutlass.min(place.end_k - k, tile_k), 0)
    return cute.domain_offset((0, count - tile_k, k // place.step), tensor)


def of_place(boxes: cute.Tensor, place: Place) -> cute.Tensor:
    """The boxes (box, index, index) of one product."""
    return boxes if cute.rank(boxes) == 3 else boxes[(None, None, None, place.batch)]


def from_first(tensor: cute.Tensor, place: Place) -> cute.Tensor:
    """A or a plane, offset to the first row of one product where the rows of products follow each other."""
    return tensor if cute.rank(tensor) == 3 else cute.domain_offset((place.first, 0), tensor)


def box_at(tensor: cute.Tensor, box: tuple, coord: tuple, place: Place) -> cute.Tensor:
    """The box at `coord` of a plane, counted from the first box of one product. It may lie behind the
    plane."""
    plane = from_first(tensor, place)
    if cute.rank(plane) == 2:
        # The lines of a segment are a constant. Of a plane with one box of them, every coordinate of
        # `local_tile` is that box, so that a later one would overwrite it.
        constant = [isinstance(lines, int) for lines in plane.shape]
        first = [at * size if known else 0 for at, size, known in zip(coord, box, constant, strict=True)]
        plane = cute.domain_offset(tuple(first), plane)
        coord = tuple(0 if known else at for at, known in zip(coord, constant, strict=True))
    coord = coord if cute.rank(tensor) == 2 else (*coord, place.batch)
    return cute.local_tile(plane, box, coord)
