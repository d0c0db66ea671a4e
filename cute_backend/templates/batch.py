"""Batched and grouped products: how boxes are cut from operands and planes of several products.

Batched ones have a mode of batches behind the two that boxes are cut from, which a kernel of one product has
nowhere. Of grouped ones B alone has it; in A and in planes the products' rows follow each other, so boxes are
counted from a product's first row, and beyond its last they reach into the next one's. Where K lies in
groups, planes have a mode of products, and boxes of A and B are cut off where a group ends, by `ragged`
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_backend.planning import TileConfig
from cute_backend.spec import ProductKind
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
    """A (M, K) and every B (K, N) as (N, K); of a batched product, A (B, M, K) as (M, K, B), and of a batched
    or grouped one every B (B, K, N) as (N, K, B). Where K lies in groups, as `ragged` ones: (M, `tile_k`,
    K + 1) and (N, `tile_k`, K + 1)."""
    if kind is ProductKind.K_GROUPED:
        by_k = [cute.make_tensor(a.iterator, cute.select(a.layout, [1, 0])), *bs]
        ragged_a, *ragged_bs = [
            cute.make_tensor(each.iterator, cute.select(each.layout, [1, 0, 2]))
            for each in (ragged(each, tile_k) for each in by_k)
        ]
        return ragged_a, ragged_bs
    batched = kind is ProductKind.BATCHED
    order_a = [1, 2, 0] if batched else [0, 1]
    order_b = [1, 0] if kind is ProductKind.DENSE else [2, 1, 0]
    return (
        cute.make_tensor(a.iterator, cute.select(a.layout, order_a)) if batched else a,
        [cute.make_tensor(b.iterator, cute.select(b.layout, order_b)) for b in bs],
    )


def products(a: cute.Tensor, offsets: cute.Tensor | None) -> Int32 | None:
    """The number of products that have rows of planes of their own: by A (M, K, B), or by `offsets` where A
    is `ragged`; None for A (M, K)."""
    if cute.rank(a) == 2:
        return None
    return a.shape[2] if offsets is None else offsets.shape[0]


def plane(tensor: cute.Tensor, m: Int32, count: Int32 | None) -> cute.Tensor:
    """A plane (B * M, N) as (M, N, B), of a `count` of B products."""
    if count is None:
        return tensor
    (stride_m, stride_n), n = tensor.stride, tensor.shape[1]
    layout = cute.make_layout((m, n, count), stride=(stride_m, stride_n, stride_m * m))
    return cute.make_tensor(tensor.iterator, layout)


def ragged(tensor: cute.Tensor, rows: int) -> cute.Tensor:
    """A plane (M, N) of which TMA moves at most `rows` rows at a time: (rows, N, M + 1), by `ragged_box_at`.

    The first mode and the last step by a row each. A box that begins at row r of the first has its row r + i
    inside while r + i < `rows`, and the last mode makes up for where that lies: so its last r rows are not
    written, whatever lies there, or not read, and come as zeros. The memory before the plane, where this
    tensor begins, has no such box.
    """
    (step, _), (m, n) = tensor.stride, tensor.shape
    layout = cute.make_layout((rows, n, m + 1), stride=(step, 1, step))
    return cute.make_tensor(tensor.iterator - rows * step, layout)


def ragged_box_at(tensor: cute.Tensor, box: tuple, row: Int32, column: Int32, count: Int32) -> cute.Tensor:
    """The first `count` rows, one at the least, of the box that begins at `row` of a `ragged` plane."""
    inside = cute.domain_offset((box[0] - count, 0, row + count), tensor)
    return cute.local_tile(inside, box, (0, column, 0))


def schedule(
    config: TileConfig, m: Int32, n: Int32, a: cute.Tensor, offsets: cute.Tensor | None = None
) -> Schedule:
    """The tiles of all products: of groups where there are `offsets`, of rows, or of K if A is `ragged`; else
    by A (M, K) or (M, K, B)."""
    if offsets is None:
        return (
            TileSchedule.of(config, m, n) if cute.rank(a) == 2 else BatchSchedule.of(config, m, n, a.shape[2])
        )
    if cute.rank(a) == 2:
        return GroupSchedule.of(config, m, n, offsets)
    every = BatchSchedule.of(config, m, n, offsets.shape[0])
    return KGroupSchedule(every, a.shape[2] - 1, offsets)


def boxes(tensor: cute.Tensor, box: tuple) -> cute.Tensor:
    """All boxes of an operand: (box, box, index, index), and batch where there are several."""
    return cute.local_tile(tensor, box, (None,) * cute.rank(tensor))


def of_k_tile(tensor: cute.Tensor, place: Place, k_tile: Int32) -> cute.Tensor:
    """A `ragged` operand (M or N, tile_k, K + 1) with a k tile of one product first: what lies beyond the
    group's end is none of it, and where the group is empty all of it lies there."""
    assert isinstance(place, KPlace)
    tile_k = tensor.shape[1]
    k = place.first_k + k_tile * tile_k
    count = cutlass.max(cutlass.min(place.end_k - k, tile_k), 0)
    return cute.domain_offset((0, tile_k - count, k + count), tensor)


def of_place(boxes: cute.Tensor, place: Place) -> cute.Tensor:
    """The boxes (box, index, index) of one product."""
    return boxes if cute.rank(boxes) == 3 else boxes[(None, None, None, place.batch)]


def from_first(tensor: cute.Tensor, place: Place) -> cute.Tensor:
    """A or a plane, with the rows of one product first where products follow each other in them."""
    return tensor if cute.rank(tensor) == 3 else cute.domain_offset((place.first, 0), tensor)


def box_at(tensor: cute.Tensor, box: tuple, coord: tuple, place: Place) -> cute.Tensor:
    """One box of a plane, counted among those of one product."""
    coord = coord if cute.rank(tensor) == 2 else (*coord, place.batch)
    return cute.local_tile(from_first(tensor, place), box, coord)
