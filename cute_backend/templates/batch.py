"""Batched products: operands and planes with a mode of batches behind the two that boxes are cut from.

A kernel of one product has no such mode anywhere, and no code for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Int32

from ..planning import TileConfig
from ..spec import ProductKind
from .scheduler import BatchSchedule, Place, TileSchedule


def operands(
    a: cute.Tensor, bs: Sequence[cute.Tensor], kind: ProductKind
) -> tuple[cute.Tensor, list[cute.Tensor]]:
    """A (M, K) and every B (K, N) as (N, K); of a batched product, A (B, M, K) as (M, K, B) and every
    B (B, K, N) as (N, K, B)."""
    batched = kind is ProductKind.BATCHED
    order_a, order_b = ([1, 2, 0], [2, 1, 0]) if batched else ([0, 1], [1, 0])
    return (
        cute.make_tensor(a.iterator, cute.select(a.layout, order_a)) if batched else a,
        [cute.make_tensor(b.iterator, cute.select(b.layout, order_b)) for b in bs],
    )


def plane(tensor: cute.Tensor, m: Int32, a: cute.Tensor) -> cute.Tensor:
    """A plane (B * M, N) as (M, N, B), where `a` is (M, K, B)."""
    if cute.rank(a) == 2:
        return tensor
    (stride_m, stride_n), n = tensor.stride, tensor.shape[1]
    layout = cute.make_layout((m, n, a.shape[2]), stride=(stride_m, stride_n, stride_m * m))
    return cute.make_tensor(tensor.iterator, layout)


def schedule(config: TileConfig, m: Int32, n: Int32, a: cute.Tensor) -> TileSchedule | BatchSchedule:
    """The tiles of all batches, by A (M, K) or (M, K, B)."""
    return TileSchedule.of(config, m, n) if cute.rank(a) == 2 else BatchSchedule.of(config, m, n, a.shape[2])


def boxes(tensor: cute.Tensor, box: tuple) -> cute.Tensor:
    """All boxes of an operand: (box, box, index, index), and batch where there are several."""
    return cute.local_tile(tensor, box, (None,) * cute.rank(tensor))


def of_place(boxes: cute.Tensor, place: Place) -> cute.Tensor:
    """The boxes (box, index, index) of one product."""
    return boxes if cute.rank(boxes) == 3 else boxes[(None, None, None, place.batch)]


def box_at(tensor: cute.Tensor, box: tuple, coord: tuple, place: Place) -> cute.Tensor:
    """One box of a plane, counted among those of one product."""
    return cute.local_tile(tensor, box, coord if cute.rank(tensor) == 2 else (*coord, place.batch))
